"""Modules that count, draw in Python, branch, write and have hooks: their steps are PyTorch's."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from tests.breadth import crossed
from tests.module.agreement import SAME

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")

ENGINES = ("aten", "onnxruntime")
STEPS = 4
TINY = 1e-7  # of gradients that are zero but for roundings


class Layer(nn.Module):
    """A part: two products, a norm, and dropout where asked for."""

    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.down(functional.gelu(self.up(x)))))


class Root(nn.Module):
    """Layers in a row between what a test wants to be there."""

    def __init__(self, dropout: float = 0.0, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout=dropout) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _sliced(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = layer(x)
    return self.head(x)[: int(x.abs().sum() > 0) + 1]


def _in_numpy(self: Any, x: Tensor) -> Any:
    kept = [layer for layer in self.layers if np.random.random() < 0.6]  # noqa: NPY002
    for layer in kept:
        x = layer(x)
    return self.head(x)


def _listed(self: Any, x: Tensor) -> Any:
    values = []
    for layer in self.layers:
        x = layer(x)
        values.append(x.mean().item())
    self.values = values
    return self.head(x) * values[-1]


def _loop(self: Any, x: Tensor) -> Any:
    for _ in range(int(x.shape[0] + x.argmax().item() % 2)):
        x = self.layers[0](x)  # the same part many times
    return self.head(self.layers[2](x))


def _unordered(self: Any, x: Tensor) -> Any:
    order = sorted(range(3), key=lambda i: float(self.layers[i].up.weight.detach().sum()))
    for i in order:
        x = self.layers[i](x)
    return self.head(x)


def _written(self: Any, x: Tensor) -> Any:
    self.calls += 1
    h = self.layers[0](x)
    h[h > 1] = 0.0
    y = self.layers[1](h)
    y += h
    h = self.layers[2](y)
    h.mul_(2)
    return self.head(h)


def _objects(self: Any, x: Tensor) -> Any:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    for layer in self.layers:
        x = layer(x)
    return Box(self.head(x)).value + self.calls * 0 if _count(self) else x


def _count(module: Any) -> bool:
    module.calls += 1
    return True


def _direct(self: Any, x: Tensor) -> Any:
    self.calls += 1
    x = self.layers[0].forward(x)  # without __call__
    x = self.layers[1](x=x)  # by name
    x = (
        x + functional.linear(x, self.layers[2].up.weight)[..., :6]
    )  # nothing of the part but its weight
    return self.head(x)


NUMPY = "draws with numpy"  # whose state checkpointing does not put back
FORWARDS: dict[str, Callable[..., Any]] = {
    "counts its calls": Root.forward,
    "takes a slice by a value": _sliced,
    NUMPY: _in_numpy,
    "takes numbers out of tensors": _listed,
    "repeats a part by a value": _loop,
    "orders its parts by their weights": _unordered,
    "writes to what parts give": _written,
    "has objects of its own": _objects,
    "calls a forward itself": _direct,
}


REPEATED = [name for name in FORWARDS if name != NUMPY]


def root(forward: Callable[..., Any] = Root.forward, dropout: float = 0.0) -> nn.Module:
    """A module that has this forward, from the same weights each time."""
    torch.manual_seed(0)
    kind = type("Root", (Root,), {"forward": forward})
    return kind(dropout)


def batches(count: int = STEPS) -> list[Tensor]:
    dice = torch.Generator().manual_seed(1)
    return [torch.randn(2 + i % 2, 3, 6, generator=dice) for i in range(count)]


def trained(model: Any, call: Callable[..., Any] | None = None) -> list[dict[str, Any]]:
    """What a few steps of training give: outputs, gradients of inputs and weights, the weights."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    np.random.seed(3)  # noqa: NPY002
    for i, x in enumerate(batches()):
        torch.manual_seed(i)
        x.requires_grad_()
        output = (call or model)(x) if call is None else call(model, x)
        optimizer.zero_grad()
        output.square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append({"output": output.detach(), "input": x.grad, **gradients})
        found[-1] = {name: None if t is None else t.clone() for name, t in found[-1].items()}
        optimizer.step()
    found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def agree(ours: list[dict[str, Any]], eager: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(ours, eager, strict=True):
        assert {n for n, t in mine.items() if t is None} == {
            n for n, t in theirs.items() if t is None
        }
        for name, tensor in mine.items():
            if tensor is not None:
                same(tensor, theirs[name], name)


def same(ours: Tensor, eager: Tensor, name: str = "") -> None:
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype), name
    error = float((ours - eager).detach().abs().max())
    assert error <= SAME * float(eager.detach().abs().max()) + TINY, f"{name}: {error:.1e}"


def wrapped(module: nn.Module, engine: Any = "aten", **options: Any) -> ORTModule:
    return ORTModule(module, options=Options(engine=engine, **options))


@pytest.mark.parametrize(("name", "engine"), crossed(FORWARDS, ENGINES, one_in=2))
def test_training_equals_pytorchs_and_runs_as_graphs(name: str, engine: str) -> None:
    model = wrapped(root(FORWARDS[name]), engine)
    agree(trained(model), trained(root(FORWARDS[name])))
    assert model.report.graph_calls == STEPS


def test_evaluation_runs_in_pytorch() -> None:
    model = wrapped(root())
    trained(model)
    with torch.no_grad():
        output = model(batches()[0])
    torch.testing.assert_close(output, model.module(batches()[0]), rtol=0, atol=0)


class Viewing(nn.Module):
    """Returns a view of its argument, of a parameter, or of another output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.inner = what, nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.table = nn.Parameter(torch.ones(2, 6))
        self.register_buffer("mean", torch.zeros(2, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        if self.what == "argument":
            return y, x[:, 0]
        if self.what == "detached":
            return y, x.detach()
        if self.what == "buffer":
            return y, self.mean[0]
        return y, y[:, 0]


@pytest.mark.parametrize("what", ["argument", "detached", "buffer", "output"])
def test_what_is_written_to_a_view_reaches_what_it_is_a_view_of(what: str) -> None:
    class Writing(Root):
        def __init__(self) -> None:
            super().__init__()
            self.viewing = Viewing(what)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = x * 2
            y, view = self.viewing(h)
            with torch.no_grad():
                view.add_(1)
            return self.head(y + h + self.viewing.mean.sum()) * view.sum()

    def outputs(module: Any) -> list[Tensor]:
        return [module(x) for x in batches()]

    torch.manual_seed(0)
    module: Any = Writing()
    twin = copy.deepcopy(module)
    model = wrapped(module)
    for mine, theirs in zip(outputs(model), outputs(twin), strict=True):
        same(mine, theirs)
    same(module.viewing.mean, twin.viewing.mean)
    assert model.report.graph_calls == STEPS


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
def test_what_is_checkpointed_repeats_what_it_did(engine: str, reentrant: bool) -> None:
    """Dropout draws the same numbers again: a graph's own, or PyTorch's where it runs both."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        result: Tensor = self.head(x)
        return result

    agree(trained(wrapped(root(forward), engine)), trained(root(forward)))
    other: nn.Module = root(dropout=0.5)
    if engine != "auto":
        other = wrapped(other, engine)
    agree(trained(wrapped(root(forward, dropout=0.5), engine)), trained(other))


@pytest.mark.parametrize(
    ("name", "engine", "reentrant"),
    crossed(
        [name for name in FORWARDS if name != NUMPY], [*ENGINES, "auto"], [True, False], one_in=3
    ),
)
def test_checkpointing_around_the_module_repeats_what_it_did(
    name: str, engine: str, reentrant: bool
) -> None:
    """Dropout draws the same numbers again: a graph's own, or PyTorch's where it runs both."""

    def call(model: Any, x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=reentrant)

    forward = FORWARDS[name]
    agree(trained(wrapped(root(forward), engine), call), trained(root(forward), call))
    other: nn.Module = root(forward, dropout=0.5)
    if engine != "auto" or reentrant:
        other = wrapped(other, engine)
    agree(trained(wrapped(root(forward, dropout=0.5), engine), call), trained(other))


def test_hooks_are_called_once_and_see_pytorchs_tensors() -> None:
    seen: list[str] = []

    def hooked(module: nn.Module) -> nn.Module:
        module.layers[0].register_forward_hook(lambda *_: seen.append("part"))
        module.layers[1].norm.register_forward_hook(
            lambda m, a, out: seen.append("below") or out * 2
        )
        module.layers[2].register_full_backward_hook(lambda *_: seen.append("backward"))
        return module

    model = wrapped(hooked(root(_unordered)))
    ours = trained(model)
    mine, seen[:] = [*seen], []
    agree(ours, trained(hooked(root(_unordered))))
    assert mine == seen
    assert model.report.graph_calls == STEPS


def test_what_a_hook_keeps_is_that_of_each_step() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result

    seen: list[Tensor] = []

    def hooked() -> nn.Module:
        module: Any = root(forward)
        module.layers[1].register_forward_hook(lambda m, a, output: seen.append(output.detach()))
        return module

    model = wrapped(hooked())
    ours = trained(model)
    mine, seen[:] = [*seen], []
    agree(ours, trained(hooked()))
    assert len(mine) == STEPS
    for one, other in zip(mine, seen, strict=True):
        same(one, other)
    assert model.report.graph_calls == STEPS


def test_hooks_that_come_later_are_called() -> None:
    model = wrapped(root())
    trained(model)
    seen: list[str] = []
    model.module.layers[0].norm.register_forward_hook(lambda *_: seen.append("norm"))
    model.module.layers[1].register_forward_pre_hook(lambda *_: seen.append("layer"))
    for x in batches(3):
        model(x)
    assert seen == ["norm", "layer"] * 3


@pytest.mark.parametrize("where", ["layers.1", "layers.0.norm", "head.0", ""])
def test_a_hook_that_is_removed_is_called_no_more(where: str) -> None:
    module, seen = root(_unordered), list[str]()
    handle = module.get_submodule(where).register_forward_hook(lambda *_: seen.append(where))
    model, plain = wrapped(module), root(_unordered)
    agree(trained(model), trained(plain))
    handle.remove()
    agree(trained(model), trained(plain))
    assert seen == [where] * STEPS
    assert model.report.graph_calls == 2 * STEPS


def test_a_module_that_had_a_hook_at_first_becomes_one_graph() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result

    module = root(forward)
    handle = module.layers[1].register_forward_hook(lambda *_: None)
    model, plain = wrapped(module), root(forward)
    agree(trained(model), trained(plain))
    handle.remove()
    agree(trained(model), trained(plain))
    assert model.report.mode == "graph"


def test_an_error_in_the_module_leaves_nothing_behind() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.layers[0](x)
        if self.calls == 3:
            raise ValueError("of the user's")
        result: Tensor = self.head(h)
        return result

    model = wrapped(root(forward))
    for x in batches(2):
        model(x)
    with pytest.raises(ValueError, match="of the user's"):
        model(batches()[0])
    x = batches()[0]
    same(model(x), model.module.head(model.module.layers[0](x)))
    assert model.module.calls == 4
    assert model.report.mode == "graph"


def test_copies_made_while_the_module_runs_stand_alone() -> None:
    copies: list[nn.Module] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        copies.append(copy.deepcopy(self.layers[0]))
        with torch.no_grad():
            copies[-1].down.weight.zero_()
            copies[-1].down.bias.zero_()
        return self.head(self.layers[0](x) + copies[-1](x))

    agree(trained(wrapped(root(forward))), trained(root(forward)))
    x = batches()[0]
    torch.testing.assert_close(copies[1](x), copies[1].norm(x), rtol=0, atol=0)


def test_the_module_can_be_pickled_and_copied_between_steps() -> None:
    model = wrapped(Root(depth=1))
    trained(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        agree(trained(copied), trained(copy.deepcopy(model.module)))
        assert copied.report.mode == "graph"


def test_other_threads_that_call_the_module_itself_run_in_pytorch() -> None:
    results: list[Tensor] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            thread = threading.Thread(target=lambda: results.append(self.layers[0](x)))
            thread.start()
            thread.join()
        result: Tensor = self.head(self.layers[0](x))
        return result

    model = wrapped(root(forward))
    for x in batches():
        model(x)
    expected = model.module.layers[0](batches()[3])
    torch.testing.assert_close(results[0], expected, rtol=0, atol=0)


def test_what_the_user_replaces_runs_from_the_next_call_on() -> None:
    model, twin = wrapped(root()), root()
    agree(trained(model), trained(twin))
    for module in (model.module, twin):
        torch.manual_seed(5)
        module.layers[1] = Layer()
    agree(trained(model), trained(twin))
    assert model.report.graph_calls == 2 * STEPS


def test_frozen_parts_have_no_gradients_and_pass_them_on() -> None:
    def frozen(module: nn.Module) -> nn.Module:
        module.layers[1].requires_grad_(False)
        return module

    model = wrapped(frozen(root()))
    agree(trained(model), trained(frozen(root())))
    assert model.report.graph_calls == STEPS


def test_second_derivatives_go_through_parts() -> None:
    def gradients(module: Any) -> list[Tensor]:
        found = []
        for x in batches():
            x.requires_grad_()
            (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            found += torch.autograd.grad(first.square().sum(), [x, *module.layers[0].parameters()])
        return found

    ours, eager = gradients(wrapped(root())), gradients(root())
    for mine, theirs in zip(ours, eager, strict=True):
        same(mine, theirs)


class Energies(nn.Module):
    """Differentiates a part of its own in its forward, as force fields do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.way = way

    def forward(self, x: Tensor) -> Any:
        if self.way == "of the argument":
            x.requires_grad_()
        else:
            x = x.detach().requires_grad_()
        hidden = self.layers[1](self.layers[0](x))
        energy = self.head(hidden).sum()
        if self.way == "of an output in between":
            (force,) = torch.autograd.grad(energy, hidden, create_graph=True)
        elif self.way == "twice":
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            (force,) = torch.autograd.grad(force.square().sum(), x, create_graph=True)
        elif self.way == "for later":
            (force,) = torch.autograd.grad(energy, x, retain_graph=True)
        else:
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return torch.cat([energy.view(1), force.flatten()])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "way", ["of the argument", "of a leaf", "of an output in between", "twice", "for later"]
)
def test_a_forward_may_differentiate_its_own_parts(way: str, engine: str) -> None:
    torch.manual_seed(2)
    module = Energies(way)
    model, found = wrapped(copy.deepcopy(module), engine), []
    for each in (model, module):
        optimizer, steps = torch.optim.SGD(each.parameters(), 0.05), []
        for x in batches():
            output = each(x)
            optimizer.zero_grad()
            (output[1:] - 1).square().mean().add(output[0].square() * 0.01).backward()
            steps.append({"output": output.detach(), **_gradients(each)})
            optimizer.step()
        found.append(steps)
    agree(*found)
    assert not any("forward" in part.__dict__ for part in model.module.modules())


def _gradients(module: nn.Module) -> dict[str, Any]:
    named = getattr(module, "module", module).named_parameters()
    return {n: None if p.grad is None else p.grad.clone() for n, p in named}


def test_modules_that_are_wrapped_or_replaced_by_the_user_are_what_they_are_without() -> None:
    def replaced(module: Any, wrap: bool) -> nn.Module:
        if wrap:
            module.layers[0] = ORTModule(module.layers[0], options=Options(engine="aten"))
        module.layers[1].forward = lambda x: Layer.forward(module.layers[1], x) + 1
        module.layers[2] = nn.DataParallel(module.layers[2])
        return module

    ours = trained(wrapped(replaced(root(), wrap=True)))
    for mine, theirs in zip(ours, trained(replaced(root(), wrap=False)), strict=True):
        for one, other in zip(mine.values(), theirs.values(), strict=True):  # of other names
            same(one, other)


def test_modules_that_keep_in_torch_names_train_as_pytorchs() -> None:
    model = wrapped(root(), keep_in_torch=["layers.1", "layers.0.up"])
    agree(trained(model), trained(root()))
    assert model.report.graph_calls == STEPS


class Middle(nn.Module):
    """A sub-module around layers, between which a graph ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * float(np.float32(x.detach().numpy().mean() > -9))
        return x


class Around(nn.Module):
    """It, between layers of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.before = nn.Sequential(*(Layer() for _ in range(layers)))
        self.middle, self.after = Middle(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.middle(self.before(x)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layers", [1, 5])
def test_a_sub_module_that_goes_by_numbers_of_numpy_is_no_obstacle(
    layers: int, engine: str
) -> None:
    torch.manual_seed(0)
    module = Around(layers)
    twin = copy.deepcopy(module)
    model = wrapped(module, engine)
    agree(trained(model), trained(twin))
    assert model.report.graph_calls == STEPS
