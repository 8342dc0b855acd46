"""The walk: reverse mode over an ONNX graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from ortrain.autodiff import rules as _rules  # noqa: F401  (registers every rule)
from ortrain.autodiff.attention import mark_long_attention
from ortrain.autodiff.decompose import DECOMPOSES, decompose
from ortrain.autodiff.pairs import take_pairs
from ortrain.autodiff.registry import Entry, Gradient, Keep, call, entry_of
from ortrain.autodiff.steepness import steep_values
from ortrain.errors import GradientError, NoGradientRule
from ortrain.graph import shapes
from ortrain.graph.broadcast import unbroadcast
from ortrain.graph.build import Builder
from ortrain.graph.rounding import NARROW, is_narrow, rounds_once
from ortrain.graph.walk import reads
from ortrain.ops.base import DOMAIN, expand, expand_node
from ortrain.ops.custom_gradient import is_custom_gradient
from ortrain.program import Phase, Program, Role, origin_of, region_of, set_role


def differentiate(
    program: Program,
    wrt: Iterable[str],
    outputs: Iterable[str] | None = None,
    *,
    keep: Keep | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Program:
    """Adds the backward of a program: the vector-Jacobian product of its outputs.

    Args:
        program: a forward program; it is left as it is.
        wrt: names of the inputs to differentiate with respect to.
        outputs: names of the outputs that receive a gradient; by default every floating user
            output that depends on ``wrt``.
        keep: says of a composite of ortrain's, such as ``ortrain::GeluGradient``, whether it stays
            one node, as an executor's ``keeps`` does; by default each is spelled in standard
            operators.
        sizes: example value of each symbolic dimension, by which it is decided what of attention
            the backward computes again; by default nothing is.

    Returns:
        A program with the forward's inputs and outputs, an input ``<output>.gradient`` for each of
        ``outputs`` (role output_gradient) and an output ``<input>.gradient`` (role gradient) for
        each of ``wrt`` that has one. An input without a path to the outputs has no gradient output,
        as its ``.grad`` is None in PyTorch.

    Raises:
        NoGradientRule: an operator between an output and ``wrt`` has no rule.
        UnsupportedGradient: its rule does not cover this form of it.
        GraphError: an unknown name.
    """
    result = program.clone()
    graph = result.graph
    sources = result.named(wrt)
    if keep is not None:
        take_pairs(result, reachable(graph, sources), keep)
    if sizes is not None:
        mark_long_attention(graph, sizes)
    _expand_operators_without_rule(result, sources)
    reached = reachable(graph, sources)
    chosen = _outputs(result, outputs, reached)

    walk = _Walk(graph, result.opset, reached, steep_values(graph, chosen), keep)
    for value in chosen:
        kind = None if value.dtype is None else ir.TensorType(value.dtype)
        seed = ir.Value(name=f"{value.name}.gradient", shape=value.shape, type=kind)
        graph.inputs.append(set_role(seed, Role.OUTPUT_GRADIENT, value.name or ""))
        walk.contribute(value, seed)
    walk.run()
    expand(graph, opset=program.opset, only=is_custom_gradient)  # what else it reads is dead now
    for source in sources:
        total = walk.total(source)
        if total is None:
            continue
        if total.producer() is None or total.is_graph_output():
            with walk.builder(None, source.name or "") as op:
                total = op.Identity(total)
        total.name = f"{source.name}.gradient"
        total.shape = source.shape
        graph.outputs.append(set_role(total, Role.GRADIENT, source.name or ""))
    result.import_domains()  # a gradient may be the first operator of ours
    result.name_values()
    return result


def _outputs(
    program: Program, names: Iterable[str] | None, reached: set[ir.Value]
) -> list[ir.Value]:
    by_name = {v.name: v for v in program.graph.outputs}
    if names is None:
        return [v for v in program.outputs(Role.USER_OUTPUT, Role.LOSS) if v in reached]
    missing = [n for n in names if n not in by_name]
    if missing:
        raise GradientError(f"the program has no output {missing[0]!r}")
    return [by_name[n] for n in names if by_name[n] in reached]


def _expand_operators_without_rule(program: Program, sources: Sequence[ir.Value]) -> None:
    """An operator that has a body and no rule of its own differentiates through its body."""
    while True:
        reached = reachable(program.graph, sources)
        found = [
            node
            for node in program.graph
            if (node.domain == DOMAIN or (not node.domain and node.op_type in DECOMPOSES))
            and entry_of(node) is None
            and any(v in reached for v in node.inputs if v is not None)
        ]
        if not found:
            return
        for node in found:
            if node.domain == DOMAIN:
                expand_node(node, opset=program.opset)
            else:
                decompose(node, program.opset)
        if any(not node.domain for node in found):
            shapes.infer_all(program.model)  # such bodies compute shapes that ours know


def reachable(graph: ir.Graph, sources: Sequence[ir.Value]) -> set[ir.Value]:
    """Floating values that depend on a source through operators that pass gradients on."""
    reached = set(sources)
    for node in graph:
        reached.update(led_on(node, reached))
    return reached


def led_on(node: ir.Node, reached: Collection[ir.Value]) -> list[ir.Value]:
    """The outputs of a node that depend on such values in the way of :func:`reachable`."""
    entry = entry_of(node)
    if (entry is not None and entry.rule is None) or not any(v in reached for v in reads(node)):
        return []
    return [v for v in node.outputs if v.dtype in shapes.FLOATING or v.dtype is None]


def influences(graph: ir.Graph, outputs: Iterable[ir.Value]) -> set[ir.Value]:
    """Values that an output depends on through operators that pass gradients on."""
    found = set(outputs)
    for node in reversed(graph):
        entry = entry_of(node)
        if (entry is None or entry.rule is not None) and any(v in found for v in node.outputs):
            found.update(reads(node))
    return found


def _narrows(node: ir.Node) -> bool:
    """Whether a node is a cast of wide numbers to float16 or bfloat16."""
    cast = node.op_type == "Cast" and not node.domain and node.outputs[0].dtype in NARROW
    source = node.inputs[0] if cast else None
    return source is not None and source.dtype in shapes.FLOATING - NARROW


class _Walk:
    def __init__(
        self,
        graph: ir.Graph,
        opset: int,
        reached: set[ir.Value],
        steep: set[ir.Value],
        keep: Keep | None,
    ) -> None:
        self.graph, self.opset, self.reached, self.steep = graph, opset, reached, steep
        self.keep = keep
        self.forward = list(graph)
        self.contributions: dict[ir.Value, list[ir.Value]] = {}
        self.constants: dict[tuple[object, ...], ir.Value] = {}

    def builder(self, node: ir.Node | None, prefix: str) -> Builder:
        return Builder(
            self.graph,
            opset=self.opset,
            prefix=f"{prefix}.gradient",
            phase=Phase.BACKWARD,
            origin=origin_of(node) if node is not None else "",
            region=region_of(node) if node is not None else "",
            constants=self.constants,
        )

    def contribute(self, value: ir.Value, gradient: ir.Value) -> None:
        self.contributions.setdefault(value, []).append(gradient)

    def total(self, value: ir.Value) -> ir.Value | None:
        """The sum of the contributions to a value's gradient."""
        parts = self.contributions.get(value)
        if not parts:
            return None
        total = parts[0]
        if len(parts) > 1:
            with self.builder(value.producer(), f"{value.name}/sum") as op:
                for part in parts[1:]:
                    total = op.Add(total, part)
            self.contributions[value] = [total]
        if shapes.static(total) is None and not total.is_graph_input():
            total.shape = value.shape
        return total

    def run(self) -> None:
        for node in reversed(self.forward):
            if not any(v in self.reached for v in reads(node)):
                continue
            if _narrows(node):
                self.widen_each(node)
                continue
            dys = [self.total(v) for v in node.outputs]
            if any(dy is not None for dy in dys):
                self.visit(node, dys)

    def widen_each(self, node: ir.Node) -> None:
        """Adds up in the wide dtype what comes to a cast to a narrow one.

        Autocast casts an activation for each reader anew, so that autograd adds up behind the
        casts. In the graph they are one.
        """
        (source,) = node.inputs
        assert source is not None
        assert source.dtype is not None
        with self.builder(node, node.outputs[0].name or "Cast") as op:
            for part in self.contributions.get(node.outputs[0], ()):
                wide = op.cast(part, source.dtype)
                self.check(node, source, wide)
                self.contribute(source, wide)

    def visit(self, node: ir.Node, dys: list[ir.Value | None]) -> None:
        entry = entry_of(node)
        if entry is None:
            raise self.missing(node)
        if entry.rule is None:
            return
        with self.builder(node, node.outputs[0].name or node.op_type) as op:
            g, gradients = self.gradients(node, entry, dys, op)
            for value, part in zip(node.inputs, gradients, strict=True):
                if value is None or part is None or value not in self.reached:
                    continue
                if entry.broadcast:
                    part = unbroadcast(op, part, value, g.y)
                if g.wide and value.dtype in NARROW:
                    part = op.cast(part, value.dtype)
                self.check(node, value, part)
                self.contribute(value, part)

    def gradients(
        self, node: ir.Node, entry: Entry, dys: list[ir.Value | None], op: Builder
    ) -> tuple[Gradient, list[ir.Value | None]]:
        """What a rule makes of a node.

        Of narrow tensors in float32, where it would round its results more than once: so do the
        kernels of PyTorch that it stands for.
        """
        assert entry.rule is not None
        steep, narrow = node.outputs[0] in self.steep, is_narrow((*node.inputs, *node.outputs))
        wide = narrow and entry.wide
        g = Gradient(node, dys, op, self.reached, steep, self.keep, wide=wide)
        gradients = call(entry.rule, g)
        if narrow and not wide and not rounds_once(op):
            op.discard()
            g = Gradient(node, dys, op, self.reached, steep, self.keep, wide=True)
            gradients = call(entry.rule, g)
        g.share_shapes()
        return g, gradients

    def check(self, node: ir.Node, value: ir.Value, part: ir.Value) -> None:
        """A gradient has its value's dtype and, as far as both are known, its shape."""
        assert part.dtype is None or value.dtype is None or part.dtype == value.dtype, (
            f"the rule of {node.op_type} returns {part.dtype} for {value.name} ({value.dtype})"
        )
        known, wanted = shapes.dims(part), shapes.dims(value)
        if known is None or wanted is None:
            return
        agree = len(known) == len(wanted) and all(
            a == b
            for a, b in zip(known, wanted, strict=True)
            if isinstance(a, int) and isinstance(b, int)
        )
        assert agree, f"the rule of {node.op_type} returns shape {known} for {value.name} {wanted}"

    def missing(self, node: ir.Node) -> NoGradientRule:
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        origin = origin_of(node)
        return NoGradientRule(
            f"no gradient rule for {name!r} (opset {self.opset})",
            where=origin or f"node {node.outputs[0].name!r}",
            because=self.path(node),
            help=f'use other operators there, or register a rule with @ortrain.gradient("{name}")',
        )

    def path(self, node: ir.Node) -> str:
        """How the node lies between the outputs and what requires a gradient."""
        source = next((v for v in reads(node) if v in self.reached), None)
        while source is not None and source.producer() is not None:
            producer = source.producer()
            assert producer is not None
            source = next((v for v in reads(producer) if v in self.reached), None)
        name = source.name if source is not None else "an input"
        return f"the outputs depend on {name!r} through it, and {name!r} requires a gradient"


__all__ = ["differentiate", "unbroadcast"]
