"""Small values have as many digits as PyTorch's: a loss may take their logarithm, or divide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ortrain import ORTModule
from tests.module.agreement import GRAPH, Called

SIZES = torch.logspace(-30, 30, 121)
NEAR = torch.logspace(-6, -1, 21)
VALUES = torch.cat([SIZES, -SIZES, torch.linspace(-25, 25, 101), 1 + NEAR, 1 - NEAR, NEAR - 1])

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in (
        "sigmoid", "log1p", "expm1", "log", "log2", "log10", "exp", "exp2", "sqrt", "rsqrt", "tanh",
        "erf", "reciprocal", "square", "sin", "atan", "asinh", "sinh", "abs", "frac",
    )},
    "softplus": F.softplus,
    "log of a sigmoid": lambda x: torch.log(torch.sigmoid(x.clamp(-80, 80))),
    "a quotient of sigmoids": lambda x: torch.sigmoid(x) / torch.sigmoid(x.clamp(-80, 80) - 1),
    "softmax": lambda x: torch.stack([x, 0 * x]).softmax(0),
    "log_softmax": lambda x: torch.stack([x, -x]).log_softmax(0),
    "logsumexp": lambda x: torch.stack([x, -x]).logsumexp(0),
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "normalize": lambda x: F.normalize(torch.stack([x, x])),
    "norm": lambda x: torch.linalg.vector_norm(torch.stack([x, 2 * x]), dim=0),
    "cubes": lambda x: x**3,
    "roots": lambda x: x.abs() ** 0.3,
    "remainder": lambda x: torch.remainder(x, 0.3),
    "remainder of a negative": lambda x: torch.remainder(x, -1.7),
    "fmod": lambda x: torch.fmod(x, 0.3),
    "binary cross entropy": lambda x: F.binary_cross_entropy(
        torch.sigmoid(x.clamp(-80, 80)), torch.ones_like(x), reduction="none"
    ),
}  # fmt: skip
# Of PyTorch's own distance from float64, and roundings of the value.
SLACK, ROUNDINGS = 32, 64


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_value_is_as_close_to_the_truth_as_pytorchs(name: str) -> None:
    module = Called(FUNCTIONS[name])
    eager, exact = module(VALUES).double(), module(VALUES.double())
    if "remainder" in name or name == "fmod":  # exact in themselves; 0.3 is another in float64
        exact = eager
    ours = ORTModule(module, options=GRAPH)(VALUES).double()
    assert torch.equal(ours.isnan(), eager.isnan())
    infinite = eager.isinf()
    assert torch.equal(ours[infinite], eager[infinite])
    tiny, eps = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).eps
    known = eager.isfinite() & exact.isfinite() & (exact.abs() > tiny)
    assert known.any()
    allowed = SLACK * (eager - exact).abs() + ROUNDINGS * eps * exact.abs()
    far = known & ((ours - exact).abs() > allowed)
    assert not far.any(), (ours[far][:3], eager[far][:3])
