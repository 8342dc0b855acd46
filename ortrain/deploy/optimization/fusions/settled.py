"""What a graph says in more nodes than it needs is said in fewer, before patterns are looked for.

::

    before                                  after
    y = Identity(x); z = Dropout(y)         (gone, readers take x)
    c = Cast<to=FLOAT>(x)  (x is FLOAT)     (gone, readers take x)
    s = Sqrt(8.0)                           s = 2.828427
    n = Gather(Shape(x), 2)  (x: [b, s, 64])  n = 64
    a = Shape(x); b = Shape(x)              a, which both readers take

Functions are put in the place of their calls. No floating-point number of a result changes: only
constants of a few elements are computed, in their own dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ortrain.deploy.optimization.fusions.fusion import graphs, remove_unread
from ortrain.deploy.optimization.fusions.matching import axes_of, integer, integers, operand
from ortrain.graph import shapes

# Elements of the largest constant that is computed here.
LIMIT = 64
_ROUNDS = 4
_UNKNOWN = re.compile(r"unk__\d+$")


def settle(model: ir.Model, *, infer: bool = True) -> None:
    """Brings a model into the form that the patterns are written for, in place.

    Args:
        model: of any opset and exporter.
        infer: whether shapes that the file does not have are inferred.
    """
    common.InlinePass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _sweep(model)
    if infer:
        _bring_in_constants(model)
        shapes.infer_all(model)
        # What is found out leads to more, a layer's merge of heads by way of their split.
        for _ in range(_ROUNDS):
            if not _sweep(model) | _complete_reshapes(model):
                break
            _forget_unknown_sizes(model)
            shapes.infer_all(model)
    common.CommonSubexpressionEliminationPass()(model)
    for graph in graphs(model):
        remove_unread(graph)


def _sweep(model: ir.Model) -> bool:
    """Visits every node once, in order; whether anything was computed."""
    computed = False
    for graph in list(graphs(model)):
        taken = set(graph.initializers)
        for node in list(graph):
            if (source := _passed_on(node)) is not None:
                _bypass(node.outputs[0], source)
            elif (found := _computed(node)) is not None:
                computed |= _write(graph, node.outputs[0], found, taken)
        remove_unread(graph)
    return computed


def _bring_in_constants(model: ir.Model) -> None:
    """Gives bodies small constants of their own: onnx infers no shape from one outside."""
    taken = {value.name for graph in graphs(model) for value in graph.initializers.values()}
    for graph in [graph for graph in graphs(model) if graph is not model.graph]:
        own: dict[ir.Value, ir.Value] = {}
        for node in graph:
            for place, value in enumerate(node.inputs):
                tensor = None if value is None or value.is_graph_input() else value.const_value
                if value is None or tensor is None or value.graph is graph or tensor.size > LIMIT:
                    continue
                if value not in own:
                    count = 0
                    while (name := f"{value.name}.{count}") in taken:
                        count += 1
                    taken.add(name)
                    own[value] = ir.Value(
                        name=name, shape=value.shape, type=value.type, const_value=tensor
                    )
                    graph.register_initializer(own[value])
                node.replace_input_with(place, own[value])


def _complete_reshapes(model: ir.Model) -> bool:
    """Finds the one unknown size of a reshape, where all symbols stay: [b, n, 64] to [b, n, ?, 16].

    Returns:
        Whether any was found.
    """
    found = False
    for graph in graphs(model):
        for node in graph:
            before, after = shapes.dims(node.inputs[0] if node.inputs else None), None
            if node.op_type == "Reshape" and not node.domain:
                after = shapes.dims(node.outputs[0])
            if before is None or after is None or None in before:
                continue
            known = [d for d in after if d is not None and (isinstance(d, int) or d in before)]
            symbols = [sorted(d for d in dims if isinstance(d, str)) for dims in (before, known)]
            if len(known) != len(after) - 1 or symbols[0] != symbols[1]:
                continue
            whole, rest = (
                math.prod(d for d in dims if isinstance(d, int)) for dims in (before, known)
            )
            if rest and whole % rest == 0:
                size = whole // rest
                node.outputs[0].shape = ir.Shape([d if d in known else size for d in after])
                found = True
    return found


def _forget_unknown_sizes(model: ir.Model) -> None:
    """Takes back the names that onnx has given to sizes which it could not infer."""
    for graph in graphs(model):
        for value in (value for node in graph for value in node.outputs):
            known = shapes.dims(value)
            if known is not None and any(_UNKNOWN.match(str(size)) for size in known):
                value.shape = ir.Shape([None if _UNKNOWN.match(str(d)) else d for d in known])


def _passed_on(node: ir.Node) -> ir.Value | None:
    """The input that a node hands on as it is, if it does."""
    if node.domain or not node.inputs:
        return None
    source = node.inputs[0]
    if node.op_type == "Identity":
        return source
    if node.op_type == "Dropout":
        training = operand(node, 2)
        known = shapes.constant(training) if training is not None else np.zeros((), np.bool_)
        told = integer(node, "is_test", 1)  # before opset 7
        unread = all(not v.uses() and not v.is_graph_output() for v in node.outputs[1:])
        return source if known is not None and not known.any() and told and unread else None
    if node.op_type == "Cast" and source is not None and source.dtype is not None:
        return source if integer(node, "to", -1) == int(source.dtype) else None
    return None


def _bypass(old: ir.Value, source: ir.Value) -> None:
    """Readers of one value take another; an output of the graph keeps its own node."""
    if old.is_graph_output():
        return
    if source.shape is None:
        source.shape = old.shape
    ir.convenience.replace_all_uses_with(old, source)


def _write(graph: ir.Graph, old: ir.Value, found: np.ndarray, taken: set[str]) -> bool:
    """Puts a constant in a value's place."""
    if old.is_graph_output() or not old.uses():
        return False
    name = base = old.name or "constant"
    count = 0
    while name in taken:
        count += 1
        name = f"{base}.{count}"
    taken.add(name)
    tensor = ir.tensor(np.ascontiguousarray(found) if found.ndim else found, name=name)
    new = ir.Value(
        name=name,
        shape=ir.Shape(found.shape),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    old.name = None
    graph.register_initializer(new)
    ir.convenience.replace_all_uses_with(old, new)
    return True


def _computed(node: ir.Node) -> np.ndarray | None:
    """The value of a node that is known before a run."""
    if node.domain or len(node.outputs) != 1:
        return None
    if (found := _sizes(node)) is not None:
        return found
    rule = _RULES.get(node.op_type)
    if rule is None or not node.inputs:
        return None
    known = []
    for value in node.inputs:
        if value is None or (shapes.size(value) or 0) > LIMIT:
            return None
        array = shapes.constant(value)
        if array is None or array.size > LIMIT or array.dtype.kind not in "fiub":
            return None
        known.append(array)
    with np.errstate(all="ignore"):
        result = rule(node, *known)
    return None if result is None or result.size > LIMIT else np.asarray(result)


def _sizes(node: ir.Node) -> np.ndarray | None:
    """A shape, or what is picked out of one, where these sizes are numbers."""
    if node.op_type == "Shape":
        picked = _axes_of_shape(node)
    elif node.op_type in ("Gather", "Slice") and node.inputs[0] is not None:
        source = node.inputs[0].producer()
        if source is None or source.op_type != "Shape" or source.domain:
            return None
        picked = _axes_of_shape(source)
        if picked is not None:
            picked = _gathered(node, picked) if node.op_type == "Gather" else _sliced(node, picked)
    else:
        return None
    if picked is None or any(not isinstance(d, int) for d in np.asarray(picked, object).flat):
        return None
    return np.asarray(picked, dtype=np.int64)


def _axes_of_shape(node: ir.Node) -> np.ndarray | None:
    known = shapes.dims(node.inputs[0])
    if known is None:
        return None
    part = slice(integer(node, "start", 0), integer(node, "end", len(known)))
    result = np.empty(len(known[part]), object)
    result[:] = known[part]
    return result


def _gathered(node: ir.Node, sizes: np.ndarray) -> np.ndarray | None:
    index = shapes.constant(node.inputs[1])
    if index is None or (index.size and not -len(sizes) <= index.min() <= index.max() < len(sizes)):
        return None
    return np.asarray(sizes[index], object)


def _sliced(node: ir.Node, sizes: np.ndarray) -> np.ndarray | None:
    if len(node.inputs) < 3:
        return None
    start, end = integers(node.inputs[1]), integers(node.inputs[2])
    axes, steps = operand(node, 3), operand(node, 4)
    if start is None or end is None or len(start) != 1:
        return None
    if axes is not None and integers(axes) not in ([0], [-1]):
        return None
    step = [1] if steps is None else integers(steps)
    return None if step is None else sizes[start[0] : end[0] : step[0]]


def _cast(node: ir.Node, x: np.ndarray) -> np.ndarray | None:
    return x.astype(ir.DataType(integer(node, "to", 1)).numpy())


def _unsqueeze(node: ir.Node, x: np.ndarray, *_: np.ndarray) -> np.ndarray | None:
    axes = axes_of(node)
    return None if axes is None else np.expand_dims(x, tuple(axes))


def _squeeze(node: ir.Node, x: np.ndarray, *_: np.ndarray) -> np.ndarray | None:
    axes = axes_of(node) if len(node.inputs) > 1 or "axes" in node.attributes else None
    return np.squeeze(x, None if axes is None else tuple(axes))


def _concat(node: ir.Node, *parts: np.ndarray) -> np.ndarray | None:
    return np.concatenate(parts, integer(node, "axis", 0))


def _divided(node: ir.Node, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    if not b.all():
        return None
    quotient = np.abs(a) // np.abs(b)  # towards zero, as ONNX divides
    return np.asarray(quotient * np.sign(a) * np.sign(b), a.dtype)


_RULES: dict[str, Callable[..., np.ndarray | None]] = {
    "Cast": _cast,
    "CastLike": lambda _, x, like: x.astype(like.dtype),
    "Sqrt": lambda _, x: np.sqrt(x) if x.dtype.kind == "f" else None,
    "Reciprocal": lambda _, x: np.reciprocal(x) if x.dtype.kind == "f" else None,
    "Neg": lambda _, x: np.negative(x),
    "Mul": lambda _, a, b: a * b,
    "Add": lambda _, a, b: a + b,
    "Sub": lambda _, a, b: a - b,
    "Div": _divided,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
}
