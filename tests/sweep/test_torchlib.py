"""What is trusted of PyTorch's exporter is what the sweep has seen agree."""

from __future__ import annotations

from ortrain.capture.onnx.torchlib import VERIFIED
from tests.sweep import results
from tests.sweep.verdict import Outcome


def test_each_was_seen_in_a_row_that_agrees() -> None:
    rows = results.load().values()
    seen = {target for row in rows if row.graphs for target in row.upstream}
    wrong = {target for row in rows if row.outcome is Outcome.WRONG for target in row.upstream}
    assert {f"aten.{name}" for name in VERIFIED} - seen == set()
    assert wrong == set()


def test_no_other_was_used() -> None:
    used = {target for row in results.load().values() for target in row.upstream}
    assert {t for t in used if t.startswith("aten.")} <= {f"aten.{name}" for name in VERIFIED}
