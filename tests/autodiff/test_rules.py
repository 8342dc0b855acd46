"""Every gradient rule, in every form that the case tables list, against every oracle there is."""

from __future__ import annotations

import pytest

from ortrain.testing import check_gradients, variants
from tests.cases import ALL

# What fails for a reason outside the rules; each entry goes when its reason does.
KNOWN: dict[str, str] = {}


def row(case, variant):
    known = case.id in KNOWN
    marks = [pytest.mark.xfail(reason=KNOWN[case.id], strict=True)] if known else []
    return pytest.param(case, variant, id=f"{case.id}-{variant}", marks=marks)


ROWS = [row(c, v) for c in ALL for v in variants(c)]


@pytest.mark.parametrize(("case", "variant"), ROWS)
def test_the_gradient_is_right(case, variant):
    check_gradients(case, only=[variant])


def test_no_two_cases_share_a_name():
    names = [case.id for case in ALL]
    assert len(names) == len(set(names))
