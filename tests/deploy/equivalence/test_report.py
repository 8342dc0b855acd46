"""The report: JSON that is read back as it was, a page by itself, an error that says all."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ortrain.deploy import Budgets, EquivalenceError, EquivalenceReport, GoldenSet, compare
from ortrain.deploy.equivalence import page, summary
from ortrain.deploy.equivalence.report import Group
from ortrain.errors import InputError, ParityError, SaveError
from tests.deploy import classifiers

NAUGHTY = '<script>alert("&\'")</script>\x00 ]]> \ud800 é'
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> EquivalenceReport:
    """Of a model that has lost a class, with a name that no page should show as it is."""
    folder = tmp_path_factory.mktemp("report")
    batches, labels = classifiers.batches()
    golden = GoldenSet(
        batches, labels, {NAUGHTY: [0, 1], "rest": [2, 3]}, {0: "red", 1: "green", 2: NAUGHTY}
    )
    after = classifiers.graph("classification", bias=[0, np.nan, -100])
    return compare(
        classifiers.folder(folder / "before"),
        classifiers.folder(folder / "<after>", after),
        golden,
        Budgets(max_abs_diff=1, max_class_drop=0.1),
        latency_runs=2,
        memory=False,
    )


def test_what_is_written_is_read_back_as_it_was(failed: EquivalenceReport, tmp_path: Path) -> None:
    written, _ = failed.save(tmp_path / "new")
    found = EquivalenceReport.load(tmp_path / "new")
    assert found.to_dict().keys() == failed.to_dict().keys()
    assert EquivalenceReport.load(written).reasons == found.reasons
    plain = dataclasses.replace(
        failed,
        classes={
            "x": Group(count=1, agreement=0.5, before={"f1": 1.0}, after={"f1": 0.5}, drop=0.5)
        },
        slices={},
        changes=failed.changes[:0],
        reasons=("one",),
    )
    plain.save(tmp_path)
    assert EquivalenceReport.load(tmp_path) == plain


def test_json_has_no_number_that_json_has_not(failed: EquivalenceReport, tmp_path: Path) -> None:
    text = failed.save(tmp_path)[0].read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert found["passed"] is False
    assert found["max_abs_diff"] == "inf"
    assert found["examples"] == 10
    assert len(found["reasons"]) == 3


class Page(HTMLParser):
    """Checks that tags are closed in their order, and collects what a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_needs_no_other_file_and_runs_nothing(failed: EquivalenceReport) -> None:
    text = page.html(failed)
    parsed = Page()
    parsed.feed(text)
    parsed.close()
    assert parsed.open == []
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "use", "image"}
    for _, attributes in parsed.tags:
        assert not {"src", "href", "style", "onload", "onclick"} & set(attributes)
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text


def test_the_page_says_everything_also_to_those_who_do_not_see_it(
    failed: EquivalenceReport,
) -> None:
    parsed = Page()
    parsed.feed(page.html(failed))
    assert dict(parsed.tags)["html"] == {"lang": "en"}
    drawings = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert len(drawings) >= 4
    assert all(each["role"] == "img" and each["aria-label"] for each in drawings)
    heads = [attributes for tag, attributes in parsed.tags if tag == "th"]
    assert heads
    assert all(each["scope"] in ("col", "row") for each in heads)
    tables = [tag for tag, _ in parsed.tags if tag in ("table", "caption")]
    assert tables.count("table") == tables.count("caption")
    text = "".join(parsed.texts)
    for told in (*failed.reasons, "logits", "red", "onnxruntime", "max_class_drop", "exceeded"):
        assert told.replace("\x00", "�") in text


def test_names_are_escaped_wherever_they_stand(failed: EquivalenceReport, tmp_path: Path) -> None:
    text = failed.save(tmp_path)[1].read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<after>" not in text
    assert "\x00" not in text
    assert "&lt;script&gt;" in text
    assert r"\ud800" in text


def test_the_summary_has_each_figure_once(failed: EquivalenceReport) -> None:
    text = failed.summary()
    assert text.startswith("not passed\n")
    for told in ("examples    10", "accuracy: 1 → ", "worst class", "operators   11 → 11", "size"):
        assert told in text


def test_outputs_that_differ_most_come_first_and_others_are_counted(
    failed: EquivalenceReport,
) -> None:
    one = failed.outputs["logits"]
    outputs = {
        f"present.{n}": dataclasses.replace(one, largest=float(n), new_nonfinite=n == 2)
        for n in range(10)
    }
    many = dataclasses.replace(failed, outputs=outputs)
    lines = [row for row in many.summary().splitlines() if row.startswith("difference")]
    assert [row.split()[1] for row in lines] == [f"present.{n}:" for n in (2, 9, 8, 7, 6, 5)]
    assert "4 more outputs differ less" in many.summary()
    assert all(f"present.{n}" in page.html(many) for n in range(10))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, "100.00 %"),
        (0.99999, "99.999000 %"),
        (0.5, "50.00 %"),
        (None, "–"),
    ],
)
def test_what_is_not_all_is_not_rounded_to_all(value: float | None, expected: str) -> None:
    assert summary.share(value) == expected


def test_sizes_are_told_in_units() -> None:
    assert [summary.size(n) for n in (0, 999, 1000, 22_700_000, 3e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "22.7 MB",
        "3 TB",
    ]
    assert summary.number(float("inf")) == "infinite"
    assert summary.number(float("nan")) == "–"


def test_the_error_says_which_budget_by_what_and_the_way_out(failed: EquivalenceReport) -> None:
    error = EquivalenceError.of(failed, "quantized model")
    assert isinstance(error, ParityError)
    assert error.report is failed
    assert error.what == "the quantized model is outside its budgets: nothing was written"
    assert "max_class_drop=0.1: of the class" in error.because
    assert "NaN or infinite on one side alone" in error.because
    assert "exclude the most sensitive nodes" in error.help
    assert pickle.loads(pickle.dumps(error)).report.reasons == failed.reasons


def test_what_is_no_report_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no report of equivalence"):
        EquivalenceReport.load(tmp_path)
    for text in ("{", "[]", "{}", '{"before": 3}'):
        (tmp_path / "equivalence.json").write_text(text)
        with pytest.raises(InputError, match="is no report of equivalence"):
            EquivalenceReport.load(tmp_path)


def test_a_report_that_cannot_be_written_is_told(failed: EquivalenceReport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="cannot save the report of equivalence"):
        failed.save(tmp_path / "file")


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Budgets)])
def test_a_budget_is_a_number_from_0_up(name: str) -> None:
    for value in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{name}="):
            Budgets(**{name: value})
    for kind in ("0.1", True, [1]):
        with pytest.raises(TypeError, match=f"{name}="):
            Budgets(**{name: kind})  # type: ignore[arg-type]


def test_an_agreement_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"min_agreement=1\.5: expected a share"):
        Budgets(min_agreement=1.5)


def test_a_difference_by_rounding_alone_is_inside(tmp_path: Path) -> None:
    # 0.9 - 0.8 is 0.09999999999999998, and 0.8 - 0.7 is 0.10000000000000009.
    from ortrain.deploy.equivalence import verdict

    for old, new in ((0.9, 0.8), (0.8, 0.7)):
        group = Group(count=10, before={"f1": old}, after={"f1": new}, drop=old - new)
        assert not verdict.reasons(
            Budgets(max_metric_drop=0.1), {}, "classification", ("f1",), group, {}, {}
        )
        assert verdict.reasons(
            Budgets(max_metric_drop=0.0999), {}, "classification", ("f1",), group, {}, {}
        )
