"""Cheap clean-up of a program: constants, copies, duplicates, and what nothing reads.

::

    before                                  after
    s = Shape(h)                            (gone)
    n = Gather(s, 0)                        (gone)
    t = Concat(n, -1, 768)                  (gone)
    y = Reshape(h, t)                       y = Reshape(h, [0, -1, 768])
    z = Cast<to=FLOAT>(y); w = Identity(z)  (gone, readers take y)

Inputs and outputs keep names, roles and order; nodes of different phases are never merged; only
constants are folded, never an input. 0.05 s for the 680 nodes of a captured BERT-base.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rewire import learn, take_place
from ortrain.passes.fold import LIMIT, fold
from ortrain.passes.simplify import RULES, Context
from ortrain.program import REGION, Program, Role, phase_of, region_of, role_of

_SWEEPS = 8
RANDOM = {"RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike", "Bernoulli",
           "Multinomial"}  # fmt: skip


def clean(program: Program) -> bool:
    """Cleans a program in place; whether anything changed."""
    graph = program.graph
    changed = remove_dead(graph) | _lift_constants(graph) | _settle(program)
    if any(v.shape is None or v.dtype is None for node in graph for v in node.outputs):
        # By now little is left of that; onnx's own inference costs as much as all else here.
        shapes.infer_all(program.model)
        changed |= _settle(program)
    return changed


def _settle(program: Program) -> bool:
    """Sweeps until nothing changes."""
    graph, changed = program.graph, False
    for _ in range(_SWEEPS):
        if not _sweep(Context(program, _symbols(graph), _pool(graph))):
            break
        changed = True
        remove_dead(graph)
    return changed


def _sweep(context: Context) -> bool:
    """Visits every node once, in order."""
    graph = context.program.graph
    seen: dict[Any, list[ir.Node]] = {}
    changed = False
    for node in list(graph):
        if not node.outputs or node.graph is not graph:
            continue
        if node.op_type == "Identity" and not node.domain:
            changed |= _remove_identity(graph, node)
            continue
        if _apply_rules(context, node) or _fold(context, node):
            changed = True
            continue
        changed |= _merge(graph, node, seen)
    return changed


def _apply_rules(context: Context, node: ir.Node) -> bool:
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    for rule in RULES.get(name, ()):
        value = rule(context, node)
        if value is not None:
            _replace(context.program.graph, node, [value])
            return True
    return False


def _replace(graph: ir.Graph, node: ir.Node, values: list[ir.Value]) -> None:
    """Readers of the node's outputs read the values instead; an output keeps its name and role."""
    for old, new in zip(node.outputs, values, strict=False):
        if not new.is_graph_input() and not new.is_initializer():
            learn(new, old)
        if old.is_graph_output():
            _become_output(graph, node, old, new)
        else:
            ir.convenience.replace_all_uses_with(old, new)
            if old.name and new.name and "~" in new.name:  # a rule made it: it inherits the name
                old.name, new.name = None, old.name
    graph.remove(node, safe=True)


def _become_output(graph: ir.Graph, node: ir.Node, old: ir.Value, new: ir.Value) -> None:
    free = new.producer() is not None and not new.is_graph_output()
    if not free:  # an input, a constant, or an output already: a copy of its own
        copy = ir.Node("", "Identity", [new], num_outputs=1)
        copy.metadata_props.update(node.metadata_props)
        graph.insert_before(node, copy)
        new, source = copy.outputs[0], new
        new.type, new.shape = source.type, source.shape
    take_place(new, old)


def _remove_identity(graph: ir.Graph, node: ir.Node) -> bool:
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    if result.is_graph_output():
        producer = source.producer()
        if producer is None or source.is_graph_output() or phase_of(producer) != phase_of(node):
            return False
    _replace(graph, node, [source])
    return True


def _fold(context: Context, node: ir.Node) -> bool:
    """Computes a node all of whose inputs are constants."""
    if any(v.is_graph_output() for v in node.outputs):
        return False
    result = fold(node)
    if result is None:
        return False
    _replace(context.program.graph, node, [context.before(node).constant(result)])
    return True


def _merge(graph: ir.Graph, node: ir.Node, seen: dict[Any, list[ir.Node]]) -> bool:
    """Common sub-expressions: one node for those that compute the same in the same phase."""
    if node.op_type in RANDOM:
        return False
    # Few have the inputs of another: only theirs are looked at more closely.
    others = seen.setdefault((node.op_type, *map(id, node.inputs)), [])
    known = next((each for each in others if _computes_the_same(node, each)), None)
    if known is None:
        others.append(node)
        return False
    if any(v.is_graph_output() for v in node.outputs):
        return False
    if region_of(known) != region_of(node):  # of use outside of its region as well
        known.metadata_props.pop(REGION, None)
    _replace(graph, node, list(known.outputs))
    return True


def _computes_the_same(one: ir.Node, two: ir.Node) -> bool:
    """Of nodes with the same operator name and inputs."""
    return (
        one.domain == two.domain
        and len(one.outputs) == len(two.outputs)
        and one.attributes.keys() == two.attributes.keys()
        and phase_of(one) == phase_of(two)
        and not _has_graph(one)
        and all(_plain(a) == _plain(two.attributes[n]) for n, a in one.attributes.items())
    )


def _plain(attribute: ir.Attr) -> str:
    if attribute.type is ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return f"{tensor.dtype}{tensor.shape}{tensor.tobytes()!r}"
    return f"{attribute.type}{attribute.value!r}"


def _has_graph(node: ir.Node) -> bool:
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(a.type in kinds for a in node.attributes.values())


def _lift_constants(graph: ir.Graph) -> bool:
    """``Constant`` nodes become initializers, equal ones a single one."""
    builder = Builder(graph, constants=_pool(graph))
    changed = False
    for node in list(graph):
        if node.op_type != "Constant" or node.domain or node.outputs[0].is_graph_output():
            continue
        array = shapes.constant(node.outputs[0])
        if array is None:
            continue
        ir.convenience.replace_all_uses_with(node.outputs[0], builder.constant(array))
        graph.remove(node, safe=True)
        changed = True
    return changed


def remove_dead(graph: ir.Graph) -> bool:
    """Removes nodes and initializers that nothing reads."""
    before = len(graph) + len(graph.initializers)
    for node in reversed(graph):
        if not any(v.uses() or v.is_graph_output() for v in node.outputs):
            graph.remove(node, safe=True)
    inputs = set(graph.inputs)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and value not in inputs:
            del graph.initializers[name]
    return len(graph) + len(graph.initializers) != before


def _pool(graph: ir.Graph) -> dict[tuple[Any, ...], ir.Value]:
    """The small constants that the graph has, as :meth:`Builder.constant` looks them up."""
    pool: dict[tuple[Any, ...], ir.Value] = {}
    for value in graph.initializers.values():
        array = shapes.constant(value) if (shapes.size(value) or 0) <= LIMIT else None
        if array is not None:
            key = (array.dtype.str, str(array.dtype), array.shape, array.tobytes())
            pool.setdefault(key, value)
    return pool


def _symbols(graph: ir.Graph) -> dict[str, tuple[ir.Value, int]]:
    """Where each symbolic dimension can be read: an input whose values are needed anyway first.

    Output gradients are last, because the forward cannot read them.
    """
    found: dict[str, tuple[ir.Value, int]] = {}

    def rank(value: ir.Value) -> tuple[bool, bool]:
        late = role_of(value) is Role.OUTPUT_GRADIENT
        return late, all(node.op_type == "Shape" for node in value.consumers())

    for value in sorted(graph.inputs, key=rank):
        for axis, dim in enumerate(shapes.dims(value) or ()):
            if isinstance(dim, str):
                found.setdefault(dim, (value, axis))
    return found
