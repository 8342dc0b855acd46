"""Tensors made of sizes: a number that is read from one is the size it was made of, at any size.

``torch.div(x.size(1), 2, rounding_mode="trunc")`` as a size of a view, as Longformer has it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.frontend.export import export
from tests.breadth import crossed
from tests.module.agreement import SAME

# Of a size between 6 and 12: a tensor with half of it, or about that.
MADE: dict[str, Callable[[Any], Any]] = {
    "div trunc": lambda n: torch.div(n, 2, rounding_mode="trunc"),
    "div floor": lambda n: torch.div(n, 2, rounding_mode="floor"),
    "floor_divide": lambda n: torch.floor_divide(n, 2),
    "tensor": lambda n: torch.tensor(n) // 2,
    "as_tensor": lambda n: torch.as_tensor(n) // 2,
    "as_tensor of a shape": lambda n: torch.as_tensor([2, n]).prod() // 4,
    "new_tensor": lambda n: torch.ones(2, dtype=torch.long).new_tensor(n) // 2,
    "scalar_tensor": lambda n: torch.scalar_tensor(n, dtype=torch.long) // 2,
    "full": lambda n: torch.full((), n) // 2,
    "full of int32": lambda n: torch.full((), n, dtype=torch.int32) // 2,
    "new_full": lambda n: torch.ones(3).new_full((), n).long() // 2,
    "ceil": lambda n: torch.ceil(torch.tensor(n / 2)).int(),
    "ceil of thirds": lambda n: torch.ceil(torch.tensor(n / 3)).long(),
    "floor of thirds": lambda n: torch.floor(torch.tensor(n) / 3).long() + 1,
    "round": lambda n: torch.round(torch.tensor(n) / 4).int() + 1,
    "element": lambda n: torch.tensor([4, n])[1] // 2,
    "element of a stack": lambda n: torch.stack([torch.tensor(n), torch.tensor(3)]).max() // 2,
    "element of cat": lambda n: (
        torch.cat([torch.tensor([n, 2]), torch.tensor([1])]).flip(0)[2] // 2
    ),
    "sum": lambda n: torch.tensor([n, -2]).sum() // 2,
    "difference": lambda n: torch.tensor(n) - 3,
    "difference the other way round": lambda n: (n + 2) - torch.tensor(n // 2) - 2,
    "minimum": lambda n: torch.minimum(torch.tensor(n), torch.tensor(30)) // 2,
    "clamp": lambda n: torch.tensor(n).clamp(min=2, max=40) // 2,
    "remainder": lambda n: torch.tensor(n) % 5 + 2,
    "written to": lambda n: torch.tensor(n).add_(2).div_(2, rounding_mode="floor") - 1,
    "filled": lambda n: torch.zeros((), dtype=torch.long).fill_(n) // 2,
    "quotient": lambda n: torch.tensor(n).div(2).long(),
    "square": lambda n: torch.tensor(n) ** 2 // 16,
    "float and back": lambda n: torch.tensor(n).to(torch.float32).clone().mul(0.5).long(),
    "its number": lambda n: torch.tensor(torch.tensor(n).item()) // 2,
}
# Of a tensor [rows, n, 4] and such a tensor of one element.
READ: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "view": lambda y, t, n: y[:, :t].reshape(-1).view(y.shape[0], t, 4),
    "shape": lambda y, t, n: y.sum() + y.new_ones(t, t + 1).sum() + torch.ones((t, 2)).sum(),
    "slice": lambda y, t, n: y[:, :t],
    "slice from the end": lambda y, t, n: y[:, -t:],
    "index": lambda y, t, n: y[:, t - 1],
    "arange": lambda y, t, n: y.sum(1) + torch.arange(t).float().sum(),
    "mask": lambda y, t, n: y * (torch.arange(n) < t)[None, :, None],
    "factor": lambda y, t, n: y * t,
    "item": lambda y, t, n: y[:, : t.item()] * t.item(),
    "tolist": lambda y, t, n: y[:, : t.reshape(1).tolist()[0]],
    "math.ceil": lambda y, t, n: y[:, : math.ceil(t)],
    "expand": lambda y, t, n: y[:, :1].expand(-1, t, -1),
    "repeat": lambda y, t, n: y.repeat(1, t, 1),
    "narrow": lambda y, t, n: y.narrow(1, 0, t),
    "comparison": lambda y, t, n: y * 2 if t > 1 else y * 3,
    "comparison of its number": lambda y, t, n: y * 2 if t.item() >= 2 else y * 3,
    "truth": lambda y, t, n: y * 2 if t else y * 3,
    "max": lambda y, t, n: y[:, : max(t, 2)],
}
# What asks Python for the number: behind that are further graphs, but not one for each size.
ASKING = {"index", "math.ceil", "comparison", "comparison of its number", "truth"}
SIZES = ((3, 8), (2, 12), (3, 6), (4, 10), (5, 9))


class Sized(nn.Module):
    def __init__(self, made: Callable[[Any], Any], read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.made, self.read = nn.Linear(4, 4), made, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.layer(x), self.made(x.shape[1]), x.shape[1])


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What a call returns, and its gradients."""
    module.zero_grad()
    output = module(x)
    (output * torch.arange(output.numel()).view(output.shape).cos()).sum().backward()
    return [output.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def agreeing(
    made: Callable[[Any], Any],
    read: Callable[..., Tensor],
    sizes: tuple[tuple[int, int], ...] = SIZES,
    engine: Any = "aten",
) -> ORTModule:
    """A module that was compared with eager at each of some sizes."""
    eager = Sized(made, read)
    model = ORTModule(copy.deepcopy(eager), options=Options(engine=engine))
    for rows, length in sizes:
        x = torch.randn(rows, length, 4)
        for mine, own in zip(step(model, x), step(eager, x), strict=True):
            torch.testing.assert_close(
                mine, own, rtol=SAME, atol=SAME * max(1.0, float(own.abs().max()))
            )
    return model


@pytest.mark.parametrize(("made", "read"), crossed(MADE, READ, one_in=7))
def test_a_number_read_from_a_tensor_of_sizes_is_that_of_each_call(made: str, read: str) -> None:
    model = agreeing(MADE[made], READ[read])
    report = model.report
    assert report.graph_calls == len(SIZES), report.reason
    assert report.captures < len(SIZES) if read in ASKING else report.captures == 1


@pytest.mark.parametrize("made", ["div trunc", "ceil", "ceil of thirds", "element"])
def test_onnxruntime_has_them_as_well(made: str) -> None:
    model = agreeing(MADE[made], READ["view"], engine="onnxruntime")
    assert model.report.captures == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda y, t, n: y * 2 if t > 4 else y * 3,
        lambda y, t, n: y * 2 if t.item() > 4 else y * 3,
        lambda y, t, n: y * 2 if t - 4 else y * 3,
        lambda y, t, n: y * 2 if bool(t == 4) else y * 3,
    ],
    ids=["tensor", "number", "truth", "bool"],
)
def test_a_comparison_stands_between_graphs_of_both_ways(read: Any) -> None:
    model = agreeing(MADE["tensor"], read)
    assert (model.report.graph_calls, model.report.astray) == (len(SIZES), 0)


def _trunc_of_negative(n: Any) -> Tensor:
    return torch.div(torch.tensor(n) - 12, 4, rounding_mode="trunc") + 4


def _floor_of_negative(n: Any) -> Tensor:
    return torch.div(torch.tensor(n) - 12, 4, rounding_mode="floor") + 4


def _over_in_int32(n: Any) -> Tensor:
    return (torch.tensor(n, dtype=torch.int32) * 2**29) // 2**28 % 7 + 2


def _rounded_in_float32(n: Any) -> Tensor:
    return (torch.tensor(n) * 1.0 + 2.0**24).sub(2.0**24).long() // 2


def _rounded_in_half(n: Any) -> Tensor:
    return (torch.tensor(n, dtype=torch.float16) + 2048).sub(2048).long() // 2 + 1


def _a_tenth(n: Any) -> Tensor:
    return (torch.tensor(n) * 0.1).mul(10).ceil().long() // 2


def _true_quotient(n: Any) -> Tensor:
    return (torch.tensor(n) / 3 * 3).ceil().long() // 2


def _written_through_a_view(n: Any) -> Tensor:
    t = torch.tensor([n, n])
    t[0] = 3
    return t[0]


def _written_past_autograd(n: Any) -> Tensor:
    t = torch.tensor(n)
    t.data.fill_(3)
    return t


@pytest.mark.filterwarnings("ignore")  # of what runs in PyTorch
@pytest.mark.parametrize(
    "made",
    [
        _trunc_of_negative, _floor_of_negative, _over_in_int32, _rounded_in_float32,
        _rounded_in_half, _a_tenth, _true_quotient, _written_through_a_view,
        _written_past_autograd,
    ],
)  # fmt: skip
def test_where_torch_rounds_otherwise_the_number_is_torchs(made: Any) -> None:
    agreeing(made, lambda y, t, n: y[:, :t] * t)


@pytest.mark.parametrize(
    ("made", "most"),
    [
        (lambda n: torch.tensor(n / 2), 2**24),
        (lambda n: torch.tensor(n).half(), 2**11),
        (lambda n: torch.ceil(torch.tensor(n) / 3), 2**22),
    ],
    ids=["float32", "float16", "quotient"],
)
def test_a_graph_is_for_sizes_that_the_dtype_holds(made: Any, most: int) -> None:
    exported = export(Sized(made, lambda y, t, n: y * 2 if t > 1 else y), (torch.randn(3, 8, 4),))
    assert exported.accepts([(3, most, 4)])
    assert not exported.accepts([(3, most + 1, 4)])


def test_a_tensor_of_a_size_that_is_not_read_asks_nothing() -> None:
    exported = export(
        Sized(_trunc_of_negative, lambda y, t, n: y * t.half()), (torch.randn(3, 8, 4),)
    )
    assert exported.accepts([(3, 14, 4)])
    assert exported.accepts([(3, 10**6, 4)])


# Of a size, in the words of Python.
CONVERTED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "int": lambda y, n: y[:, : int(n)] * int(n),
    "int of a quotient": lambda y, n: y[:, : int(n / 2)],
    "int of a tensor": lambda y, n: y[:, : int(torch.tensor(n) // 2) + 1],
    "float": lambda y, n: y / float(n) + float(torch.tensor(n)),
    "ceil": lambda y, n: y[:, : math.ceil(n / 3)] * math.floor(n / 3),
    "int of a text": lambda y, n: y[:, : int("3")] * float("2"),
    "bound of a range": lambda y, n: y.sum() + torch.arange(0, n / 2).sum(),
    "slope": lambda y, n: torch.nn.functional.leaky_relu(y, 1 / n),
    "value of a choice": lambda y, n: torch.where(y > 0, y, n / 2),
    "half and half": lambda y, n: y * (n / 2 + n / 3 * 2 - 0.5) if n / 2 * 3 > 4 else y,
    "isinstance": lambda y, n: y[:, : n // 2] if isinstance(n, int) else y * float("nan"),
    "isinstance of one of several": lambda y, n: y if isinstance(n, (int, float)) else y + y,
    "isinstance of another": lambda y, n: y + y if isinstance(n, float) else y,
    "isinstance of a quotient": lambda y, n: y / (n / 2) if isinstance(n / 2, float) else y,
    "isinstance of an answer": lambda y, n: y if isinstance(n > 1, int) else y + y,
}


# Floats that operators take amiss, or whose arithmetic a graph has not: a capture a size.
FIXED = ("bound of a range", "slope", "value of a choice", "half and half")


@pytest.mark.parametrize(("name", "engine"), crossed(CONVERTED, ["aten", "onnxruntime"], one_in=2))
def test_pythons_conversions_leave_a_size_a_size(name: str, engine: str) -> None:
    model = agreeing(lambda n: n, lambda y, _, n: CONVERTED[name](y, n), engine=engine)
    assert model.report.graph_calls == len(SIZES)
    assert model.report.captures == 1 or name in FIXED
