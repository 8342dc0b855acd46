"""What tells a held module's graphs from the module: roundings do not, however far they lead."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from ortrain.frontend.twin import Reference, Seen, seen_of, tensors_of, wanting_of
from ortrain.frontend.watch import Watch
from ortrain.step.digest import Digest


class Chaotic(nn.Module):
    """The logistic map, which doubles a rounding each time, beside a steady number."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.start, self.steady = nn.Parameter(torch.full((64,), 0.3)), nn.Parameter(torch.ones(64))
        self.register_buffer("seen", torch.zeros(64))
        self.times = times

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value = self.start + 0.01 * x.sigmoid()
        for _ in range(self.times):
            value = 3.99 * value * (1 - value)
        self.seen += self.steady.detach()
        return value.sum(), (self.steady * x).sum()


def faults(module: nn.Module, change: Callable[[nn.Module], None], *, twice: bool) -> list[str]:
    """What a comparison with a changed module finds."""
    other, x = copy.deepcopy(module), torch.linspace(0, 1, 64)
    reference = Reference(module, Watch(module), (x,), {}, narrow=False)
    reference.run([0, 1], twice=twice)
    assert (reference.rounded is not None) == twice
    with torch.no_grad():
        change(other)
    found: Seen = seen_of(tensors_of(other(x)), other, {}, [0, 1], again=False)
    before = [p.detach().clone() for p in module.parameters()]
    told = reference.faults(found, all_are_read=True)
    assert all(torch.equal(p, was) for p, was in zip(module.parameters(), before, strict=True))
    assert not module.get_buffer("seen").any()
    assert all(p.grad is None for p in module.parameters())
    return told


def rounded(module: nn.Module) -> None:
    module.get_parameter("start").mul_(1 + 2**-22)


def steadily_wrong(module: nn.Module) -> None:
    rounded(module)
    module.get_parameter("steady").mul_(1.2)


@pytest.mark.parametrize("twice", [False, True])
def test_roundings_that_lead_far_are_no_fault_and_a_fault_beside_them_is_one(twice: bool) -> None:
    module = Chaotic(40)
    assert faults(module, rounded, twice=twice) == []
    told = faults(module, steadily_wrong, twice=twice)
    assert [each.partition(" ")[0] for each in told] == ["output", "seen"]
    assert all("differs by 17%" in each for each in told), told


def test_where_roundings_stay_roundings_the_same_change_is_a_fault() -> None:
    def changed(module: nn.Module) -> None:
        module.get_parameter("start").mul_(1.2)

    told = faults(Chaotic(2), changed, twice=False)
    assert told
    assert all("output 0" in each or "start" in each for each in told), told


def test_in_sixteen_bits_a_parameter_is_rounded_as_they_are() -> None:
    def moved(module: nn.Module) -> None:
        module.get_parameter("start").mul_(1 + 2**-9)

    with torch.autocast("cpu", torch.bfloat16):
        assert faults(Chaotic(10), moved, twice=True) == []
    assert faults(Chaotic(10), moved, twice=True)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_graphs_compute_in_counts_where_tensors_do_not_say_it(
    dtype: torch.dtype, narrow: bool
) -> None:
    module = nn.Linear(3, 3).to(dtype)
    reference = Reference(module, Watch(module), (torch.ones(1, 3, dtype=dtype),), {}, narrow)
    wide = torch.bfloat16 if narrow else torch.float32
    assert reference.precision is (dtype if dtype.itemsize < 4 else wide)


class Layers(nn.Module):
    """Layers one behind another, with or without a checkpoint around the last two."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reentrant, self.alive = reentrant, list[int]()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.layers[0](x) + y
        first.register_hook(lambda _: self.alive.append(self.gradients()))
        second = self.layers[1](first)
        if self.reentrant:
            second = checkpoint(self.rest, second, use_reentrant=True)
        else:
            second = self.rest(second)
        # The weight is read behind the checkpoint as well as in it.
        return (second @ self.layers[3].weight).square().mean()

    def rest(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[2](x).tanh())

    def gradients(self) -> int:
        return sum(p.grad is not None for p in self.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("one", [False, True])
def test_gradients_are_looked_at_as_they_come_but_behind_functions_in_python(
    reentrant: bool, one: bool
) -> None:
    module, x = Layers(reentrant=reentrant), torch.randn(3, 8, requires_grad=True)
    y = x if one else torch.randn(3, 8, requires_grad=True)
    wanting = [*module.parameters(), x, y]
    expected = torch.autograd.grad(Layers.forward(_plain(module), x, y), wanting)
    module.alive.clear()
    arguments = wanting_of(((x, y), {}))
    found = seen_of([module(x, y)], module, arguments, [0], again=False).gradients
    assert module.alive == [6 if reentrant else 0]
    for gradient, digest in zip(expected, found.values(), strict=True):
        assert digest is not None
        assert digest.distance(Digest.of(gradient)) < 1e-6
    assert all(leaf.grad is None for leaf in wanting)


def _plain(module: Layers) -> Layers:
    """The same module, with the same parameters, without a checkpoint."""
    plain = copy.copy(module)
    plain.reentrant = False
    return plain


def test_a_leaf_with_gradients_of_two_backwards_is_told() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    loss = layer(x).sum()
    loss.register_hook(torch.enable_grad()(lambda _: layer(x).square().sum().backward()))
    with pytest.raises(RuntimeError, match="gradients of several backwards"):
        seen_of([loss], layer, {}, [0], again=False)


class Filling(nn.Module):
    """Returns the dictionary that it was given, as models of sentence-transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.stops = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), False

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        scale = self.scale.detach() if self.stops else self.scale
        given["scaled"] = self.layer(given["x"]) * scale
        return given


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("stops", [False, True])
def test_what_a_module_puts_among_its_arguments_is_no_argument(stops: bool, wanted: bool) -> None:
    module = Filling()
    other, given = copy.deepcopy(module), {"x": torch.randn(3, 4, requires_grad=wanted)}
    reference = Reference(module, Watch(module), (given,), {}, narrow=False)
    reference.run([1], twice=False)
    other.stops = stops
    found = seen_of(tensors_of(other(given)), other, reference.wanting, [1], again=True)
    assert found.gradients
    told = ["scale has a gradient in PyTorch only"] if stops else []
    assert reference.faults(found, all_are_read=True) == told


def test_a_model_that_returns_what_it_was_given_is_compared() -> None:
    model = ORTModule(Filling(), options=Options(engine="aten"))
    for _ in range(3):
        model({"x": torch.randn(3, 4)})["scaled"].square().sum().backward()
    assert model.report.graph_calls == 3
    assert "not compared" not in str(model.report)
