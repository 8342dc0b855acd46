"""``Block``: a piece of a graph that is stacked on an ONNX model by calling it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

from ortrain.ondevice import contract
from ortrain.ondevice.making.base import Accessor, base, check_model, current, types_of, values_of
from ortrain.ondevice.making.onnx_source import read


class Block(ABC):
    """A piece of a graph. Subclasses write :meth:`build`; calling the block runs and checks it.

    ::

        class Squared(Block):
            def build(self, name):
                self.base.graph.node.append(helper.make_node("Mul", [name, name], ["squared"]))
                return "squared"

    Args:
        temp_file_name: taken so that scripts that give it run; nothing is written.
    """

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:  # noqa: B027
        """Has nothing to set up: subclasses need not call it."""

    @property
    def base(self) -> onnx.ModelProto:
        """The model of the ``with onnxblock.base(…)`` around the call.

        Raises:
            StateError: there is none.
        """
        return current().model

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Appends to ``self.base.graph``.

        Args:
            *args: of the subclass's choice; commonly names of values.
            **kwargs: likewise.

        Returns:
            The name of the result, or several.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the block, and checks that the model is valid ONNX.

        Raises:
            StateError: there is no base around the call.
            GraphError: the model is not valid afterwards.
        """
        accessor = current()
        output = self.build(*args, **kwargs)
        check_model(accessor.model, after=type(self).__name__)
        return output

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """A copy of the base whose values have dtypes and shapes, as far as they can be told."""
        result = onnx.ModelProto()
        result.CopyFrom(self.base)
        graph, known = result.graph, types_of(self.base)
        outputs = [known.get(output.name, output) for output in graph.output]
        others = {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
        del graph.output[:], graph.value_info[:]
        graph.output.extend(outputs)
        graph.value_info.extend(value for name, value in known.items() if name not in others)
        return result

    def _node(
        self, op_type: str, inputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> str:
        """Appends a node; the name of its output.

        Args:
            op_type: the operator.
            inputs: names of values; empty for one that is left out.
            domain: of the operator.
            **attributes: of the node.
        """
        accessor = current()
        accessor.require(name for name in inputs if name)
        output = accessor.unique_name(f"{op_type}_output")
        node = helper.make_node(op_type, inputs, [output], domain=domain, **attributes)
        node.name = accessor.unique_name(op_type)
        accessor.model.graph.node.append(node)
        return output

    def _tensor(self, stem: str, value: Any) -> str:
        """Appends an initializer; its name.

        Args:
            stem: what the name begins with.
            value: an array.
        """
        name = current().unique_name(stem)
        self.base.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        return name


def names_of(output: Any) -> list[str]:
    """What a block returned, as a list of names.

    Raises:
        TypeError: it is neither a name nor several.
    """
    names = [output] if isinstance(output, str) else output
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) for n in names):
        raise TypeError(f"build returned {output!r}: return the name of a value, or several names")
    return list(names)


def with_loss(
    model: onnx.ModelProto | str | os.PathLike[str],
    loss: Block,
    input_names: Sequence[str] | None = None,
) -> tuple[onnx.ModelProto, list[str]]:
    """A model with a loss of its outputs.

    Args:
        model: the model, or the path of its file; left as it is.
        loss: called with names of outputs; the first name that it returns is the loss.
        input_names: the outputs that go to the loss, in this order; by default all.

    Returns:
        The model, whose first output is the loss, and the other names that the block returned.

    Raises:
        GraphError: there is no value of such a name, or the block is wrong.
        TypeError: the block is a training block.
    """
    path = None if isinstance(model, onnx.ModelProto) else model
    with base(read(model), path) as accessor:
        graph = accessor.model.graph
        outputs = [output.name for output in graph.output]
        accessor.require(input_names or ())
        first, *others = names_of(loss(*(input_names or outputs)))
        if accessor.differentiated:
            raise TypeError(
                f"loss={type(loss).__name__}: a training block makes models of its own; give the "
                "block that computes the loss"
            )
        accessor.set_outputs([_as_loss(accessor, first), *others, *outputs])
        return accessor.model, others


def _as_loss(accessor: Accessor, name: str) -> str:
    """The value under the contract's name of the loss, where that is free."""
    graph = accessor.model.graph
    if contract.LOSS in values_of(graph):
        return name
    graph.node.append(helper.make_node("Identity", [name], [contract.LOSS]))
    return contract.LOSS
