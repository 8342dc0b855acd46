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

import re
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ortrain.deploy.optimization.fusions.computed import result_of, sizes_of_file
from ortrain.deploy.optimization.fusions.contents import LIMIT
from ortrain.deploy.optimization.fusions.extents import Extents
from ortrain.deploy.optimization.fusions.fusion import graphs, remove_unread
from ortrain.deploy.optimization.fusions.matching import (
    integer,
    integers,
    operand,
    same_shape,
)
from ortrain.graph import shapes

_ROUNDS = 4
_UNKNOWN = re.compile(r"unk__\d+$")


def settle(model: ir.Model, *, infer: bool = True) -> Extents:
    """Brings a model into the form that the patterns are written for, in place.

    Args:
        model: of any opset and exporter.
        infer: whether shapes that the file does not have are inferred.

    Returns:
        What is known of sizes, whose names are to be taken back when all is done.
    """
    common.InlinePass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _name_apart(model)
    _read_sizes(model)
    _open_bodies(model)
    # Before inference, a file whose inputs were made open says of its values what was true before.
    _sweep(model, (lambda _: None) if infer else sizes_of_file)
    extents = Extents(model)
    if infer:
        _bring_in_constants(model)
        _infer(model)
        # Constants that are found out tell onnx's inference more, of a convolution or a window.
        for _ in range(_ROUNDS):
            extents.follow()
            if not _sweep(model, extents.numbers) | _bypass_unchanged(model) | _fix_targets(model):
                break
            shapes.infer_all(model)
            _forget_unknown_sizes(model)
    common.CommonSubexpressionEliminationPass()(model)
    for graph in graphs(model):
        remove_unread(graph)
    return extents


def _name_apart(model: ir.Model) -> None:
    """Gives values of bodies names that no other graph has.

    Two branches may use one name for two things, and onnx's inference takes the numbers that one
    computes of sizes for those of the other.
    """
    taken: set[str] = set()
    for graph in graphs(model):
        values = [*graph.inputs, *graph.initializers.values()]
        values += [value for node in graph for value in node.outputs]
        for value in dict.fromkeys(values):
            name, count = value.name, 0
            while value.name and value.name in taken:
                count += 1
                value.name = f"{name}.{count}"
            taken.add(value.name or "")


def _open_bodies(model: ir.Model) -> None:
    """Takes names of sizes from what goes into a body again and again: they may be others then."""
    for node in model.graph.all_nodes():
        if node.op_type not in ("Loop", "Scan") or node.domain:
            continue
        for value in node.attributes["body"].as_graph().inputs:
            known = shapes.dims(value)
            if known is not None:
                value.shape = ir.Shape([d if isinstance(d, int) else None for d in known])


def _read_sizes(model: ir.Model) -> None:
    """Takes constants of a few elements into the model, where all of them are kept beside it.

    onnx infers nothing from axes and sizes that are in another file.
    """
    for graph in graphs(model):
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.size <= LIMIT:
                value.const_value = ir.tensor(tensor.numpy().copy(), tensor.dtype, name=value.name)


def _sweep(model: ir.Model, held: Callable[[ir.Node], np.ndarray | None]) -> bool:
    """Visits every node once, in order; whether anything was computed.

    Args:
        model: whose nodes they are.
        held: what is known of the sizes that a node computes.
    """
    computed = False
    for graph in list(graphs(model)):
        taken = set(graph.initializers)
        for node in list(graph):
            if (source := _passed_on(node)) is not None:
                _bypass(node.outputs[0], source)
                continue
            found = result_of(node)
            if found is None and node.op_type != "Constant" and len(node.outputs) == 1:
                found = held(node)
            if found is not None:
                computed |= _write(graph, node.outputs[0], found, taken)
        remove_unread(graph)
    return computed


def _infer(model: ir.Model) -> None:
    """Infers shapes from the inputs' alone; the file is asked where that finds nothing.

    In a file whose inputs were made open by hand, what it says of all else is of before. It is
    believed where it contradicts nothing that follows, and knows of the inputs' open sizes.
    """
    told = forget_shapes(model)
    shapes.infer_all(model)
    _forget_unknown_sizes(model)
    given = [d for graph in graphs(model) for v in graph.inputs for d in shapes.dims(v) or ()]
    open_sizes = {d for d in given if isinstance(d, str)}
    is_open = any(not isinstance(d, int) for d in given) or any(
        shapes.dims(value) is None for value in model.graph.inputs
    )
    if is_open and not any(d in open_sizes for said in told.values() for d in said):
        return
    merged: dict[ir.Value, list[shapes.Dim]] = {}
    for value, said in told.items():
        known = shapes.dims(value) or (None,) * len(said)
        if len(known) != len(said):
            return
        pairs = [*zip(known, said, strict=True)]
        if any(isinstance(y, int) and x not in (None, y) for x, y in pairs):
            return
        if shapes.dims(value) is None or None in known:
            merged[value] = [y if x is None else x for x, y in pairs]
    for value, both in merged.items():
        value.shape = ir.Shape(both)
    if merged:
        shapes.infer_all(model)
        _forget_unknown_sizes(model)


def forget_shapes(model: ir.Model) -> dict[ir.Value, tuple[shapes.Dim, ...]]:
    """Takes away what a file says of the shapes of values that are computed, in place.

    Returns:
        What it has said of each.
    """
    told = {}
    for graph in graphs(model):
        for value in (value for node in graph for value in node.outputs):
            if (known := shapes.dims(value)) is not None:
                told[value], value.shape = known, None
    return told


def _bypass_unchanged(model: ir.Model) -> bool:
    """Passes by what expands a value to its own shape, pads nothing, or keeps all in its order."""
    found = False
    for graph in graphs(model):
        for node in graph:
            source = node.inputs[0] if node.inputs else None
            if node.domain or node.op_type not in ("Expand", "Slice", "Pad") or source is None:
                continue
            result = node.outputs[0]
            if node.op_type == "Expand":
                kept = same_shape(source, result)
            elif node.op_type == "Pad":
                kept = set(integers(operand(node, 1)) or [1]) == {0}
            else:
                steps = operand(node, 4)
                forward = steps is None or set(integers(steps) or [0]) == {1}
                kept = forward and same_shape(source, result)
            if kept and not result.is_graph_output():
                found |= bool(result.uses())
                _bypass(result, source)
        remove_unread(graph)
    return found


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


def _forget_unknown_sizes(model: ir.Model) -> None:
    """Takes back the names that onnx has given to sizes which it could not infer."""
    given = {d for graph in graphs(model) for v in graph.inputs for d in shapes.dims(v) or ()}

    def unknown(dim: shapes.Dim) -> bool:
        return isinstance(dim, str) and dim not in given and bool(_UNKNOWN.match(dim))

    for graph in graphs(model):
        for value in (value for node in graph for value in node.outputs):
            known = shapes.dims(value)
            if known is not None and any(map(unknown, known)):
                value.shape = ir.Shape([None if unknown(d) else d for d in known])


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


def _fix_targets(model: ir.Model) -> bool:
    """Targets of reshapes become constants, where each size is a number or stays in its place.

    The computation of sizes goes with them: in a BERT of an older exporter, 40 nodes a layer.

    Returns:
        Whether there was any.
    """
    fixed = False
    for graph in graphs(model):
        own: dict[tuple[int, ...], ir.Value] = {}
        for node in graph:
            if node.op_type != "Reshape" or node.domain or node.inputs[1] is None:
                continue
            before, after = shapes.dims(node.inputs[0]), shapes.dims(node.outputs[0])
            if before is None or after is None or node.inputs[1].const_value is not None:
                continue
            target = tuple(
                size if isinstance(size, int) else 0 if before[i : i + 1] == (size,) else -1
                for i, size in enumerate(after)
            )
            # A -1 would refuse a value without elements; a 0 that is meant, stand for another size.
            if -1 in target or 0 in [size for size in after if isinstance(size, int)]:
                continue
            if target not in own:
                name, count = f"shape/{'_'.join(map(str, target)) or 'scalar'}", 0
                while name in graph.initializers:
                    count += 1
                    name = f"shape/{'_'.join(map(str, target)) or 'scalar'}.{count}"
                tensor = ir.tensor(np.asarray(target, np.int64), name=name)
                own[target] = ir.Value(
                    name=name,
                    shape=ir.Shape(tensor.shape.numpy()),
                    type=ir.TensorType(tensor.dtype),
                    const_value=tensor,
                )
                graph.register_initializer(own[target])
            node.replace_input_with(1, own[target])
            node.attributes.pop("allowzero", None)
            fixed = True
        remove_unread(graph)
    return fixed
