"""Whatever changes between two steps, the next one computes what eager would compute."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.config import Engine
from ortrain.errors import OrtrainWarning
from tests.breadth import crossed
from tests.module.agreement import GRAPH, Outcome, assert_agree, in_double


class Adapter(nn.Module):
    """A linear layer with a low-rank addition that can be switched off or merged."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.active = True
        self.scale = 0.5

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.base(value)
        return result + self.up(self.down(value)) * self.scale if self.active else result


class Model(nn.Module):
    """Holds one of everything that can change."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(residual=True, scale=[1.0, 2.0])
        self.embed = nn.Embedding(9, 6)
        self.norm = nn.BatchNorm1d(6)
        self.adapter = Adapter()
        self.drop = nn.Dropout(0.0)
        self.functional_drop = 0.0
        self.gain = 1.5
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        value = self.norm(self.embed(ids))
        hidden = self.drop(self.adapter(value)).tanh() * self.gain
        hidden = nn.functional.dropout(hidden, self.functional_drop, self.training)
        if self.config.residual:
            hidden = hidden + value * self.config.scale[0]
        return nn.functional.cross_entropy(self.head(hidden), ids)


IDS = torch.tensor([0, 3, 8, 3, 1])

Mutation = Callable[[Model], Any]


def _set(path: str, value: Any) -> Mutation:
    *owner, name = path.split(".")

    def mutate(model: Model) -> None:
        target: Any = model
        for part in owner:
            target = getattr(target, part)
        setattr(target, name, copy.deepcopy(value))

    return mutate


def _negative(self: nn.Module, value: Tensor) -> Tensor:
    return -value


def _forward_twice(model: Model) -> None:
    original = model.adapter.forward
    model.adapter.forward = lambda value: original(original(value))  # type: ignore[method-assign]


def _break_the_tie(model: Model) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone() * 2)


def _tie(model: Model) -> None:
    model.adapter.base.weight = nn.Parameter(torch.eye(6))
    model.adapter.base.weight = model.adapter.base.weight


def _merge(model: Model) -> None:
    adapter = model.adapter
    with torch.no_grad():
        adapter.base.weight += adapter.scale * adapter.up.weight @ adapter.down.weight
    adapter.active = False


def _new_head(model: Model) -> None:
    torch.manual_seed(1)
    model.head = nn.Linear(6, 9)


def _resized_vocabulary(model: Model) -> None:
    old = model.embed.weight.detach()
    model.embed = nn.Embedding(12, 6)
    with torch.no_grad():
        model.embed.weight.fill_(0.1)
        model.embed.weight[:9] = old
    model.head.weight = model.embed.weight


def _written_in_place(model: Model) -> None:
    with torch.no_grad():
        model.adapter.base.weight.mul_(2.0)
        model.norm.weight.data = torch.full((6,), 3.0)


def _loaded(model: Model) -> None:
    torch.manual_seed(2)
    model.load_state_dict(Model().state_dict())


def _buffer(model: Model) -> None:
    model.norm.running_mean = torch.ones(6)


# Each leaves a graph in use, another one or the same.
RECAPTURED: dict[str, Mutation] = {
    "dropout of everything": _set("drop.p", 1.0),
    "functional dropout of everything": _set("functional_drop", 1.0),
    "a number in forward": _set("gain", -0.5),
    "a number that becomes an integer": _set("gain", 2),
    "eval": lambda m: m.eval(),
    "eval of a sub-module": lambda m: m.norm.eval(),
    "statistics no longer tracked": _set("norm.track_running_stats", False),
    "another momentum": _set("norm.momentum", 0.9),
    "a configuration switch": _set("config.residual", False),
    "a number in a list in a configuration": lambda m: m.config.scale.__setitem__(0, 3.0),
    "a configuration replaced": _set("config", SimpleNamespace(residual=True, scale=[-1.0])),
    "an adapter switched off": _set("adapter.active", False),
    "an adapter scaled": _set("adapter.scale", 4.0),
    "an adapter merged": _merge,
    "forward patched on an instance": _forward_twice,
    "a method of torch patched on an instance": lambda m: setattr(m.drop, "forward", torch.neg),
    "a class changed": lambda m: setattr(
        m.drop, "__class__", type("Negative", (nn.Dropout,), {"forward": _negative})
    ),
    "a parameter replaced": _set("adapter.base.bias", nn.Parameter(torch.ones(6))),
    "a parameter removed": _set("adapter.base.bias", None),
    "a parameter added": lambda m: m.head.register_parameter("bias", nn.Parameter(torch.ones(9))),
    "a tie broken": _break_the_tie,
    "a layer replaced": _new_head,
    "a layer replaced by another kind": _set("adapter", nn.Identity()),
    "a vocabulary resized": _resized_vocabulary,
    "a buffer replaced": _buffer,
    "a layer frozen": lambda m: m.adapter.requires_grad_(False),
    "a tied weight frozen": lambda m: m.embed.requires_grad_(False),
    "parameters written in place": _written_in_place,
    "a state loaded": _loaded,
    "float64": lambda m: m.double(),
}


def _outcome(module: nn.Module) -> Outcome:
    module.zero_grad()
    loss = module(IDS)
    assert isinstance(loss, Tensor)
    if loss.requires_grad:
        loss.backward()
    return Outcome.of(module, loss)


class Trio:
    """The model as a graph, in eager and in float64, which change together."""

    def __init__(self, options: Options = GRAPH) -> None:
        self.eager = Model()
        self.graph = ORTModule(copy.deepcopy(self.eager), options=options)
        self.truth = in_double(self.eager)

    def change(self, mutate: Mutation) -> None:
        for number, model in enumerate((self.graph.module, self.eager, self.truth)):
            assert isinstance(model, Model)
            mutate(model)
            if number == 2:
                model.double()

    def check(self) -> None:
        assert_agree(_outcome(self.graph), _outcome(self.eager), _outcome(self.truth))


@pytest.fixture
def trio() -> Trio:
    return Trio()


@pytest.mark.parametrize("change", RECAPTURED)
def test_a_change_between_two_steps_gives_eagers_result(trio: Trio, change: str) -> None:
    trio.check()
    before = _outcome(copy.deepcopy(trio.eager))
    trio.change(RECAPTURED[change])
    after = _outcome(copy.deepcopy(trio.eager))
    assert not _equal(before, after), "the change makes a difference"
    trio.check()
    trio.check()
    assert trio.graph.report.mode == "graph"
    assert trio.graph.report.captures <= 2


def _equal(one: Outcome, other: Outcome) -> bool:
    if one.gradients.keys() != other.gradients.keys() or not torch.equal(one.loss, other.loss):
        return False
    for name, gradient in one.gradients.items():
        again = other.gradients[name]
        if (gradient is None) != (again is None):
            return False
        if gradient is not None and again is not None and not torch.equal(gradient, again):
            return False
    return all(torch.equal(buffer, other.buffers[name]) for name, buffer in one.buffers.items())


def test_a_change_that_is_undone_finds_its_capture_again(trio: Trio) -> None:
    for _ in range(3):
        for gain in (1.5, -0.5):
            trio.change(_set("gain", gain))
            trio.check()
    assert trio.graph.report.captures == 2


def test_training_and_evaluation_alternate_without_a_new_capture(trio: Trio) -> None:
    for _ in range(3):
        trio.change(lambda m: m.train())
        trio.check()
        trio.change(lambda m: m.eval())
        trio.check()
        with torch.no_grad():
            assert torch.equal(trio.graph(IDS), trio.graph(IDS))
    assert trio.graph.report.captures == 2, "training and evaluation"


def test_a_layer_is_frozen_and_thawed_on_two_captures(trio: Trio) -> None:
    for frozen in (False, True, False, True):
        trio.change(lambda m, frozen=frozen: m.adapter.requires_grad_(not frozen))  # type: ignore[misc]
        trio.check()
    assert trio.graph.report.captures == 2


def test_dtype_goes_there_and_back(trio: Trio) -> None:
    trio.check()
    trio.graph.double()
    ours, truth = _outcome(trio.graph), _outcome(trio.truth)
    torch.testing.assert_close(ours.loss, truth.loss, rtol=1e-12, atol=0.0)
    trio.graph.float()
    trio.eager.load_state_dict(trio.graph.state_dict())
    trio.truth.load_state_dict(trio.graph.state_dict())
    trio.check()
    assert trio.graph.report.captures == 2


def test_ten_changes_in_ten_steps_of_a_long_run_are_followed(trio: Trio) -> None:
    for number in range(10):
        trio.change(_set("gain", 1.0 + number))
        for _ in range(3):
            trio.check()
    assert trio.graph.report.mode == "graph"
    assert trio.graph.report.captures == 2, "from the second value on it is an input"


def test_ten_changes_of_numbers_in_a_list_are_followed(trio: Trio) -> None:
    for number in range(10):
        trio.change(_set("gain", 1.0 + number))
        trio.change(_set("config.scale", [1.0 + number, 2.0]))
        for _ in range(3):
            trio.check()
    assert trio.graph.report.mode == "graph"
    assert trio.graph.report.captures == 2


def test_ten_changes_of_which_the_code_reads_one_are_those_of_one(trio: Trio) -> None:
    for number in range(10):
        trio.change(_set("gain", 1.0 + number))
        trio.change(_set("note", str(number)))
        for _ in range(3):
            trio.check()
    assert trio.graph.report.mode == "graph"
    assert trio.graph.report.captures == 2


# --- what is around a call and inside of it -----------------------------------------------------


@contextmanager
def _function_mode() -> Iterator[None]:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.tanh or function is Tensor.tanh:
                return args[0] * 2
            return function(*args, **(kwargs or {}))

    with Mode():
        yield


def _output_plus_one(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


def _input_doubled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def _gradient_doubled(module: nn.Module, gradients: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in gradients)


HOOKS: dict[str, Mutation] = {
    "a forward hook": lambda m: m.adapter.base.register_forward_hook(_output_plus_one),
    "a forward pre-hook": lambda m: m.adapter.register_forward_pre_hook(_input_doubled),
    "a backward hook": lambda m: m.adapter.base.register_full_backward_hook(_gradient_doubled),
    "a hook on the model": lambda m: m.register_forward_hook(_output_plus_one),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_runs_in_graphs_until_it_is_removed(trio: Trio, kind: str) -> None:
    trio.check()
    before = _outcome(copy.deepcopy(trio.eager))
    handles: list[Any] = []
    trio.change(lambda m: handles.append(HOOKS[kind](m)))
    assert not _equal(before, _outcome(copy.deepcopy(trio.eager))), "it makes a difference"
    trio.check()
    for handle in handles:
        handle.remove()
    trio.check()
    assert trio.graph.report.graph_calls == 3


def test_autocast_around_the_call_gives_eagers_result() -> None:
    trio = Trio(Options(engine="onnxruntime"))
    trio.check()
    trio.graph.load_state_dict(trio.eager.state_dict())
    refused = pytest.warns(OrtrainWarning, match="in PyTorch: autocast is on")
    with refused, torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = _outcome(trio.graph), _outcome(trio.eager)
    assert _equal(ours, eager)
    assert "mixed precision is not served" in trio.graph.report.reason
    trio.truth.load_state_dict(trio.eager.state_dict())
    trio.check()
    assert trio.graph.report.mode == "graph"


def test_a_function_mode_around_the_call_is_in_its_graph(trio: Trio) -> None:
    trio.check()
    with _function_mode():
        trio.check()
    trio.check()
    assert (trio.graph.report.graph_calls, trio.graph.report.captures) == (3, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_runs_eagerly_with_one_reason(dtype: torch.dtype) -> None:
    trio = Trio(Options(engine="onnxruntime"))
    trio.check()
    trio.graph.load_state_dict(trio.eager.state_dict())
    for model in (trio.graph, trio.eager):
        model.to(dtype)
    with pytest.warns(OrtrainWarning, match=f"in PyTorch: embed.weight is {dtype}: reduced"):
        ours, eager = _outcome(trio.graph), _outcome(trio.eager)
    assert _equal(ours, eager)
    assert "reduced precision is not served" in trio.graph.report.reason
    assert _equal(_outcome(trio.graph), _outcome(trio.eager)), "and warns only once"


def test_deterministic_algorithms_are_another_graph(trio: Trio) -> None:
    trio.check()
    torch.use_deterministic_algorithms(True)
    try:
        trio.check()
    finally:
        torch.use_deterministic_algorithms(False)
    trio.check()


def test_a_change_to_what_cannot_be_captured_runs_eagerly() -> None:
    trio = Trio(Options(engine="onnxruntime"))
    trio.check()
    trio.change(_set("drop", Remembers()))
    with pytest.warns(OrtrainWarning, match=r"Remembers\.factor keeps its results"):
        trio.check()
    assert trio.graph.report.mode == "eager"
    trio.change(_set("drop", nn.Dropout(0.0)))
    trio.check()
    assert trio.graph.report.mode == "graph"


class Remembers(nn.Module):
    """Has a method that keeps its results, which a graph does not."""

    @functools.cache  # noqa: B019
    def factor(self) -> float:
        return 1.5

    def forward(self, value: Tensor) -> Tensor:
        return value * self.factor()


# --- modules that never stay the same -----------------------------------------------------------


class Counting(nn.Module):
    """Counts its forwards in a plain attribute that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layer(value) * self.calls
        return result


def test_a_module_that_counts_its_calls_is_right_at_every_call() -> None:
    eager = Counting()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    value = torch.ones(2, 4)
    for _ in range(30):
        torch.testing.assert_close(model(value), eager(value))
    assert model.calls == 30
    assert model.report.graph_calls == 30
    assert model.report.captures == 2  # for the first count, and for all others


class Collecting(nn.Module):
    """Keeps what its forward makes on the way in a list, for a loss that is summed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.extras: list[Tensor] = []
        self.seen: dict[str, int] = {}

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.layer(value)
        self.extras.append(result.square().mean())
        self.seen["last"] = len(value)
        return result


def test_what_a_forward_puts_into_lists_and_dicts_is_there_after_every_call() -> None:
    eager = Collecting()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for rows in (2, 3, 4, 5):
        for each in (model, eager):
            each(torch.ones(rows, 4))
        torch.testing.assert_close(model.extras, eager.extras)
        assert model.seen["last"] == rows
    for each in (model, eager):
        torch.stack(each.extras).sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, eager.layer.weight.grad)
    assert model.report.graph_calls == 4


@pytest.mark.parametrize(
    "assign",
    [
        lambda self, value: value.detach().mean(),
        lambda self, value: torch.cat([self.kept, value.detach()[0]]),
        lambda self, value: value.detach()[0].double(),
    ],
    ids=["a number", "a longer one", "another dtype"],
)
def test_a_buffer_is_what_the_forward_put_in_its_place(assign: Any) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("kept", torch.zeros(4))

        def forward(self, value: Tensor) -> Tensor:
            result: Tensor = self.layer(value)
            self.kept = assign(self, result)
            return result

    eager = Keeps()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for rows in (2, 2, 3, 2):
        torch.testing.assert_close(model(torch.ones(rows, 4)), eager(torch.ones(rows, 4)))
        torch.testing.assert_close(model.kept, eager.kept)
    assert model.report.mode == "graph"


def test_a_module_changed_before_every_call_has_its_number_as_an_input() -> None:
    model = ORTModule(_Scheduled(), options=GRAPH)
    plain: Any = copy.deepcopy(model.module)
    for number in range(30):
        model.temperature = plain.temperature = [1.0 + number]
        torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert model.report.captures == 2


class _Scheduled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.temperature = [1.0]

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.layer(value) / self.temperature[0]
        return result


class Lazy(nn.Module):
    """Fills in a setting at its first call with labels, as transformers' ``problem_type``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.config = SimpleNamespace(kind=None)

    def forward(self, value: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None and self.config.kind is None:
            self.config.kind = "doubled"
        result: Tensor = self.layer(value)
        if self.config.kind == "doubled":
            result = result * 2
        return result if labels is None else (result - labels).square().mean()


def test_a_setting_that_the_first_call_fills_in_is_part_of_the_state() -> None:
    model = ORTModule(Lazy(), options=Options(engine="onnxruntime", fallback="raise"))
    for _ in range(3):
        model(torch.ones(2, 4), torch.ones(2, 4)).backward()
    assert model.config.kind == "doubled"
    assert model.report.captures == 2  # one that fills it in, and one that finds it


class Scaled(nn.Module):
    """Finds a factor at its first call; at its sizes alone all calls do the same."""

    def __init__(self, rule: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.config = SimpleNamespace(factor=None)
        self.rule = rule

    def forward(self, value: Tensor) -> Tensor:
        result = self.layer(value)
        result = self.rule(result, self.config.factor)
        if self.config.factor is None:
            self.config.factor = 4
        return result


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize(
    "rule",
    [
        lambda value, factor: value * (value.shape[0] if factor is None else factor),
        lambda value, factor: value * (4 if factor is None else value.shape[0]),
        lambda value, factor: value * (3 if factor is None else factor),
        lambda value, factor: value * torch.tensor(3.0 if factor is None else 4.0),
        lambda value, factor: value if factor is None else value.flatten(1),
    ],
)
def test_what_a_first_call_fills_in_may_change_what_later_calls_compute(rule: Any) -> None:
    eager = Scaled(rule)
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for rows in (4, 4, 5, 3, 4):
        value = torch.randn(rows, 4)
        torch.testing.assert_close(model(value), eager(value))


class Windowed(nn.Module):
    """Gives up its shift where a window covers all, as Swin's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.window, self.shift = 4, 2

    def set_window(self, size: int) -> None:
        if size <= self.window:
            self.shift = 0

    def forward(self, value: Tensor) -> Tensor:
        self.set_window(value.shape[0])
        return torch.roll(self.layer(value), self.shift, 0)


def test_a_setting_that_the_first_call_makes_is_part_of_the_state() -> None:
    eager = Windowed()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime", fallback="raise"))
    for rows in (8, 6, 4, 4, 8, 3):
        value = torch.randn(rows, 4)
        torch.testing.assert_close(model(value), eager(value))
        assert model.shift == eager.shift
    assert model.report.graph_calls == 6


class Turning(nn.Module):
    """Sets an attribute that is another at each call."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.turn, self.turns = 0, turns

    def forward(self, value: Tensor) -> Tensor:
        self.turn = (self.turn + 1) % self.turns
        return self.layer(value) * (1 if self.turn < 2 else 2)


@pytest.mark.parametrize("turns", [1, 2, 3, 100])
def test_a_setting_that_does_not_come_to_rest_is_set_by_graphs(turns: int) -> None:
    eager = Turning(turns)
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for _ in range(6):
        value = torch.randn(3, 4)
        torch.testing.assert_close(model(value), eager(value))
        assert model.turn == eager.turn
    assert model.report.graph_calls == 6


@pytest.mark.parametrize("engine", ["onnxruntime", "auto"])
def test_captures_made_before_a_setting_was_filled_in_are_not_used_after(engine: Engine) -> None:
    eager = Lazy()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine=engine, fallback="raise"))
    value, labels = torch.randn(2, 4), torch.randn(2, 4)
    for inputs in ([value],) * 3 + ([value, labels],) * 3 + ([value],) * 3:
        assert torch.allclose(model(*inputs), eager(*inputs))
    assert model.report.captures <= 4  # with labels one more, which fills it in


class Ordered(nn.Module):
    """Goes through what is registered, in the order in which it is."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.steps = nn.ModuleList([nn.Linear(4, 4), nn.Sigmoid()])
        self.named = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Softplus()})
        self.gain, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("low", torch.randn(4))
        self.register_buffer("high", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.chain(x)
        for part in [*self.steps, *self.named.values()]:
            x = part(x)
        for _, parameter in self.named_parameters(recurse=False):
            x = torch.sin(x) * parameter
        for _, buffer in self.named_buffers(recurse=False):
            x = torch.cos(x) * buffer
        return x


ORDERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Sequential": lambda m: m.chain._modules,
    "ModuleList": lambda m: m.steps._modules,
    "ModuleDict": lambda m: m.named._modules,
    "parameters": lambda m: m._parameters,
    "buffers": lambda m: m._buffers,
}


@pytest.mark.parametrize(("name", "engine"), crossed(ORDERS, ["aten", "onnxruntime"], one_in=2))
def test_what_changes_its_place_is_computed_at_its_new_one(name: str, engine: Engine) -> None:
    eager = Ordered()
    ours = ORTModule(copy.deepcopy(eager), options=Options(engine=engine))
    x, found = torch.randn(3, 4), []
    for turn in range(4):
        rows = []
        for model, inner in ((eager, eager), (ours, ours.module)):
            registry = ORDERS[name](inner)
            if turn % 2:  # there, and back
                for key in [*registry][-2::-1]:
                    registry[key] = registry.pop(key)
            model.zero_grad()
            out = model(x)
            out.square().sum().backward()
            gradients = {n: p.grad for n, p in inner.named_parameters()}
            rows.append((out.detach(), dict(sorted(gradients.items()))))
        torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-6)
        found.append(rows[0][0])
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    assert ours.report.mode == "graph"
