"""The densities of a step's tokens, a line that ``ORTMODULE_PRINT_INPUT_DENSITY`` asks for."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ortrain.step.progress import speaks
from ortrain.step.report import Saving, alone
from ortrain.step.tokens import LABELLED, REAL

# The names that ONNX Runtime Training gave them.
_NAMES = {LABELLED: "label density", REAL: "embedding density"}


def print_density(densities: Mapping[str, float], step: int, saving: Saving | None) -> None:
    """Prints how many of a step's places are labelled and real, and what was left out.

    To standard error, of the first process of several.

    Args:
        densities: of the sets of tokens, by what they are in words; empty where there are none.
        step: its number.
        saving: what was saved of it; None where nothing was to be.
    """
    if not speaks():
        return
    parts = []
    for words, density in sorted(alone(dict(densities)).items()):
        kind, _, of = words.partition(" of ")
        if not kind.startswith("at position") or " or " in kind:
            name = _NAMES.get(kind, f"density of {kind}")
            parts.append(f"{name}{f' of {of}' if of else ''} {density:.1%}")
    if not parts:
        parts.append("no labels and no mask by which tokens could be left out")
    share = saving.share if saving is not None else 0.0
    parts.append(f"{share:.0%} of the multiplications left out")
    print(f"ORTModule step {step}: {', '.join(parts)}", file=sys.stderr)
