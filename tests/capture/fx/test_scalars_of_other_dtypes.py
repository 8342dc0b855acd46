"""Numbers of other dtypes than the tensors that they meet, and what small integers add up to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

Binary = Callable[[Tensor, Tensor], Tensor]

BINARY: dict[str, Binary] = {
    "add": torch.add,
    "add a part": lambda a, b: torch.add(a, b, alpha=0.5),
    "sub": torch.sub,
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": lambda a, b: torch.pow(a.abs(), b),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "atan2": torch.atan2,
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp": lambda a, b: torch.clamp(a, min=b) if not b.ndim else torch.clamp(b, max=a),
    "addcmul": lambda a, b: torch.addcmul(a + a if a.ndim else b, a, b),
    "compare": torch.gt,
    "equal": torch.eq,
}
# On their left a whole number is rounded several times, by PyTorch alone.
BY_TRUNCATION: dict[str, Binary] = {
    "div, rounded down": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div, rounded to zero": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide": torch.floor_divide,
}


class Together(nn.Module):
    """All functions, of two tensors in both orders."""

    def __init__(self, functions: dict[str, Binary]) -> None:
        super().__init__()
        self.functions, self.weight = functions, nn.Parameter(torch.ones(1))

    def forward(self, a: Tensor, b: Tensor) -> tuple[list[Tensor], Tensor]:
        found = [each(x, y) for each in self.functions.values() for x, y in ((a, b), (b, a))]
        return found, self.weight * 2


@pytest.mark.parametrize(
    ("dtype", "engine"),
    [
        (torch.float16, "aten"),
        (torch.bfloat16, "aten"),
        (torch.float32, "aten"),
        (torch.float32, "onnxruntime"),
    ],
)
@pytest.mark.parametrize(
    ("other", "number"), [(torch.float32, 0.1), (torch.float64, 0.1), (torch.int64, 4099)]
)
def test_a_tensor_without_dimensions_is_rounded_where_pytorch_rounds_it(
    dtype: torch.dtype, engine: str, other: torch.dtype, number: float
) -> None:
    """PyTorch's products and quotients of 16 bits take it as it is, on their right side alone."""
    functions = BINARY if other is torch.int64 else {**BINARY, **BY_TRUNCATION}
    module = Together(functions)
    options = Options(engine=engine, fallback="raise", certificate="off")  # type: ignore[arg-type]
    model = ORTModule(module, options=options)
    x, scalar = torch.linspace(-3, 3, 301).to(dtype), torch.tensor(number, dtype=other)
    names = [name for name in functions for _ in range(2)]
    bound = 1e-6 if dtype is torch.float32 else 0.0
    for name, got, wanted in zip(names, model(x, scalar)[0], module(x, scalar)[0], strict=True):
        assert got.dtype is wanted.dtype, name
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound, equal_nan=True, msg=name)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(-1),
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: x.prod(1, keepdim=True),
    "prod in float64": lambda x: x.prod(1, dtype=torch.float64),
    "cumsum": lambda x: x.cumsum(0),
    "mean in float32": lambda x: x.mean(dtype=torch.float32),
    "any": lambda x: x.any(-1),
    "all": lambda x: x.all(0),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(-1),
    "count_nonzero": lambda x: x.count_nonzero(),
}


class Reducing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        return [each(x) for each in REDUCTIONS.values()], self.weight * 2


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_reductions_of_small_integers_have_pytorchs_dtype(dtype: torch.dtype, engine: str) -> None:
    x = torch.tensor([[1, 0, 3], [2, 5, 1], [7, 1, 100]])
    x = x > 0 if dtype is torch.bool else x.to(dtype)
    module = Reducing()
    options = Options(engine=engine, fallback="raise", certificate="off")  # type: ignore[arg-type]
    got, wanted = ORTModule(module, options=options)(x)[0], module(x)[0]
    for name, one, other in zip(REDUCTIONS, got, wanted, strict=True):
        assert one.dtype is other.dtype, name
        assert torch.equal(one, other), name
