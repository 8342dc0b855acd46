"""Code that asks how tensors lie in memory, and cuts windows out of it: `stride`, `as_strided`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.module.agreement import SAME

WIDTH = 6


class Runs(nn.Module):
    """A function of what a layer makes."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.layer(x))


def assert_eagers(
    function: Callable[[Tensor, Tensor], Tensor], inputs: list[Tensor], engine: Any = "aten"
) -> ORTModule:
    """At each of the inputs: outputs and gradients."""
    torch.manual_seed(0)
    eager = Runs(function)
    model = ORTModule(copy.deepcopy(eager), options=Options(engine=engine))
    for x in inputs:
        given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        wanted, found = eager(given), model(other)
        torch.testing.assert_close(found, wanted, rtol=SAME, atol=SAME)
        for module, output in ((eager, wanted), (model, found)):
            module.zero_grad()
            (output * torch.arange(output.numel()).view(output.shape).cos()).sum().backward()
        torch.testing.assert_close(other.grad, given.grad, rtol=SAME, atol=SAME)
        for mine, own in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, own.grad, rtol=10 * SAME, atol=10 * SAME)
    return model


def chunks(hidden: Tensor, half: int = 2) -> Tensor:
    """Chunks of a sequence that overlap by half, as Longformer and LED cut them."""
    rows, length, width = hidden.shape
    hidden = hidden.view(rows, length // (2 * half), 2 * half, width)
    size, stride = [*hidden.size()], [*hidden.stride()]
    size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
    return hidden.as_strided(size=size, stride=stride)


def written(own: Tensor) -> Tensor:
    """What a window is of, once that is written to."""
    own = own * 1
    own.as_strided((3, 2), (4, 1), 1).mul_(own.sum())
    return own


SIZES = [(3, 8), (2, 12), (1, 4), (5, 16), (1, 8)]
OF_ITS_OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "chunks": lambda x, own: chunks(own),
    "chunks of what lies the other way round": lambda x, own: chunks(
        torch.relu(own.transpose(0, 1).contiguous().transpose(0, 1))
    ),
    "fixed windows": lambda x, own: own.as_strided((3, 2, 4), (5, 2, 1), 3),
    "windows whose rows are not whole": lambda x, own: torch.as_strided(own, (4, 3), (2, 3)),
    "numbers": lambda x, own: own.as_strided((3,), (7,)),
    "one number": lambda x, own: own.as_strided((1, 1), (1, 1), 5),
    "a copy": lambda x, own: torch.as_strided_copy(own, (3, 4), (4, 1)),
    "a stride": lambda x, own: own * own.stride(0),
    "whether it lies in order": lambda x, own: own * (2 if own.mT.is_contiguous() else 3),
    "a window that is written to": lambda x, own: (own * 1).as_strided((2, 3), (3, 1)).sin_(),
    "windows of what is written to": lambda x, own: (
        own.as_strided((3, 4), (2, 1)) + torch.relu_(own).sum()
    ),
}


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_what_a_module_makes_itself_lies_as_it_does(name: str, engine: Any) -> None:
    inputs = [torch.randn(rows, length, WIDTH) for rows, length in SIZES]
    model = assert_eagers(OF_ITS_OWN[name], inputs, engine)
    assert model.report.mode == "graph"


BY_ITS_INPUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the input": lambda x, own: own.sum() * x.as_strided((2, 3), (3, 1)),
    "a view of it": lambda x, own: own.sum() * x.mT.as_strided((2, 3), (3, 1)),
    "what lies as it does": lambda x, own: own.sum() * torch.exp(x).as_strided((2, 3), (3, 1)),
    "a stride": lambda x, own: own * torch.exp(x).stride(0),
    "the operator itself": lambda x, own: torch.ops.aten.as_strided(
        torch.exp(x) * own.sum(), [2, 3], [3, 1]
    ),
    "where it begins": lambda x, own: own * (1 + x.storage_offset()),
    "beyond its own": lambda x, own: own[:1].as_strided((2, 3), (4 * WIDTH, 1)),
    "what is written to by a window": lambda x, own: written(own),
}


@pytest.mark.parametrize("name", BY_ITS_INPUT)
def test_what_lies_as_the_input_does_is_pytorchs(name: str) -> None:
    flat = torch.randn(4, 4, WIDTH)
    turned = flat.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    with pytest.warns():
        model = assert_eagers(BY_ITS_INPUT[name], [flat, turned])
    assert model.report.mode == "eager"


@pytest.mark.parametrize("seed", range(12))
def test_drawn_windows_of_drawn_layouts_are_eagers(seed: int) -> None:
    draw = random.Random(seed)
    axes = draw.sample(range(3), 3)
    back = [axes.index(axis) for axis in range(3)]
    size = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    stride = [draw.randint(1, 5) for _ in size]
    offset = draw.randint(0, 3)

    def windows(x: Tensor, own: Tensor) -> Tensor:
        laid = own.permute(axes).contiguous().permute(back)
        return torch.as_strided(laid, size, stride, offset)

    model = assert_eagers(windows, [torch.randn(4, 5, WIDTH), torch.randn(3, 2, WIDTH)])
    assert model.report.mode == "graph"
