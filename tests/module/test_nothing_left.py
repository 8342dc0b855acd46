"""What capture and certificate save for a backward is freed, and the caller's hooks stay his."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.pytorch.saving import unhooked

# Operators that save what they give: each would hold itself.
SAVED: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.softmax(-1),
    torch.tanh,
    torch.exp,
    torch.sigmoid,
    torch.relu,
    lambda x: (x * x + 1).sqrt(),
    lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    lambda x: x.amax(-1, keepdim=True) + x,
]


def alone(y: Tensor) -> Any:
    return y


def loss(y: Tensor) -> Any:
    return y.pow(2).sum()


def both(y: Tensor) -> Any:
    return {"loss": y.pow(2).sum(), "hidden": [y, y.detach()]}


class Saving(nn.Module):
    """A row of linear layers, behind each an operator that saves its result."""

    def __init__(self, result: Callable[[Tensor], Any], asks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in SAVED)
        self.result, self.asks = result, asks

    def forward(self, x: Tensor) -> Any:
        for layer, operator in zip(self.layers, SAVED, strict=True):
            x = operator(layer(x))
            if self.asks and not torch.compiler.is_compiling() and x.isnan().any():
                raise ValueError("no number")
        return self.result(x)


def tensors_with_a_past() -> int:
    """How many live that an operator has made which autograd has noted."""
    gc.collect()
    return sum(type(each) is Tensor and each.grad_fn is not None for each in gc.get_objects())


@pytest.mark.parametrize("engine", ["aten", "onnxruntime", "auto"])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("result", [alone, loss, both])
def test_no_tensor_of_a_capture_or_a_certificate_lives_on(
    result: Callable[[Tensor], Any], asks: bool, engine: Any
) -> None:
    before = tensors_with_a_past()
    model = ORTModule(Saving(result, asks), options=Options(engine=engine))
    for rows in (4, 4, 5):
        found = model(torch.randn(rows, 6))
        found = found["loss"] if isinstance(found, dict) else found.sum()
        if rows == 4:
            found.backward()
        del found
    assert tensors_with_a_past() == before


def test_hooks_are_taken_off_and_put_back_in_their_order() -> None:
    seen = list[str]()

    def hooks(name: str) -> Any:
        def pack(value: Tensor) -> Tensor:
            seen.append(name)
            return value.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value)

    x = torch.ones(2, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        with unhooked():
            x.exp()
            with hooks("own"):
                x.exp()
            assert seen == ["own"]
        x.exp()
        with pytest.raises(ZeroDivisionError), unhooked():
            raise ZeroDivisionError
        x.exp()
        assert seen == ["own", "inner", "inner"]
    # Popped one by one, the outer ones are still behind the inner ones.
    with hooks("outer"):
        with hooks("inner"), unhooked():
            pass
        x.exp()
    assert seen == ["own", "inner", "inner", "outer"]
    x.exp()
    assert seen[4:] == []
