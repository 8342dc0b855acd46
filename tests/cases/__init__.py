"""Tables of operators: one row a form. They drive the tests of rules, executors and coverage."""

from __future__ import annotations

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

FAMILIES = {
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

ALL: list[OpCase] = [case for cases in FAMILIES.values() for case in cases]
