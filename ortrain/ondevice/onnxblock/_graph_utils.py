"""Functions on models that blocks written for ``onnxruntime.training`` import from here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from ortrain.ondevice.making.base import Accessor, current, values_of


def generate_graph_name(token: str) -> str:
    """A name that is free in the model of the ``with`` statement around the call."""
    return current().unique_name(token)


def node_arg_exists(model: onnx.ModelProto, node_arg_name: str) -> bool:
    """Whether there is a value of this name."""
    return node_arg_name in values_of(model.graph)


def get_output_from_output_name(
    onnx_model: onnx.ModelProto, output_name: str
) -> onnx.ValueInfoProto:
    """The output of this name.

    Raises:
        LookupError: there is none.
    """
    return _named(onnx_model.graph.output, output_name, "output")


def get_input_from_input_name(onnx_model: onnx.ModelProto, input_name: str) -> onnx.ValueInfoProto:
    """The input of this name.

    Raises:
        LookupError: there is none.
    """
    return _named(onnx_model.graph.input, input_name, "input")


def register_graph_outputs(model: onnx.ModelProto, output_names: Sequence[str] | str) -> None:
    """Makes these values all outputs of the model.

    Raises:
        GraphError: there is no such value, or its dtype cannot be told.
    """
    names = [output_names] if isinstance(output_names, str) else output_names
    Accessor(model).set_outputs(names)


def _named(values: Iterable[onnx.ValueInfoProto], name: str, kind: str) -> onnx.ValueInfoProto:
    for value in values:
        if value.name == name:
            return value
    raise LookupError(f"the model has no {kind} {name!r}")
