"""What a forward reads around a module and what it writes, kind by kind: eager's numbers always."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import threading
import time
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.breadth import crossed

ENGINE = Options(engine="onnxruntime", fallback="torch")
pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")

Function = Callable[[Any, Tensor], Tensor]


class Calls(nn.Module):
    """A forward as a function of the module, with attributes to hold."""

    def __init__(self, function: Function, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def leaves(module: Any) -> list[Tensor]:
    """What a step may train: parameters, buffers and what the module holds besides."""
    held = [*vars(module).values(), *vars(module).get("held", [])]
    found = [each.parameters() if isinstance(each, nn.Module) else [each] for each in held]
    own = [*module.parameters(), *module.buffers(), *itertools.chain.from_iterable(found)]
    return [each for each in own if isinstance(each, Tensor) and each.is_leaf]


def modes(
    build: Callable[[], nn.Module],
    change: Callable[[Any], object] | None = None,
    state: Callable[[Any], Any] = lambda module: (),
) -> tuple[list[str], ORTModule]:
    """What four training steps ran on, each of which must agree with eager's.

    Args:
        build: makes the module; called twice.
        change: is done to both modules after the second and the third step.
        state: what must be alike after each step as well.
    """
    torch.manual_seed(0)
    mine = build()
    torch.manual_seed(0)
    eager = build()
    model, ran = ORTModule(mine, options=ENGINE), []
    for step in range(4):
        x = torch.arange(8.0).reshape(2, 4) + step
        gradients = []
        for module, own in ((model, mine), (eager, eager)):
            own.zero_grad()
            output = module(x)
            if output.requires_grad:
                output.square().sum().backward()
            gradients.append([output.detach(), *(leaf.grad for leaf in leaves(own))])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state(mine), state(eager), rtol=1e-4, atol=1e-4)
        ran.append(model.report.mode)
        if change is not None and step in (1, 2):
            change(mine)
            change(eager)
    return ran, model


# -- what the code reads ---------------------------------------------------------------------------


def _flip(module: Any) -> None:
    module.layer.weight.requires_grad_(not module.layer.weight.requires_grad)


def _flip_all(module: Any) -> None:
    module.layer.requires_grad_(not module.layer.weight.requires_grad)


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (lambda m, x: m.layer(x) * (2 if m.layer.weight.requires_grad else 3), _flip),
        (lambda m, x: m.layer(x) * sum(p.requires_grad for p in m.parameters()), _flip),
        (lambda m, x: m.layer(x) * (2 if getattr(m.layer.bias, "is_leaf", 0) else 3), _flip),
    ],
    ids=["an attribute", "in a generator", "by its name"],
)
def test_what_is_trained_is_state_where_the_code_reads_it(
    function: Function, change: Callable[[Any], None]
) -> None:
    ran, _ = modes(lambda: Calls(function), change)
    assert ran == ["graph"] * 4


def test_what_follows_from_what_is_trained_is_right_too() -> None:
    modes(lambda: Calls(lambda m, x: m.layer(x) * (2 if m.layer(x).grad_fn else 3)), _flip_all)


def test_the_environment_is_state_where_the_code_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_TEST_SCALE", "1")

    def change(module: Any) -> None:
        monkeypatch.setenv("ORTRAIN_TEST_SCALE", "3")

    ran, model = modes(
        lambda: Calls(lambda m, x: m.layer(x) * float(os.environ["ORTRAIN_TEST_SCALE"])), change
    )
    assert ran == ["graph"] * 4
    assert model.report.captures == 2


def test_a_default_argument_that_changes_in_place_is_seen() -> None:
    def build() -> nn.Module:
        def function(m: Any, x: Tensor, scale: list[float] = [2.0]) -> Tensor:  # noqa: B006
            return m.layer(x) * scale[0]  # type: ignore[no-any-return]

        function.__defaults__ = ([2.0],)
        return Calls(function)

    ran, _ = modes(
        build, lambda m: m.function.__defaults__[0].append(m.function.__defaults__[0].pop() + 1)
    )
    assert ran == ["graph"] * 4


def test_a_function_whose_code_is_replaced_is_seen() -> None:
    def build() -> nn.Module:
        return Calls(lambda m, x: m.layer(x) * 2)

    def change(module: Any) -> None:
        module.function.__code__ = (lambda m, x: m.layer(x) * 3).__code__

    ran, _ = modes(build, change)
    assert ran == ["graph"] * 4


def test_the_numbers_of_a_frozen_module_outside_of_the_tree_are_inputs() -> None:
    ran, model = modes(
        lambda: Calls(lambda m, x: m.held[0](x), held=[nn.Linear(4, 4).requires_grad_(False)]),
        lambda m: m.held[0].weight.mul_(2),
    )
    assert ran == ["graph"] * 4
    assert model.report.captures == 1


def test_a_lock_around_all_of_the_forward_leaves_it_to_pytorch() -> None:
    def locked(m: Any, x: Tensor) -> Tensor:
        with m.lock:
            return m.layer(x)  # type: ignore[no-any-return]

    ran, model = modes(lambda: Calls(locked, lock=threading.Lock()))
    assert ran == ["eager"] * 4
    assert "context manager" in model.report.reason


def test_an_assertion_that_pytest_has_rewritten_is_no_obstacle() -> None:
    def asserting(m: Any, x: Tensor) -> Tensor:
        assert x.shape != m.layer.weight.shape, "not so many rows"
        assert isinstance(m.layer, nn.Linear)
        assert bool((x >= 0).all())
        return m.layer(x)  # type: ignore[no-any-return]

    assert any(name.startswith("@") for name in asserting.__code__.co_names)
    ran, _ = modes(lambda: Calls(asserting))
    assert ran == ["graph"] * 4


# -- what lies outside of the module and moves, or is trained --------------------------------------

ONE = torch.ones(4)


def _numbers() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0, 4.0, 5.0)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Calls(lambda m, x: m.layer(x) * next(m.count), count=itertools.count(1)),
        lambda: Calls(lambda m, x: m.layer(x) * next(m.draws), draws=_numbers()),
        lambda: Calls(lambda m, x: m.layer(x) + 0 * time.perf_counter()),
        lambda: Calls(lambda m, x: m.layer(x) * m.held[0], held=[ONE.clone().requires_grad_()]),
        lambda: Calls(lambda m, x: m.held[0](x), held=[nn.Linear(4, 4)]),
        lambda: Calls(lambda m, x: m.layer(x) * float(m.table[0]), table=np.ones(1 << 16)),
    ],
    ids=[
        "an iterator",
        "a generator",
        "the time",
        "a tensor to be trained",
        "a module to be trained",
        "a large array",
    ],
)
def test_what_is_no_part_of_the_module_is_no_obstacle(build: Callable[[], nn.Module]) -> None:
    ran, _ = modes(build)
    assert ran == ["graph"] * 4


def test_a_generator_of_random_numbers_is_named_and_left_to_pytorch() -> None:
    ran, model = modes(
        lambda: Calls(
            lambda m, x: m.layer(x) * m.config["draw"].random(), config={"draw": random.Random(3)}
        ),
        state=lambda m: list(m.config["draw"].getstate()[1]),
    )
    assert ran == ["eager"] * 4
    assert "module.config['draw'] is a generator of Python's" in model.report.reason


def test_a_buffer_that_requires_a_gradient_has_it() -> None:
    def build() -> nn.Module:
        module = Calls(lambda m, x: m.layer(x) * m.scale)
        module.register_buffer("scale", torch.ones(4).requires_grad_())
        return module

    ran, _ = modes(build, state=lambda m: m.scale.grad)
    assert ran == ["graph"] * 4


def test_a_tensor_that_comes_to_require_a_gradient_is_seen() -> None:
    ran, _ = modes(
        lambda: Calls(lambda m, x: m.layer(x) * m.scale, scale=torch.ones(4)),
        lambda m: m.scale.requires_grad_(),
        lambda m: m.scale.grad,
    )
    assert ran == ["graph"] * 4


# -- what the forward writes -----------------------------------------------------------------------


def _average(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(x)
    now = y.detach().mean(0)
    m.average = now if m.average is None else 0.9 * m.average + 0.1 * now
    return y - m.average


def _freeze(m: Any, x: Tensor) -> Tensor:
    m.layer.bias.requires_grad_(False)
    return m.layer(x)  # type: ignore[no-any-return]


def _child(m: Any, x: Tensor) -> Tensor:
    m.child = nn.Identity()
    return m.child(m.layer(x))  # type: ignore[no-any-return]


def _history(m: Any, x: Tensor) -> Tensor:
    m.config.seen.append(x.detach())
    return m.layer(x) * len(m.config.seen)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("build", "state"),
    [
        (lambda: Calls(_average, average=None), lambda m: m.average),
        (lambda: Calls(_freeze), lambda m: m.layer.bias.requires_grad),
        (lambda: Calls(_child), lambda m: type(m.child) is nn.Identity),
        (lambda: Calls(_history, config=SimpleNamespace(seen=[])), lambda m: m.config.seen),
    ],
    ids=["an average", "what is trained", "a sub-module", "a history in a configuration"],
)
def test_what_a_forward_writes_is_there_after_every_call(
    build: Callable[[], nn.Module], state: Callable[[Any], Any]
) -> None:
    ran, _ = modes(build, state=state)
    assert ran == ["graph"] * 4


def test_a_method_that_keeps_its_results_is_named_and_left_to_pytorch() -> None:
    class Masked(Calls):
        @functools.cache  # noqa: B019
        def mask(self, size: int) -> Tensor:
            return torch.arange(float(size))

        @functools.cached_property
        def scale(self) -> Tensor:
            return torch.full((4,), 2.0)

    ran, model = modes(lambda: Masked(lambda m, x: m.layer(x) * m.mask(4) * m.scale))
    assert ran == ["eager"] * 4
    assert "Masked.mask keeps its results" in model.report.reason
    Masked.mask.cache_clear()


def test_a_mask_that_is_made_when_it_is_missing_is_made_by_the_first_graph() -> None:
    def masked(m: Any, x: Tensor) -> Tensor:
        if m.mask is None or m.mask.shape[0] != x.shape[1]:
            m.mask = torch.full((x.shape[1],), 2.0)
        return m.layer(x) * m.mask  # type: ignore[no-any-return]

    ran, _ = modes(lambda: Calls(masked, mask=None), state=lambda m: m.mask)
    assert ran == ["graph"] * 4


@pytest.mark.filterwarnings("error::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
def test_a_call_that_makes_what_the_next_ones_find_is_no_refusal(engine: Any) -> None:
    def masked(m: Any, x: Tensor) -> Tensor:
        if m.mask is None or m.mask.shape[0] != x.shape[0]:
            m.mask = torch.full((x.shape[0], 1), 2.0)
            m.seen["made"] = True
        return m.layer(x) * m.mask  # type: ignore[no-any-return]

    options = Options(engine=engine, fallback="raise")
    model, ran = ORTModule(Calls(masked, mask=None, seen={}), options=options), []
    for rows in (3, 3, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), model.layer(x) * 2)
        ran.append(model.report.mode)
    assert ran == ["graph"] * 3
    assert model.seen == {"made": True}


class InitializedByData(nn.Module):
    """What the first batch in training says of its scales is written into the parameters."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.written = written
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
        self.register_buffer("initialized", torch.tensor(0))
        self.initialized: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.training and not self.initialized:
            deviations = x.detach().std(0)
            if self.written == "data":
                self.scale.data = deviations
                self.initialized.data = torch.tensor(1)
            elif self.written == "copy into data":
                self.scale.data.copy_(deviations)
                self.initialized.fill_(1)
            else:
                with torch.no_grad():
                    self.scale.copy_(deviations)
                self.initialized += 1
        return x * self.scale


@pytest.mark.filterwarnings("error::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
@pytest.mark.parametrize(
    ("written", "nested"), [("data", False), ("copy into data", False), ("copy", True)]
)
def test_a_first_call_that_sets_parameters_by_its_values_is_a_graph_as_the_next_are(
    engine: Any, written: str, nested: bool
) -> None:
    parts: nn.Module = InitializedByData(written)
    if nested:
        parts = nn.Sequential(nn.Linear(4, 4), parts, InitializedByData(written))
    eager, ran = copy.deepcopy(parts), []
    model = ORTModule(parts, options=Options(engine=engine))
    for rows in (5, 5, 3, 5):
        x = torch.randn(rows, 4)
        for each in (model, eager):
            each.zero_grad()
            each(x).square().mean().backward()
        for (name, own), plain in zip(parts.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(own, plain, msg=name)
            torch.testing.assert_close(own.grad, plain.grad, msg=name)
        ran.append(model.report.mode)
    assert ran == ["graph"] * 4
    state = {name: bool(t) for name, t in model.state_dict().items() if "initialized" in name}
    assert state
    assert all(state.values())


def _by_data(m: Any) -> None:
    m.layer.weight.data = m.layer.weight.data * 0.5


def _in_place(m: Any) -> None:
    with torch.no_grad():
        m.layer.weight.mul_(0.5)


def _in_data(m: Any) -> None:
    m.layer.weight.data.mul_(0.5)


@pytest.mark.parametrize("engine", ["onnxruntime", "aten", "auto"])
@pytest.mark.parametrize("write", [_by_data, _in_place, _in_data])
def test_what_a_call_writes_into_parameters_is_written_once(engine: Any, write: Any) -> None:
    def decaying(m: Any, x: Tensor) -> Tensor:
        if m.layer.weight.abs().sum() > 0:
            write(m)
        return m.layer(x)  # type: ignore[no-any-return]

    module = Calls(decaying)
    eager = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine=engine))
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), eager(x), rtol=0, atol=0)
        torch.testing.assert_close(module.layer.weight, eager.layer.weight, rtol=0, atol=0)
    assert model.report.graph_calls == (0 if engine == "auto" else 3)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mask = nn.Parameter(torch.ones(4)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.shape[0] != x.shape[0]:
            self.mask = torch.full((x.shape[0], 1), 2.0)
        return x * self.scale * self.mask


class Positions(nn.Module):
    """Its buffer is as long as the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("at", torch.zeros(1, 1))
        self.at: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.at.shape[0] != x.shape[0]:
            self.at = torch.arange(float(x.shape[0])).unsqueeze(1)
        return self.layer(x) + self.at


@pytest.mark.filterwarnings("error::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
def test_a_buffer_that_a_call_makes_anew_the_next_one_finds(engine: Any) -> None:
    parts = nn.Sequential(nn.Linear(4, 4), Positions(), nn.Linear(4, 4))
    model = ORTModule(parts, options=Options(engine=engine))
    eager, ran = copy.deepcopy(parts), []
    for _ in range(3):
        x = torch.randn(5, 4)
        torch.testing.assert_close(model(x), eager(x))
        torch.testing.assert_close(parts.state_dict()["1.at"], eager.state_dict()["1.at"])
        ran.append(model.report.mode)
    assert ran == ["graph"] * 3


@pytest.mark.filterwarnings("error::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
@pytest.mark.parametrize("lengths", [(3, 3, 3, 3), (3, 5, 3, 6)])
def test_a_part_that_makes_a_mask_for_each_length_is_in_the_graph(
    engine: Any, lengths: tuple[int, ...]
) -> None:
    parts = nn.Sequential(nn.Linear(4, 4), Masked(), nn.Linear(4, 4))
    model = ORTModule(parts, options=Options(engine=engine, fallback="raise"))
    eager, ran = copy.deepcopy(parts), []
    for rows in lengths:
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), eager(x))
        torch.testing.assert_close(parts[1].mask, eager[1].mask)
        ran.append(model.report.mode)
    assert ran == ["graph"] * 4


@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
def test_a_call_that_leaves_something_each_time_is_a_graph_each_time(engine: Any) -> None:
    def counting(m: Any, x: Tensor) -> Tensor:
        m.calls = m.calls + 1
        return m.layer(x)  # type: ignore[no-any-return]

    model = ORTModule(Calls(counting, calls=0), options=Options(engine=engine, fallback="raise"))
    for number in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), model.layer(x))
        assert model.calls == number + 1
    assert model.report.graph_calls == 3


def test_a_setting_that_the_forward_fills_in_and_that_decides_does_so_in_graphs() -> None:
    def filled(m: Any, x: Tensor) -> Tensor:
        first = m.config.kind is None
        m.config.kind = "filled"
        return m.layer(x) * (2.0 if first else 3.0)  # type: ignore[no-any-return]

    ran, _ = modes(lambda: Calls(filled, config=SimpleNamespace(kind=None)))
    assert ran == ["graph"] * 4


# -- a call aside ----------------------------------------------------------------------------------


class Restless(nn.Module):
    """Writes whatever a forward can write."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.config = SimpleNamespace(calls=0, seen=[], inner=SimpleNamespace(last=None))
        self.table = torch.zeros(4)
        self.array = np.zeros(4)
        self.draws = random.Random(1)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        type(self).total += 1
        self.config.calls += 1
        self.config.seen.append(x)
        self.config.inner.last = x
        self.fresh = x
        self.table += 1
        self.array += 1
        self.draws.random()
        torch.rand(2, generator=self.generator)
        np.random.rand()  # noqa: NPY002
        x = self.norm(self.layer(x)) + torch.rand(4)
        return x * (self.config.calls + self.table)


@pytest.mark.filterwarnings("default:of the forward")
def test_a_forward_that_warns_does_so_in_its_calls_and_in_no_rehearsal() -> None:
    def warning(m: Any, x: Tensor) -> Tensor:
        warnings.warn("of the forward", UserWarning, stacklevel=1)
        return m.layer(x)  # type: ignore[no-any-return]

    model = ORTModule(Calls(warning), options=Options(engine="auto"))
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.randn(3, 4)).sum().backward()
        assert [str(each.message) for each in caught] == ["of the forward"]


class Recent(OrderedDict):  # type: ignore[type-arg]
    """A subclass, as caches of other packages are."""


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize(
    ("kind", "engine", "bound"),
    crossed(
        [dict, OrderedDict, Recent, lambda: defaultdict(int)],
        ["aten", "onnxruntime"],
        [2, 9],
        one_in=3,
    ),
)
def test_results_kept_by_sizes_in_a_dictionary_of_any_kind_are_those_of_pytorch(
    engine: Any, kind: Any, bound: int
) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(4, 4), kind()

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[0]
            if size not in self.kept:
                self.kept[size] = float(size)
                if len(self.kept) > bound:
                    del self.kept[next(iter(self.kept))]
            elif isinstance(self.kept, OrderedDict):
                self.kept.move_to_end(size)
            return self.layer(x) * self.kept[size]  # type: ignore[no-any-return]

    plain = Keeping()
    model = ORTModule(copy.deepcopy(plain), options=Options(engine=engine))
    for rows in (2, 3, 2, 3, 4, 2, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), plain(x))
        assert [*model.module.kept.items()] == [*plain.kept.items()]
        assert type(model.module.kept) is type(plain.kept)


WRITES = {
    "a set": ("self.kept.add(x.shape[0])", set),
    "a dict by shape": ("self.kept[tuple(x.shape)] = 1", dict),
    "an OrderedDict by size": ("self.kept.setdefault(x.shape[0], 1)", OrderedDict),
}


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", WRITES)
def test_what_a_forward_without_a_source_writes_is_seen_though_a_second_run_writes_no_more(
    name: str, engine: Any
) -> None:
    line, kind = WRITES[name]
    names: dict[str, Any] = {}
    source = f"def forward(self, x):\n    {line}\n    return self.layer(x) * len(self.kept)"
    exec(source, names)  # noqa: S102 - as code from a pipe or a macro, of which no file tells

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(4, 4), kind()

        forward = names["forward"]

    plain = Writing()
    model = ORTModule(copy.deepcopy(plain), options=Options(engine=engine))
    for rows in (2, 3, 2, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), plain(x))
        assert model.module.kept == plain.kept
