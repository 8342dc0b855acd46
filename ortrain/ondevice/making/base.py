"""``base``: the ONNX model that blocks are stacked on, and what is known of it.

::

    with base(model) as accessor:
        loss = MyLoss()("output")
        model = accessor.model
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import onnx
import onnxruntime
from onnx import helper

from ortrain.errors import GraphError, StateError
from ortrain.graph.external_data import read_into
from ortrain.ondevice import contract

# Larger initializers are no constants of shapes, and inference does without their values.
_SMALL = 1024


class Accessor:
    """The model under construction.

    Attributes:
        model: what blocks append to.
        path: of the file that it was read from; None where none was given.
        differentiated: whether a training block has made it a training model.
        eval_model: the evaluation model that the training block made beside it; None before.
    """

    def __init__(self, model: onnx.ModelProto, path: str | os.PathLike[str] | None = None) -> None:
        self.model = model
        self.path = None if path is None else os.fspath(path)
        self.differentiated = False
        self.eval_model: onnx.ModelProto | None = None
        self._names: set[str] = set()

    @property
    def has_path(self) -> bool:
        """Whether a path was given."""
        return self.path is not None

    def unique_name(self, stem: str) -> str:
        """A name that no value and no node has, and that is not given out again."""
        graph = self.model.graph
        taken = self._names | values_of(graph) | {node.name for node in graph.node}
        name, count = stem, 0
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        self._names.add(name)
        return name

    def require(self, names: Iterable[str]) -> None:
        """Checks that there are values of these names.

        Raises:
            GraphError: naming the first of which there is none.
        """
        known = values_of(self.model.graph)
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, 3)
                raise GraphError(
                    f"the model has no value {name!r}",
                    because=f"it has {', '.join(near)}" if near else "",
                    help="give the name of an input, an initializer or a node's output, such as "
                    "another block returned",
                )

    def types(self, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        """Dtypes and shapes of values.

        Raises:
            GraphError: there is no such value, or its dtype cannot be told.
        """
        self.require(names)
        known = types_of(self.model)
        if missing := [name for name in names if name not in known]:
            raise GraphError(
                f"the dtype of {missing[0]!r} is not known",
                because="ONNX's inference does not reach it",
                help="append its onnx.helper.make_tensor_value_info to base.graph.value_info",
            )
        return [known[name] for name in names]

    def set_outputs(self, names: Iterable[str]) -> None:
        """Makes these values, in this order, all outputs of the graph.

        Raises:
            GraphError: there is no such value, or its dtype cannot be told.
        """
        outputs = self.types([*dict.fromkeys(names)])
        del self.model.graph.output[:]
        self.model.graph.output.extend(outputs)


_CURRENT: ContextVar[Accessor | None] = ContextVar("base", default=None)


def current() -> Accessor:
    """The model of the ``with`` statement around the call.

    Raises:
        StateError: there is none.
    """
    accessor = _CURRENT.get()
    if accessor is None:
        raise StateError(
            "a block was called outside of a base",
            because="it has no model to append to",
            help="call it within `with onnxblock.base(model):` or `with onnxblock.empty_base():`",
        )
    return accessor


@contextmanager
def base(
    model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None
) -> Iterator[Accessor]:
    """Blocks called inside are stacked on a copy of the model.

    Args:
        model: stays as it is.
        model_path: of the file that it was read from; tensors that still lie beside that are read.

    Yields:
        The accessor; its ``model`` is the copy.

    Raises:
        StateError: there is a base around this one.
        TypeError: it is no model.
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"base takes an onnx.ModelProto, not {type(model).__name__}: load the file")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if model_path is not None:
        read_into(copy, Path(model_path))
    with _entered(Accessor(copy, model_path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[Accessor]:
    """Blocks called inside are stacked on a model without a node.

    Args:
        opset_version: of the standard domain; by default that of artifacts.

    Yields:
        The accessor.

    Raises:
        StateError: there is a base around this one.
    """
    version = contract.OPSET if opset_version is None else opset_version
    graph = helper.make_graph([], "onnxblock", [], [])
    imports = [helper.make_opsetid("", version)]
    model = helper.make_model(graph, opset_imports=imports, producer_name="ortrain")
    model.ir_version = max(contract.IR_VERSION, helper.find_min_ir_version_for(imports))
    with _entered(Accessor(model)) as accessor:
        yield accessor


@contextmanager
def _entered(accessor: Accessor) -> Iterator[Accessor]:
    if _CURRENT.get() is not None:
        raise StateError(
            "a base was entered inside another",
            because="blocks would not know which of the two models is theirs",
            help="leave the first `with` statement before the second",
        )
    token = _CURRENT.set(accessor)
    try:
        yield accessor
    finally:
        _CURRENT.reset(token)


@contextmanager
def custom_op_library(path: str | os.PathLike[str]) -> Iterator[str]:
    """Blocks called inside may append operators of a library of onnxruntime's.

    Building models does not run them, so this only checks that onnxruntime can load it. Gradients
    of such operators are rules registered with :func:`ortrain.gradient`.

    Args:
        path: of the shared library.

    Yields:
        The path.

    Raises:
        FileNotFoundError: there is no such file.
        GraphError: onnxruntime cannot load it.
    """
    library = os.fspath(path)
    if not Path(library).is_file():
        raise FileNotFoundError(f"there is no library of operators at {library!r}")
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(library)
    except Exception as error:
        raise GraphError(
            f"{library!r} is no library of operators",
            because=str(error).strip().splitlines()[0],
            help="give a shared library with a function RegisterCustomOps, built for this machine",
        ) from error
    yield library


# -- what is known of a model ----------------------------------------------------------------------


def opset_of(model: onnx.ModelProto) -> int:
    """The opset of the standard domain."""
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)


def values_of(graph: onnx.GraphProto) -> set[str]:
    """Names of all values of a graph."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return names.union(*(node.output for node in graph.node)) - {""}


def types_of(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Dtypes and shapes by name, as far as ONNX's inference can tell."""
    graph = onnx.shape_inference.infer_shapes(without_weights(model)).graph
    initializers = [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in model.graph.initializer
    ]
    return {v.name: v for v in (*initializers, *graph.value_info, *graph.output, *graph.input)}


def check_model(model: onnx.ModelProto, after: str) -> None:
    """Checks that a model is valid ONNX, without looking at its weights.

    Args:
        model: the model.
        after: what made it, for the error.

    Raises:
        GraphError: it is not.
    """
    try:
        onnx.checker.check_model(without_weights(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(
            f"{after} left a model that is not valid",
            because=" ".join(str(error).split()),
            help="look at the nodes that its build appends; the model is of opset "
            f"{opset_of(model)}",
        ) from error


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with large initializers as inputs: checked and inferred at any size."""
    result, graph = onnx.ModelProto(), model.graph
    result.ir_version = model.ir_version
    result.opset_import.extend(model.opset_import)
    result.functions.extend(model.functions)
    result.graph.name = graph.name
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(result.graph, field).extend(getattr(graph, field))
    inputs = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _SMALL and not tensor.external_data:
            result.graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            result.graph.input.append(value)
    return result
