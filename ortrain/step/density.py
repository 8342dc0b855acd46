"""The densities of a step's tokens, a line that ``ORTMODULE_PRINT_INPUT_DENSITY`` asks for."""

from __future__ import annotations

import sys

from ortrain.guards.structure import FlatCall
from ortrain.step.forms import CompiledCapture
from ortrain.step.progress import speaks
from ortrain.step.report import Report, Saving, alone
from ortrain.step.tokens import LABELLED, REAL

# The names that ONNX Runtime Training gave them.
_NAMES = {LABELLED: "label density", REAL: "embedding density"}


def print_density(
    served: CompiledCapture, flat: FlatCall, report: Report, saving: Saving | None
) -> None:
    """Prints how many of a step's places are labelled and real, and what was left out.

    To standard error, of the first process of several.

    Args:
        served: the capture that ran.
        flat: the call.
        report: on the calls.
        saving: what was saved of it; None where nothing was to be.
    """
    if not speaks():
        return
    densities: dict[str, float] = {}
    if served.counts is not None:
        counts = served.counts([flat.tensors[i] for i in served.positions])
        densities = served.counts.densities(counts, served.sizes(flat))
    parts = []
    for words, density in sorted(alone(densities).items()):
        kind, _, of = words.partition(" of ")
        if not kind.startswith("at position") or " or " in kind:
            name = _NAMES.get(kind, f"density of {kind}")
            parts.append(f"{name}{f' of {of}' if of else ''} {density:.1%}")
    if not parts:
        parts.append("no labels and no mask by which tokens could be left out")
    share = saving.share if saving is not None else 0.0
    parts.append(f"{share:.0%} of the multiplications left out")
    step = report.graph_calls + report.eager_calls
    print(f"ORTModule step {step}: {', '.join(parts)}", file=sys.stderr)
