"""Operands of different dtypes under autocast, which alone makes one dtype of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortrain import Options, ORTModule

Operation = Callable[[Tensor, Tensor], Tensor]

# Of two matrices of the same shape. Autocast has kernels of its own for some, and for others
# only for what they are composed of.
OPERATIONS: dict[str, Operation] = {
    "linear": F.linear,
    "bmm": lambda a, b: torch.bmm(a[None], b.T[None]),
    "baddbmm": lambda a, b: torch.baddbmm(torch.ones(1, 4, 4), a[None], b.T[None]),
    "einsum of two": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "einsum of three": lambda a, b: torch.einsum("ij,kj,kl->il", a, b, b),
    "einsum with batches": lambda a, b: torch.einsum("bi,bj->bij", a, b),
    "tensordot": lambda a, b: torch.tensordot(a, b.T, 1),
    "chain of products": lambda a, b: torch.linalg.multi_dot([a, b.T, a]),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 6, 6)),
    "cosine similarity": F.cosine_similarity,
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
    "triplets": lambda a, b: F.triplet_margin_loss(a, b, a * b),
    "outer": lambda a, b: torch.outer(a[0], b[0]),
    "concatenation": lambda a, b: torch.cat([a, b]),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [pair for pair in itertools.product(DTYPES, DTYPES) if pair[0] is not pair[1]]


class Applied(nn.Module):
    """An operation on parameters of two dtypes."""

    def __init__(self, operation: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.operation = operation
        self.a, self.b = (nn.Parameter(torch.randn(4, 6).to(dtype)) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return OPERATIONS[self.operation](self.a * x.to(self.a.dtype), self.b)


@pytest.mark.parametrize("number", range(2 * len(OPERATIONS)))
def test_operands_of_two_dtypes_are_captured_as_autocast_takes_them(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The certificate compares; each operation meets two of the six pairs, one with each dtype."""
    name = [*OPERATIONS][number // 2]
    pair = PAIRS[number * 5 % len(PAIRS)]
    autocast = torch.autocast("cpu", (torch.bfloat16, torch.float16)[number % 2])
    module, x = Applied(name, pair), torch.randn(4, 6)
    try:
        with autocast:
            expected = module(x)
    except RuntimeError as error:
        pytest.skip(f"PyTorch has no {name} of {pair}: {error}")
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    with autocast, caplog.at_level(logging.ERROR):
        y = model(x)
    y.float().sum().backward()
    assert model.report.mode == "graph"
    assert y.dtype is expected.dtype
    assert caplog.records == []  # PyTorch has its say about none of the trials of a capture


# Without autocast: what PyTorch promotes.
PROMOTED: dict[str, Operation] = {
    "einsum": lambda a, b: torch.einsum("bi,bj->bij", a, b),
    "einsum that sums": lambda a, b: torch.einsum("bi,bj->b", a, b),
    "cross entropy with probabilities": lambda a, b: F.cross_entropy(a, b.softmax(-1)),
    "smoothed cross entropy": lambda a, b: F.cross_entropy(
        a, b.softmax(-1), label_smoothing=0.1, reduction="none"
    ),
    "cross entropy of classes": lambda a, b: F.cross_entropy(a * b, torch.arange(4)),
    "square error": lambda a, b: (a - b).square().mean(),
}


@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", "")
)
@pytest.mark.parametrize("name", PROMOTED)
def test_operands_of_two_dtypes_are_promoted_as_pytorch_promotes_them(
    name: str, pair: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATIONS, "promoted", PROMOTED[name])
    module, x = Applied("promoted", pair), torch.randn(4, 6)
    expected = module(x)
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    y = model(x)
    y.float().sum().backward()
    assert model.report.mode == "graph"
    assert y.dtype is expected.dtype
