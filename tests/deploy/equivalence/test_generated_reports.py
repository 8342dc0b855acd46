"""Reports of many kinds of models: each figure of the JSON stands on the page, by any names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortrain.deploy import Budgets, EquivalenceReport, GoldenSet, compare
from ortrain.deploy.equivalence.summary import number, share
from tests.deploy import classifiers

VOID = {"meta", "br"}
_HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
# Scripts from right to left, letters beyond 16 bits, marks that join, controls and none at all.
NAMES = [
    "čeština",
    "日本語",
    "עברית",
    "👩‍🔬",
    "e\u0301",
    "a\tb",
    " ",
    "",
    "<b>",
    "x" * 300,
    "\u202e",
]


@dataclass
class Case:
    """Two models and examples for both."""

    graph: str
    weights: dict[str, np.ndarray]
    changed: dict[str, np.ndarray]
    golden: GoldenSet
    config: dict[str, Any]


def _rows(count: int, width: int, seed: int = 0) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed)
    return {"x": noise.standard_normal((count, width)).astype(np.float32)}


def _linear(classes: int, seed: int = 1) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed)
    return {"w": noise.standard_normal((8, classes)).astype(np.float32)}


_ONE = "g (float[batch, 8] x) => (float[batch, classes] logits) { logits = MatMul(x, w) }"


def many_classes() -> Case:
    batches = [_rows(200, 8, seed) for seed in range(5)]
    weights = _linear(1000)
    labels = np.concatenate([(b["x"] @ weights["w"]).argmax(-1) for b in batches])
    changed = {"w": weights["w"] + _linear(1000, 2)["w"] * np.float32(0.3)}
    return Case(_ONE, weights, changed, GoldenSet(batches, labels), {})


def strange_names() -> Case:
    batches = [_rows(30, 8, seed) for seed in range(2)]
    weights = _linear(len(NAMES))
    labels = np.concatenate([(b["x"] @ weights["w"]).argmax(-1) for b in batches])
    names = {i: name or "nothing" for i, name in enumerate(NAMES)}
    slices = {name: [i, i + 1, i + 20] for i, name in enumerate(NAMES)}
    changed = {"w": weights["w"] * np.where(np.arange(len(NAMES)) % 3, 1, 0.2).astype(np.float32)}
    return Case(_ONE, weights, changed, GoldenSet(batches, labels, slices, names), {})


def regression() -> Case:
    batches = [_rows(30, 8, seed) for seed in range(2)]
    weights = _linear(1)
    labels = np.concatenate([(b["x"] @ weights["w"])[:, 0] for b in batches]) + 0.1
    golden = GoldenSet(batches, labels.astype(np.float64), {"first": range(10)})
    config = {"num_labels": 1, "problem_type": "regression", "id2label": {"0": "LABEL_0"}}
    return Case(_ONE, weights, {"w": weights["w"] * np.float32(1.2)}, golden, config)


def several_outputs() -> Case:
    batches = [_rows(12, 8, seed) for seed in range(2)]
    graph = (
        "g (float[batch, 8] x) => (float[batch, classes] first, float[batch, classes] second, "
        "bool[batch, classes] third) { first = MatMul(x, w) second = Tanh(first) "
        "third = Less(first, second) }"
    )
    weights = _linear(4)
    changed = {"w": weights["w"] * np.float32(1.01)}
    return Case(graph, weights, changed, GoldenSet(batches), {})


def not_numbers() -> Case:
    batches = [_rows(12, 8)]
    graph = "g (float[batch, 8] x) => (float[batch, classes] logits) { m = MatMul(x, w) "
    graph += "logits = Log(m) }"  # NaN of every negative number, on both sides or on one
    return Case(graph, _linear(5), {"w": _linear(5)["w"] * np.float32(1.5)}, GoldenSet(batches), {})


CASES = [many_classes, strange_names, regression, several_outputs, not_numbers]


def _saved(folder: Path, case: Case, weights: dict[str, np.ndarray]) -> Path:
    model = onnx.parser.parse_model(_HEAD + case.graph)
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in weights.items())
    return classifiers.folder(folder, model, config=case.config)


class Texts(HTMLParser):
    """The texts of a page, whose tags are closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def figures(report: EquivalenceReport) -> Iterator[str]:
    """What a reader of the JSON would look for on the page."""
    for output in report.outputs.values():
        yield from (number(output.largest), number(output.mean), number(output.relative))
        yield from (str(output.elements), str(output.new_nonfinite))
    for group in (report.overall, *report.classes.values(), *report.slices.values()):
        yield from (number(value) for value in (*group.before.values(), *group.after.values()))
        yield str(group.count)
        if group.agreement is not None:
            yield share(group.agreement)
        if group.drop is not None and group is not report.overall:
            yield number(group.drop)
    for flip in report.flips:
        yield from (str(flip.up), str(flip.down), str(flip.decisions))
    for change in report.changes:
        yield str(change.example)
    for side in (report.before, report.after):
        yield from (str(count) for count in side.operators.values())
        yield from side.sha256.values()


@pytest.mark.parametrize("case", CASES)
def test_each_figure_of_the_json_stands_on_the_page(case: Any, tmp_path: Path) -> None:
    made = case()
    before = _saved(tmp_path / "before", made, made.weights)
    after = _saved(tmp_path / "after", made, made.changed)
    budgets = Budgets(max_abs_diff=1e-3)
    report = compare(before, after, made.golden, budgets, latency_runs=1, memory=False)
    assert not report.passed
    assert compare(before, before, made.golden, budgets, latency_runs=0, memory=False).passed
    written, page = report.save(tmp_path / "report")
    json.loads(written.read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))
    found = EquivalenceReport.load(tmp_path / "report")
    assert found.to_dict() == report.to_dict()
    parsed = Texts()
    parsed.feed(page.read_text("utf-8"))
    parsed.close()
    assert not parsed.open
    text = " ".join(parsed.texts)
    missing = [figure for figure in figures(found) if figure not in text]
    assert not missing
    assert "\u202e" not in text
    assert "Worst class: ." not in text
    assert len(report.classes) <= 1000
    for name, group in report.slices.items():
        assert group.count == 3 if case is strange_names else group.count == 10, name


def test_of_a_thousand_classes_each_has_its_row(tmp_path: Path) -> None:
    made = many_classes()
    before = _saved(tmp_path / "before", made, made.weights)
    after = _saved(tmp_path / "after", made, made.changed)
    report = compare(before, after, made.golden, latency_runs=0, memory=False)
    labels = made.golden.labels
    assert labels is not None
    assert {int(name.removeprefix("class ").removeprefix("LABEL_")) for name in report.classes} >= {
        *map(int, np.unique(np.concatenate([np.ravel(each) for each in [labels]])))
    }
    for name, group in list(report.classes.items())[:50]:
        index = int(name.removeprefix("class ").removeprefix("LABEL_"))
        x = np.concatenate([batch["x"] for batch in made.golden.batches])
        own = np.ravel(np.asarray(labels)) == index
        right = (x @ made.changed["w"]).argmax(-1) == index
        assert group.after["recall"] == pytest.approx((right & own).sum() / own.sum())
