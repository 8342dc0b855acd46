"""A model in float16, whose inputs and outputs keep their types where that is asked for.

What float16 cannot hold stays float32, with casts around it: angles of sines and cosines with all
that they are computed from, sums and powers of norms that are spelled out, numbers beyond 65504,
factors so small that float16 has few digits of them, and inputs that an operator takes in float32
alone. The lowest number of float32, which masks have, becomes the lowest of float16, as in a model
that transformers itself loads in float16: to it a score above 16 still counts, in rows that are
masked as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from ortrain.deploy.optimization.fusions.fusion import graphs, remove_unread
from ortrain.graph import shapes
from ortrain.graph.walk import reads

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_LARGEST = 65504.0
# From which on the ends of a Clip are inputs.
_CLIP_OF_INPUTS = 11
# Factors that float16 rounds by a larger part stay float32.
_COARSE = 2.0**-9
# Masks have numbers of this size; in float16 transformers itself writes the lowest there is.
_MASKED = 1e30
# Their results overflow for ordinary numbers, or need more digits.
_EXACT = frozenset(
    {"Pow", "Exp", "Log", "Sqrt", "Reciprocal", "Range", "CumSum", "ReduceMean", "ReduceSum",
     "ReduceSumSquare", "ReduceL2", "ReduceProd", "ReduceLogSumExp", "Sin", "Cos", "Tan"}
)  # fmt: skip
# Where numbers that become whole ones come from: what is before stays as it would be anyway.
_ROUGH = frozenset(
    {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention",
     "MultiHeadAttention", "GroupQueryAttention", "LayerNormalization", "RMSNormalization",
     "SimplifiedLayerNormalization", "SkipLayerNormalization",
     "SkipSimplifiedLayerNormalization", "BatchNormalization", "If", "Loop", "Scan"}
)  # fmt: skip
_ANGLES = frozenset({"Sin", "Cos", "Tan"})


def to_half(
    model: ir.Model,
    *,
    infer: bool = True,
    keep_io_types: bool = True,
    stays: Callable[[ir.Node], bool] = lambda node: False,
) -> None:
    """Makes a model compute in float16, in place.

    Args:
        model: inputs and outputs of bodies in it keep their types.
        infer: whether types that the file does not have are inferred.
        keep_io_types: whether its own inputs and outputs keep theirs, too.
        stays: whether a node stays float32 in any case.
    """
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if infer:
        shapes.infer_all(model)
    conversion = _Conversion(model)
    for graph in graphs(model):
        conversion.note_exact(graph, stays)
    if not keep_io_types:
        for value in model.graph.inputs:
            if value.dtype == _FLOAT and not value.is_initializer():
                value.type = ir.TensorType(_HALF)
    shown = {graph: [value.dtype for value in graph.outputs] for graph in graphs(model)}
    for graph, dtypes in shown.items():
        conversion.convert(graph, dtypes, keep=keep_io_types or graph is not model.graph)
    for graph in graphs(model):
        remove_unread(graph)


class _Conversion:
    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.exact: set[ir.Node] = set()
        self.constants: dict[ir.Value, ir.Value] = {}
        self.halves: dict[tuple[ir.Graph, ir.Value], ir.Value] = {}
        self.floats: dict[tuple[ir.Graph, ir.Value], ir.Value] = {}
        # Nodes that may give a number which float16 has not, as masks of -1e10 do.
        self.large: set[ir.Node] = set()
        # Nodes whose numbers are float16 already, which stay as they are.
        self.halved: set[ir.Node] = set()
        self.names = {value.name for graph in graphs(model) for value in _values(graph)}

    def note_exact(self, graph: ir.Graph, stays: Callable[[ir.Node], bool]) -> None:
        """Nodes that stay float32, or float16."""
        wanted: set[ir.Value] = set()
        counted: set[ir.Value] = set()
        for node in reversed(list(graph)):
            kinds = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None}
            if _HALF in kinds and not kinds & {_FLOAT, None}:
                self.halved.add(node)
                continue
            of_angle = any(v in wanted for v in node.outputs)
            others = any(map(shapes.is_no_tensor, (*node.inputs, *node.outputs)))
            beyond = any(map(_beyond, node.inputs))
            exact = node.op_type in _EXACT or _ends_sessions(node)
            if _becomes_whole(node) or (
                node.op_type not in _ROUGH and any(v in counted for v in node.outputs)
            ):
                exact = True
                counted.update(reads(node))
            if of_angle or exact or beyond or others or stays(node):
                self.exact.add(node)
            if any(map(_large, node.inputs)):
                self.large.add(node)
            if of_angle or node.op_type in _ANGLES:
                wanted.update(v for v in reads(node) if v.dtype in (_FLOAT, None))

    def convert(self, graph: ir.Graph, dtypes: list[ir.DataType | None], *, keep: bool) -> None:
        """Converts the nodes of a graph; ``keep`` leaves its outputs ``dtypes``, else float16."""
        for node in list(graph):
            self._node(graph, node)
        for index, (output, dtype) in enumerate(zip(list(graph.outputs), dtypes, strict=True)):
            wanted = (dtype or _FLOAT) if keep else _HALF
            if output.dtype != wanted and {output.dtype, wanted} <= {_FLOAT, _HALF}:
                self._cast_output(graph, index, output, wanted)

    def _node(self, graph: ir.Graph, node: ir.Node) -> None:
        if node in self.halved:
            for place, value in enumerate(node.inputs):
                if value is not None and value.dtype == _FLOAT:  # of one that stays float32
                    node.replace_input_with(place, self._as(graph, node, value, _HALF))
            return
        schema = _schema(node, self.model)
        bodies = any(
            a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for a in node.attributes.values()
        )
        can = schema is not None and node not in self.exact and not bodies
        inputs = _formal(schema, len(node.inputs), "inputs") if schema is not None else []
        variables = _variables(schema)
        for place, value in enumerate(node.inputs):
            if value is None or value.dtype not in (_FLOAT, _HALF):
                continue
            half = can and "tensor(float16)" in variables.get(inputs[place], ())
            node.replace_input_with(place, self._as(graph, node, value, _HALF if half else _FLOAT))
        if not can or schema is None:
            for value in node.outputs:
                if value.dtype is None and (found := _bound(node, schema, variables, value)):
                    value.dtype = found
            return
        self._attributes(node)
        for place, value in enumerate(node.outputs):
            names = _formal(schema, len(node.outputs), "outputs")
            bound = _bound(node, schema, variables, value)
            takes = "tensor(float16)" in variables.get(names[place], ())
            if (value.dtype == _FLOAT and takes and bound in (_HALF, None)) or (
                value.dtype is None and bound == _HALF
            ):
                value.type = ir.TensorType(_HALF)
            elif value.dtype is None and bound is not None:
                value.type = ir.TensorType(bound)

    def _attributes(self, node: ir.Node) -> None:
        """What an operator is told to make."""
        for name in ("to", "dtype"):
            told = node.attributes.get(name)
            if told is not None and told.type is ir.AttributeType.INT and told.as_int() == _FLOAT:
                node.attributes[name] = ir.AttrInt64(name, int(_HALF))
        filled = node.attributes.get("value")
        if node.op_type == "ConstantOfShape":
            tensor = ir.tensor(np.zeros(1, np.float32)) if filled is None else filled.as_tensor()
            array = np.asarray(tensor.numpy())
            if array.dtype == np.float32:
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(rounded(array)))

    def _as(self, graph: ir.Graph, node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A value in a dtype, by a cast or as a constant of it, made once in each graph."""
        if value.dtype == dtype:
            return value
        tensor = None if value.is_graph_input() else value.const_value
        if tensor is not None and dtype == _HALF:
            if value not in self.constants:
                name = self._unused(f"{value.name}.half")
                self.constants[value] = made = _constant(value, tensor, name)
                owner = value.graph if isinstance(value.graph, ir.Graph) else graph
                owner.register_initializer(made)
            return self.constants[value]
        known = self.halves if dtype == _HALF else self.floats
        if (graph, value) in known:
            return known[graph, value]
        source = self._cut(graph, value) if dtype == _HALF else value
        cast = ir.Node("", "Cast", [source], [ir.AttrInt64("to", int(dtype))], num_outputs=1)
        made = cast.outputs[0]
        made.name = self._unused(f"{value.name}.{'half' if dtype == _HALF else 'float'}")
        made.type, made.shape = ir.TensorType(dtype), value.shape
        producer = source.producer()
        if producer is not None and producer.graph is graph:
            graph.insert_after(producer, cast)
        else:
            first = next(iter(graph))
            graph.insert_before(first, cast)
        known[graph, value] = made
        return made

    def _cut(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """A value that may be large, within what float16 has: beyond that a cast gives infinities.

        A row of a mask that shuts all out would then be NaN behind a softmax.
        """
        producer = value.producer()
        if producer is None or producer not in self.large or producer.graph is not graph:
            return value
        if self.model.opset_imports.get("", 0) < _CLIP_OF_INPUTS:
            return value
        ends = []
        for end in (-_LARGEST, _LARGEST):
            name = self._unused(f"{value.name}.{'least' if end < 0 else 'most'}")
            tensor = ir.tensor(np.asarray(end, np.float32), name=name)
            made = ir.Value(
                name=name, shape=ir.Shape([]), type=ir.TensorType(_FLOAT), const_value=tensor
            )
            graph.register_initializer(made)
            ends.append(made)
        clip = ir.Node("", "Clip", [value, *ends], num_outputs=1)
        found = clip.outputs[0]
        found.name = self._unused(f"{value.name}.cut")
        found.type, found.shape = ir.TensorType(_FLOAT), value.shape
        graph.insert_after(producer, clip)
        return found

    def _unused(self, name: str) -> str:
        """A name that no value has: of a body, it may not be that of one outside either."""
        found, number = name, 1
        while found in self.names:
            found, number = f"{name}.{number}", number + 1
        self.names.add(found)
        return found

    def _cast_output(
        self, graph: ir.Graph, index: int, output: ir.Value, dtype: ir.DataType
    ) -> None:
        """An output in another dtype under its own name."""
        name = output.name
        output.name = self._unused(f"{name}.{'half' if dtype == _FLOAT else 'float'}")
        cast = ir.Node("", "Cast", [output], [ir.AttrInt64("to", int(dtype))], num_outputs=1)
        made = cast.outputs[0]
        made.name, made.shape = name, output.shape
        made.type = ir.TensorType(dtype)
        graph.append(cast)
        graph.outputs[index] = made


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _becomes_whole(node: ir.Node) -> bool:
    """Whether floats become whole numbers, which decide on rows and places: they have to be exact.

    An edge of a histogram, the float32 next to 3, is 3 in float16, and the last expert has no row.
    """
    if node.op_type != "Cast" or node.domain not in ("", "ai.onnx"):
        return False
    to = ir.DataType(node.attributes["to"].as_int()) if "to" in node.attributes else _FLOAT
    source = node.inputs[0]
    return to.is_integer() and source is not None and source.dtype in (_FLOAT, None)


def _ends_sessions(node: ir.Node) -> bool:
    """Whether a product reads a ``Transpose`` that moves the batch: it stays float32.

    In float16, onnxruntime 1.31.1 ends the process that loads such a product with a matrix, as one
    behind an LSTM is whose batch comes first.
    """
    if node.op_type != "Transpose" or node.domain not in ("", "ai.onnx"):
        return False
    perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
    kept = len(perm) < 3 or perm[:-2] == list(range(len(perm) - 2))
    return not kept and any(use.node.op_type == "MatMul" for use in node.outputs[0].uses())


def _magnitudes(value: ir.Value | None) -> np.ndarray | None:
    """The absolute values of a constant in float32; None of anything else, and of an empty one."""
    if value is None or value.dtype != _FLOAT or value.is_graph_input():
        return None
    tensor = value.const_value
    return None if tensor is None or tensor.size == 0 else np.abs(np.asarray(tensor.numpy()))


def _large(value: ir.Value | None) -> bool:
    """Whether a constant has finite numbers beyond those of float16."""
    sizes = _magnitudes(value)
    return sizes is not None and bool(((sizes > _LARGEST) & (sizes < _MASKED)).any())


def _beyond(value: ir.Value | None) -> bool:
    """Whether a constant has numbers that float16 has not, and that count."""
    sizes = _magnitudes(value)
    if sizes is None:
        return False
    if ((sizes > _LARGEST) & (sizes < _MASKED)).any():
        return True
    if sizes.size > 1:
        return False
    # Of numbers this small float16 has few digits: 1e-7 becomes 1.19e-7.
    sizes = sizes[sizes <= _LARGEST]
    return bool((np.abs(sizes.astype(np.float16) - sizes) > _COARSE * sizes).any())


def rounded(array: np.ndarray) -> np.ndarray:
    """Numbers in float16, those beyond its range as its largest; infinities stay what they are."""
    finite = np.isfinite(array)
    with np.errstate(over="ignore"):
        return np.where(finite, np.clip(array, -_LARGEST, _LARGEST), array).astype(np.float16)


def _constant(value: ir.Value, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    lazy = ir.LazyTensor(
        lambda: ir.tensor(rounded(np.asarray(tensor.numpy()))),
        dtype=_HALF,
        shape=ir.Shape(tensor.shape.numpy()),
        name=name,
    )
    return ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(_HALF), const_value=lazy
    )


# A schema of onnx's or onnxruntime's own; both have inputs, outputs and type constraints.
_Schema = Any


def _schema(node: ir.Node, model: ir.Model) -> _Schema | None:
    version = model.opset_imports.get(node.domain, 1)
    try:
        return onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return _contributed().get((node.domain, node.op_type))


@functools.cache
def _contributed() -> dict[tuple[str, str], _Schema]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    found = {}
    for schema in state.get_all_operator_schema():
        domain = "" if schema.domain == "ai.onnx" else schema.domain
        found[domain, schema.name] = schema
    return found


def _formal(schema: _Schema, count: int, which: str) -> list[str]:
    """The type variable, or the type, of each of a node's inputs or outputs."""
    names = [_type_name(parameter) for parameter in getattr(schema, which)]
    return [names[min(i, len(names) - 1)] for i in range(count)] if names else [""] * count


def _type_name(parameter: Any) -> str:
    return str(getattr(parameter, "type_str", None) or parameter.typeStr)


def _variables(schema: _Schema | None) -> dict[str, list[str]]:
    if schema is None:
        return {}
    found: dict[str, list[str]] = {}
    for constraint in schema.type_constraints:
        name = getattr(constraint, "type_param_str", None) or constraint.typeParam
        found[name] = list(getattr(constraint, "allowed_type_strs", None) or ())
    return found


def _bound(
    node: ir.Node, schema: _Schema | None, variables: dict[str, list[str]], value: ir.Value
) -> ir.DataType | None:
    """The dtype that an output shares with an input, by the schema."""
    if schema is None:
        return None
    name = _formal(schema, len(node.outputs), "outputs")[node.outputs.index(value)]
    if name not in variables:
        return None
    for formal, given in zip(_formal(schema, len(node.inputs), "inputs"), node.inputs, strict=True):
        if formal == name and given is not None and given.dtype is not None:
            return given.dtype
    return None


def floats_left(model: ir.Model) -> Iterator[str]:
    """Names of the float32 weights that a model has."""
    for graph in graphs(model):
        for name, value in graph.initializers.items():
            if value.dtype == _FLOAT:
                yield name
