"""Cutting a training program into a forward and one or more backward pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence

import onnx_ir as ir

from ortrain.graph.rewire import copied_attribute
from ortrain.graph.rounding import is_narrowing, is_widening
from ortrain.graph.walk import reads
from ortrain.program import (
    PHASE,
    ROLE,
    TARGET,
    Phase,
    Program,
    Role,
    phase_of,
    region_of,
    role_of,
    set_role,
)

# Operators that cost at most a pass or two over memory. Where everything that they read is at hand
# in the backward anyway, their result is computed again instead of being kept.
CHEAP = {
    "Add", "And", "Cast", "Concat", "Equal", "Expand", "Flatten", "Gelu", "Greater",
    "GreaterOrEqual", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Mul", "Neg", "Not", "Or",
    "Range", "Relu", "Reshape", "Shape", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze",
    "Where", "LayerNormalization",
}  # fmt: skip
CHEAP_COMPOSITES = {"Dropout", "StopGradient"}
# Operators that cost nothing inside a program, but a copy where their result is an output of it.
VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}


def is_cheap(node: ir.Node) -> bool:
    """Whether a node's result is computed again rather than kept."""
    if node.domain == "ortrain":
        return node.op_type in CHEAP_COMPOSITES
    return node.op_type in CHEAP and not node.domain


Kept = tuple[set[ir.Value], set[ir.Node]]
"""Which values of the forward the backward keeps, and which of its nodes it runs again."""


def partition(
    program: Program,
    pieces: int = 1,
    cheap: Callable[[ir.Node], bool] = is_cheap,
    decide: Callable[[Sequence[ir.Node], Kept], Kept] = lambda _, kept: kept,
) -> list[Program]:
    """Cuts a differentiated program between its phases.

    Args:
        program: what :func:`~ortrain.autodiff.engine.differentiate` returned; left as it is.
        pieces: how many programs the backward becomes. With several, what an earlier piece alone
            needed can be freed before the later ones run, and gradients come out in groups. Where
            there are checkpointed regions, each has a piece of its own, whatever is asked for: what
            it computes again is freed before the next one begins.
        cheap: tells of which nodes the result is computed again rather than kept.
        decide: is given the nodes of the forward and what is kept of them, and may keep less.

    Returns:
        The forward, which has the user outputs, the updated buffers and then the saved values as
        outputs, and the backward pieces in the order in which they run. Each declares as inputs
        what it takes: output gradients, values saved by earlier programs (role saved, by name) and
        inputs of the whole program that it reads itself.
    """
    graph = program.graph
    order = list(graph)
    forward = [n for n in order if phase_of(n) is Phase.FORWARD or _asks_for_sizes(n)]
    ahead = set(forward)
    backward = [n for n in order if n not in ahead]
    if (pieces > 1 or _by_region(backward)) and any(map(_is_read, graph.outputs)):
        return partition(_gradients_apart(program), pieces, cheap, decide)
    needed = {v for n in backward for v in reads(n)} | set(program.outputs(Role.GRADIENT))
    keep, again = decide(forward, saved_values(forward, needed, cheap))

    groups = _split(backward, pieces, again)
    cuts: list[tuple[list[ir.Node], list[ir.Value], list[ir.Value]]] = []
    forward_outputs = [v for v in graph.outputs if role_of(v) is not Role.GRADIENT]
    gradients = set(program.outputs(Role.GRADIENT))
    ordered_keep = [v for n in forward for v in n.outputs if v in keep]
    cuts.append((forward, forward_outputs, [v for v in ordered_keep if not v.is_graph_output()]))
    for i, group in enumerate(groups):
        made = [v for n in group for v in n.outputs]
        later = {v for other in groups[i + 1 :] for n in other for v in reads(n)}
        again_later = {v for other in groups[i + 1 :] for n in other for v in n.outputs}
        passed_on = [v for v in made if v in later and v not in again_later and v not in gradients]
        produced = [v for v in graph.outputs if v in gradients and v in set(made)]
        cuts.append((group, produced, passed_on))
    first, *rest = cuts
    inputs = [v for v in graph.inputs if role_of(v) is not Role.OUTPUT_GRADIENT]
    return [
        extract(program, *first, phase=Phase.FORWARD, inputs=inputs),
        *(extract(program, *cut, phase=Phase.BACKWARD) for cut in rest),
    ]


def _is_read(value: ir.Value) -> bool:
    """Whether an output is a gradient that the backward goes on with."""
    return role_of(value) is Role.GRADIENT and bool(value.uses())


def _gradients_apart(program: Program) -> Program:
    """A copy of a program whose gradients nothing else reads.

    Where it has several pieces, a gradient is the user's while the next one runs: a hook may write
    to it. The later piece gets a value of its own.
    """
    result = program.clone()
    graph = result.graph
    for i, value in enumerate(graph.outputs):
        if not _is_read(value):
            continue
        own = ir.Value(shape=value.shape, type=copy.copy(value.type))
        own.name, value.name = value.name, f"{value.name}/read"
        node = ir.Node("", "Identity", [value], outputs=[own])
        node.metadata_props[PHASE] = Phase.BACKWARD.value
        own.metadata_props.update(value.metadata_props)
        value.metadata_props.pop(ROLE)
        value.metadata_props.pop(TARGET, None)
        producer = value.producer()
        assert producer is not None
        graph.insert_after(producer, node)
        graph.outputs[i] = own
    return result


def _asks_for_sizes(node: ir.Node) -> bool:
    """Whether a node wants no more of a result of the forward than its sizes.

    They are kept then, and not all of it.
    """
    source = node.inputs[0].producer() if node.op_type == "Shape" and node.inputs[0] else None
    return source is not None and not node.domain and phase_of(source) is Phase.FORWARD


def saved_values(
    forward: Iterable[ir.Node],
    needed: Collection[ir.Value],
    cheap: Callable[[ir.Node], bool] = is_cheap,
) -> Kept:
    """Which forward values the backward keeps, and which forward nodes it runs again.

    A cheap node runs again where all it reads is at hand: a constant, a saved value, the result of
    another node that runs again, or a graph input. An argument of the call is at hand only where
    the backward reads it anyway: a user may write to the others once the forward is over. Of a view
    its source is kept, and so it is of a cast that makes numbers wider. A parameter is cast to a
    narrower dtype once. Of a checkpointed region only what the forward reads outside of it is kept,
    and everything else in it runs again.
    A memory budget takes from there (:mod:`ortrain.autodiff.budget`).
    """
    forward = list(forward)
    keep: set[ir.Value] = set()
    inside: set[ir.Node] = set()  # nodes that run again for their own region alone
    again: set[ir.Node] = set()
    wanted = set(needed)
    for node in reversed(forward):
        if any(v in wanted and _stays_inside(v) for v in node.outputs):
            inside.add(node)
            wanted.update(reads(node))
        elif node.outputs[0] in wanted and not region_of(node) and (source := _viewed(node)):
            wanted.add(source)

    def at_hand(value: ir.Value) -> bool:
        producer = value.producer()
        if producer is None:
            return role_of(value) is not Role.USER_INPUT or value in wanted
        return value in keep or producer in again or is_constant(producer)

    for node in forward:
        mine = [v for v in node.outputs if v in wanted and not _stays_inside(v)]
        if not mine:
            continue
        runs = cheap(node) and not _narrows_parameter(node)
        if is_constant(node) or _asks_input(node) or (runs and all(map(at_hand, reads(node)))):
            again.add(node)
        else:
            keep.update(mine)
    return keep, with_constants(again | inside)


def _asks_input(node: ir.Node) -> bool:
    """Whether a node reads nothing of a graph input but its sizes, which a write leaves."""
    source = node.inputs[0] if node.op_type == "Shape" and not node.domain else None
    return source is not None and source.producer() is None


def _stays_inside(value: ir.Value) -> bool:
    """Whether a value of a checkpointed region is read by the forward of that region alone."""
    producer = value.producer()
    region = region_of(producer) if producer is not None else ""
    return bool(region) and not (
        value.is_graph_output()
        or any(
            phase_of(use.node) is Phase.FORWARD and region_of(use.node) != region
            for use in value.uses()
        )
    )


def is_constant(node: ir.Node) -> bool:
    """Whether a node is a constant of the graph."""
    return node.op_type == "Constant" and not node.domain


def _narrows_parameter(node: ir.Node) -> bool:
    """Whether a node is a cast of a parameter as a product reads it: a pass over all of it."""
    source = node.inputs[0] if node.inputs else None
    return is_narrowing(node) and source is not None and role_of(source) is Role.PARAMETER


def _viewed(node: ir.Node) -> ir.Value | None:
    """The source of a view whose shape is at hand anywhere, and of a cast to a wider dtype."""
    if is_widening(node):
        wider = node.inputs[0]
        return wider if wider is not None and role_of(wider) is not Role.USER_INPUT else None
    if node.op_type not in VIEWS or node.domain:
        return None
    source, *others = reads(node)
    producers = [value.producer() for value in others]
    return source if all(p is None or is_constant(p) for p in producers) else None


def with_constants(nodes: set[ir.Node]) -> set[ir.Node]:
    """Nodes, and the constants that they read."""
    result = set(nodes)
    for node in nodes:
        for value in reads(node):
            producer = value.producer()
            if producer is not None and is_constant(producer):
                result.add(producer)
    return result


def _split(backward: list[ir.Node], pieces: int, again: Collection[ir.Node]) -> list[list[ir.Node]]:
    """Contiguous groups of backward nodes, with what each group runs again of the forward."""
    return [_prepared(group, again) for group in _by_region(backward) or _equal(backward, pieces)]


def _prepared(group: Iterable[ir.Node], again: Collection[ir.Node]) -> list[ir.Node]:
    """A group with what it runs again, each node right in front of the first that reads it.

    At the front of the group all of their results would be held at once: of twelve layers' masks
    drawn again the last one is read at the end of the backward.
    """
    ordered: dict[ir.Node, None] = {}

    def place(node: ir.Node) -> None:
        stack = [(node, False)]
        while stack:
            current, is_prepared = stack.pop()
            if is_prepared:
                ordered.setdefault(current)
            elif current not in ordered:
                stack.append((current, True))
                made_by = [p for value in reads(current) if (p := value.producer()) is not None]
                stack.extend((p, False) for p in reversed(made_by) if p in again or is_constant(p))

    for node in group:
        place(node)
    return [*ordered]


def _equal(backward: list[ir.Node], pieces: int) -> list[list[ir.Node]]:
    """Groups of about equal numbers of nodes."""
    share = max(1, -(-len(backward) // pieces))
    return [backward[i : i + share] for i in range(0, len(backward), share)] or [[]]


def _by_region(backward: list[ir.Node]) -> list[list[ir.Node]]:
    """One group for each checkpointed region, the last one's first; none where there are none.

    A node outside of all regions goes with the last of those that it depends on; what comes before
    them, such as the gradient of the loss, has a group of its own. What depends on saved values
    alone, such as a transposed operand, goes with the first that reads it.
    """
    number: dict[str, int] = {"": 0}
    for node in backward:
        number.setdefault(region_of(node), len(number))
    if len(number) == 1:
        return []
    group: dict[ir.Node, int] = {}
    prepares: dict[ir.Node, None] = {}
    for node in backward:
        producers = [p for value in reads(node) if (p := value.producer()) in group]
        group[node] = max([number[region_of(node)], *(group[p] for p in producers)])
        upstream = any(role_of(value) is Role.OUTPUT_GRADIENT for value in reads(node))
        if not region_of(node) and not upstream and all(p in prepares for p in producers):
            prepares[node] = None
    for node in reversed(prepares):
        readers = [group[use.node] for v in node.outputs for use in v.uses() if use.node in group]
        group[node] = min(readers, default=0)
    groups = [[n for n in backward if group[n] == i] for i in range(len(number))]
    return [nodes for nodes in groups if nodes]


def extract(
    program: Program,
    nodes: list[ir.Node],
    outputs: list[ir.Value],
    saved: list[ir.Value],
    phase: Phase | None = None,
    inputs: Iterable[ir.Value] = (),
) -> Program:
    """A program of its own from some nodes: what they do not make becomes an input.

    Args:
        program: that the nodes are of; left as it is.
        nodes: in an order in which they can run.
        outputs: that keep their roles.
        saved: further outputs, for other programs.
        phase: that all its nodes take, so that a mask that the backward draws again and one that a
            forward node drew can be one computation there; None leaves each its own.
        inputs: of the program, that it takes whether it reads them or not.
    """
    values: dict[ir.Value, ir.Value] = {}
    copied: list[ir.Value] = []
    initializers: list[ir.Value] = []
    made = {v for n in nodes for v in n.outputs}
    taken: dict[ir.Value, None] = dict.fromkeys(inputs)
    for value in [v for n in nodes for v in reads(n)] + outputs:
        if value not in made:
            taken.setdefault(value)
    inputs_in_order = [v for v in program.graph.inputs if v in taken]
    for value in [*inputs_in_order, *(v for v in taken if v not in set(inputs_in_order))]:
        twin = ir.Value(
            name=value.name,
            shape=value.shape,
            type=copy.copy(value.type),
            const_value=value.const_value if value.is_initializer() else None,
            metadata_props=dict(value.metadata_props),
        )
        values[value] = twin
        if value.is_initializer() and not value.is_graph_input():
            initializers.append(twin)
        else:
            copied.append(twin if value.is_graph_input() else set_role(twin, Role.SAVED))
    copies = []
    for node in nodes:
        copy_node = ir.Node(
            node.domain,
            node.op_type,
            [values[v] if v is not None else None for v in node.inputs],
            [copied_attribute(attribute, values) for attribute in node.attributes.values()],
            num_outputs=len(node.outputs),
            name=node.name,
            metadata_props={**node.metadata_props, PHASE: (phase or phase_of(node)).value},
        )
        for old, new in zip(node.outputs, copy_node.outputs, strict=True):
            new.name, new.shape, new.type = old.name, old.shape, copy.copy(old.type)
            new.metadata_props.update(old.metadata_props)
            values[old] = new
        copies.append(copy_node)
    outs = [values[v] for v in outputs] + [set_role(values[v], Role.SAVED) for v in saved]
    graph = ir.Graph(
        copied,
        outs,
        nodes=copies,
        initializers=initializers,
        opset_imports=dict(program.model.opset_imports),
        name=program.graph.name,
    )
    model = ir.Model(graph, ir_version=program.model.ir_version)
    return Program(model)
