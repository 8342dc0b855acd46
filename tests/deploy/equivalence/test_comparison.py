"""A model before and after, on the same examples: what is measured, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortrain.deploy import Budgets, EquivalenceReport, GoldenSet, ModelFolder, compare
from ortrain.errors import ExecutionError, InputError
from tests.deploy import classifiers

QUICK: dict[str, Any] = {"latency_runs": 0, "memory": False}


def golden(**options: Any) -> GoldenSet:
    batches, labels = classifiers.batches()
    return GoldenSet(batches, labels, **options)


def compared(
    tmp_path: Path,
    after: onnx.ModelProto,
    examples: GoldenSet,
    budgets: Budgets | None = None,
    *,
    before: onnx.ModelProto | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> EquivalenceReport:
    old = classifiers.folder(tmp_path / "before", before, config=config)
    new = classifiers.folder(tmp_path / "after", after, name="model_quantized.onnx", config=config)
    return compare(old, new, examples, budgets, **{**QUICK, **options})


# --- what is measured ---------------------------------------------------------------------------


def test_a_model_is_equal_to_itself(tmp_path: Path) -> None:
    report = compared(
        tmp_path,
        classifiers.graph("classification"),
        golden(slices={"first": [0, 1]}),
        Budgets(
            max_abs_diff=0, max_metric_drop=0, max_class_drop=0, max_slice_drop=0, min_agreement=1
        ),
    )
    assert report.passed, report.reasons
    assert report.max_abs_diff == 0
    assert report.overall.agreement == 1
    assert report.overall.before == report.overall.after == {"accuracy": 1, "f1": 1}
    assert report.task == "classification"
    assert list(report.classes) == ["red", "green", "blue"]


def test_a_difference_is_the_one_that_is_there(tmp_path: Path) -> None:
    report = compared(
        tmp_path,
        classifiers.graph("classification", bias=[0, 0.25, 0]),
        golden(),
        Budgets(max_abs_diff=0.2),
    )
    found = report.outputs["logits"]
    assert found.largest == pytest.approx(0.25, rel=1e-6)
    assert found.mean == pytest.approx(0.25 / 3, rel=1e-6)
    assert found.elements == 30
    assert sum(found.histogram) == 30
    assert found.histogram[0] == 20  # of the two classes that are as they were
    assert not report.passed
    (reason,) = report.reasons
    assert reason.startswith("max_abs_diff=0.2: output logits differs by 0.25 in example ")


def test_a_class_that_is_lost_is_named_with_its_figures(tmp_path: Path) -> None:
    report = compared(
        tmp_path,
        classifiers.graph("classification", bias=[0, 0, -100]),
        golden(),
        Budgets(max_metric_drop=0.05, max_class_drop=0.05),
    )
    count = int((golden().labels == 2).sum())
    assert report.worst_class == "blue"
    assert report.classes["blue"].after["recall"] == 0
    assert report.classes["blue"].drop == 1
    assert report.changed == count
    assert report.overall.after["accuracy"] == 1 - count / 10
    metric, lost = report.reasons
    assert metric.startswith(f"max_metric_drop=0.05: accuracy goes from 1 to {1 - count / 10:.4g}")
    assert lost.startswith(f"max_class_drop=0.05: of the class blue ({count} examples) recall goes")
    assert "exclude the most sensitive nodes" in lost


def test_a_class_that_others_are_taken_for_is_seen_by_its_f1(tmp_path: Path) -> None:
    batches, _ = classifiers.batches(((30, 1),))
    batches[0]["input_ids"] = np.r_[np.zeros(28, np.int64), 1, 2][:, None]
    batches[0]["attention_mask"] = np.ones((30, 1), np.int64)
    examples = GoldenSet(batches, np.r_[np.zeros(28, np.int64), 1, 2])
    # One word of class 0 in 28 is now of class 1: its recall falls by 0.04, precision of 1 to half.
    changed = classifiers.weights()
    batches[0]["input_ids"][0] = 3
    changed["table"][3] = changed["table"][1]
    after = classifiers.graph("classification", changed)
    report = compared(tmp_path, after, examples, Budgets(max_class_drop=0.1))
    assert report.classes["red"].drop == pytest.approx(1 / 28)
    assert report.classes["green"].drop == pytest.approx(1 - 2 / 3)
    assert report.reasons[0].startswith("max_class_drop=0.1: of the class green (1 examples) f1 ")


def test_a_slice_that_falls_is_named_where_the_whole_stays(tmp_path: Path) -> None:
    examples = golden(slices={"blue": list(np.flatnonzero(golden().labels == 2)), "all": range(10)})
    after = classifiers.graph("classification", bias=[0, 0, -100])
    report = compared(tmp_path, after, examples, Budgets(max_slice_drop=0.5))
    assert report.worst_slice == "blue"
    assert report.reasons[0].startswith("max_slice_drop=0.5: of the slice blue (")
    assert report.slices["all"].count == 10


def test_without_labels_predictions_are_compared_with_each_other(tmp_path: Path) -> None:
    examples = GoldenSet(classifiers.batches()[0])
    after = classifiers.graph("classification", bias=[0, 0, -100])
    report = compared(tmp_path, after, examples, Budgets(min_agreement=0.99))
    count = int((golden().labels == 2).sum())
    assert report.overall.agreement == pytest.approx(1 - count / 10)
    assert report.overall.drop is None
    assert report.classes["blue"].agreement == 0
    assert "of the class blue 0.00%" in report.reasons[0]
    assert any("without labels" in note for note in report.notes)


@pytest.mark.parametrize("budget", ["max_metric_drop", "max_class_drop", "max_slice_drop"])
def test_a_budget_that_nothing_can_judge_is_refused(budget: str, tmp_path: Path) -> None:
    examples = GoldenSet(classifiers.batches()[0])
    with pytest.raises(InputError, match=f"budget {budget} cannot be judged: it needs"):
        compared(tmp_path, classifiers.graph("classification"), examples, Budgets(**{budget: 0.1}))


def test_features_have_differences_and_no_predictions(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"]}
    changed = classifiers.weights()
    changed["table"] = changed["table"] + np.float32(0.5)
    report = compared(
        tmp_path,
        classifiers.graph("features", changed),
        GoldenSet(classifiers.batches()[0], slices={"first": [0]}),
        before=classifiers.graph("features"),
        config=config,
    )
    assert report.task is None
    assert "nothing is measured of first: no predictions" in report.notes
    assert report.overall.agreement is None
    assert report.max_abs_diff == pytest.approx(0.5, rel=1e-6)
    with pytest.raises(InputError, match="min_agreement cannot be judged"):
        compared(
            tmp_path,
            classifiers.graph("features"),
            GoldenSet(classifiers.batches()[0]),
            Budgets(min_agreement=0.5),
            before=classifiers.graph("features"),
            config=config,
        )


def test_labels_without_predictions_are_refused(tmp_path: Path) -> None:
    features = classifiers.graph("features")
    with pytest.raises(InputError, match="predicts nothing that they could be compared with"):
        compared(tmp_path, features, golden(), before=features, config={})


def test_what_is_padding_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    batches = [
        {
            "input_ids": np.array([[1, 2, 15], [1, 15, 15]]),
            "attention_mask": np.array([[1, 1, 0], [1, 0, 0]]),
        }
    ]
    changed = classifiers.weights()
    changed["table"][15] += 7  # which stands at padded positions alone
    report = compared(
        tmp_path,
        classifiers.graph("features", changed),
        GoldenSet(batches),
        before=classifiers.graph("features"),
        config={},
    )
    assert report.max_abs_diff == 0
    assert report.outputs["last_hidden_state"].elements == 9
    assert any("9 elements at padded positions" in note for note in report.notes)


def test_classes_are_no_positions_where_there_are_as_many(tmp_path: Path) -> None:
    batches = [{"input_ids": np.array([[1, 2, 0]]), "attention_mask": np.array([[1, 0, 0]])}]
    after = classifiers.graph("classification", bias=[0, 0, 0.5])
    report = compared(tmp_path, after, GoldenSet(batches))
    assert report.max_abs_diff == pytest.approx(0.5)
    assert report.outputs["logits"].elements == 3


# --- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["before", "after", "padding"])
def test_what_is_not_finite_on_one_side_is_never_equal(
    value: float, side: str, tmp_path: Path
) -> None:
    broken = classifiers.weights()
    batches = [{"input_ids": np.array([[1, 2, 15]]), "attention_mask": np.array([[1, 1, 0]])}]
    broken["table"][15 if side == "padding" else 2, 0] = value
    models = [classifiers.graph("features"), classifiers.graph("features", broken)]
    if side == "before":
        models.reverse()
    report = compared(tmp_path, models[1], GoldenSet(batches), before=models[0], config={})
    assert not report.passed
    assert report.outputs["last_hidden_state"].new_nonfinite == 1
    assert report.max_abs_diff == np.inf
    assert "1 elements are NaN or infinite on one side alone" in report.reasons[0]
    json.dumps(report.to_dict(), allow_nan=False)


def test_what_is_not_finite_on_both_sides_is_equal_where_it_is_the_same(tmp_path: Path) -> None:
    def with_values(*values: float) -> onnx.ModelProto:
        table = classifiers.weights()
        table["table"][2] = values
        return classifiers.graph("features", table)

    batches = [{"input_ids": np.array([[2]]), "attention_mask": np.array([[1]])}]
    before = with_values(np.nan, np.inf, -np.inf)
    for values, count in (
        ((np.nan, np.inf, -np.inf), 0),
        ((np.nan, -np.inf, np.inf), 2),
        ((np.inf, np.nan, -np.inf), 2),
    ):
        report = compared(
            tmp_path, with_values(*values), GoldenSet(batches), before=before, config={}
        )
        assert report.outputs["last_hidden_state"].new_nonfinite == count
        assert report.passed is (count == 0)


def test_nan_in_a_prediction_does_not_pass_any_budget(tmp_path: Path) -> None:
    after = classifiers.graph("classification", bias=[np.nan] * 3)
    report = compared(tmp_path, after, golden(), Budgets(max_abs_diff=1e9, max_metric_drop=1e9))
    assert not report.passed


def test_two_models_that_give_nothing_but_nan_are_not_equivalent(tmp_path: Path) -> None:
    broken = classifiers.graph("classification", bias=[np.nan] * 3)
    with pytest.raises(InputError, match="nothing but NaN"):
        compared(tmp_path, broken, golden(), Budgets(min_agreement=1.0), before=broken)


def test_what_is_nan_in_both_models_is_counted_and_not_compared(tmp_path: Path) -> None:
    broken = classifiers.graph("classification", bias=[0, np.nan, 0])
    report = compared(tmp_path, broken, golden(), before=broken)
    found = report.outputs["logits"]
    assert f"{found.elements // 2} elements of logits are NaN in both models" in "".join(
        report.notes
    )


# --- what is refused ----------------------------------------------------------------------------


def test_a_wrong_name_of_an_input_is_told_with_the_right_ones(tmp_path: Path) -> None:
    batches = [
        {"input_idz": np.ones((1, 2), np.int64), "attention_mask": np.ones((1, 2), np.int64)}
    ]
    with pytest.raises(InputError, match=r"no input 'input_ids'") as raised:
        compared(tmp_path, classifiers.graph("classification"), GoldenSet(batches))
    assert (
        raised.value.help == "name the arrays as the inputs of the model: input_ids, attention_mask"
    )


def test_arrays_of_another_kind_are_told_and_other_widths_are_not(tmp_path: Path) -> None:
    narrow = [{k: v.astype(np.int32) for k, v in b.items()} for b in classifiers.batches()[0]]
    assert compared(tmp_path, classifiers.graph("classification"), GoldenSet(narrow)).passed
    broken = [{k: v.astype(np.float32) for k, v in b.items()} for b in narrow]
    with pytest.raises(InputError, match="takes int64, and the golden set has float32"):
        compared(tmp_path, classifiers.graph("classification"), GoldenSet(broken))


def test_outputs_that_vanish_or_appear_are_told(tmp_path: Path) -> None:
    renamed = classifiers.graph("classification")
    renamed.graph.node[-1].output[0] = renamed.graph.output[0].name = "scores"
    with pytest.raises(InputError, match="logits vanished and scores appeared"):
        compared(tmp_path, renamed, golden())


def test_another_number_of_classes_is_told(tmp_path: Path) -> None:
    other = classifiers.graph("classification", classifiers.weights(classes=4))
    with pytest.raises(InputError, match="tell 3 classes apart before and 4 after"):
        compared(tmp_path, other, golden())


def test_a_label_that_is_no_class_is_told_with_its_example(tmp_path: Path) -> None:
    batches, labels = classifiers.batches()
    labels[6] = 3
    with pytest.raises(InputError, match="example 6 has the label 3, which is no class") as raised:
        compared(tmp_path, classifiers.graph("classification"), GoldenSet(batches, labels))
    assert raised.value.because == "it has 3 classes, 0 to 2"


def test_files_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    old = classifiers.folder(tmp_path / "before")
    classifiers.folder(old, name="other.onnx")
    new = classifiers.folder(tmp_path / "after", name="model_int8.onnx")
    with pytest.raises(InputError, match=r"no file for other\.onnx"):
        compare(old, new, golden(), **QUICK)
    one = ModelFolder.open(old, ["model.onnx"])
    assert compare(one, new, golden(), **QUICK).passed
    classifiers.folder(new, name="model_int4.onnx")
    with pytest.raises(InputError, match=r"two files for model\.onnx"):
        compare(old, new, golden(), **QUICK)
    assert compare(one, new / "model_int4.onnx", golden(), **QUICK).passed


def test_a_model_that_onnxruntime_cannot_load_is_told(tmp_path: Path) -> None:
    broken = classifiers.graph("classification")
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ExecutionError, match="cannot load"):
        compared(tmp_path, broken, golden())


def test_sizes_that_a_model_does_not_take_are_told_with_the_batch(tmp_path: Path) -> None:
    fixed = classifiers.graph("classification")
    for value in fixed.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 4
    with pytest.raises(ExecutionError, match="cannot run") as raised:
        compared(tmp_path, fixed, golden(), before=fixed)
    assert raised.value.where == "batch 2: input_ids [2, 7], attention_mask [2, 7]"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"provider": "NoSuchProvider"}, ValueError, "this onnxruntime has"),
        ({"threads": 0}, ValueError, "threads=0: expected a whole number from 1 up"),
        ({"threads": "two"}, TypeError, "threads='two'"),
        ({"latency_runs": -1}, ValueError, "latency_runs=-1"),
        ({"memory": "no"}, TypeError, "memory='no'"),
        ({"thresholds": [1.5]}, ValueError, "expected probabilities between 0 and 1"),
    ],
)
def test_a_wrong_option_is_told_by_name(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        compared(tmp_path, classifiers.graph("classification"), golden(), **options)
    with pytest.raises(TypeError, match="golden="):
        compare(tmp_path, tmp_path, [{}])  # type: ignore[arg-type]


# --- cost ---------------------------------------------------------------------------------------


def test_size_operators_latency_and_memory_are_measured(tmp_path: Path) -> None:
    after = classifiers.graph("classification")
    after.graph.node.add(op_type="Identity", input=["mean"], output=["unused"])
    report = compared(tmp_path, after, golden(), latency_runs=3, memory=True)
    assert report.before.files == {
        "model.onnx": (tmp_path / "before" / "model.onnx").stat().st_size
    }
    assert report.fused == {"Identity": 1}
    assert report.after.nodes == report.before.nodes + 1
    assert set(report.after.latency) == set(report.before.latency) == {"1 x 7", "2 x 7"}
    for median, high in report.after.latency.values():
        assert 0 < median <= high
    assert report.before.peak_memory is not None, report.notes
    assert report.before.peak_memory >= 0
    assert {"onnxruntime", "processor", "provider", "threads"} <= set(report.environment)


def test_the_models_take_turns_on_the_clock(tmp_path: Path) -> None:
    from ortrain.deploy.equivalence.sessions import opened
    from ortrain.deploy.equivalence.speed import timed

    old, new = (ModelFolder.open(classifiers.folder(tmp_path / n)) for n in ("a", "b"))
    sides = opened(old, new, "CPUExecutionProvider", 1)
    ran: list[int] = []
    for number, side in enumerate(sides):
        run = side.files[0].run
        side.files[0].run = lambda *a, n=number, r=run: (ran.append(n), r(*a))[1]  # type: ignore[method-assign]
    ticks = iter(range(10_000))
    before, after, notes = timed(
        *sides, classifiers.batches()[0], 4, clock=lambda: next(ticks) / 1000
    )
    assert ran == [0, 1, 1, 0] * 6
    for side in (before, after):
        assert side == {name: pytest.approx((1.0, 1.0)) for name in ("1 x 7", "2 x 7")}
    assert notes == []


def test_a_process_that_cannot_be_started_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ortrain.deploy.equivalence import memory

    monkeypatch.setattr(memory.sys, "executable", str(tmp_path / "nothing"))
    report = compared(tmp_path, classifiers.graph("classification"), golden(), memory=True)
    assert report.after.peak_memory is None
    assert any(note.startswith("the peak of memory was not measured") for note in report.notes)
