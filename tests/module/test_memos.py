"""Functions that keep their results, and tables by class: eager's numbers."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")


class Calls(nn.Module):
    """A forward as a function of the module, with what it works with."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def steps(
    build: Callable[[], Calls],
    *,
    change: dict[int, Callable[[Any], object]] | None = None,
    rows: tuple[int, ...] = (2, 3, 2, 3, 5, 6),
    state: Callable[[Any], Any] = lambda module: None,
) -> tuple[list[str], ORTModule]:
    """What each training step ran on; losses, gradients and state are eager's after each.

    Both modules are built anew, so that neither finds what the other has memoised.

    Args:
        build: makes the module and all that it works with.
        change: what is done to a module before a step, by its number.
        rows: of the batch of each step.
        state: what the module has come to hold besides its parameters.
    """
    histories: list[list[Any]] = []
    ran: list[str] = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        module, history = build(), []
        model: Any = ORTModule(module, options=Options(engine="aten")) if wrapped else module
        for step, count in enumerate(rows):
            if change is not None and step in change:
                change[step](module)
            model.zero_grad()
            loss = model(torch.arange(4.0 * count).reshape(count, 4) / 10 + step).square().mean()
            loss.backward()
            gradients = [parameter.grad.clone() for parameter in module.parameters()]
            history.append(([loss.detach(), *gradients], state(module), random.getstate()))
            if wrapped:
                ran.append(model.report.mode)
        histories.append(history)
    for step, (mine, eager) in enumerate(zip(*histories, strict=True)):
        torch.testing.assert_close(mine[0], eager[0], rtol=1e-5, atol=1e-6, msg=f"step {step}")
        assert mine[1:] == eager[1:], f"step {step}"
    return ran, model


class Recipe:
    """A result that is an object, as parsers make."""

    def __init__(self, factor: float, names: tuple[str, ...]) -> None:
        self.factor, self.names = factor, names


@pytest.mark.parametrize("bound", [None, 64], ids=["without bound", "bounded"])
def test_a_function_of_the_modules_that_keeps_its_results_runs_in_pytorch(
    bound: int | None,
) -> None:
    def build() -> Calls:
        @functools.lru_cache(bound)
        def recipe(pattern: str, axes: int) -> Recipe:
            return Recipe(2.0 * axes, (pattern, "b"))

        @functools.lru_cache(bound)
        def widths(shape: tuple[int, ...]) -> list[int]:
            return [2 * size for size in shape]

        def forward(m: Any, x: Tensor) -> Tensor:
            hidden = m.layer(x) * m.recipe("a b", x.dim()).factor
            return hidden * m.widths(m.layer.weight.shape)[0]  # type: ignore[no-any-return]

        return Calls(forward, recipe=recipe, widths=widths)

    def elsewhere(module: Calls) -> None:  # as another module of the script does
        for number in range(4):
            module.recipe("b a", number)
            module.widths((number,))

    ran, model = steps(build, change={3: elsewhere, 4: elsewhere})
    assert ran == ["eager"] * 6
    assert "module.recipe is a function with a cache" in model.report.reason


def test_what_the_function_of_a_result_notes_elsewhere_comes_to_be() -> None:
    def build() -> Calls:
        registry: dict[str, float] = {}

        @functools.cache
        def load(name: str) -> str:
            registry[name] = 3.0
            return name

        return Calls(
            lambda m, x: m.layer(x) * m.registry[m.load("a")], load=load, registry=registry
        )

    steps(build, state=lambda module: dict(module.registry))


def test_a_result_that_is_drawn_is_drawn_once() -> None:
    def build() -> Calls:
        @functools.cache
        def noise(level: int) -> float:
            return random.random() * level

        return Calls(lambda m, x: m.layer(x) * m.noise(2), noise=noise)

    steps(build)


def test_a_result_stays_what_it_was_when_what_it_was_made_of_changes() -> None:
    def build() -> Calls:
        @functools.cache
        def scale(kind: str) -> float:
            return float(settings[kind])

        settings = {"a": 2.0, "b": 3.0}

        def forward(m: Any, x: Tensor) -> Tensor:  # the second key in another form of the call
            return m.layer(x) * m.scale("a") * (m.scale("b") if torch.is_grad_enabled() else 1)  # type: ignore[no-any-return]

        module = Calls(forward, scale=scale, settings=settings)
        with torch.no_grad():
            module(torch.ones(2, 4))
        return module

    _, model = steps(
        build,
        change={
            0: lambda module: module.settings.update(a=5.0),
            3: lambda module: module.settings.update(b=7.0),
            4: lambda module: module.scale.cache_clear(),
        },
    )
    assert model.module.scale("b") == 7.0


def test_a_result_that_a_bounded_memo_drops_is_made_anew() -> None:
    def build() -> Calls:
        settings = {"a": 2.0}

        @functools.lru_cache(1)
        def scale(kind: str) -> float:
            return float(settings.get(kind, 1.0))

        return Calls(lambda m, x: m.layer(x) * m.scale("a"), scale=scale, settings=settings)

    def change(module: Calls) -> None:
        module.settings["a"] += 1.0
        module.scale("another")

    steps(build, change={2: change, 4: lambda module: module.scale("another")})


# -- memos of sizes --------------------------------------------------------------------------------


def doubled(shape: tuple[int, ...], factor: int) -> list[int]:
    return [factor * size for size in shape]


memoised = functools.lru_cache(64)(doubled)


def scaled_or_own(m: Any, x: Tensor) -> Tensor:
    """As einops does: sizes that are symbols have no hash."""
    try:
        rows, columns = memoised(x.shape, 2)
    except TypeError:
        rows, columns = doubled(x.shape, 2)
    return m.layer(x).repeat(2, 2).reshape(rows, columns) * rows  # type: ignore[no-any-return]


def scaled_or_else(m: Any, x: Tensor) -> Tensor:
    try:
        rows, _ = memoised(x.shape, 2)
    except TypeError:
        rows, _ = doubled(x.shape, 7)
    return m.layer(x) * rows  # type: ignore[no-any-return]


def scaled_by_kept(m: Any, x: Tensor) -> Tensor:
    return m.layer(x) * memoised(x.shape, 2)[0]  # type: ignore[no-any-return]


def scaled_by_parts(m: Any, x: Tensor) -> Tensor:
    return m.layer(x) * memoised((x.shape[0], (x.shape[1],)[0]), 2)[0]  # type: ignore[no-any-return]


@functools.cache
def looked_up(size: int) -> float:
    return {2: 1.0, 3: 5.0, 5: 7.0, 6: -2.0, 7: 0.0}[size]


def scaled_by_table(m: Any, x: Tensor) -> Tensor:
    return m.layer(x) * looked_up(x.shape[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "forward", [scaled_or_own, scaled_or_else, scaled_by_kept, scaled_by_parts, scaled_by_table]
)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["alone", "filled elsewhere"])
def test_a_memo_of_sizes_gives_eagers_numbers_and_keeps_no_symbols(
    forward: Callable[[Any, Tensor], Tensor], elsewhere: bool
) -> None:
    def build() -> Calls:
        memoised.cache_clear()
        looked_up.cache_clear()
        return Calls(forward)

    def use(_: Calls) -> None:
        for rows in (3, 5):
            memoised(torch.Size([rows, 4]), 2)
            looked_up(rows)

    ran, _ = steps(build, change={0: use, 2: use} if elsewhere else None)
    assert ran[1:] == ["eager"] * 5
    for rows in (2, 3, 5, 6, 7):
        assert all(type(size) is int for size in memoised(torch.Size([rows, 4]), 2))
        assert type(looked_up(rows)) is float


# -- tables by class -------------------------------------------------------------------------------


class Backend:
    """What a library of several frameworks has for one of them."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda: defaultdict(list)])
def test_a_table_that_notes_what_a_class_needs_is_filled_in_by_one_graph_and_read_by_another(
    kind: Callable[[], dict[Any, Any]],
) -> None:
    def build() -> Calls:
        table = kind()

        def backend(tensor: Tensor) -> Backend:
            if type(tensor) not in table:
                table[type(tensor)] = shared
            return table[type(tensor)]  # type: ignore[no-any-return]

        shared = Backend()

        def forward(m: Any, x: Tensor) -> Tensor:
            hidden, weight = m.layer(x), m.layer.weight
            return m.backend(hidden).scaled(hidden) + m.backend(weight).scaled(weight).sum()  # type: ignore[no-any-return]

        return Calls(forward, backend=backend, table=table)

    ran, model = steps(build, state=lambda module: list(module.table))
    assert ran == ["graph"] * 6
    assert model.report.captures == 2


def test_a_table_of_functions_by_class_is_looked_up_as_in_pytorch() -> None:
    def build() -> Calls:
        handlers = {Tensor: lambda x: x * 3, list: lambda x: x}
        return Calls(lambda m, x: m.layer(m.handlers[type(x)](x)), handlers=handlers)

    ran, _ = steps(build)
    assert ran == ["graph"] * 6


@pytest.mark.parametrize("before", [{}, {Tensor: 4}], ids=["empty", "begun"])
def test_a_table_that_counts_by_class_counts_each_call(before: dict[type, int]) -> None:
    def build() -> Calls:
        def forward(m: Any, x: Tensor) -> Tensor:
            m.counts[type(x)] = m.counts.get(type(x), 0) + 1
            return m.layer(x)  # type: ignore[no-any-return]

        return Calls(forward, counts=dict(before))

    ran, _ = steps(build, state=lambda module: dict(module.counts))
    assert ran == ["graph"] * 6


def test_a_table_with_entries_of_two_classes_of_pytorch_gives_eagers_numbers() -> None:
    def build() -> Calls:
        handlers: Any = {Tensor: lambda x: x * 3, nn.Parameter: lambda x: x * 5}

        def forward(m: Any, x: Tensor) -> Tensor:
            weight = m.layer.weight
            one = m.handlers.get(type(x), lambda x: x)(x)
            return m.layer(one) + m.handlers.get(type(weight), lambda x: x)(weight).sum()  # type: ignore[no-any-return]

        return Calls(forward, handlers=handlers)

    steps(build)
