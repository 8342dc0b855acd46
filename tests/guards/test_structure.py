"""Calls become tensors and a key; outputs come back as the types they were."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain.errors import CaptureError, UnsupportedInput
from ortrain.guards.structure import OutputStructure, bind_names, flatten_call

x, y, z = torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), 2.0)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    ids: Any
    mask: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any
    note: str = "n"


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def key(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return flatten_call(args, kwargs).key


def same_tensors(actual: list[Tensor], *expected: Tensor) -> bool:
    return len(actual) == len(expected) and all(
        a is e for a, e in zip(actual, expected, strict=True)
    )


# --- tensors ------------------------------------------------------------------------------------


def test_tensors_come_positional_first_then_by_the_names_of_keywords() -> None:
    assert same_tensors(flatten_call((x,), {"b": z, "a": y}).tensors, x, y, z)


def test_nested_tensors_come_depth_first() -> None:
    flat = flatten_call(([x, (y,)], {"k": z}), {"batch": Batch(x, None)})
    assert same_tensors(flat.tensors, x, y, z, x)


def test_a_tensor_that_is_passed_twice_is_listed_twice() -> None:
    assert same_tensors(flatten_call((), {"input_ids": x, "labels": x}).tensors, x, x)


def test_a_parameter_is_a_tensor_like_any_other() -> None:
    parameter = nn.Parameter(x.clone())
    assert key(parameter) == key(x.clone().requires_grad_())


# --- keys ---------------------------------------------------------------------------------------


def test_sizes_are_no_part_of_the_key() -> None:
    assert key(x, mask=x) == key(torch.zeros(7, 1), mask=torch.zeros(1, 5))


def test_the_order_of_keyword_arguments_does_not_matter() -> None:
    assert key(a=x, b=1, c=None) == key(c=None, b=1, a=x)


def test_the_key_is_hashable_for_every_kind_of_argument() -> None:
    arguments = [None, True, 1, 1.5, 1j, "s", b"b", torch.float16, torch.device("cpu"), Color.RED]
    containers = [(x, 1), [x], {"k": x}, OrderedDict(k=x), Pair(x, 1), Batch(x), Slotted(x)]
    assert isinstance(hash(key(*arguments, *containers, len, Tensor)), int)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(x, x.double(), id="dtype"),
        pytest.param(x, x[0], id="rank"),
        pytest.param(x, x.clone().requires_grad_(), id="requires_grad"),
        pytest.param(x, x.to("meta"), id="device"),
        pytest.param(x, x.to_sparse(), id="layout"),
        pytest.param(x, None, id="tensor or None"),
        pytest.param(True, 1, id="bool or int"),
        pytest.param(1, 1.0, id="int or float"),
        pytest.param(0.0, -0.0, id="sign of zero"),
        pytest.param("a", "b", id="strings"),
        pytest.param(0, None, id="zero or None"),
        pytest.param(False, None, id="False or None"),
        pytest.param(torch.float32, torch.float16, id="dtypes as arguments"),
        pytest.param(Color.RED, Color.BLUE, id="members of an enum"),
        pytest.param((x, y), [x, y], id="tuple or list"),
        pytest.param((x, y), Pair(x, y), id="tuple or named tuple"),
        pytest.param((x, (y,)), ((x, y),), id="nesting"),
        pytest.param(((), x), ((x,),), id="an empty tuple"),
        pytest.param({"a": x}, {"b": x}, id="names of a dict"),
        pytest.param({"a": x, "b": y}, {"b": x, "a": y}, id="order of a dict"),
        pytest.param({"a": x}, OrderedDict(a=x), id="dict or OrderedDict"),
        pytest.param(Batch(x), Batch(x, y), id="a field of a dataclass that is None"),
        pytest.param(Slotted(x, "n"), Slotted(x, "m"), id="a constant in a dataclass"),
        pytest.param(len, max, id="functions"),
    ],
)
def test_calls_that_one_capture_cannot_serve_have_different_keys(one: Any, other: Any) -> None:
    assert key(one) != key(other)
    assert key(name=one) != key(name=other)
    assert key((1, one)) != key((1, other))


def test_an_argument_more_is_another_key() -> None:
    keys = [key(), key(x), key(x, None), key(x, a=None), key(None, x), key((x, None))]
    assert len(set(keys)) == len(keys)


def test_not_a_number_equals_itself() -> None:
    assert key(math.nan) == key(float("nan"))


def test_a_subclass_of_tensor_has_a_key_of_its_own() -> None:
    class Marked(Tensor):
        pass

    assert key(x.as_subclass(Marked)) != key(x)


# --- refusals -----------------------------------------------------------------------------------


class DynamicCache:
    pass


@pytest.mark.parametrize(
    ("args", "kwargs", "where", "remedy"),
    [
        pytest.param(
            (x, object()), {}, "args[1] is of type object", "pass tensors", id="an object"
        ),
        pytest.param(
            (),
            {"ids": x, "past_key_values": DynamicCache()},
            "kwargs['past_key_values'] is of type ",
            "use_cache=False",
            id="a cache",
        ),
        pytest.param(
            ({"a": [None, np.zeros(2)]},),
            {},
            "args[0]['a'][1] is of type numpy.ndarray",
            "torch.from_numpy",
            id="an array, nested",
        ),
        pytest.param(
            (Batch({1, 2}),), {}, "args[0]['ids'] is of type set", "pass tensors", id="a set"
        ),
        pytest.param(
            (SimpleNamespace(),), {}, "args[0] is of type types.Simple", "pass", id="mutable"
        ),
    ],
)
def test_an_argument_that_a_graph_cannot_take_is_named_with_a_remedy(
    args: tuple[Any, ...], kwargs: dict[str, Any], where: str, remedy: str
) -> None:
    with pytest.raises(UnsupportedInput) as caught:
        flatten_call(args, kwargs)
    assert isinstance(caught.value, TypeError)
    assert str(caught.value).startswith(where)
    assert remedy in str(caught.value)


# --- names --------------------------------------------------------------------------------------


class Named(nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any = None, *, past_key_values: Any) -> None:
        pass


class Variadic(nn.Module):
    def forward(self, first: Any, *inputs: Any, **options: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "args", "kwargs", "names"),
    [
        pytest.param(Named(), (x, y), {}, ["input_ids", "attention_mask"], id="positional"),
        pytest.param(Named(), (x,), {"attention_mask": y}, ["input_ids", "attention_mask"]),
        pytest.param(
            Named(),
            (None,),
            {"past_key_values": ((x, y), (z, x))},
            [f"past_key_values.{i}.{j}" for i in (0, 1) for j in (0, 1)],
            id="nested",
        ),
        pytest.param(
            Named(),
            (Batch(x, {"a": y}),),
            {},
            ["input_ids.ids", "input_ids.mask.a"],
            id="dataclass",
        ),
        pytest.param(Variadic(), (x, y, z), {}, ["first", "inputs.0", "inputs.1"], id="variadic"),
        pytest.param(Variadic(), (x,), {"labels": y}, ["first", "labels"], id="options"),
        pytest.param(Named(), (x, y, z), {}, ["input_ids", "attention_mask", "args.2"], id="extra"),
        pytest.param(
            Variadic(), (x, y), {"inputs.0": z}, ["first", "inputs.0", "inputs.0_1"], id="unique"
        ),
    ],
)
def test_tensors_are_named_after_the_parameters_of_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> None:
    assert bind_names(module, flatten_call(args, kwargs)) == names


# --- outputs ------------------------------------------------------------------------------------


def rebuilt(output: Any) -> tuple[Any, list[Tensor]]:
    """The output made anew around fresh tensors, and those."""
    tensors, structure = OutputStructure.from_output(output)
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    assert len(structure.names) == len(set(structure.names)) == len(tensors)
    return structure.rebuild(fresh), fresh


def test_a_single_tensor_comes_back_bare() -> None:
    output, fresh = rebuilt(x)
    assert output is fresh[0]


@pytest.mark.parametrize(
    "output",
    [(x,), (x, y), [x], [x, y], Pair(x, y), (), []],
    ids=[
        "tuple of one",
        "tuple",
        "list of one",
        "list",
        "named tuple",
        "empty tuple",
        "empty list",
    ],
)
def test_a_sequence_comes_back_as_the_same_type(output: Any) -> None:
    again, fresh = rebuilt(output)
    assert type(again) is type(output)
    assert same_tensors(list(again), *fresh)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_dict_comes_back_with_its_names_in_order(kind: Any) -> None:
    again, (first, second) = rebuilt(kind([("b", x), ("a", y)]))
    assert type(again) is kind
    assert list(again) == ["b", "a"]
    assert again["b"] is first
    assert again["a"] is second


def test_a_defaultdict_keeps_its_factory() -> None:
    again, _ = rebuilt(defaultdict(list, a=x))
    assert again["new"] == []


def test_nested_values_none_and_constants_come_back_in_place() -> None:
    again, (a, b, c) = rebuilt((x, None, [y, {"k": (z, "text", 3)}], True, torch.float16))
    assert again[0] is a
    assert again[1] is None
    assert again[2][0] is b
    assert again[2][1]["k"][0] is c
    assert again[2][1]["k"][1:] == ("text", 3)
    assert again[3:] == (True, torch.float16)


def test_every_call_makes_new_containers() -> None:
    tensors, structure = OutputStructure.from_output({"a": [x]})
    first, second = structure.rebuild(tensors), structure.rebuild(tensors)
    assert first is not second
    assert first["a"] is not second["a"]


def test_a_dataclass_comes_back_without_running_its_constructor() -> None:
    @dataclasses.dataclass
    class Doubled:
        value: Tensor
        derived: Tensor = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.derived = self.value * 2
            self.extra = self.value + 1

    again, (value, derived, extra) = rebuilt(Doubled(x))
    assert type(again) is Doubled
    assert again.value is value
    assert again.derived is derived
    assert again.extra is extra


def test_a_frozen_slotted_dataclass_comes_back() -> None:
    again, (value,) = rebuilt(Slotted(x))
    assert again == Slotted(value)


def test_a_structured_sequence_of_torch_comes_back() -> None:
    again, (values, indices) = rebuilt(torch.max(x, dim=0))
    assert type(again) is torch.return_types.max
    assert again.values is values
    assert again.indices is indices


def test_a_model_output_comes_back_with_attributes_keys_and_none_fields() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    original = outputs.SequenceClassifierOutput(loss=x, logits=y, hidden_states=(z, x))
    again, (loss, logits, *hidden) = rebuilt(original)
    assert type(again) is outputs.SequenceClassifierOutput
    assert again.loss is again["loss"] is again[0] is loss
    assert again.logits is again["logits"] is again[1] is logits
    assert same_tensors(list(again.hidden_states), *hidden)
    assert again["hidden_states"] is again.hidden_states
    assert again.attentions is None
    assert list(again.keys()) == ["loss", "logits", "hidden_states"]
    assert vars(again).keys() == vars(original).keys()
    assert len(again.to_tuple()) == 3
    again.attentions = (x,)
    assert again["attentions"] == (x,)


def test_a_dict_with_attributes_of_its_own_keeps_both() -> None:
    class Tagged(dict):  # type: ignore[type-arg]
        pass

    original = Tagged(a=x, b=y)
    original.a, original.tag, original.other = original["a"], "t", z  # type: ignore[attr-defined]
    again, _ = rebuilt(original)
    assert type(again) is Tagged
    assert list(again) == ["a", "b"]
    assert again.a is again["a"]
    assert (again.tag, again.other.shape) == ("t", z.shape)


def test_outputs_are_named_by_the_way_to_them() -> None:
    _, structure = OutputStructure.from_output({"loss": x, "hidden": (y, Pair(z, x))})
    assert structure.names == ("loss", "hidden.0", "hidden.1.first", "hidden.1.second")
    assert OutputStructure.from_output(x)[1].names == ("output",)


def test_an_output_that_cannot_be_rebuilt_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"output\['past'\]\[0\] is of type .*DynamicCache"):
        OutputStructure.from_output({"past": [DynamicCache()]})
