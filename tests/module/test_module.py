"""ORTModule in place of the module it wraps: nothing else in a training script changes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from ortrain.errors import StateError
from ortrain.frontend.backend import _KNOWN
from ortrain.module import unwrap
from ortrain.runtime.onnxruntime import Compiled
from ortrain.step.build import build
from tests.models import MODELS, Mlp
from tests.module.agreement import GRAPH, SAME, Outcome, assert_agree, double, in_double, step


def wrapped(module: nn.Module) -> ORTModule:
    """A copy of the module as a graph."""
    return ORTModule(copy.deepcopy(module), options=GRAPH)


def linear(size: int = 4) -> Any:
    return nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 3))


@pytest.fixture(autouse=True)
def no_graphs_of_others() -> None:
    """Modules share graphs that are equal, and with them what they have learned of backwards."""
    _KNOWN.clear()


def rows(count: int = 5, size: int = 4, *, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def assert_same(ours: Tensor | None, eager: Tensor | None) -> None:
    """Raises unless both are there, and equal but for roundings of the largest value."""
    assert (ours is None) == (eager is None)
    if ours is not None and eager is not None:
        bound = SAME * float(eager.detach().abs().max()) if eager.numel() else 0.0
        torch.testing.assert_close(ours, eager, rtol=0.0, atol=bound)


def assert_same_gradients(ours: nn.Module, eager: nn.Module) -> None:
    theirs = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        assert_same(parameter.grad, theirs[name].grad)


# --- the module's own names and attributes ------------------------------------------------------


def test_names_are_those_of_the_module() -> None:
    module = MODELS["cnn"].build()
    model = ORTModule(module)
    assert list(model.state_dict()) == list(module.state_dict())
    for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        ours, own = getattr(model, names)(), getattr(module, names)()
        assert [name for name, _ in ours] == [name for name, _ in own]
    assert all(a is b for a, b in zip(model.parameters(), module.parameters(), strict=True))
    assert model.module is module
    assert unwrap(model) is module
    assert unwrap(module) is module


def test_a_state_dict_goes_in_and_out() -> None:
    module, other = linear(), linear()
    model = ORTModule(module, options=GRAPH)
    before = model(rows())
    model.load_state_dict(other.state_dict())
    assert_same(model(rows()), other(rows()))
    assert not torch.allclose(model(rows()), before)
    other.load_state_dict(model.state_dict())


def test_a_state_dict_has_the_prefix_of_the_model_around() -> None:
    around = nn.ModuleDict({"encoder": ORTModule(linear()), "head": nn.Linear(3, 2)})
    plain = nn.ModuleDict({"encoder": linear(), "head": nn.Linear(3, 2)})
    assert list(around.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(around.state_dict())
    around.load_state_dict(plain.state_dict())


def test_attributes_are_read_set_and_deleted_on_the_module() -> None:
    module: Any = Mlp()
    model = ORTModule(module)
    module.note = "a"
    assert model.note == "a"
    model.note = "b"
    assert module.note == "b"
    del model.note
    assert not hasattr(module, "note")
    assert not hasattr(model, "note")
    model.extra = nn.Linear(2, 2)
    assert module.extra is model.extra
    assert "extra.weight" in dict(model.named_parameters())
    del model.extra
    assert "extra.weight" not in dict(module.named_parameters())
    assert "layers" in dir(model)
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


def test_parameters_and_buffers_are_registered_on_the_module() -> None:
    module = linear()
    model = ORTModule(module)
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    model.register_buffer("mean", torch.zeros(1))
    assert "scale" in dict(module.named_parameters())
    assert "mean" in dict(module.named_buffers())


@pytest.mark.parametrize("name", ["_parameters", "_buffers", "_modules"])
def test_a_dictionary_that_a_library_replaces_is_replaced_in_the_module(name: str) -> None:
    """As DeepSpeed ZeRO 3 does with that of the parameters."""
    module = linear()
    model = ORTModule(module)
    replaced = OrderedDict(getattr(model, name))
    setattr(model, name, replaced)
    assert getattr(model, name) is getattr(module, name) is replaced


def test_a_wrapped_sequence_is_indexed() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert ORTModule(module)[0] is module[0]


def test_the_signature_is_that_of_the_module() -> None:
    module = MODELS["bert"].build()
    model = ORTModule(module)
    assert inspect.signature(model.forward) == inspect.signature(module.forward)
    assert inspect.signature(model) == inspect.signature(module.forward)


def test_train_and_eval_set_the_modules_mode() -> None:
    module = MODELS["mlp"].build(dropout=0.5)
    model = ORTModule(module)
    assert model.eval() is model
    assert not module.training
    assert not model.training
    assert not any(each.training for each in module.modules())
    model.train()
    assert all(each.training for each in module.modules())
    model.training = False
    assert not module.training


def test_apply_visits_the_module_itself() -> None:
    module = linear()
    visited: list[nn.Module] = []
    assert isinstance(ORTModule(module).apply(visited.append), ORTModule)
    assert visited == [module[0], module[1], module[2], module]


def test_wrapping_twice_wraps_once() -> None:
    module = linear()
    assert ORTModule(ORTModule(module)).module is module


def test_what_is_no_module_is_refused() -> None:
    what: Any = torch.relu
    with pytest.raises(TypeError, match="ORTModule"):
        ORTModule(what)


def test_the_representation_names_the_module_and_what_ran() -> None:
    model = ORTModule(linear(), options=GRAPH)
    assert "Sequential, not called yet" in repr(model)
    model(rows())
    assert "Sequential, graph" in repr(model)


def test_optimizers_made_before_and_after_wrapping_hold_the_same_parameters() -> None:
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = ORTModule(module, options=GRAPH)
    twin = copy.deepcopy(module)
    model(rows()).sum().backward()
    optimizer.step()
    torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(rows()).sum().backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
    assert_same(model(rows()), twin(rows()))


# --- copies and casts ---------------------------------------------------------------------------


def _deep_copy(model: ORTModule) -> ORTModule:
    return copy.deepcopy(model)


def _pickled(model: ORTModule) -> ORTModule:
    copied = pickle.loads(pickle.dumps(model))
    assert isinstance(copied, ORTModule)
    return copied


def _saved(model: ORTModule) -> ORTModule:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    assert isinstance(copied, ORTModule)
    return copied


def _double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("make", [_deep_copy, _pickled, _saved])
def test_a_copy_trains_apart_with_the_same_options_and_hooks(
    make: Callable[[ORTModule], ORTModule],
) -> None:
    model = ORTModule(linear(), options=GRAPH)
    model.register_forward_hook(_double_output)
    before = model(rows())
    copied = make(model)
    assert type(copied.module) is nn.Sequential
    assert_same(copied(rows()), before)
    assert copied.report.mode == "graph"
    copied(rows()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert_same(model(rows()), before)


def test_a_module_in_float64_is_computed_in_float64() -> None:
    module = linear()
    model = wrapped(module)
    model(rows()).sum().backward()
    assert model.to(torch.float64) is model
    twin = in_double(module)
    model.zero_grad()
    ours, eager = model(rows().double()), twin(rows().double())
    assert ours.dtype is torch.float64
    torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12)
    ours.sum().backward()
    eager.sum().backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12)
    model.float()
    assert_same(model(rows()), module(rows()))
    assert model.report.captures == 2, "the capture in float32 is still good"


# --- a part of a model --------------------------------------------------------------------------


class Around(nn.Module):
    """A model whose encoder may be wrapped, with eager layers before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.encoder: nn.Module = linear()
        self.last = nn.Linear(3, 1)

    def forward(self, value: Tensor) -> Tensor:
        last: Tensor = self.last(self.encoder(self.first(value).relu()))
        return last


def test_a_wrapped_part_passes_gradients_through() -> None:
    eager = Around()
    model = copy.deepcopy(eager)
    model.encoder = ORTModule(model.encoder, options=GRAPH)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in eager.named_parameters()]
    for seed in range(3):
        ours, theirs = rows(seed=seed).requires_grad_(), rows(seed=seed).requires_grad_()
        model(ours).sum().backward()
        eager(theirs).sum().backward()
        assert_same(ours.grad, theirs.grad)
    assert_same_gradients(model, eager)
    assert model.encoder.report.mode == "graph"


def test_a_wrapped_part_of_a_wrapped_model_is_part_of_its_graph() -> None:
    eager = Around()
    inner = copy.deepcopy(eager)
    inner.encoder = ORTModule(inner.encoder)
    model = ORTModule(inner, options=GRAPH)
    for _ in range(2):
        model(rows()).sum().backward()
        eager(rows()).sum().backward()
    assert_same_gradients(model, eager)
    assert model.report.captures == 1


# --- inputs and outputs -------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclasses.dataclass
class Record:
    value: Tensor
    label: str = "x"
    missing: Tensor | None = None


class Nested(nn.Module):
    """Takes and returns what its ``shape`` says."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.shape = shape

    def forward(self, value: Tensor) -> Any:
        hidden = self.layer(value)
        return self.shape(hidden, hidden.sum())


def _model_output(hidden: Tensor, loss: Tensor) -> Any:
    from transformers.modeling_outputs import MaskedLMOutput

    return MaskedLMOutput(loss=loss, logits=hidden, hidden_states=(hidden, hidden * 2))


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tensor": lambda hidden, loss: hidden,
    "a tuple": lambda hidden, loss: (loss, hidden),
    "a list": lambda hidden, loss: [hidden, loss],
    "a dict": lambda hidden, loss: {"loss": loss, "all": {"hidden": hidden}},
    "None inside": lambda hidden, loss: (None, hidden, [None, loss]),
    "constants inside": lambda hidden, loss: (hidden, 3, "name", True, 0.5),
    "a named tuple": lambda hidden, loss: Pair(hidden, None),
    "a dataclass": lambda hidden, loss: Record(hidden),
    "a model output": _model_output,
    "the same tensor twice": lambda hidden, loss: (hidden, hidden),
    "integers and truth values": lambda hidden, loss: (hidden, hidden.argmax(-1), hidden > 0),
}


def _leaves(output: Any) -> list[Any]:
    if isinstance(output, dict):
        return [leaf for value in output.values() for leaf in _leaves(value)]
    if isinstance(output, list | tuple):
        return [leaf for value in output for leaf in _leaves(value)]
    if dataclasses.is_dataclass(output):
        return _leaves(list(vars(output).values()))
    return [output]


def _types(output: Any) -> Any:
    if isinstance(output, dict):
        return type(output), {name: _types(value) for name, value in output.items()}
    if isinstance(output, list | tuple):
        return type(output), [_types(value) for value in output]
    return type(output)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_come_back_as_the_same_types(kind: str) -> None:
    eager = Nested(OUTPUTS[kind])
    model = wrapped(eager)
    for _ in range(2):
        ours, theirs = model(rows()), eager(rows())
        assert _types(ours) == _types(theirs)
        for mine, its in zip(_leaves(ours), _leaves(theirs), strict=True):
            if isinstance(its, Tensor):
                assert mine.dtype is its.dtype
                assert mine.requires_grad == its.requires_grad
                torch.testing.assert_close(mine, its)
            else:
                assert mine == its
    assert model.report.mode == "graph"


class Gathers(nn.Module):
    """Takes nested inputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *values: Any, scale: float = 1.0, options: Any = None) -> Tensor:
        total = torch.zeros(())
        for tensor in (leaf for leaf in _leaves([values, options]) if isinstance(leaf, Tensor)):
            total = total + self.layer(tensor).sum() * scale
        return total


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "positional": ((rows(), rows(seed=1)), {}),
    "keyword": ((rows(),), {"scale": 2.0}),
    "a tuple": (((rows(), rows(seed=1)),), {}),
    "a list and a dict": (([rows()], {"a": rows(seed=1), "b": {"c": rows(seed=2)}}), {}),
    "a named tuple": ((Pair(rows(), None),), {}),
    "a dataclass": ((Record(rows()),), {}),
    "None and constants": ((rows(), None), {"options": {"name": "x", "count": 3, "flag": True}}),
    "a tensor of one number": ((rows(), torch.randn(1, 4)), {"scale": 0.5}),
}


@pytest.mark.parametrize("kind", CALLS)
def test_nested_inputs_reach_the_graph(kind: str) -> None:
    args, kwargs = CALLS[kind]
    eager = Gathers()
    model = wrapped(eager)
    for _ in range(2):
        ours, theirs = model(*args, **kwargs), eager(*args, **kwargs)
        assert_same(ours, theirs)
        ours.backward()
        theirs.backward()
    assert_same_gradients(model, eager)
    assert model.report.mode == "graph"


def test_a_model_output_is_read_by_name_and_by_position() -> None:
    case = MODELS["bert"]
    model = wrapped(case.build())
    output = model(**case.batch())
    assert output.loss is output["loss"] is output[0]
    assert type(output).__name__ == "SequenceClassifierOutput"
    assert output.hidden_states is None


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, minuend: Tensor, subtrahend: Tensor) -> Tensor:
        difference: Tensor = self.layer(minuend) - 3 * subtrahend
        return difference


@pytest.mark.parametrize("order", [("minuend", "subtrahend"), ("subtrahend", "minuend")])
def test_a_tensor_passed_twice_is_two_inputs_of_a_graph_of_its_own(order: tuple[str, str]) -> None:
    eager = Difference()
    model = wrapped(eager)
    same = rows().requires_grad_()
    ours = model(**dict.fromkeys(order, same))
    theirs = eager(**dict.fromkeys(order, same))
    assert_same(ours, theirs)
    (mine,) = torch.autograd.grad(ours.sum(), same)
    (its,) = torch.autograd.grad(theirs.sum(), same)
    assert_same(mine, its)
    apart = {"minuend": rows(seed=1).requires_grad_(), "subtrahend": rows(seed=2).requires_grad_()}
    assert_same(model(**apart), eager(**apart))
    assert model.report.captures == 2


def test_labels_may_be_the_input_tokens() -> None:
    case = MODELS["gpt2"]
    eager = case.build()
    model = wrapped(eager)
    tokens = case.batch(2, 6)["input_ids"]
    truth = in_double(eager)
    batch = {"input_ids": tokens, "labels": tokens}
    assert_agree(step(model, batch), step(eager, batch), step(truth, double(batch)))


def test_a_parameter_of_the_module_may_be_its_input() -> None:
    eager = nn.Linear(4, 4)
    model = wrapped(eager)
    ours, theirs = model(model.weight), eager(eager.weight)
    assert_same(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    assert_same_gradients(model, eager)


def test_a_call_without_a_tensor_runs() -> None:
    eager: Any = Gathers()
    eager.forward = eager.layer.weight.sum
    model = ORTModule(eager)
    assert_same(model(), eager())


@pytest.mark.parametrize(
    "make",
    [
        lambda: rows(4).t(),
        lambda: rows(8)[::2],
        lambda: torch.randn(1, 4).expand(5, 4),
        lambda: rows(9, 8)[2:5, 1:5],
    ],
    ids=["transposed", "strided", "expanded", "a window"],
)
def test_an_input_may_lie_in_memory_as_it_likes(make: Callable[[], Tensor]) -> None:
    eager = linear()
    model = wrapped(eager)
    value = make()
    assert_same(model(value), eager(value))


def test_a_module_that_returns_its_input_or_its_parameter_works() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return value, self.weight, value * self.weight

    eager = Returns()
    model = wrapped(eager)
    ours, theirs = rows().requires_grad_(), rows().requires_grad_()
    sum(t.sum() for t in model(ours)).backward()
    sum(t.sum() for t in eager(theirs)).backward()
    assert_same(ours.grad, theirs.grad)
    assert_same_gradients(model, eager)


# --- gradients ----------------------------------------------------------------------------------


def test_inputs_that_require_a_gradient_receive_one() -> None:
    eager = linear()
    model = wrapped(eager)
    ours, theirs = rows().requires_grad_(), rows().requires_grad_()
    model(ours).pow(2).sum().backward()
    eager(theirs).pow(2).sum().backward()
    assert_same(ours.grad, theirs.grad)
    assert_same_gradients(model, eager)
    plain = model(rows())
    plain.sum().backward()
    assert model.report.captures <= 2


def test_frozen_parameters_receive_none_and_thawed_ones_do() -> None:
    eager = linear()
    model = wrapped(eager)
    for frozen in (True, False, True):
        for each in (model, eager):
            each.zero_grad()
            each[0].requires_grad_(not frozen)
            each(rows()).sum().backward()
        assert_same_gradients(model, eager)
        assert (model[0].weight.grad is None) == frozen
    assert model.report.captures == 2


def test_a_module_with_nothing_to_train_yields_outputs_without_gradient() -> None:
    model = wrapped(linear().requires_grad_(False))
    assert not model(rows()).requires_grad


def test_outputs_that_depend_on_no_parameter_require_no_gradient() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.layer(value)
            return hidden.detach() * 2, hidden

    eager = Detached()
    model = wrapped(eager)
    fixed, hidden = model(rows())
    assert not fixed.requires_grad
    assert hidden.requires_grad
    hidden.sum().backward()
    eager(rows())[1].sum().backward()
    assert_same_gradients(model, eager)


def test_no_grad_runs_a_graph_without_backward() -> None:
    eager = linear()
    model = wrapped(eager)
    with torch.no_grad():
        ours = model(rows())
    assert not ours.requires_grad
    assert_same(ours, eager(rows()).detach())
    model(rows()).sum().backward()
    assert model[0].weight.grad is not None


def test_inference_mode_runs_a_graph() -> None:
    eager = MODELS["cnn"].build(train=False)
    model = wrapped(eager)
    batch = MODELS["cnn"].batch()
    with torch.inference_mode():
        inside = {**batch, "pixel_values": batch["pixel_values"] * 1.0}
        for _ in range(2):
            assert_same(model(**inside)["logits"], eager(**inside)["logits"])
    assert model.report.mode == "graph"
    model(**batch)["loss"].backward()
    eager(**batch)["loss"].backward()
    assert_same_gradients(model, eager)


def test_training_in_inference_mode_updates_buffers() -> None:
    eager = MODELS["cnn"].build()
    model = wrapped(eager)
    batch = MODELS["cnn"].batch()
    with torch.inference_mode():
        model(**batch)
        eager(**batch)
    for mine, its in zip(model.buffers(), eager.buffers(), strict=True):
        assert_same(mine.float(), its.float())


def test_training_and_evaluation_have_graphs_of_their_own() -> None:
    eager = MODELS["cnn"].build(dropout=0.5)
    model = wrapped(eager)
    batch = MODELS["cnn"].batch()
    for _ in range(2):
        model.train()
        model(**batch)["loss"].backward()
        eager.train()
        eager(**batch)
        model.eval()
        eager.eval()
        with torch.no_grad():
            first, second, theirs = model(**batch), model(**batch), eager(**batch)
        assert torch.equal(first["logits"], second["logits"])
        assert_same(first["logits"], theirs["logits"])
    assert model.report.inference is not None
    assert model.report.inference.captures == 2, "both: there was that of training before"


def test_forwards_wait_for_their_backwards_in_any_order() -> None:
    eager = linear()
    model = wrapped(eager)
    for each in (model, eager):
        losses = [each(rows(seed=seed)).pow(2).sum() for seed in range(3)]
        for number in (1, 0, 2):
            losses[number].backward()
    assert_same_gradients(model, eager)


def test_one_backward_passes_through_several_forwards() -> None:
    eager = linear()
    model = wrapped(eager)
    for each in (model, eager):
        sum(each(rows(seed=seed)).pow(2).sum() for seed in range(3)).backward()
    assert_same_gradients(model, eager)


def test_gradients_accumulate() -> None:
    eager = linear()
    model = wrapped(eager)
    for each in (model, eager):
        for seed in range(4):
            (each(rows(seed=seed)).pow(2).sum() / 4).backward()
    assert_same_gradients(model, eager)


def test_gradients_are_not_shared_between_steps() -> None:
    model = wrapped(linear())
    model(rows()).sum().backward()
    kept = model[0].weight.grad
    assert kept is not None
    before = kept.clone()
    model.zero_grad()
    model(rows(seed=1)).sum().backward()
    assert torch.equal(kept, before)


def test_autograd_grad_and_hooks_on_parameters_work() -> None:
    eager = linear()
    model = wrapped(eager)
    seen: list[Tensor] = []

    def double_it(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 2

    handle = model[0].weight.register_hook(double_it)
    model(rows()).sum().backward()
    handle.remove()
    (theirs,) = torch.autograd.grad(eager(rows()).sum(), eager[0].weight)
    assert_same(seen[0], theirs)
    assert_same(model[0].weight.grad, 2 * theirs)
    (ours,) = torch.autograd.grad(model(rows()).sum(), model[0].weight)
    assert_same(ours, theirs)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(value).tanh()
        return self.one(hidden), self.two(hidden)


@pytest.mark.parametrize(
    "pattern", ["1", "2", "1212", "12", "1122b1b2", "b12b", "222222"], ids=lambda p: f"heads {p}"
)
def test_outputs_that_the_loss_leaves_out_have_no_gradient(pattern: str) -> None:
    eager = TwoHeads()
    model = wrapped(eager)
    for number, heads in enumerate(pattern):
        for each in (model, eager):
            each.zero_grad()
            one, two = each(rows(seed=number))
            chosen = {"1": one, "2": two, "b": one + two}[heads]
            chosen.pow(2).sum().backward()
        assert_same_gradients(model, eager)
        assert (model.one.weight.grad is None) == (heads == "2")
    assert model.report.captures == 1


def test_the_pooler_of_bert_has_no_gradient_where_it_is_not_used() -> None:
    from transformers import BertConfig, BertModel

    eager = BertModel(
        BertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            vocab_size=30, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    model, truth = wrapped(eager), in_double(eager)
    tokens = torch.randint(0, 30, (2, 5))
    for name in ("last_hidden_state", "pooler_output", "last_hidden_state"):
        outcomes = []
        for each in (model, eager, truth):
            each.zero_grad()
            loss = each(tokens)[name].tanh().pow(2).sum()
            loss.backward()
            outcomes.append(Outcome.of(each, loss))
        assert_agree(*outcomes)
        assert (model.pooler.dense.weight.grad is not None) == (name == "pooler_output")


def test_patterns_of_gradients_are_compiled_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        built.append(args)
        return build(*args, **kwargs)

    monkeypatch.setattr("ortrain.frontend.form.build", counted)
    model = wrapped(TwoHeads())
    for number in range(12):
        one, two = model(rows())
        (one if number % 2 else two).sum().backward()
    assert len(built) == 3, "both heads, which was the guess, and each alone"


def test_a_forward_that_has_to_run_again_notices_changed_parameters() -> None:
    model = wrapped(TwoHeads())
    one, _ = model(rows())
    with torch.no_grad():
        model.body.bias.add_(1.0)  # no backward reads a bias, but what it went into
    with pytest.raises(StateError, match=r"modified by an inplace operation: body\.bias"):
        one.sum().backward()


def test_a_forward_that_has_to_run_again_may_have_changed_where_no_gradient_comes_from() -> None:
    eager = TwoHeads()
    model = wrapped(eager)
    for each in (model, eager):
        one, _ = each(rows())
        with torch.no_grad():
            each.two.weight.add_(1.0)
        one.sum().backward()
    assert_same_gradients(model, eager)


def test_a_forward_that_has_to_run_again_starts_from_the_same_buffers() -> None:
    class Counting(TwoHeads):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.ones(1))
            self.count: Tensor

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            value = value * self.count
            self.count.mul_(2.0)
            return super().forward(value)

    eager = Counting()
    model = wrapped(eager)
    for number in range(4):
        for each in (model, eager):
            each.zero_grad()
            each(rows())[number % 2].pow(2).sum().backward()
        assert_same_gradients(model, eager)
        assert_same(model.count, eager.count)


# --- what must be an error ----------------------------------------------------------------------


def test_a_second_backward_says_so() -> None:
    for model in (linear(), wrapped(linear())):
        loss = model(rows()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("what", ["parameter", "input"])
def test_an_in_place_change_of_what_the_backward_reads_is_an_error(what: str) -> None:
    model = wrapped(linear())
    value = rows()
    loss = model(value).pow(2).sum()
    with torch.no_grad():
        (value if what == "input" else model[2].weight).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_in_place_change_of_what_no_backward_reads_is_none() -> None:
    eager = nn.Linear(4, 4)
    model = wrapped(eager)
    for each in (model, eager):
        loss = each(rows()).sum()
        with torch.no_grad():
            each.bias.add_(1.0)
        loss.backward()
    assert_same_gradients(model, eager)


# --- torch's own tools around it -----------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_it_gives_eagers_gradients(reentrant: bool) -> None:
    eager = linear()
    model = wrapped(eager)
    for _ in range(2):
        for each in (model, eager):
            value = rows().requires_grad_()
            checkpoint(each, value, use_reentrant=reentrant).pow(2).sum().backward()
        assert_same_gradients(model, eager)
    assert model.report.mode == "graph"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_masks_again(reentrant: bool) -> None:
    model = ORTModule(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), options=GRAPH)
    for _ in range(2):
        model.zero_grad()
        value = rows(64, 64).requires_grad_()
        output = checkpoint(model, value, use_reentrant=reentrant)
        output.sum().backward()
        dropped = (output == 0).all(0)
        kept = (output != 0).sum(0) * 2.0
        assert not dropped.any()
        assert_same(model[0].bias.grad, kept)


def test_saved_tensors_may_be_offloaded() -> None:
    eager = linear()
    model = wrapped(eager)
    for each in (model, eager):
        with torch.autograd.graph.save_on_cpu():
            loss = each(rows()).pow(2).sum()
        loss.backward()
    assert_same_gradients(model, eager)


def test_a_functional_call_uses_the_parameters_that_it_is_given_in_pytorch() -> None:
    eager = linear()
    model = ORTModule(copy.deepcopy(eager), options=dataclasses.replace(GRAPH, fallback="torch"))
    others = {name: p.detach() * 2 for name, p in eager.named_parameters()}
    for _ in range(2):
        ours = torch.func.functional_call(model, others, (rows(),))
        assert_same(ours, torch.func.functional_call(eager, others, (rows(),)))
        assert model.report.mode == "eager"
        assert "as torch.func.functional_call sets them" in model.report.reason
        assert_same(model(rows()), eager(rows()))
        assert model.report.mode == "graph"


def test_a_functional_call_reads_what_has_been_written_to_its_parameters() -> None:
    eager = linear()
    model = ORTModule(copy.deepcopy(eager), options=dataclasses.replace(GRAPH, fallback="torch"))
    others = {name: p.detach() * 2 for name, p in eager.named_parameters()}
    for _ in range(3):
        ours = torch.func.functional_call(model, others, (rows(),))
        assert_same(ours, torch.func.functional_call(eager, others, (rows(),)))
        for each in others.values():
            each.mul_(1.5)


def test_gradients_are_clipped_and_scaled() -> None:
    eager = linear()
    model = wrapped(eager)
    for each in (model, eager):
        (each(rows()).pow(2).sum() * 1e3).backward()
        nn.utils.clip_grad_norm_(each.parameters(), 0.5)
    assert_same_gradients(model, eager)


# --- hooks on ORTModule itself ------------------------------------------------------------------


def test_hooks_on_the_wrapper_run() -> None:
    model = wrapped(linear())
    order: list[str] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        order.append("before")
        return (args[0] * 2,)

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        order.append("after")
        return output + 1

    def backward(module: nn.Module, inputs: Any, outputs: Any) -> None:
        order.append("backward")

    expected = model.module(rows() * 2) + 1
    handles = [
        model.register_forward_pre_hook(before),
        model.register_forward_hook(after),
        model.register_full_backward_hook(backward),
    ]
    value = rows().requires_grad_()
    output = model(value)
    assert_same(output, expected)
    output.sum().backward()
    assert order == ["before", "after", "backward"]
    assert model.report.mode == "graph"
    for handle in handles:
        handle.remove()
    model(rows())
    assert order == ["before", "after", "backward"]


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_piece")
def test_no_tensor_is_copied_on_the_way_in_between_and_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[tuple[set[int], set[int]]] = []  # addresses of what each program took and gave
    original = Compiled.run_values

    def run_values(self: Compiled, feeds: Any) -> Any:
        fetches = original(self, feeds)
        both = ([vector[i].data_ptr() for i in range(len(vector))] for vector in (feeds, fetches))
        runs.append(tuple(map(set, both)))  # type: ignore[arg-type]
        return fetches

    monkeypatch.setattr(Compiled, "run_values", run_values)
    case = MODELS["cnn"]
    model = wrapped(case.build())
    batch = case.batch()
    pixels = batch["pixel_values"].requires_grad_()
    for _ in range(2):
        model(**batch)  # which is compared with the module
    for _ in range(2):
        runs.clear()
        model.zero_grad()
        output = model(**batch)
        ((taken, given),) = runs
        assert {t.data_ptr() for t in (pixels, batch["labels"])} <= taken
        assert {p.data_ptr() for p in model.parameters()} <= taken
        assert {output["loss"].data_ptr(), output["logits"].data_ptr()} <= given
        upstream = torch.ones(())
        output["loss"].backward(upstream)
        (_, (taken_again, gradients)) = runs
        own = {p.data_ptr() for p in model.parameters()} | {pixels.data_ptr()}
        constants = {batch["labels"].data_ptr(), upstream.data_ptr()}
        assert upstream.data_ptr() in taken_again
        assert taken_again <= given | own | constants, "saved tensors are the forward's own"
        assert len(taken_again & given) > 3
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() in gradients


def test_a_parameter_that_moves_is_read_where_it_is() -> None:
    eager = linear()
    model = wrapped(eager)
    model(rows())
    for each in (model, eager):
        torch.manual_seed(1)
        each[0].weight.data = torch.randn(4, 4)
    assert_same(model(rows()), eager(rows()))
    assert model.report.captures == 1


def test_a_parameter_that_is_not_contiguous_is_read_as_it_is_now() -> None:
    eager = linear()
    model = wrapped(eager)
    for each in (model, eager):
        each[0].weight.data = each[0].weight.data.t()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, eager)]
    for _ in range(3):
        for each, optimizer in zip((model, eager), optimizers, strict=True):
            optimizer.zero_grad()
            each(rows()).pow(2).sum().backward()
            optimizer.step()
        assert_same(model(rows()), eager(rows()))
    for each in (model, eager):
        each[0].weight.data = each[0].weight.data.t()
    assert_same(model(rows()), eager(rows()))


def test_outputs_and_gradients_belong_to_the_caller() -> None:
    model = wrapped(linear())
    first = model(rows())
    kept = first.detach().clone()
    model(rows(seed=1)).sum().backward()
    del model
    gc.collect()
    assert torch.equal(first, kept)


def test_what_a_forward_kept_is_freed_by_its_backward() -> None:
    model = wrapped(linear())
    model(rows()).sum().backward()
    array = np.ones((64, 4), np.float32)
    alive = weakref.ref(array)
    value = torch.from_numpy(array)
    loss = model(value).pow(2).sum()
    del array, value
    gc.collect()
    assert alive() is not None, "the backward reads the input"
    loss.backward(retain_graph=False)
    gc.collect()
    assert alive() is None


def test_what_a_forward_kept_is_freed_with_a_loss_that_is_dropped() -> None:
    model = wrapped(linear())
    array = np.ones((64, 4), np.float32)
    alive = weakref.ref(array)
    loss = model(torch.from_numpy(array)).pow(2).sum()
    del array, loss
    gc.collect()
    assert alive() is None


def test_a_dropped_model_is_freed() -> None:
    model = wrapped(linear())
    model(rows()).sum().backward()
    alive = weakref.ref(model.module)
    del model
    gc.collect()
    assert alive() is None


# --- dropout ------------------------------------------------------------------------------------


def _losses(model: nn.Module, seed: int, count: int = 3) -> list[float]:
    case = MODELS["bert"]
    torch.manual_seed(seed)
    batch = case.batch()
    return [model(**batch)["loss"].item() for _ in range(count)]


def test_a_seed_repeats_the_masks_of_a_run() -> None:
    model = wrapped(MODELS["bert"].build(dropout=0.3))
    first = _losses(model, seed=1)
    assert _losses(model, seed=1) == first
    assert _losses(model, seed=2) != first
    assert len(set(first)) == 3, "each step has masks of its own"
    again = wrapped(MODELS["bert"].build(dropout=0.3))
    assert _losses(again, seed=1) == first


def test_capturing_draws_no_random_numbers() -> None:
    model = wrapped(MODELS["mlp"].build())
    torch.manual_seed(3)
    model(**MODELS["mlp"].batch())
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


def test_evaluation_drops_nothing() -> None:
    case = MODELS["bert"]
    eager = case.build(dropout=0.3)
    model = wrapped(eager).eval()
    eager.eval()
    batch = case.batch()
    assert_same(model(**batch)["logits"], eager(**batch)["logits"])
    assert torch.equal(model(**batch)["logits"], model(**batch)["logits"])


def test_the_backward_uses_the_masks_of_its_forward() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))
            self.drop = nn.Dropout(0.5)

        def forward(self) -> Tensor:
            dropped: Tensor = self.drop(self.weight)
            return dropped

    model = ORTModule(Drops(), options=Options(engine="onnxruntime"))
    first, second = model(), model()
    assert not torch.equal(first, second)
    for output in (second, first):
        model.zero_grad()
        output.sum().backward()
        assert_same(model.weight.grad, output.detach())


# --- torch.compile ------------------------------------------------------------------------------


def test_torch_compile_around_it_leaves_the_graph_to_run() -> None:
    eager = linear()
    model = wrapped(eager)
    compiled = torch.compile(model, backend="eager")
    for count in (2, 5):
        model.zero_grad()
        eager.zero_grad()
        assert_same(compiled(rows(count)), eager(rows(count)))
        compiled(rows(count)).sum().backward()
        eager(rows(count)).sum().backward()
        assert_same_gradients(model, eager)
    assert (model.report.graph_calls, model.report.captures) == (4, 1)
