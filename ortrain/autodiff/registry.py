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
from types import CodeType
from typing import Any, NoReturn

import onnx_ir as ir

from ortrain.errors import GradientError, UnsupportedGradient
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import attributes_of
from ortrain.program import origin_of

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """What the registry knows of an operator.

    Attributes:
        rule: None where the operator is declared not differentiable.
        broadcast: the rule's gradients have the output's shape, and the walk reduces them to each
            input's.
        reason: why there is no gradient.
    """

    rule: Rule | None
    broadcast: bool = False
    reason: str = ""


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


def gradient(*names: str, broadcast: bool = False) -> Callable[[Rule], Rule]:
    """Registers the decorated rule for operators (``domain::Name`` outside the standard domain).

    Args:
        names: operators that share the rule.
        broadcast: the operator broadcasts its inputs as numpy does; the rule returns gradients of
            the output's shape and the walk sums them over the broadcast axes.

    Raises:
        GradientError: one of the operators has a rule already.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            _register(name, Entry(rule, broadcast))
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


class Gradient:
    """What a rule sees of one node.

    Attributes:
        op: the builder that emits the backward nodes.
        node: the forward node.
        sees_every_output: whether the rule has asked for :attr:`dys`. One that has not knows of the
            first output alone, and a gradient of another is refused rather than lost.
        steep: whether the gradient of the first output may be infinite (:func:`steep_values`).
    """

    def __init__(
        self,
        node: ir.Node,
        dys: Sequence[ir.Value | None],
        op: Builder,
        wanted: set[ir.Value],
        steep: bool = True,
    ) -> None:
        self.node = node
        self.op = op
        self._dys = list(dys)
        self._wanted = wanted
        self.sees_every_output = False
        self.steep = steep

    @property
    def dys(self) -> list[ir.Value | None]:
        """Gradient of each output, None where none flows."""
        self.sees_every_output = True
        return self._dys

    @property
    def dy(self) -> ir.Value:
        """Gradient of the first output (zeros where none flows)."""
        known = self._dys[0]
        return self.op.zeros_like(self.y) if known is None else known

    def dy_where(self, condition: ir.Value) -> ir.Value:
        """The gradient of the first output where the condition holds, and 0 elsewhere.

        An infinite one times 0 would be no number, of which PyTorch makes 0 here as well. Where
        none can be infinite, a product serves: of 256 x 3072 floats it takes 1.4 ms, a `Where` 2.0.
        """
        if self.steep:
            return self.op.Where(condition, self.dy, self.op.constant(0, self.dy.dtype))
        assert self.dy.dtype is not None
        return self.dy * self.op.cast(condition, self.dy.dtype)

    @property
    def y(self) -> ir.Value:
        """The first output."""
        return self.node.outputs[0]

    @property
    def opset(self) -> int:
        """Opset of the standard domain."""
        return self.op.opset

    def needs(self, index: int) -> bool:
        """Whether the gradient of an input is wanted at all."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        return value is not None and value in self._wanted

    def output(self, index: int, dtype: ir.DataType | None = None) -> ir.Value:
        """An output of the forward node, added to the node where it is optional and absent.

        Args:
            index: position of the output.
            dtype: of the output; the first output's by default.
        """
        if index >= len(self.node.outputs):
            self.node.resize_outputs(index + 1)
        value = self.node.outputs[index]
        if not value.name:
            value.name = f"{self.y.name}/output_{index}"
        if value.dtype is None:
            value.type = ir.TensorType(dtype or self.y.dtype or ir.DataType.FLOAT)
        return value

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


def call(rule: Rule, g: Gradient) -> list[ir.Value | None]:
    """Calls a rule with a node's inputs and attributes; one gradient for each input."""
    attributes = attributes_of(g.node)
    signature = inspect.signature(rule)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    keyword = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if not keyword:
        known = signature.parameters
        unknown = [name for name in attributes if name not in known]
        if unknown:
            g.unsupported(f"the rule does not know the attribute {unknown[0]!r}")
    inputs = list(g.node.inputs)
    if not variadic:
        positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        inputs += [None] * (len(positional) - 1 - len(inputs))
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
