"""Every change that would make a capture stale is seen and named; nothing else is."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrize
from transformers import GenerationConfig

from ortrain.guards import guard as guard_file
from ortrain.guards.guard import Ambient, Guard, ambient, inner_hooks


class Config:
    """Configuration as users write it: attributes, some inherited from the class, some nested."""

    activation = "gelu"

    def __init__(self) -> None:
        self.rate = 0.1
        self.sizes = [1, 2]
        self.rope = {"theta": 1e4, "scaling": [1.0, 2.0]}
        self.vision = SimpleNamespace(depth=3, deeper=SimpleNamespace(deepest=SimpleNamespace(n=1)))


class Block(nn.Module):
    causal = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.1)
        self.config = config
        self.scale = 1.0
        self.flag = True
        self.shape = (1, 2)
        self.extra: Any = None

    def forward(self, value: Tensor) -> Tensor:
        return self.drop(self.norm(self.linear(value))) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = Config()
        self.config = config
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList([Block(config), Block(config)])
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.layers = [1, 2, 3]
        self.table = {"a": [1, 2], "b": {"c": None}}
        self.names = {"x", "y"}
        self.mixed: list[Any] = [1, SimpleNamespace(n=1), [nn.Identity()]]
        self.constant = torch.tensor([1.0])
        self.act: Any = torch.relu
        self.norm_class: Any = Config
        self.gain = nn.Parameter(torch.ones(1))
        self.aliases = [self.embed.weight]

    def forward(self, ids: Tensor) -> Tensor:
        value = self.embed(ids)
        for block in self.blocks:
            value = block(value)
        return self.head(value) * self.gain


@pytest.fixture(params=["versions", "identities"], ids=["fast check", "no fast check"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model, with torch's fast checks and, as on a torch that lacks them, without."""
    if request.param == "identities":
        monkeypatch.setattr(guard_file, "dict_version", guard_file._never_the_same)
        monkeypatch.setattr(guard_file, "_layout_check", lambda tensors: lambda *_: False)
    else:
        assert guard_file.dict_version is not guard_file._never_the_same
    return Model()


Mutation = Callable[[Model], Any]


def _set(path: str, value: Any) -> Mutation:
    """Set an attribute of the module or object at a dotted path."""
    *owner, name = path.split(".")

    def mutate(model: Model) -> None:
        target: Any = model
        for part in owner:
            target = target[int(part)] if part.isdigit() else getattr(target, part)
        setattr(target, name, value)

    return mutate


def _hook(*_: Any) -> None:
    pass


def _parametrize(model: Model) -> None:
    parametrize.register_parametrization(model.blocks[0].linear, "weight", nn.Identity())


CHANGES: dict[str, tuple[Mutation, str]] = {
    "dropout p": (
        _set("blocks.0.drop.p", 0.5),
        "blocks.0.drop: p was 0.1, is 0.5",
    ),
    "float attribute": (
        _set("blocks.1.scale", 2.0),
        "blocks.1: scale was 1.0, is 2.0",
    ),
    "type of a number": (
        _set("blocks.1.scale", 1),
        "blocks.1: scale was 1.0, is 1",
    ),
    "bool to an equal int": (
        _set("blocks.1.flag", 1),
        "blocks.1: flag was True, is 1",
    ),
    "sign of zero": (
        _set("blocks.1.norm.momentum", -0.0),
        "blocks.1.norm: momentum was 0.1, is -0.0",
    ),
    "tuple attribute": (
        _set("blocks.0.shape", (1, 3)),
        "blocks.0: shape was (1, 2), is (1, 3)",
    ),
    "None to a value": (
        _set("blocks.0.extra", "on"),
        "blocks.0: extra was None, is 'on'",
    ),
    "scalar to an object": (
        _set("blocks.0.extra", SimpleNamespace()),
        "blocks.0: extra was None, is a SimpleNamespace",
    ),
    "new attribute": (
        _set("blocks.0.fresh", 3),
        "blocks.0: fresh was added (3)",
    ),
    "removed attribute": (
        lambda m: delattr(m.blocks[0], "scale"),
        "blocks.0: scale was removed (1.0)",
    ),
    "function attribute": (
        _set("act", torch.tanh),
        "Model: act was relu, is tanh",
    ),
    "eval": (
        lambda m: m.eval(),
        "Model: training was True, is False",
    ),
    "eval of a sub-module": (
        lambda m: m.blocks[1].norm.eval(),
        "blocks.1.norm: training was True, is False",
    ),
    "list appended": (
        lambda m: m.layers.append(4),
        "Model: layers was [1, 2, 3], is [1, 2, 3, 4]",
    ),
    "list element to an equal one": (
        lambda m: m.layers.__setitem__(0, True),
        "Model: layers was [1, 2, 3], is [True, 2, 3]",
    ),
    "list sorted": (
        lambda m: m.layers.reverse(),
        "Model: layers was [1, 2, 3], is [3, 2, 1]",
    ),
    "dict entry": (
        lambda m: m.table["b"].update(c=1),
        "Model: table was {'a': [1, 2], 'b': {'c': None}}, is {'a': [1, 2], 'b': {'c': 1}}",
    ),
    "list in a dict": (
        lambda m: m.table["a"].append(3),
        "Model: table was {'a': [1, 2], 'b': {'c': None}}, is {'a': [1, 2, 3], 'b': {'c': None}}",
    ),
    "set": (
        lambda m: m.names.clear(),
        "Model: names was {",
    ),
    "object in a list": (
        lambda m: setattr(m.mixed[1], "n", 2),
        "mixed[1]: n was 1, is 2",
    ),
    "object in a list replaced": (
        lambda m: m.mixed.__setitem__(1, SimpleNamespace(n=1)),
        "Model: mixed[1] was replaced",
    ),
    "module in a list in a list": (
        lambda m: m.mixed[2][0].eval(),
        "mixed[2][0]: training was True, is False",
    ),
    "config attribute": (
        _set("config.rate", 0.2),
        "config: rate was 0.1, is 0.2",
    ),
    "config list appended": (
        lambda m: m.config.sizes.append(3),
        "config: sizes was [1, 2], is [1, 2, 3]",
    ),
    "config dict": (
        lambda m: m.config.rope["scaling"].append(3.0),
        "config: rope was {'theta': 10000.0, 'scaling': [1.0, 2.0]}, is {",
    ),
    "config in a config": (
        _set("config.vision.depth", 4),
        "config.vision: depth was 3, is 4",
    ),
    "what lies deep inside a config": (
        _set("config.vision.deeper.deepest.n", 2),
        "config.vision.deeper.deepest: n was 1, is 2",
    ),
    "config attribute over its class's": (
        _set("config.activation", "relu"),
        "config: activation was added ('relu')",
    ),
    "config replaced by an equal one": (
        _set("blocks.1.config", Config()),
        "blocks.1: config was replaced",
    ),
    "constant tensor written": (
        lambda m: m.constant.fill_(2.0),
        "Model: constant was changed in place",
    ),
    "constant tensor replaced by an equal one": (
        _set("constant", torch.tensor([1.0])),
        "Model: constant was replaced",
    ),
    "forward hook": (
        lambda m: m.blocks[0].linear.register_forward_hook(_hook),
        "blocks.0.linear: a forward hook was added",
    ),
    "forward hook with keywords, always called": (
        lambda m: m.blocks[0].register_forward_hook(_hook, with_kwargs=True, always_call=True),
        "blocks.0: a forward hook was added",
    ),
    "forward pre-hook": (
        lambda m: m.embed.register_forward_pre_hook(_hook),
        "embed: a forward pre-hook was added",
    ),
    "backward hook": (
        lambda m: m.blocks[0].register_full_backward_hook(_hook),
        "blocks.0: a backward hook was added",
    ),
    "backward pre-hook": (
        lambda m: m.register_full_backward_pre_hook(_hook),
        "Model: a backward pre-hook was added",
    ),
    "forward overridden": (
        _set("blocks.0.forward", lambda value: value),
        "blocks.0: forward was overridden on the instance",
    ),
    "method overridden": (
        _set("blocks.0.helper", _hook),
        "blocks.0: helper was added (_hook)",
    ),
    "class of a module": (
        lambda m: setattr(m.blocks[0], "__class__", type("Patched", (Block,), {})),
        "blocks.0: __class__ was Block, is Patched",
    ),
    "parameter replaced": (
        lambda m: setattr(m.blocks[0].linear, "bias", nn.Parameter(torch.zeros(4))),
        "blocks.0.linear: parameter bias was replaced",
    ),
    "parameter removed": (
        _set("blocks.0.linear.bias", None),
        "blocks.0.linear: parameter bias was float32[4] on cpu, is None",
    ),
    "parameter added": (
        lambda m: setattr(m.head, "bias", nn.Parameter(torch.zeros(4))),
        "head: parameter bias was None, is float32[4] on cpu",
    ),
    "parameter registered": (
        lambda m: m.register_parameter("shift", nn.Parameter(torch.zeros(4))),
        "Model: parameter shift was added (float32[4] on cpu)",
    ),
    "one-element parameter replaced by an equal one": (
        lambda m: setattr(m, "gain", nn.Parameter(torch.ones(1))),
        "Model: parameter gain was replaced",
    ),
    "tie broken": (
        lambda m: setattr(m.head, "weight", nn.Parameter(m.embed.weight.detach().clone())),
        "head: parameter weight was tied to embed.weight, is no longer",
    ),
    "tie made": (
        lambda m: setattr(m.blocks[0].linear, "weight", m.blocks[1].linear.weight),
        "blocks.0.linear: parameter weight was replaced, is now tied to blocks.1.linear.weight",
    ),
    "dtype of everything": (
        lambda m: m.double(),
        "Model: parameter gain was float32[1] on cpu, is float64[1] on cpu",
    ),
    "dtype of one layer": (
        lambda m: m.blocks[1].linear.half(),
        "blocks.1.linear: parameter weight was float32[4, 4] on cpu, is float16[4, 4] on cpu",
    ),
    "data of another shape": (
        lambda m: setattr(m.blocks[0].linear.bias, "data", torch.zeros(5)),
        "blocks.0.linear: parameter bias was float32[4] on cpu, is float32[5] on cpu",
    ),
    "buffer replaced": (
        lambda m: setattr(m.blocks[0].norm, "running_mean", torch.zeros(4)),
        "blocks.0.norm: buffer running_mean was replaced",
    ),
    "buffer added": (
        lambda m: m.register_buffer("mask", torch.zeros(2)),
        "Model: buffer mask was added (float32[2] on cpu)",
    ),
    "child replaced": (
        lambda m: setattr(m, "head", nn.Linear(4, 4, bias=False)),
        "Model: child head was replaced",
    ),
    "child replaced by a child of another class": (
        lambda m: m.blocks.__setitem__(0, nn.Identity()),
        "blocks: child 0 was replaced",
    ),
    "child added": (
        lambda m: m.blocks.append(nn.Identity()),
        "blocks: child 2 was added",
    ),
    "child removed": (
        lambda m: m.blocks.__delitem__(1),
        "blocks: child 1 was removed",
    ),
    "first child of a leaf": (
        lambda m: m.blocks[0].drop.add_module("inner", nn.Identity()),
        "blocks.0.drop: child inner was added",
    ),
    "parametrization": (
        _parametrize,
        "blocks.0.linear: __class__ was Linear, is ParametrizedLinear",
    ),
    "attributes replaced wholesale": (
        lambda m: setattr(m.blocks[0].drop, "__dict__", {**m.blocks[0].drop.__dict__, "p": 0.7}),
        "blocks.0.drop: p was 0.1, is 0.7",
    ),
}


class Ordered(nn.Module):
    """Goes through its parts, parameters and buffers as they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.steps = nn.ModuleList([nn.Sigmoid(), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"cube": nn.Linear(4, 4), "root": nn.ReLU()})
        self.gain, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("low", torch.zeros(4))
        self.register_buffer("high", torch.ones(4))


# A registry, and what is said where its first entry comes last.
ORDERS: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "Sequential": (
        lambda m: m.chain._modules,
        "chain: the order of its children was ['0', '1', '2'], is ['1', '2', '0']",
    ),
    "ModuleList": (
        lambda m: m.steps._modules,
        "steps: the order of its children was ['0', '1'], is ['1', '0']",
    ),
    "ModuleDict": (
        lambda m: m.named._modules,
        "named: the order of its children was ['cube', 'root'], is ['root', 'cube']",
    ),
    "parts": (
        lambda m: m._modules,
        "Ordered: the order of its children was ['chain', 'steps', 'named'], is ['steps', 'nam",
    ),
    "parameters": (
        lambda m: m._parameters,
        "Ordered: the order of its parameters was ['gain', 'shift'], is ['shift', 'gain']",
    ),
    "buffers": (
        lambda m: m._buffers,
        "Ordered: the order of its buffers was ['low', 'high'], is ['high', 'low']",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_in_which_code_goes_through_a_registry_is_watched(name: str) -> None:
    model = Ordered()
    guard = Guard(model)
    find, said = ORDERS[name]
    registry = find(model)
    for turn in range(len(registry)):
        first = next(iter(registry))
        registry[first] = registry.pop(first)
        assert (turn == len(registry) - 1) == (guard.changed() is None)
        if not turn:
            assert (guard.changed() or "").startswith(said)
    assert guard.changed() is None


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_new_or_gone_is_said_before_the_order_that_follows(name: str) -> None:
    model = Ordered()
    guard = Guard(model)
    registry = ORDERS[name][0](model)
    registry["fresh"] = None
    assert "fresh was added" in (guard.changed() or "")
    del registry["fresh"]
    assert guard.changed() is None
    first = next(iter(registry))
    gone = registry.pop(first)
    assert f"{first} was removed" in (guard.changed() or "")
    registry[first] = gone
    assert "the order of its" in (guard.changed() or "")


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(model: Model, change: str) -> None:
    mutate, reason = CHANGES[change]
    guard = Guard(model)
    assert guard.changed() is None
    mutate(model)
    found = guard.changed()
    assert found is not None
    assert found.startswith(reason)
    assert guard.changed() == found, "a change does not go away by asking"
    assert Guard(model).changed() is None


def _optimizer_step(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([0, 1, 2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _copy_into_data(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(torch.ones_like(parameter))


def _eval_and_back(model: Model) -> None:
    model.eval()
    model.train()


def _hook_and_back(model: Model) -> None:
    model.blocks[0].register_forward_hook(_hook).remove()


def _attribute_and_back(model: Model) -> None:
    model.blocks[0].config.causal = True
    del model.blocks[0].config.causal


NO_CHANGES: dict[str, Mutation] = {
    "nothing": lambda m: None,
    "an optimizer step": _optimizer_step,
    "a forward that updates BatchNorm's buffers": lambda m: m(torch.tensor([0, 1, 2])),
    "a gradient": lambda m: setattr(m.embed.weight, "grad", torch.ones(4, 4)),
    "load_state_dict": lambda m: m.load_state_dict(Model().state_dict()),
    "a copy into the data": _copy_into_data,
    "other data of the same kind": lambda m: setattr(m.embed.weight, "data", torch.ones(4, 4)),
    "data with other strides": lambda m: setattr(m.embed.weight, "data", torch.ones(4, 4).t()),
    "a parameter written in place": lambda m: nn.init.zeros_(m.head.weight),
    "train() where it is on": lambda m: m.train(),
    "eval() and back": _eval_and_back,
    "a hook, removed again": _hook_and_back,
    "a config attribute, removed again": _attribute_and_back,
    "an equal float": _set("blocks.0.drop.p", float("0.1")),
    "an equal list": _set("layers", [1, 2, 3]),
    "an equal dict": _set("table", {"a": [1, 2], "b": {"c": None}}),
    "the same hooks in another dict": _set("blocks.0._forward_hooks", OrderedDict()),
    "a frozen layer": lambda m: m.head.requires_grad_(False),
    "a hook on loading": lambda m: m.register_load_state_dict_pre_hook(_hook),
    "a hook on a tensor": lambda m: m.embed.weight.register_hook(_hook),
    "to the device where it is": lambda m: m.to("cpu", torch.float32),
}


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_a_graph_does_not_freeze_is_no_change(model: Model, change: str) -> None:
    guard = Guard(model)
    NO_CHANGES[change](model)
    assert guard.changed() is None
    assert guard.changed() is None


@pytest.mark.parametrize(
    ("replace", "mutate", "reason"),
    [
        pytest.param(
            lambda m: setattr(m, "layers", [*m.layers]),
            lambda m: m.layers.append(4),
            "Model: layers was [1, 2, 3], is [1, 2, 3, 4]",
            id="list",
        ),
        pytest.param(
            lambda m: setattr(m.blocks[0], "_forward_hooks", OrderedDict()),
            lambda m: m.blocks[0].register_forward_hook(_hook),
            "blocks.0: a forward hook was added",
            id="hooks",
        ),
        pytest.param(
            _set("blocks.0._modules", {}),
            lambda m: None,
            "blocks.0: child linear was removed",
            id="children",
        ),
    ],
)
def test_an_equal_container_is_watched_in_place_of_the_one_it_replaced(
    model: Model, replace: Mutation, mutate: Mutation, reason: str
) -> None:
    guard = Guard(model)
    replace(model)
    guard.changed()
    mutate(model)
    assert guard.changed() == reason


def test_a_change_that_is_undone_is_none(model: Model) -> None:
    guard = Guard(model)
    model.blocks[0].drop.p = 0.5
    assert guard.changed() == "blocks.0.drop: p was 0.1, is 0.5"
    model.blocks[0].drop.p = 0.1
    assert guard.changed() is None


def test_a_hook_that_was_there_is_missed_when_it_is_removed(model: Model) -> None:
    handle = model.head.register_forward_hook(_hook)
    guard = Guard(model)
    assert guard.changed() is None
    handle.remove()
    assert guard.changed() == "head: a forward hook was removed"


@pytest.mark.parametrize(
    ("owner", "name", "reason"),
    [
        (Block, "forward", "forward was Block.forward, is _hook"),
        (Block, "causal", "causal was False, is _hook"),
        (nn.Linear, "forward", "forward was Linear.forward, is _hook"),
        (Config, "activation", "activation was 'gelu', is _hook"),
    ],
)
def test_a_patched_class_is_a_change(
    model: Model, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, reason: str
) -> None:
    guard = Guard(model)
    monkeypatch.setattr(owner, name, _hook)
    assert guard.changed() == f"class {owner.__qualname__}: {reason}"
    monkeypatch.undo()
    assert Guard(model).changed() is None


def test_two_classes_of_one_name_are_told_apart() -> None:
    def make() -> type[nn.Module]:
        class Same(nn.Module):
            factor = 1.0

        return Same

    first, second = make(), make()
    guard = Guard(nn.Sequential(first(), second()))
    first.factor = 2.0  # type: ignore[attr-defined]
    assert "factor was 1.0, is 2.0" in (guard.changed() or "")


def test_a_shared_module_is_watched_once(model: Model) -> None:
    model.blocks.append(model.blocks[0])
    guard = Guard(model)
    model.blocks[2].scale = 3.0
    assert guard.changed() == "blocks.0: scale was 1.0, is 3.0"


def test_a_container_that_contains_itself_is_watched() -> None:
    module = nn.Identity()
    module.loop = loop = [1]  # type: ignore[assignment]
    loop.append(loop)  # type: ignore[arg-type]
    guard = Guard(module)
    assert guard.changed() is None
    loop[0] = 2
    assert "loop" in (guard.changed() or "")


def test_objects_that_hold_no_configuration_may_change() -> None:
    module = nn.Linear(2, 2)
    module.logger = logging.getLogger("ortrain.test")  # type: ignore[assignment]
    module.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[assignment]
    module.partial = partial(torch.sum, dim=0)  # type: ignore[assignment]
    guard = Guard(module)
    module.logger.isEnabledFor(logging.DEBUG)
    module.optimizer.param_groups[0]["lr"] = 0.2
    assert guard.changed() is None


def test_a_view_of_a_parameter_changes_with_it() -> None:
    module = nn.Linear(2, 2)
    module.view = module.weight.detach()[:1]  # type: ignore[assignment]
    guard = Guard(module)
    nn.init.zeros_(module.weight)
    assert guard.changed() == "Linear: view was changed in place"


def test_the_settings_of_generation_are_not_those_of_a_forward() -> None:
    model = Model()
    model.generation_config = GenerationConfig(max_length=20)
    guard = Guard(model)
    model.generation_config.max_length = 30
    model.generation_config.num_beams = 4
    assert guard.changed() is None
    model.generation_config = GenerationConfig(max_length=40)
    assert guard.changed() is None
    model.generation_config = {"max_length": 20}
    assert guard.changed() is not None


def test_tied_weights_leave_the_check_of_layouts_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    assert model.head.weight is model.embed.weight
    guard = Guard(model)
    monkeypatch.setattr(Guard, "_same_exact_layouts", lambda self: pytest.fail("the slow check"))
    assert guard.changed() is None


def test_going_to_evaluation_and_back_needs_no_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    training = Guard(model)
    evaluation = Guard(model.eval())
    monkeypatch.delattr(guard_file, "Survey")
    for _ in range(2):
        assert training.changed() == "Model: training was True, is False"
        assert evaluation.changed() is None
        model.train()
        assert training.changed() is None
        assert evaluation.changed() == "Model: training was False, is True"
        model.eval()


# --- what may be trained ------------------------------------------------------------------------


def test_freezing_a_layer_shows_in_trainable_and_is_no_change(model: Model) -> None:
    guard = Guard(model)
    names = [name for name, _ in model.named_parameters()]
    assert guard.trainable() == (True,) * len(names)
    model.blocks[0].linear.requires_grad_(False)
    assert guard.changed() is None
    frozen = [n for n, free in zip(names, guard.trainable(), strict=True) if not free]
    assert frozen == ["blocks.0.linear.weight", "blocks.0.linear.bias"]


# --- hooks that rule a graph out ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (lambda m: None, None),
        (
            lambda m: m.blocks[1].linear.register_forward_hook(_hook),
            "blocks.1.linear: has a forward hook",
        ),
        (lambda m: m.embed.register_full_backward_hook(_hook), "embed: has a backward hook"),
        (
            lambda m: m.embed.register_forward_pre_hook(_hook, with_kwargs=True),
            "embed: has a forward pre-hook",
        ),
        (lambda m: m.register_full_backward_pre_hook(_hook), "Model: has a backward pre-hook"),
    ],
    ids=["none", "forward", "backward", "pre", "root"],
)
def test_the_first_module_with_a_hook_is_named(register: Mutation, reason: str | None) -> None:
    model = Model()
    register(model)
    assert inner_hooks(model) == reason


def test_a_global_hook_counts_for_every_module(model: Model) -> None:
    guard = Guard(model)
    handle = global_hooks.register_module_forward_hook(_hook)
    try:
        assert inner_hooks(model) == "every module: has a global forward hook"
        assert guard.changed() == "every module: a global forward hook was added"
    finally:
        handle.remove()
    assert inner_hooks(model) is None
    assert guard.changed() is None


def test_hooks_that_collect_hidden_states_are_no_obstacle(model: Model) -> None:
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    guard = Guard(model)
    capturing.install_output_capuring_hook(model.blocks[0], "hidden_states", 0)
    assert inner_hooks(model) is None
    assert guard.changed() is None
    model.blocks[0].register_forward_hook(_hook)
    assert inner_hooks(model) == "blocks.0: has a forward hook"
    assert guard.changed() == "blocks.0: a forward hook was added"


# --- what is set around a module ----------------------------------------------------------------


class _Mode(torch.overrides.TorchFunctionMode):
    pass


def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("context", "field", "value"),
    [
        (torch.no_grad, "grad", False),
        (torch.inference_mode, "inference", True),
        (
            lambda: torch.autocast("cpu", torch.bfloat16),
            "autocast",
            (("cpu", torch.bfloat16),),
        ),
        (lambda: torch.autocast("cpu", torch.float16), "autocast", (("cpu", torch.float16),)),
        (_Mode, "function_modes", 1),
        (torch.utils._python_dispatch.TorchDispatchMode, "dispatch_modes", 1),
        (torch.autograd.forward_ad.dual_level, "tangents", True),
        (torch.autograd.graph.save_on_cpu, "saving", "torch.autograd.graph"),
    ],
    ids=[
        "no_grad",
        "inference",
        "bfloat16",
        "float16",
        "function mode",
        "dispatch mode",
        "tangents",
        "offloading",
    ],
)
def test_ambient_state_shows_in_its_field(
    context: Callable[[], Any], field: str, value: object
) -> None:
    before = ambient()
    with context():
        inside = ambient()
        assert getattr(Ambient(*inside), field) == value
        assert inside != before
        assert hash(inside) == hash(ambient())
    assert ambient() == before


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [(_deterministic, "deterministic", True), (_double, "default_dtype", torch.float64)],
)
def test_ambient_settings_show_in_their_field(
    setting: Callable[[], Iterator[None]], field: str, value: object
) -> None:
    before, steps = ambient(), setting()
    next(steps)
    try:
        assert getattr(Ambient(*ambient()), field) == value
    finally:
        next(steps, None)
    assert ambient() == before


def test_a_function_transform_shows() -> None:
    seen: list[Ambient] = []

    def function(value: Tensor) -> Tensor:
        seen.append(Ambient(*ambient()))
        return value

    torch.func.vmap(function)(torch.zeros(2))
    assert seen[0].transformed
    assert not Ambient(*ambient()).transformed


def test_a_backward_that_runs_shows() -> None:
    seen: list[Ambient] = []
    value = torch.zeros(2, requires_grad=True)
    value.register_hook(lambda _: seen.append(Ambient(*ambient())))
    value.sum().backward()
    assert seen[0].in_backward
    assert not Ambient(*ambient()).in_backward


def test_the_guard_holds_under_every_ambient_state(model: Model) -> None:
    guard = Guard(model)
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        with context():
            assert guard.changed() is None
        assert guard.changed() is None


# --- torch's private checks, and speed ----------------------------------------------------------


def test_the_version_of_a_dictionary_counts_writes_of_other_objects_alone() -> None:
    module = nn.Identity()
    before = guard_file.dict_version(module.__dict__)
    module.training = True
    assert guard_file.dict_version(module.__dict__) == before
    module.training = False
    assert guard_file.dict_version(module.__dict__) != before


def test_the_layout_check_of_torch_sees_dtype_and_shape() -> None:
    tensor = torch.zeros(2, 3)
    check = guard_file._layout_check([tensor])
    assert check(tensor)
    assert check(torch.ones(2, 3))
    assert not check(torch.zeros(3, 2))
    assert not check(torch.zeros(2, 3, dtype=torch.float64))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = OrderedDict(a=1.0, b=2.0)
        self.mixed = OrderedDict(a=torch.ones(1), b=nn.Identity(), c=3)
        self.local = threading.local()
        self.local.scale = 2.0

    def forward(self, value: Tensor) -> Tensor:
        first = next(iter(self.plain.values()))
        return value * first * self.local.scale * len(next(iter(self.mixed)))


@pytest.mark.parametrize("name", ["plain", "mixed"])
def test_an_ordered_dict_is_watched_where_its_order_alone_changes(name: str) -> None:
    model = Cached()
    guard, ordered = Guard(model), getattr(model, name)
    first = next(iter(ordered))
    ordered.move_to_end(first)
    assert (guard.changed() or "").startswith(f"Cached: {name} ")
    ordered.move_to_end(first, last=False)
    assert guard.changed() is None
    ordered.move_to_end(first, last=False)  # to where it is
    assert guard.changed() is None


def test_what_a_thread_has_put_aside_for_itself_is_watched() -> None:
    model = Cached()
    guard = Guard(model)
    model.local.scale = 3.0
    assert guard.changed() == "local: scale was 2.0, is 3.0"
    model.local.scale = 2.0
    assert guard.changed() is None
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(guard.changed()))
    thread.start()
    thread.join()
    assert found == ["local: scale was removed (2.0)"]  # the other thread has none
    assert guard.changed() is None


def _asking(name: str) -> nn.Module:
    """A module whose forward asks PyTorch for a setting, or the like of it."""
    names: dict[str, Any] = {"torch": torch}
    source = "def forward(self, value):\n    return value if {asked} else value * 2"
    asked = ASKED[name][0]
    exec(source.format(asked=asked), names)  # noqa: S102
    kind = type("Asking", (nn.Module,), {"forward": names["forward"]})
    asking: nn.Module = kind()
    return asking


# A name, what a forward writes, and how the setting is given another value and its own again.
ASKED: dict[str, tuple[str, Callable[[bool], Any]]] = {
    "get_num_threads": (
        "torch.get_num_threads() > 1",
        lambda other: torch.set_num_threads(2 if other else 1),
    ),
    "get_float32_matmul_precision": (
        "torch.get_float32_matmul_precision() == 'high'",
        lambda other: torch.set_float32_matmul_precision("high" if other else "highest"),
    ),
    "is_anomaly_enabled": (
        "torch.is_anomaly_enabled()",
        lambda other: torch.autograd.set_detect_anomaly(other, check_nan=True),
    ),
    "initial_seed": (
        "torch.initial_seed() % 2",
        lambda other: torch.manual_seed(8 if other else 7),
    ),
    "cudnn": (
        "torch.backends.cudnn.deterministic",
        lambda other: setattr(torch.backends.cudnn, "deterministic", other),
    ),
    "flash_sdp_enabled": (
        "torch.backends.cuda.flash_sdp_enabled()",
        lambda other: torch.backends.cuda.enable_flash_sdp(not other),
    ),
}


@pytest.fixture
def precisions_as_before() -> Iterator[None]:
    """Setting "highest" says more than the default, which other tests look at."""
    c: Any = torch._C
    places = [(backend, "matmul") for backend in ("mkldnn", "cuda")]
    before = [c._get_fp32_precision_getter(*place) for place in places]
    yield
    for place, precision in zip(places, before, strict=True):
        c._set_fp32_precision_setter(*place, precision)


@pytest.mark.usefixtures("precisions_as_before")
@pytest.mark.parametrize("name", ASKED)
def test_a_setting_of_pytorch_is_watched_where_the_code_asks_for_it(name: str) -> None:
    turn = ASKED[name][1]
    turn(False)
    try:
        guard, idle = Guard(_asking(name)), Guard(nn.Linear(2, 2))
        assert guard.changed() is None
        turn(True)
        assert (guard.changed() or "").startswith(f"global torch: {name} was ")
        assert idle.changed() is None
    finally:
        turn(False)
    assert guard.changed() is None
