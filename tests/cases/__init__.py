"""Tables of operators: one row a form. They drive the tests of rules, executors and coverage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ortrain.testing import OpCase
from tests.cases import (
    composite,
    conv,
    elementwise,
    gradients,
    index,
    linear,
    loss,
    norm,
    pool,
    recurrent,
    reduce,
    shape,
)

TRIED: dict[str, tuple[int, ...]] = {}


def with_opsets(cases: Iterable[OpCase]) -> list[OpCase]:
    """The cases with the opsets that they are tried at written out.

    To find those of an operator takes 8 ms, and the cases are tried in a dozen tables.
    """
    found = []
    for case in cases:
        if case.opsets is None:
            if case.operator not in TRIED:
                TRIED[case.operator] = case.tried_opsets()
            case = replace(case, opsets=TRIED[case.operator])
        found.append(case)
    return found


TABLES = {
    "elementwise": elementwise.CASES,
    "linear": linear.CASES,
    "reduce": reduce.CASES,
    "shape": shape.CASES,
    "index": index.CASES,
    "norm": norm.CASES,
    "loss": loss.CASES,
    "conv": conv.CASES,
    "pool": pool.CASES,
    "recurrent": recurrent.CASES,
    "composite": composite.CASES,
    "gradients": gradients.CASES,
}

FAMILIES = {name: with_opsets(cases) for name, cases in TABLES.items()}
ALL: list[OpCase] = [case for cases in FAMILIES.values() for case in cases]
