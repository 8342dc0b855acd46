"""The ledger: what becomes of the gradient of each operator of the ONNX standard domain.

Every operator has exactly one status. Run the module to print the table in ``docs/operators.md``::

    python -m ortrain.autodiff.ledger > docs/operators.md
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import onnx

from ortrain.autodiff import rules as _rules  # noqa: F401  (registers every rule)
from ortrain.autodiff.decompose import DECOMPOSES
from ortrain.autodiff.registry import registered
from ortrain.errors import GradientError
from ortrain.ops import DOMAIN, OPERATORS


class Status(StrEnum):
    """What becomes of an operator's gradient."""

    RULE = "rule"
    NO_GRADIENT = "no gradient"
    DECOMPOSES = "decomposes"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Row:
    """An operator's line in the ledger.

    Attributes:
        operator: its name.
        since: the opset of its latest version; None for ortrain's own.
        status: what becomes of its gradient.
        note: the derivative, or the reason why there is none.
    """

    operator: str
    since: int | None
    status: Status
    note: str


_CONTROL = "not yet: control flow"
_SEQUENCE = "not yet: sequences of tensors"
_ROUNDING = "rounding: ortrain::FakeQuantize has the straight-through estimate"
_QUANTIZED = "computes on quantized integers"

UNSUPPORTED = {
    "AffineGrid": _CONTROL,
    "CausalConvWithState": "not yet",
    "ConcatFromSequence": _SEQUENCE,
    "ConvInteger": _QUANTIZED,
    "CumProd": "not yet: a product through zeros has no closed form in cumulative sums",
    "DFT": "not yet: complex numbers",
    "DeformConv": "not yet",
    "DequantizeLinear": _ROUNDING,
    "Det": "needs the inverse of a matrix, which ONNX has no operator for",
    "DynamicQuantizeLinear": _ROUNDING,
    "GlobalLpPool": "not yet",
    "GridSample": "not yet",
    "If": _CONTROL,
    "LRN": "not yet",
    "LinearAttention": "not yet",
    "Loop": _CONTROL,
    "LpPool": "not yet",
    "MatMulInteger": _QUANTIZED,
    "MaxRoiPool": "not yet",
    "MeanVarianceNormalization": "not yet: LayerNormalization and its kin have rules",
    "OneHot": "not yet: its two values may require a gradient, its indices never do",
    "Optional": _SEQUENCE,
    "OptionalGetElement": _SEQUENCE,
    "QLinearConv": _QUANTIZED,
    "QLinearMatMul": _QUANTIZED,
    "QuantizeLinear": _ROUNDING,
    "RoiAlign": "not yet",
    "STFT": "not yet: complex numbers",
    "Scan": _CONTROL,
    "Scatter": "deprecated: ScatterElements has a rule",
    "SequenceAt": _SEQUENCE,
    "SequenceConstruct": _SEQUENCE,
    "SequenceErase": _SEQUENCE,
    "SequenceInsert": _SEQUENCE,
    "SequenceMap": _SEQUENCE,
    "SplitToSequence": _SEQUENCE,
    "TensorScatter": "not yet",
    "Unique": "not yet",
    "Upsample": "deprecated: Resize has a rule",
}


_HEAD = """\
# Gradients of the ONNX operators

Written by `python -m ortrain.autodiff.ledger` from the rules themselves, for onnx {onnx}:
{counts}.

- **rule**: a gradient rule exists; the note is the derivative. A form that the rule does not cover
  is refused by name when a graph is differentiated, never ignored.
- **no gradient**: the derivative is zero or undefined; no gradient flows.
- **decomposes**: the operator is replaced by its function body, whose operators have rules.
- **unsupported**: between the loss and a parameter it is an error.

| operator | since opset | gradient | |
| --- | --- | --- | --- |
"""


def ledger() -> list[Row]:
    """One row for each operator of the standard domain, then for each of ortrain's own.

    Raises:
        GradientError: an operator has two statuses, or none.
    """
    known = registered()
    rows = []
    for name, since in sorted(_latest().items()):
        entry = known.get(name)
        found = []
        if entry is not None and entry.rule is not None:
            found.append((Status.RULE, _first_line(entry.rule.__doc__)))
        elif entry is not None:
            found.append((Status.NO_GRADIENT, entry.reason))
        if name in DECOMPOSES:
            found.append((Status.DECOMPOSES, DECOMPOSES[name]))
        if name in UNSUPPORTED:
            found.append((Status.UNSUPPORTED, UNSUPPORTED[name]))
        if len(found) != 1:
            statuses = " and ".join(s.value for s, _ in found) or "no status"
            raise GradientError(
                f"the ledger has {statuses} for {name!r}",
                help="register a rule, or say in ledger.py why there is none; not both",
            )
        rows.append(Row(name, since, *found[0]))
    for name, operator in sorted(OPERATORS.items()):
        entry = known.get(f"{DOMAIN}::{name}")
        if entry is None:
            status, note = Status.DECOMPOSES, _first_line(operator.body.__doc__)
        elif entry.rule is None:
            status, note = Status.NO_GRADIENT, entry.reason
        else:
            status, note = Status.RULE, _first_line(entry.rule.__doc__)
        rows.append(Row(f"{DOMAIN}::{name}", None, status, note))
    return rows


def _latest() -> dict[str, int]:
    """The opset of the latest version of each operator of the standard domain."""
    found: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            found[schema.name] = max(schema.since_version, found.get(schema.name, 0))
    return found


def _first_line(text: str | None) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = (text or "").strip().split("\n\n")[0]
    return " ".join(paragraph.split())


def table() -> str:
    """The ledger as a page of documentation."""
    rows = ledger()
    counts = {status: sum(r.status is status for r in rows) for status in Status}
    head = _HEAD.format(
        onnx=onnx.__version__,
        counts=", ".join(f"{count} {status.value}" for status, count in counts.items()),
    )
    return head + "".join(
        f"| `{r.operator}` | {r.since or ''} | {r.status.value} | {_escaped(r.note)} |\n"
        for r in rows
    )


def _escaped(text: str) -> str:
    for character in "|*<":
        text = text.replace(character, "\\" + character)
    return text


if __name__ == "__main__":
    print(table(), end="")
