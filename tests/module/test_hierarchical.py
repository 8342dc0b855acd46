"""HierarchicalORTModule: the largest parts become graphs, gradients are those of PyTorch."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.hierarchical import HierarchicalORTModule


class Odd(nn.Module):
    """What no graph has: the way depends on numpy."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach().numpy().sum() > 1e9:
            return x
        for module in self.inside:
            x = module(x)
        return x


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(4, 4)
        self.odd = Odd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(nn.functional.linear(x, self.side.weight))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, Odd(layer, plain()), nn.ReLU())


CASES = {
    "whole": (plain, {""}),
    "in a list": (lambda: Odd(plain(), nn.Linear(4, 4)), {"inside.0", "inside.1"}),
    "two levels": (
        lambda: nn.Sequential(plain(), Odd(plain(), Odd(nn.Linear(4, 4)), nn.Tanh())),
        {"0", "1.inside.0", "1.inside.1.inside.0"},
    ),
    "a shared part": (shared, {"0", "1.inside.1"}),
    "not called": (Unused, set()),
    "a part by hand": (lambda: Odd(ORTModule(plain()), plain()), {"inside.0", "inside.1"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_largest_parts_are_graphs(name: str) -> None:
    make, parts = CASES[name]
    model = make()
    eager = copy.deepcopy(model)
    keys = list(model.state_dict())
    module = HierarchicalORTModule(model, options=Options(engine="aten"))
    for step in range(3):
        x, y = (torch.randn(3 + step, 4).requires_grad_() for _ in range(2))
        y.data.copy_(x.data)
        ours, theirs = module(x), eager(y)
        torch.testing.assert_close(ours, theirs)
        for result, each in ((ours, module), (theirs, eager)):
            each.zero_grad()
            result.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        for p, q in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert set(module.parts) == parts
    assert list(module.state_dict()) == keys
    if name != "a part by hand":
        assert {part.report.mode for part in module.parts.values()} <= {"graph"}
    assert not any(reason == "" for reason in module.reasons.values())
    if parts != {""}:
        assert "numpy" in "".join(module.reasons.values())
        assert f"{len(parts)} parts" in repr(module)


def test_copies_find_their_parts_again() -> None:
    module = HierarchicalORTModule(Odd(plain()), options=Options(engine="aten"))
    x = torch.randn(3, 4)
    expected = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), expected)
        assert list(other.parts) == ["inside.0"]
        assert other(x).requires_grad
        assert other.parts["inside.0"].report.mode == "graph"


def test_a_first_call_that_fails_leaves_the_module_as_it_was() -> None:
    module = HierarchicalORTModule(Odd(plain()), options=Options(engine="aten"))
    with pytest.raises(RuntimeError):
        module(torch.randn(3, 5))
    assert not any(m._forward_pre_hooks for m in module.modules())
    module(torch.randn(3, 4))
    assert list(module.parts) == ["inside.0"]


def test_parts_that_no_second_call_reaches_are_no_mistake() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = HierarchicalORTModule(Odd(plain()), options=Options(engine="aten"))
        module(torch.randn(3, 4)).sum().backward()
        assert list(module.parts) == ["inside.0"]
        del module
        gc.collect()
    assert [str(each.message) for each in caught] == []
