"""Writes to what a graph has returned: they count in the gradient, whatever the backward reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ortrain import Options, ORTModule
from tests.breadth import crossed
from tests.module.agreement import SAME

# What a module ends with, of which autograd's graph or ours may keep the result, and what is
# written to that then.
ENDS: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda h: h,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "dropout of nothing": lambda h: functional.dropout(h, 0.0),
    "a norm": lambda h: functional.layer_norm(h * torch.arange(6.0), (6,)),
    "a view of tanh": lambda h: h.tanh().view(2, 18),
    "sigmoid with an axis more": lambda h: h.sigmoid()[None],
    "softmax transposed": lambda h: h.softmax(-1).transpose(0, 1),
    "a slice of exp": lambda h: h.exp()[:, 1:],
    "two of one": lambda h: (lambda t: (t, t * 1))(h.tanh()),
    "a pair of views": lambda h: (lambda t: (t, t.view(-1)))(h.tanh()),
    "chunks": lambda h: h.tanh().chunk(2, -1),
}
WRITTEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "neg_": (Tensor.neg_, Tensor.neg),
    "+=": (lambda t: t.add_(1), lambda t: t + 1),
    "a mask": (lambda t: t.masked_fill_(t > 0.2, 0.0), lambda t: t.masked_fill(t > 0.2, 0.0)),
    "a row": (
        lambda t: t[0].mul_(3),
        lambda t: torch.cat([t[:1] * 3, t[1:]]),
    ),
}


class Ending(nn.Module):
    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(6, 6), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.layer(x))


@pytest.mark.parametrize(
    ("end", "write", "engine"), crossed(ENDS, WRITTEN, ["aten", "onnxruntime"], one_in=2)
)
def test_a_write_to_an_output_counts_in_the_gradient(end: str, write: str, engine: str) -> None:
    torch.manual_seed(0)
    module, x = Ending(ENDS[end]), torch.randn(2, 3, 6)
    in_place, elsewhere = WRITTEN[write]

    def gradient(model: nn.Module, *, writes: bool) -> Tensor:
        module.zero_grad()
        outputs = [*pytree.tree_leaves(model(x))]
        torch.manual_seed(1)
        if writes:
            in_place(outputs[-1])
        else:
            outputs[-1] = elsewhere(outputs[-1])
        sum((t * torch.randn(t.shape)).sum() for t in outputs).backward()
        assert module.layer.weight.grad is not None
        return module.layer.weight.grad.clone()

    model = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    if end == "chunks":  # of which PyTorch lets write to none
        for each in (module, model):
            with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                gradient(each, writes=True)
        return
    if end == "a pair of views":  # PyTorch's own backward then misses what it has kept of one
        ours = ENDS[end](model.module.layer(x).detach())
        shared = [*model(x)]
        with torch.no_grad():
            in_place(ours[-1])
            in_place(shared[-1])
        torch.testing.assert_close([each.detach() for each in shared], [*ours])
        return
    expected = gradient(module, writes=False)
    error = float((gradient(model, writes=True) - expected).abs().max())
    assert error <= SAME * float(expected.abs().max())
