"""A held module's machine: whatever changes, its calls give what the module gives."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import os
import random
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as of_all
from torch.overrides import has_torch_function
from torch.utils.checkpoint import checkpoint

import ortrain
from ortrain import Options, ORTModule
from ortrain.errors import InputError, NotServed, OrtrainWarning, ParityError
from ortrain.frontend.graph import Graph
from ortrain.frontend.machine import QUIET
from ortrain.frontend.policy import Policy
from ortrain.pytorch.autocast import autocast_depth
from tests.frontend.compiling import Doubled

PACKAGE = Path(ortrain.__file__).parent


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.changed(self.linear(x))

    def changed(self, x: Tensor) -> Tensor:
        return x * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.inner(x))
        return result


def held(module: nn.Module, **options: Any) -> ORTModule:
    return ORTModule(module, options=Options(**{"engine": "aten", **options}))


def agree(model: ORTModule, *args: Any) -> None:
    """Outputs and gradients are those of the module."""
    found = []
    for call in (model, model.module):
        model.module.zero_grad()
        output = call(*args)
        output.sum().backward()
        found.append([output.detach(), *(p.grad for p in model.module.parameters())])
    torch.testing.assert_close(*found)


class InTiles(torch.autograd.Function):
    """Products into a part of a buffer, as losses in chunks compute them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        buffer = x.new_empty(len(x), 2 * len(weight))
        return torch.mm(x, weight.t(), out=buffer[:, : len(weight)]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@pytest.mark.parametrize("tiles", [False, True])
def test_code_that_ends_graphs_is_known_before_it_is_traced(
    tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    monkeypatch.setattr(Policy, "expect_parts", lambda policy: heard.append(policy))

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return InTiles.apply(x, self.weight) if tiles else super().forward(x)

    model = ORTModule(nn.Sequential(nn.Linear(4, 4), Head(4, 3, bias=False)))
    model(torch.randn(5, 4)).sum().backward()
    assert bool(heard) is tiles


# -- what Dynamo does not look at ----------------------------------------------------------------


def _added(module: Any, args: Any, output: Tensor) -> Tensor:
    return output + 1


def _forward_hook(outer: Outer) -> Callable[[], None]:
    return outer.inner.register_forward_hook(_added).remove


def _pre_hook(outer: Outer) -> Callable[[], None]:
    hook = lambda module, args: (args[0] * 3,)  # noqa: E731
    return outer.inner.linear.register_forward_pre_hook(hook).remove


def _backward_hook(outer: Outer) -> Callable[[], None]:
    hook = lambda module, given, received: (given[0] * 2,)  # noqa: E731
    return outer.inner.register_full_backward_hook(hook).remove


def _of_all(outer: Outer) -> Callable[[], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output - 1 if isinstance(module, nn.Linear) else None

    return of_all.register_module_forward_hook(hook).remove


def _method_of_the_class(outer: Outer) -> Callable[[], None]:
    before = Inner.changed
    Inner.changed = lambda self, x: x * 5  # type: ignore[method-assign,assignment]

    def back() -> None:
        Inner.changed = before  # type: ignore[method-assign]

    return back


def _method_of_the_part(outer: Outer) -> Callable[[], None]:
    outer.inner.changed = types.MethodType(lambda self, x: x * 7, outer.inner)  # type: ignore[method-assign]
    return lambda: delattr(outer.inner, "changed")


def _forward_of_the_part(outer: Outer) -> Callable[[], None]:
    outer.inner.forward = lambda x: x * 9  # type: ignore[method-assign]
    return lambda: delattr(outer.inner, "forward")


def _another_part(outer: Outer) -> Callable[[], None]:
    before, outer.head = outer.head, nn.Linear(4, 4, bias=False)
    outer.head.register_forward_hook(_added)
    return lambda: setattr(outer, "head", before)


CHANGES = [
    _forward_hook,
    _pre_hook,
    _backward_hook,
    _of_all,
    _method_of_the_class,
    _method_of_the_part,
    _forward_of_the_part,
    _another_part,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_a_change_is_seen_and_so_is_its_end(change: Callable[[Outer], Callable[[], None]]) -> None:
    outer, x = Outer(), torch.randn(3, 4, requires_grad=True)
    model = held(outer)
    agree(model, x)
    before = outer(x)
    back = change(outer)
    try:
        agree(model, x)
        agree(model, x)
    finally:
        back()
    agree(model, x)
    torch.testing.assert_close(model(x), before)
    assert model.report.eager_calls == 0


def test_a_change_that_comes_and_goes_is_converted_once() -> None:
    outer, x = Outer(), torch.randn(3, 4)
    model = held(outer)
    for _ in range(3):
        agree(model, x)
        back = _forward_hook(outer)
        agree(model, x)
        back()
    conversions = [each.conversions for each in model._runner.graphs.compiled.values()]
    assert len(conversions) == 2
    agree(model, x)
    assert conversions == [each.conversions for each in model._runner.graphs.compiled.values()]


class Drawn(Outer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.generator.random()


class Bounded(Outer):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = collections.deque([1.0, 2.0], maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(self.last[0] + 1)
        return super().forward(x) * sum(self.last)


class Remembered(Outer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.table = functools.lru_cache(lambda count: torch.full((count,), self.scale))

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 1
        return super().forward(x) * self.table(4)


class RememberedByClass(Outer):
    scale = 2.0

    @functools.lru_cache  # noqa: B019
    def table(self, count: int) -> Tensor:
        return torch.full((count,), self.scale)

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 1
        return super().forward(x) * self.table(4)


class Nearby(Outer):
    """Has one of each, of which its forward reads none."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.losses = random.Random(0), collections.deque([1.0], maxlen=2)
        self.table = functools.lru_cache(lambda count: torch.ones(count))
        self.seen = collections.deque([1.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.seen[0]


@pytest.mark.parametrize("kind", [Drawn, Bounded, Remembered, RememberedByClass, Nearby])
def test_what_dynamo_does_not_follow_is_pytorchs(kind: type[Outer]) -> None:
    module = kind()
    model, plain = held(module), copy.deepcopy(module)
    if isinstance(plain, Remembered):
        plain.table = functools.lru_cache(lambda count: torch.full((count,), plain.scale))
    told = contextlib.nullcontext() if kind is Nearby else pytest.warns(OrtrainWarning)
    for call in range(4):
        x = torch.randn(3 + call % 2, 4)
        with told if not call else contextlib.nullcontext():
            torch.testing.assert_close(model(x), plain(x))
    assert model.report.graph_calls == (4 if kind is Nearby else 0)
    assert model._runner.graphs.last.conversions <= 2


# -- sizes ---------------------------------------------------------------------------------------


def test_all_sizes_are_one_conversion() -> None:
    model = held(Outer())
    for rows in (5, 3, 1, 7):
        agree(model, torch.randn(rows, 4))
    assert model.report.captures == 1


def test_a_size_of_one_in_the_first_call_may_be_broadcast() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            return self.linear(x) * weights

    model = held(Weighted())
    agree(model, torch.randn(3, 5, 4), torch.rand(3, 1, 4))
    agree(model, torch.randn(2, 7, 4), torch.rand(2, 1, 4))
    agree(model, torch.randn(2, 7, 4), torch.rand(2, 7, 4))
    agree(model, torch.randn(2, 6, 4), torch.rand(2, 1, 4))
    agree(model, torch.randn(2, 6, 4), torch.rand(1, 6, 4))
    assert model.report.eager_calls == 0


def test_sizes_of_parts_stay_open_as_those_of_the_whole() -> None:
    class Parted(Outer):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(super().forward(x))
            x = torch.fft.fft(x).abs()
            for _ in range(3):
                x = torch.tanh(super().forward(x))
            return x

    model = held(Parted())
    for rows in (5, 3, 7, 4):
        agree(model, torch.randn(rows, 4))
    assert model.report.captures == 1
    assert len(model._runner.graphs.last.graphs) == 2


def test_the_smaller_of_two_sizes_is_a_condition() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.register_buffer("places", torch.arange(9)[None])

        def forward(self, x: Tensor) -> Tensor:
            places: Any = self.places
            result: Tensor = x + self.embedding(places[:, : x.shape[1]])
            return result

    model = held(Positions())
    for length in (5, 8, 3):
        agree(model, torch.randn(2, length, 4))
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        model(torch.randn(2, 12, 4))
    agree(model, torch.randn(2, 4, 4))
    assert model.report.captures == 1


def test_what_forgets_all_of_dynamo_leaves_the_next_calls_graphs() -> None:
    class Pooled(Outer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[x[:, 0] > 0].sum() * float(x.sum() > 0)

    model, x = held(Pooled()), torch.rand(3, 4)
    agree(model, x)
    torch.compiler.reset()
    agree(model, x)
    assert model.report.graph_calls == 2
    assert model._runner.graphs.last.conversions == 2


# -- what is drawn -------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws in two graphs and a checkpoint."""

    def __init__(self, broken: bool = True) -> None:
        super().__init__()
        self.linear, self.broken = nn.Linear(8, 8), broken

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.linear(x), 0.5)
        x = x + torch.rand(x.shape) + torch.empty(x.shape).normal_()
        if self.broken:
            torch._dynamo.graph_break()
        return nn.functional.dropout(x, 0.25).cumsum(1)


@pytest.mark.parametrize("broken", [False, True])
def test_eager_and_graph_steps_draw_the_same(broken: bool) -> None:
    found = []
    for engine, steps in (("aten", None), ("auto", None), ("auto", 0), ("onnxruntime", None)):
        torch.manual_seed(0)
        model = held(Drawing(broken), engine=engine)
        if steps is not None:
            model.steps_to_come = steps
        torch.manual_seed(1)
        outputs = []
        for _ in range(3):
            output = model(torch.ones(4, 8))
            output.sum().backward()
            outputs.append(output.detach())
        found.append([*outputs, model.module.linear.weight.grad, torch.randint(0, 1000, (5,))])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_what_draws_nothing_leaves_the_generator_alone() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model, before = ORTModule(layer), torch.get_rng_state()
    x = torch.ones(2, 3, 8)
    before = torch.get_rng_state()
    for _ in range(3):
        model(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_a_checkpoint_repeats_what_an_eager_step_has_drawn(reentrant: bool, outside: bool) -> None:
    """The gradient of a mask's sum is the mask, if it is drawn alike."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if outside:
                return nn.functional.dropout(x, 0.5)
            kept: Tensor = checkpoint(
                lambda x: nn.functional.dropout(x * x, 0.5), x, use_reentrant=reentrant
            )
            return kept

    model = ORTModule(nn.Sequential(Masked()))
    model.steps_to_come = 0
    x = torch.ones(64, requires_grad=True)
    run = (lambda x: checkpoint(model, x, use_reentrant=reentrant)) if outside else model
    output = run(x)
    output.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, output.detach() * (1 if outside else 2))
    assert model.report.eager_calls >= 1


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["aten", "auto"])
@pytest.mark.parametrize("inner", [False, True])
def test_both_runs_of_a_checkpoint_are_alike_where_no_graph_is_made(
    inner: bool, engine: Any
) -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.vmap(lambda row: row.tanh() * 2)(self.first(x))
            if inner:
                x = checkpoint(lambda x: self.second(x).tanh(), x, use_reentrant=True)
            return x

    module = Mapped()
    plain = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine=engine))
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        for each in (model, plain):
            checkpoint(lambda x, each=each: each(x).sum(), x, use_reentrant=False).backward()
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], [p.grad for p in plain.parameters()]
    )


def test_a_number_that_a_checkpoints_repetition_changes_is_that_of_the_first_run() -> None:
    class Decayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rate = nn.Linear(4, 4), 1.0

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            self.rate *= 0.9
            return x * self.rate

    module = Decayed()
    plain = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine="aten"))
    for _ in range(3):
        x = torch.randn(3, 4)
        for each in (model, plain):
            checkpoint(each, x, use_reentrant=False).square().sum().backward()
        torch.testing.assert_close(module.layer.weight.grad, plain.layer.weight.grad)
    assert model.report.graph_calls == 3  # a repetition ends before its graph does


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("drawing", [False, True])
def test_a_checkpoints_repetition_may_run_another_graph(
    engine: Any, normed: bool, counting: bool, drawing: bool
) -> None:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=not normed)
            self.norm = nn.BatchNorm1d(4) if normed else nn.Identity()
            self.ones = nn.Parameter(torch.ones(4))
            self.register_buffer("count", torch.zeros(()))
            self.seen: list[int] = []

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.norm(self.layer(x)).tanh()
            if drawing:  # what comes of it tells whether the backward has the forward's mask
                mask = nn.functional.dropout((self.ones / self.ones.detach()).expand(x.shape))
                x = x + mask * (2 - mask) ** 2
            if counting:
                self.count += 1
                x = x * self.count
            self.seen.append(len(x))
            return x * len(self.seen[-2:]) * y.exp()

    module = Grown()
    plain = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine=engine))
    for step in range(3):
        x, y = torch.randn(8, 4), torch.randn(8, 4, requires_grad=step == 1)
        found = []
        for each, inner in ((model, module), (plain, plain)):
            loss = checkpoint(each, x, y, use_reentrant=False).square().mean()
            loss.backward()
            found.append([loss.detach(), y.grad, *[p.grad for p in inner.parameters()]])
            found[-1] += [b.clone() for b in inner.buffers()]
            y.grad = None
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert model.report.graph_calls == 3


# -- calls that are none for a graph --------------------------------------------------------------


def test_a_wrong_call_is_the_modules_own_error_and_nothing_is_noted() -> None:
    outer, x = Outer(), torch.randn(3, 4)
    model = held(outer, fallback="raise")
    for _ in range(2):
        with pytest.raises(RuntimeError) as ours:
            model(torch.randn(3, 5))
        with pytest.raises(RuntimeError) as theirs:
            outer(torch.randn(3, 5))
        assert type(ours.value) is type(theirs.value)
        assert str(ours.value) == str(theirs.value)
        agree(model, x)
    assert model.report.mode == "graph"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ortrain.errors.OrtrainWarning")
def test_derivatives_of_another_kind_are_pytorchs() -> None:
    outer, x = Outer(), torch.randn(3, 4)
    model = held(outer)
    agree(model, x)
    found = []
    for call in (model, outer):
        _, tangent = torch.func.jvp(call, (x,), (torch.ones(3, 4),))
        with forward_ad.dual_level():
            dual = call(forward_ad.make_dual(x, torch.ones(3, 4)))
            again = forward_ad.unpack_dual(dual).tangent
        rows = torch.func.vmap(torch.func.grad(lambda row, call=call: call(row[None]).sum()))(x)
        found.append([tangent, again, rows])
    torch.testing.assert_close(*found)
    agree(model, x)
    assert model.report.mode == "graph"


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_derivatives_are_taken_through_calls_that_are_watched_for_draws() -> None:
    module = nn.Linear(4, 4)
    model, x = ORTModule(module), torch.randn(3, 4)
    values = {name: p.detach() for name, p in module.named_parameters()}

    def loss(call: nn.Module, values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(call, values, x).square().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        found = [transform(lambda v, call=call: loss(call, v))(values) for call in (model, module)]
        torch.testing.assert_close(*found)


def test_what_is_kept_in_pytorch_runs_there_between_steps() -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(5)]
    module = nn.Sequential(*layers)
    model = held(module, keep_in_torch=["2.*", "2"])
    agree(model, torch.randn(3, 4))
    assert model.report.mode == "graph"
    (parts,) = model._runner.graphs.last.made
    kept = [not isinstance(part, Graph) for part in parts.parts]
    assert kept == [False, True, False]
    with pytest.raises(InputError, match="layer"):
        held(module, keep_in_torch=["layer"])(torch.randn(3, 4))


def test_what_a_wrong_call_assigns_before_it_raises_is_assigned_once() -> None:
    class Counted(Outer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x * self.calls)

    module = Counted()
    model, plain = held(module), copy.deepcopy(module)
    for x in (torch.ones(3, 4), torch.ones(3, 4).double(), torch.ones(3, 5), torch.ones(3, 4)):
        found = []
        for call in (model, plain):
            try:
                found.append(call(x).detach())
            except RuntimeError as error:
                found.append(torch.tensor(len(str(error))))
        torch.testing.assert_close(*found)
        assert module.calls == plain.calls
    assert model.report.mode == "graph"


class Watched(nn.Module):
    """Tells of each call whether PyTorch's functions are heard."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.heard, self.rate = nn.Linear(4, 4), list[bool](), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.heard.append(has_torch_function((x,)))
        return nn.functional.dropout(self.layer(x), self.rate, self.training)


def test_calls_that_draw_nothing_are_soon_watched_for_draws_no_more() -> None:
    module = Watched()
    model = ORTModule(module)
    for _ in range(5):
        model(torch.ones(2, 4))
    assert module.heard == [True] * QUIET + [False] * 2
    model.eval()
    model(torch.ones(2, 4))
    assert module.heard.pop()
    model.train()
    module.rate = 0.5
    for _ in range(5):  # the first of them is the first that draws
        model(torch.ones(2, 4))
    assert module.heard[5:] == [False] + [True] * 4


def test_calls_that_draw_are_watched_for_as_long_as_a_graph_may_come() -> None:
    module = Watched()
    module.rate = 0.5
    model = ORTModule(module)
    for _ in range(8):
        model(torch.ones(2, 4))
    assert all(module.heard)


class Marked(nn.Module):
    """Writes and assigns before what may raise."""

    mean: Tensor
    last: Tensor

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between, self.table, self.layer = between, nn.Embedding(5, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.last = x.sum(0)
        x = self.between(torch.tanh(x * x + self.mean) * 2 - 1)
        return self.layer(x + self.table(ids)) * self.last.mean()


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda x: x * 2, id="one graph"),
        pytest.param(lambda x: torch.fft.fft(x).abs(), id="parts"),
    ],
)
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_wrong_call_leaves_what_the_modules_own_leaves(
    between: Callable[[Tensor], Tensor], first: bool
) -> None:
    module = Marked(between)
    plain = copy.deepcopy(module)
    model = held(module)
    good = torch.rand(3, 4), torch.tensor([0, 1, 2])
    out_of_range = torch.rand(3, 4), torch.tensor([0, 1, 7])
    of_another_dtype = torch.rand(3, 4).double(), torch.tensor([0, 1, 2])
    calls = [out_of_range, of_another_dtype, good, good, out_of_range, good]
    for call in calls if first else [good, *calls]:
        found: list[Any] = []
        for run in (model, plain):
            try:
                found.append(run(*call).detach())
            except (IndexError, RuntimeError) as error:
                found.append(torch.tensor(len(str(error))))
        torch.testing.assert_close(*found)
        torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


class Spectral(nn.Module):
    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        return torch.fft.fft(x).abs() if whole else torch.tanh(x) * x


def test_kinds_of_calls_without_a_graph_run_in_pytorch_and_others_as_graphs() -> None:
    model, x = held(Spectral()), torch.randn(3, 4, requires_grad=True)
    with pytest.warns(OrtrainWarning, match="fft"):
        model(x)
    assert model.report.mode == "eager"
    assert "fft" in model.report.reason
    model(x, whole=False).sum().backward()
    assert model.report.mode == "graph"
    model(x)
    assert (model.report.graph_calls, model.report.eager_calls) == (1, 2)


def test_without_a_fallback_a_call_without_a_graph_raises() -> None:
    model = held(Spectral(), fallback="raise")
    for _ in range(2):
        with pytest.raises(Exception, match="fft"):
            model(torch.randn(3, 4))
    model = held(Outer(), fallback="raise")
    with pytest.raises(NotServed, match="empty"):
        model(torch.randn(0, 4))


def test_a_graph_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Graph.run

    def wrong(self: Graph, *given: Any) -> Any:
        return tuple(each * 1.01 for each in own(self, *given))

    monkeypatch.setattr(Graph, "run", wrong)
    layer, x = nn.Linear(5, 7), torch.randn(3, 5)  # of which no other test has a graph
    with pytest.warns(OrtrainWarning, match="does not compute what PyTorch does"):
        agree(held(layer), x)
    with pytest.raises(ParityError):
        held(layer, fallback="raise")(x)
    model = held(layer, certificate="off")
    torch.testing.assert_close(model(x), layer(x) * 1.01)
    assert model.report.certificate == ""


# -- which output is the loss --------------------------------------------------------------------


class Scored(nn.Module):
    """A loss that its graph returns last, beside another scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8192)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        spread = h.var()
        logits = self.head(h)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "spread": spread}


def test_the_loss_is_found_among_the_outputs_and_logits_that_nobody_reads_are_not_made() -> None:
    module = Scored()
    model, x, labels = held(module), torch.randn(6, 8), torch.randint(0, 8192, (6,))
    labels[:4] = -100
    model.only_loss_is_read = True
    for call in range(3):
        module.zero_grad()
        output = model(x, labels)
        output["loss"].backward()
        if call:  # the first one has told which it is
            assert not output["logits"].any()
        found = [p.grad for p in module.parameters()]
        module.zero_grad()
        module(x, labels)["loss"].backward()
        torch.testing.assert_close(found, [p.grad for p in module.parameters()])
    model.only_loss_is_read = False
    torch.testing.assert_close(model(x, labels), module(x, labels))


@pytest.mark.parametrize("mode", ["torch.no_grad()", "torch.inference_mode()"])
def test_what_is_loaded_in_the_first_call_is_not_made_for_its_mode(mode: str) -> None:
    script = (
        "import torch, ortrain; m = ortrain.compile(torch.nn.Linear(4, 2), engine='aten')\n"
        f"with {mode}: m(torch.ones(3, 4))\n"
        "m(torch.ones(3, 4)).sum().backward(); print(ortrain.report_of(m).graph_calls)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["2"]


# -- what a call costs, and leaves ---------------------------------------------------------------


def _folders(call: Callable[[], Any]) -> dict[str, str]:
    """The folders of what a call enters, with a function of each."""
    found: dict[str, str] = {}

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found[os.fspath(path.parent.relative_to(PACKAGE))] = frame.f_code.co_qualname

    gc.collect()
    gc.disable()  # which would enter generators of other tests to close them
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def test_a_settled_call_passes_at_most_five_folders() -> None:
    model, x = held(Drawing(broken=False)), torch.ones(4, 8)
    for _ in range(4):
        model(x).sum().backward()
    found = _folders(lambda: model(x).sum().backward())
    assert len(found) <= 5, found


@pytest.fixture
def collected() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


@pytest.mark.usefixtures("collected")
def test_a_module_goes_with_its_wrapper() -> None:
    outer, x = Outer(), torch.randn(3, 4)
    model = held(outer)
    agree(model, x)
    graph = weakref.ref(next(iter(model._runner.graphs.compiled.values())).graphs[0])
    references = [weakref.ref(outer), weakref.ref(outer.head.weight), weakref.ref(x), graph]
    del model, outer, x
    gc.collect()
    assert [each() for each in references] == [None] * 4


@pytest.mark.parametrize("by_option", [True, False])
def test_where_runs_have_to_repeat_no_clock_decides(by_option: bool) -> None:
    found = []
    torch.use_deterministic_algorithms(not by_option)
    try:
        for _ in range(2):
            torch.manual_seed(0)
            model = held(Drawing(broken=False), engine="auto", deterministic=by_option)
            for _ in range(3):
                model(torch.ones(4, 8)).sum().backward()
            assert (model.report.graph_calls, model.report.contest) == (3, None)
            found.append(model.module.linear.weight.grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*found)


def test_layers_that_share_code_behind_a_break_have_their_own_hooks() -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first = float(x.detach().sum())
            order = sorted(range(3), key=lambda i: float(self.layers[i].weight.detach().sum()))
            for i in order:
                x = self.layers[i](x)
            return x * first

    module = Ordered()
    module.layers[1].register_forward_hook(lambda _, given, out: out * 2)
    model = held(module)
    for _ in range(2):
        agree(model, torch.randn(3, 4))
    assert model.report.graph_calls == 2


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_a_forward_that_differentiates_what_graphs_have_computed(engine: Any) -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x.requires_grad_()
            energy = self.layer(x).tanh().sum()
            (force,) = torch.autograd.grad(energy, x)
            return self.layer(x).sum() + force.sum()

    model = held(Force(), engine=engine)
    for rows in (3, 5):
        agree(model, torch.randn(rows, 4))
    assert model.report.graph_calls == 2


def test_a_wrong_call_is_no_failure_of_its_graph() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, i: Tensor) -> Tensor:
            result: Tensor = self.table(i).sum()
            return result

    model = held(Looked(), fallback="raise")
    for index in (2, 7, 3, -1, 4):
        given = torch.tensor([0, index])
        if index in (7, -1):
            with pytest.raises(IndexError):
                model(given)
        else:
            agree(model, given)
    assert model.report.graph_calls == 3


def test_hooks_that_change_what_is_saved_are_pytorchs() -> None:
    outer, x = Outer(), torch.randn(3, 4)
    model = held(outer)
    agree(model, x)
    found = []
    for each in (model, outer):
        each.zero_grad()
        told = pytest.warns(OrtrainWarning) if each is model else contextlib.nullcontext()
        rounded = torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t.round(decimals=1)
        )
        with told, rounded:
            loss = each(x).square().sum()
        loss.backward()
        found.append([p.grad.clone() for p in each.parameters()])
    torch.testing.assert_close(*found)


def test_a_size_that_a_translation_needs_is_a_number_of_its_graph() -> None:
    model = held(nn.Sequential(nn.Conv2d(1, 2, 1), nn.AvgPool2d(3, 2, 1, ceil_mode=True)))
    for size in (6, 7):
        agree(model, torch.randn(2, 1, size, size))
    assert model.report.graph_calls == 2


def test_a_negative_base_keeps_its_sign() -> None:
    """The code that PyTorch makes of a graph has it as ``-3 ** x``."""

    class Powers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (-3) ** x

    model = held(Powers(), fallback="torch")
    x = torch.tensor([2, 3, 50])  # beyond 2**63: PyTorch's
    assert torch.equal(model(x), Powers()(x))


def test_gradients_lie_in_memory_as_those_of_pytorch_do() -> None:
    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(5))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).permute(0, 2, 3, 1).tanh()

    model = held(Permuted())
    x = torch.randn(3, 2, 4, 5).transpose(0, 1).requires_grad_()
    ours, theirs = (
        torch.autograd.grad(each(x).square().sum(), x)[0] for each in (model, model.module)
    )
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs)


class Halted(nn.Module):
    """Counts, breaks its graph, and then does what Dynamo does not follow or fails at."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.count = nn.BatchNorm1d(4), nn.Linear(4, 4), 0
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.norm(x)
        torch._dynamo.graph_break()
        return self.rest(x)

    def rest(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.random.random()
        return result


class Dropped(Halted):
    def rest(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze()


@pytest.mark.parametrize("kind", [Halted, Dropped])
def test_a_call_that_has_begun_is_not_begun_again(
    kind: type[Halted], capfd: pytest.CaptureFixture[str]
) -> None:
    module = kind()
    eager = copy.deepcopy(module)
    model = held(module)
    for rows in (3, 5):
        outputs = []
        for call in (model, eager):
            call.zero_grad()
            torch.manual_seed(rows)
            output = call(torch.randn(rows, 4))
            output.sum().backward()
            outputs.append([output.detach(), *(p.grad for p in call.parameters())])
        torch.testing.assert_close(*outputs)
        assert module.count == eager.count
        torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))
    assert model.report.graph_calls == 2
    (compiled,) = model._runner.graphs.compiled.values()
    assert len(compiled.graphs) > 1  # behind the break too
    assert capfd.readouterr() == ("", "")


def test_what_has_no_graph_behind_a_break_is_told() -> None:
    class Behind(Halted):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.rest(x)

    model = held(Behind())
    with pytest.warns(OrtrainWarning, match="a generator of Python's of its own"):
        model(torch.ones(2, 4))


class Attending(nn.Module):
    """Attention, whose keys' bias has a gradient of roundings alone."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside:
            return self.attended(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.attended(x)

    def attended(self, x: Tensor) -> Tensor:
        parts = self.query, self.key, self.value
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in parts)
        weights = nn.functional.dropout(torch.softmax(q @ k.mT, -1), 0.4)
        return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("where", ["around", "inside", "parameters"])
def test_roundings_of_16_bits_are_no_faults(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortrain.runtime.aten.strips.STRIP", 1)  # in which sums round otherwise
    monkeypatch.setattr("ortrain.autodiff.attention._RATIO", 0)
    module, x = Attending(inside=where == "inside"), torch.randn(3, 6, 32)
    if where == "parameters":
        module, x = module.to(torch.bfloat16), x.to(torch.bfloat16)
    model = held(module, fallback="raise")
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            y = model(x)
        y.float().square().mean().backward()
    assert model.report.eager_calls == 0


class Within(nn.Module):
    """Reads words within autocast, or without gradients."""

    def __init__(self, region: Callable[[], Any]) -> None:
        super().__init__()
        self.words, self.layer, self.region = nn.Embedding(5, 4), nn.Linear(4, 4), region

    def forward(self, ids: Tensor) -> Tensor:
        with self.region():
            h = self.layer(self.words(ids))
        return h.float()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("region", [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad])
@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_region_in_which_a_call_raises_is_left(region: Callable[[], Any], good: int) -> None:
    """A graph switches autocast and gradients on and off, without a ``with`` statement."""
    model, ids = held(Within(region)), torch.tensor([1, 2])
    for _ in range(good):
        model(ids)
    for _ in range(2):
        with pytest.raises(IndexError):
            model(torch.tensor([1, 7]))
        assert autocast_depth() == 0
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
    model(ids)


class Counting(nn.Module):
    """A buffer that counts calls, and a checkpoint whose graph is compared behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.up, self.norm(x), use_reentrant=True)
        self.calls += 1
        return (x * self.calls).sum()


def test_a_comparison_behind_a_call_leaves_what_the_call_has_written() -> None:
    eager, x = Counting(), torch.randn(3, 4, requires_grad=True)
    model = held(copy.deepcopy(eager), fallback="raise")
    for _ in range(3):
        for each in (eager, model):
            each(x).backward()
        torch.testing.assert_close([*model.buffers()], [*eager.buffers()])
    assert model.report.eager_calls == 0


# -- what code assigns behind functions that Dynamo traces aside ----------------------------------


def _with_hook(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 0.5)
    return x


ASIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    "checkpoint with reentrance": lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
    "function of autograd": Doubled.apply,
    "hook": _with_hook,
    "cond": lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,)),
    "vmap": lambda x: torch.vmap(torch.tanh)(x),
    "gradients inside": lambda x: torch.func.grad(lambda y: (y * y).sum())(x),
}


class Assigns(nn.Module):
    """Assigns to attributes before, between and behind calls of a function."""

    def __init__(self, aside: Callable[[Tensor], Tensor], breaks: bool) -> None:
        super().__init__()
        self.layer, self.aside, self.breaks = nn.Linear(4, 4), aside, breaks
        self.count, self.counts, self.seen = 0, dict[str, int](), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for place in range(3):
            self.count += 1
            self.counts["k"] = self.counts.get("k", 0) + place
            self.seen.append(self.count)
            if self.breaks:
                torch._dynamo.graph_break()
            self.count += 1
            x = self.aside(x)
            self.count += 1
        self.count += 1
        return torch.tanh(self.layer(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("name", ASIDE)
def test_what_is_assigned_behind_a_function_that_is_traced_aside_is_there(
    name: str, breaks: bool
) -> None:
    module = Assigns(ASIDE[name], breaks)
    plain = copy.deepcopy(module)
    model = held(module)
    for rows in (3, 4, 5, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), plain(x))
        found = [(each.count, each.counts, each.seen) for each in (module, plain)]
        assert found[0] == found[1]


class Picked(nn.Module):
    """Drops axes that are one whatever the sizes are, and one that need not be."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.linear, self.drops = nn.Linear(4, 6), drops

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        found = h.gather(-1, labels.unsqueeze(-1)).squeeze(-1) + h.sum(1, keepdim=True).squeeze(1)
        found = found + h[:, :1].squeeze() if self.drops else found
        return found.square()


@pytest.mark.parametrize("drops", [False, True])
def test_an_axis_that_is_one_for_certain_is_dropped_in_one_graph_for_all_sizes(drops: bool) -> None:
    module = Picked(drops)
    model = held(module)
    for rows in (5, 3, 1, 8):
        x, labels = torch.randn(rows, 4), torch.randint(0, 6, (rows,))
        torch.testing.assert_close(model(x, labels), module(x, labels))
    assert (model.report.captures == 1) is not drops


class Causal(nn.Module):
    """Asks for a causal mask as transformers does: what ``and`` gives may be of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.causal = nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        causal = h.shape[-2] > 1 and self.causal
        found = nn.functional.scaled_dot_product_attention(h, h, h, is_causal=causal)
        return found.square().sum()


def test_what_an_operator_must_know_of_a_size_ends_no_graph() -> None:
    module = Causal()
    model = held(module)
    for rows in (5, 3, 1, 8):
        x = torch.randn(2, 1, rows, 4)
        torch.testing.assert_close(model(x), module(x))
    assert (model.report.captures, model.report.breaks) == (2, ())


class Parted(nn.Module):
    """Ends its graph behind some layers; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head, self.count = nn.Linear(4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            x = layer(x)
        if x.sum() > 1e6:
            x = x / 2
        return self.head(x).square().sum()


@pytest.mark.parametrize("may", [False, True])
def test_of_code_that_ends_its_graph_nothing_has_run_when_that_is_found_out(
    monkeypatch: pytest.MonkeyPatch, may: bool
) -> None:
    asked = []

    def may_part(_: Policy) -> bool:
        asked.append(module.count)
        return may

    monkeypatch.setattr(Policy, "may_part", may_part)
    module = Parted()
    eager = copy.deepcopy(module)
    model = held(module)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        found = []
        for run in (model, eager):
            run.zero_grad()
            loss = run(x)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in run.parameters())])
        torch.testing.assert_close(*found)
    assert module.count == eager.count == 2
    assert asked == [0]
    assert model.report.graph_calls == (2 if may else 1)
    assert model.report.breaks == ("Data-dependent branching",)


@pytest.mark.filterwarnings("ignore:ORTModule runs Masked in PyTorch")
def test_within_a_transform_the_padding_of_a_first_call_is_not_counted() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.linear(x) * attention_mask[..., None]

    module = Masked()
    model = ORTModule(module)
    x, mask = torch.randn(2, 3, 5, 4), torch.randint(0, 2, (2, 3, 5))
    found = [
        torch.func.vmap(lambda x, mask, call=call: call(x, attention_mask=mask))(x, mask)
        for call in (model, module)
    ]
    torch.testing.assert_close(*found)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d((1, 2), return_indices=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.pool(x)[0]
        return found


def test_an_error_of_a_trace_is_not_told_as_the_modules() -> None:
    """Sizes of fakes are looked at in another order, so that another error comes first."""
    wrong = torch.tensor(1.0)
    with pytest.raises(RuntimeError) as expected:
        Pooled()(wrong)
    with pytest.raises(RuntimeError) as found:
        ORTModule(Pooled(), options=Options(engine="aten"))(wrong)
    assert str(found.value) == str(expected.value)
