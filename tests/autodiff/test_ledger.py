from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from ortrain.autodiff import ledger as module
from ortrain.autodiff.decompose import DECOMPOSES
from ortrain.autodiff.ledger import Status, ledger, table
from ortrain.autodiff.registry import registered
from ortrain.errors import GradientError
from ortrain.ops import OPERATORS
from tests.cases import ALL

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
ROWS = ledger()


def test_every_operator_of_the_standard_domain_has_exactly_one_status():
    names = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    listed = [row.operator for row in ROWS if "::" not in row.operator]
    assert sorted(listed) == sorted(names)


def test_every_operator_of_ours_is_listed():
    listed = {row.operator for row in ROWS if "::" in row.operator}
    assert listed == {f"ortrain::{name}" for name in OPERATORS}


def test_every_row_says_what_the_derivative_is_or_why_there_is_none():
    assert [row.operator for row in ROWS if not row.note] == []


def test_every_rule_and_every_decomposition_has_a_case():
    tried = {case.operator for case in ALL}
    wanted = {row.operator for row in ROWS if row.status in (Status.RULE, Status.DECOMPOSES)}
    wanted.remove("ortrain::CustomGradient")  # it need be no derivative: test_custom.py
    assert sorted(wanted - tried) == []


def test_nothing_is_listed_that_does_not_exist():
    names = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    assert set(module.UNSUPPORTED) | set(DECOMPOSES) <= names


def test_a_second_status_is_an_error(monkeypatch):
    monkeypatch.setitem(module.UNSUPPORTED, "Exp", "a test")
    with pytest.raises(GradientError, match="rule and unsupported for 'Exp'"):
        ledger()


def test_no_status_is_an_error(monkeypatch):
    monkeypatch.delitem(module.UNSUPPORTED, "Loop")
    with pytest.raises(GradientError, match="no status for 'Loop'"):
        ledger()


def test_an_operator_that_decomposes_has_no_rule_that_would_hide_its_body():
    assert set(DECOMPOSES).isdisjoint(registered())


def test_the_page_in_the_docs_is_current():
    if f"for onnx {onnx.__version__}:" not in PAGE.read_text():
        pytest.skip("the page was written for another version of onnx")
    assert PAGE.read_text() == table(), "run: python -m ortrain.autodiff.ledger > docs/operators.md"
