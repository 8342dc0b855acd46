"""One registry of gradient rules, and ``Gradient``: what a rule is given.

A rule reads like the maths. Its signature is the ONNX schema: inputs positional, attributes keyword
with ONNX's defaults. It returns one gradient for each input, None where none flows::

    @gradient("Softmax")
    def softmax(g, input, *, axis=-1):
        \"\"\"dx = y * (dy - sum(dy * y))\"\"\"
        return g.y * (g.dy - g.op.ReduceSum(g.dy * g.y, [axis], keepdims=1))

The walk (:mod:`ortrain.autodiff.engine`) does what every rule would repeat: it finds the nodes,
adds up contributions, reduces broadcast axes and checks the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, NamedTuple, NoReturn

import onnx_ir as ir

from ortrain.errors import GradientError, UnsupportedGradient
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rewire import detach
from ortrain.graph.rounding import NARROW, WIDE
from ortrain.ops.base import DOMAIN, OPERATORS, attributes_of
from ortrain.ops.gradients.activation import passed_where
from ortrain.program import origin_of

Rule = Callable[..., Any]
Keep = Callable[[ir.Node], bool]
"""Whether an executor has something better for a composite than its body."""


@dataclass(frozen=True)
class Entry:
    """What the registry knows of an operator.

    Attributes:
        rule: None where the operator is declared not differentiable.
        broadcast: the rule's gradients have the output's shape, and the walk reduces them to each
            input's.
        reason: why there is no gradient.
        wide: narrow tensors are handed out in float32, whatever the rule makes of them.
    """

    rule: Rule | None
    broadcast: bool = False
    reason: str = ""
    wide: bool = False


_ENTRIES: dict[tuple[str, str], Entry] = {}


def _key(name: str) -> tuple[str, str]:
    domain, _, op_type = name.rpartition("::")
    return domain, op_type


def _register(name: str, entry: Entry) -> None:
    if _key(name) in _ENTRIES:
        raise GradientError(
            f"a gradient of {name!r} is registered twice",
            help="one rule an operator: remove one of the two",
        )
    _ENTRIES[_key(name)] = entry


def gradient(*names: str, broadcast: bool = False, wide: bool = False) -> Callable[[Rule], Rule]:
    """Registers the decorated rule for operators (``domain::Name`` outside the standard domain).

    Args:
        names: operators that share the rule.
        broadcast: the operator broadcasts its inputs as numpy does; the rule returns gradients of
            the output's shape and the walk sums them over the broadcast axes.
        wide: PyTorch's kernel computes in float32 on float16 and bfloat16, products included. Rules
            without products are found to need that by what they emit.

    Raises:
        GradientError: one of the operators has a rule already.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            _register(name, Entry(rule, broadcast, wide=wide))
        return rule

    return register


def no_gradient(*names: str, reason: str) -> None:
    """Declares operators through which no gradient flows: their derivative is zero or undefined."""
    for name in names:
        _register(name, Entry(None, reason=reason))


def entry_of(node: ir.Node) -> Entry | None:
    """What the registry knows of a node's operator, None where nothing."""
    return _ENTRIES.get((node.domain, node.op_type))


def status(name: str) -> str:
    """``"rule"``, ``"no gradient"`` or ``"missing"`` for an operator."""
    entry = _ENTRIES.get(_key(name))
    if entry is None:
        return "missing"
    return "rule" if entry.rule is not None else "no gradient"


def registered() -> dict[str, Entry]:
    """All entries by name."""
    return {f"{d}::{n}" if d else n: entry for (d, n), entry in _ENTRIES.items()}


def foreign_rules() -> list[tuple[object, ...]]:
    """Rules that are not ortrain's own, with their code: what a cache of gradients depends on.

    A rule without code of its own, such as a ``functools.partial``, is told by its repr, which
    differs from process to process.
    """
    found: list[tuple[object, ...]] = []
    for key, entry in sorted(_ENTRIES.items(), key=lambda item: item[0]):
        module = getattr(entry.rule, "__module__", "") or ""
        if entry.rule is not None and module.partition(".")[0] != "ortrain":
            found.append((key, entry.broadcast, entry.reason, _code(entry.rule)))
    return found


def _code(function: object) -> object:
    """What a function computes, as far as its code and closure tell."""
    code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    cells = getattr(function, "__closure__", None) or ()
    inner = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    values = [repr(cell.cell_contents) for cell in cells]
    return (code.co_code.hex(), code.co_names, inner, values)


@dataclass(frozen=True)
class Like:
    """A value of which a composite reads the shape and nothing else."""

    value: ir.Value


class Gradient:
    """What a rule sees of one node.

    Attributes:
        op: the builder that emits the backward nodes.
        node: the forward node.
        sees_every_output: whether the rule has asked for :attr:`dys`. One that has not knows of the
            first output alone, and a gradient of another is refused rather than lost.
        steep: whether the gradient of the first output may be infinite (:func:`steep_values`).
        wide: whether narrow tensors are handed out in float32.
    """

    def __init__(
        self,
        node: ir.Node,
        dys: Sequence[ir.Value | None],
        op: Builder,
        wanted: set[ir.Value],
        steep: bool = True,
        keep: Keep | None = None,
        wide: bool = False,
    ) -> None:
        self.node = node
        self.op = op
        self._dys = list(dys)
        self._wanted = wanted
        self._keep = keep
        self.sees_every_output = False
        self.steep = steep
        self.wide = wide
        self._widened: dict[ir.Value, ir.Value] = {}

    @property
    def inputs(self) -> list[ir.Value | None]:
        """The node's inputs, None where an optional one is absent."""
        return [None if v is None else self.widened(v) for v in self.node.inputs]

    def widened(self, value: ir.Value) -> ir.Value:
        """A value as the rule sees it."""
        if not self.wide or value.dtype not in NARROW:
            return value
        known = self._widened.get(value)
        if known is None:
            known = self._widened[value] = self.op.cast(value, WIDE)
        return known

    def share_shapes(self) -> None:
        """Has the forward's values know what the rule has noted of their shapes."""
        for value, wide in self._widened.items():
            if value.shape is None:
                value.shape = wide.shape

    @property
    def dys(self) -> list[ir.Value | None]:
        """Gradient of each output, None where none flows."""
        self.sees_every_output = True
        return [None if dy is None else self.widened(dy) for dy in self._dys]

    @property
    def arriving(self) -> list[ir.Value | None]:
        """The same in the dtypes in which they arrive."""
        self.sees_every_output = True
        return self._dys

    @property
    def dy(self) -> ir.Value:
        """Gradient of the first output (zeros where none flows)."""
        known = self._dys[0]
        return self.op.zeros_like(self.y) if known is None else self.widened(known)

    def dy_where(self, condition: ir.Value) -> ir.Value:
        """The gradient of the first output where the condition holds, and 0 elsewhere.

        See :func:`~ortrain.ops.gradients.activation.passed_where`.
        """
        return passed_where(self.op, self.dy, condition, self.steep)

    @property
    def y(self) -> ir.Value:
        """The first output."""
        return self.widened(self.node.outputs[0])

    @property
    def opset(self) -> int:
        """Opset of the standard domain."""
        return self.op.opset

    def needs(self, index: int) -> bool:
        """Whether the gradient of an input is wanted at all."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        return value is not None and value in self._wanted

    def output(
        self, index: int, dtype: ir.DataType | None = None, *, like: ir.Value | None = None
    ) -> ir.Value:
        """An output of the forward node, added to the node where it is optional and absent.

        Args:
            index: position of the output.
            dtype: of the output; the first output's by default.
            like: a value of its shape.
        """
        if index >= len(self.node.outputs):
            self.node.resize_outputs(index + 1)
        value = self.node.outputs[index]
        if not value.name:
            value.name = f"{self.y.name}/output_{index}"
        if value.dtype is None:
            own = self.node.outputs[0].dtype
            value.type = ir.TensorType(dtype or own or ir.DataType.FLOAT)
        if like is not None and like.shape is not None:
            value.shape = like.shape.copy()
        return self.widened(value)

    def composite(self, name: str, *inputs: ir.Value | Like | None, **attributes: Any) -> Any:
        """Emits a gradient composite: one node where the executor keeps it, else its body.

        Args:
            name: of the composite, in ortrain's domain.
            inputs: of it; :meth:`like` marks those that only lend their shape.
            attributes: of it, None for those that are absent. ``needs`` has a flag for each output
                of one that has several.

        Returns:
            The output; a tuple of several, with None for those that are not needed.
        """
        values = [v.value if isinstance(v, Like) else v for v in inputs]
        given = {key: value for key, value in attributes.items() if value is not None}
        if "needs" in given:
            given["needs"] = [int(flag) for flag in given["needs"]]
        operator = OPERATORS[name]
        if not self.keeps(name, *values, **given):
            return operator.body(self.op, *values, **given)
        own = [v for v in inputs if isinstance(v, ir.Value)]
        operands = [self._zeros_like(v.value, own) if isinstance(v, Like) else v for v in inputs]
        count = len(operator.outputs)
        results = self.op.node(name, operands, domain=DOMAIN, outputs=count, **given)
        if count == 1:
            return results
        needs = given.get("needs", [1] * count)
        return tuple(r if n else None for r, n in zip(results, needs, strict=True))

    def keeps(self, name: str, *inputs: ir.Value | None, **attributes: Any) -> bool:
        """Whether the executor keeps a composite in this form."""
        if self._keep is None:
            return False
        known = ir.convenience.convert_attributes(attributes)
        probe = ir.Node(DOMAIN, name, inputs, known, num_outputs=len(OPERATORS[name].outputs))
        try:
            return self._keep(probe)
        finally:
            detach(probe)

    def like(self, value: ir.Value) -> Like:
        """A value of which a composite reads the shape alone, so that it is not kept for that."""
        return Like(value)

    def _zeros_like(self, value: ir.Value, others: Sequence[ir.Value]) -> ir.Value:
        """Zeros of a value's shape, which is told by the other inputs as far as they know it.

        An expanded number takes no memory, in ONNX as in PyTorch.
        """
        if shapes.static(value) is not None:
            return self.op.zeros_like(value)
        sizes = (self._size(value, axis, others) for axis in range(self.rank(value)))
        shape = self.op.Concat(*sizes, axis=0)
        zeros = self.op.Expand(self.op.constant(0, value.dtype), shape)
        zeros.shape = value.shape
        return zeros

    def _size(self, value: ir.Value, axis: int, others: Sequence[ir.Value]) -> ir.Value:
        size = self.dims(value)[axis]
        for other in others:
            known = shapes.dims(other) or ()
            if isinstance(size, str) and size in known:
                return self.op.dim(other, known.index(size))
        return self.op.dim(value, axis)

    def rank(self, value: ir.Value) -> int:
        """The number of axes of a value.

        Raises:
            UnsupportedGradient: it is unknown.
        """
        return len(self.dims(value))

    def dims(self, value: ir.Value) -> tuple[shapes.Dim, ...]:
        """The dimensions of a value: sizes, symbols, and None for those that nothing is known of.

        Raises:
            UnsupportedGradient: even their number is unknown.
        """
        known = shapes.dims(value)
        if known is None:
            self.unsupported(f"the rank of {value.name!r} is unknown")
        return known

    def constant(self, value: ir.Value | None, name: str) -> Any:
        """The value of an input that the rule needs as a constant.

        Raises:
            UnsupportedGradient: it is computed at run time.
        """
        known = shapes.constant(value)
        if known is None:
            self.unsupported(f"its input {name!r} is not a constant")
        return known

    def unsupported(self, reason: str) -> NoReturn:
        """Says that the gradient should exist and does not."""
        raise UnsupportedGradient(
            f"no gradient for this form of {self.node.op_type!r}: {reason}",
            where=origin_of(self.node) or f"node {self.y.name!r}",
            help="use another form or other operators there, or report the form",
        )


class _Takes(NamedTuple):
    """What a rule takes: any number of inputs, any attribute, or so many and these."""

    variadic: bool
    keyword: bool
    positional: int
    names: frozenset[str]


@cache
def _takes(rule: Rule) -> _Takes:
    parameters = inspect.signature(rule).parameters
    kinds = [each.kind for each in parameters.values()]
    of = inspect.Parameter
    return _Takes(
        of.VAR_POSITIONAL in kinds,
        of.VAR_KEYWORD in kinds,
        kinds.count(of.POSITIONAL_OR_KEYWORD),
        frozenset(parameters),
    )


def call(rule: Rule, g: Gradient) -> list[ir.Value | None]:
    """Calls a rule with a node's inputs and attributes; one gradient for each input."""
    attributes = attributes_of(g.node)
    takes = _takes(rule)
    unknown = [] if takes.keyword else [name for name in attributes if name not in takes.names]
    if unknown:
        g.unsupported(f"the rule does not know the attribute {unknown[0]!r}")
    inputs = g.inputs
    if not takes.variadic:
        inputs += [None] * (takes.positional - 1 - len(inputs))
    result = rule(g, *inputs, **attributes)
    further = [i for i, dy in enumerate(g._dys) if i and dy is not None]
    if further and not g.sees_every_output:
        g.unsupported(f"a gradient flows into its output {further[0]}")
    if result is None or isinstance(result, ir.Value):
        result = (result,)
    gradients = list(result)
    given = len(g.node.inputs)
    assert not any(gradients[given:]), f"{g.node.op_type}: a gradient for an input that is absent"
    return (gradients + [None] * given)[:given]
