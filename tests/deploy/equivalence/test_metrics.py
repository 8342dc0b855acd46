"""Metrics against scikit-learn and numpy, for each task, over all and by class."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sklearn

from ortrain.deploy.equivalence import groups, tasks
from ortrain.deploy.equivalence.metrics import fall, measured, measured_of_class
from ortrain.deploy.equivalence.predictions import Predictions, Rows
from ortrain.errors import InputError

Array = np.ndarray


def rows_of(
    task: str, before: Any, after: Any = None, labels: Any = None, mask: Any = None, **names: Any
) -> Rows:
    """Of one batch of logits."""
    predictions = Predictions(task, None if labels is None else np.asarray(labels))
    outputs = [
        {"logits": np.asarray(x, np.float32)} if not isinstance(x, dict) else x
        for x in (before, before if after is None else after)
    ]
    predictions.add(outputs[0], outputs[1], mask, 0)
    return predictions.rows()


def all_of(rows: Rows) -> Array:
    return np.ones(len(rows.label), np.bool_)


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    noise = np.random.default_rng(0)
    logits, labels = noise.standard_normal((60, 4)), noise.integers(0, 3, 60)
    rows = rows_of("classification", logits, labels=labels)
    said, found = logits.argmax(1), measured("classification", rows, rows.before, all_of(rows))
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(labels, said))
    assert found["f1"] == pytest.approx(sklearn.f1_score(labels, said, average="macro"))
    expected = sklearn.precision_recall_fscore_support(
        labels, said, labels=range(4), zero_division=0
    )
    for number in range(3):
        one = measured_of_class("classification", rows, rows.before, number)
        for name, values in zip(("precision", "recall", "f1"), expected, strict=False):
            assert one[name] == pytest.approx(values[number])
    half = np.arange(60) < 30
    assert measured("classification", rows, rows.before, half)["accuracy"] == pytest.approx(
        np.mean(said[:30] == labels[:30])
    )


def test_metrics_of_several_labels_are_those_of_scikit_learn() -> None:
    noise = np.random.default_rng(0)
    logits, labels = noise.standard_normal((40, 3)), noise.integers(0, 2, (40, 3))
    rows = rows_of("multi-label", logits, labels=labels)
    said = logits > 0
    found = measured("multi-label", rows, rows.before, all_of(rows))
    assert found["f1"] == pytest.approx(sklearn.f1_score(labels, said, average="micro"))
    assert found["accuracy"] == pytest.approx(np.mean(labels == said))
    for number in range(3):
        one = measured_of_class("multi-label", rows, rows.before, number)
        assert one["f1"] == pytest.approx(sklearn.f1_score(labels[:, number], said[:, number]))


def test_metrics_of_numbers_are_those_of_numpy() -> None:
    noise = np.random.default_rng(0)
    labels = noise.standard_normal(30)
    values = labels + noise.standard_normal(30) * 0.1
    rows = rows_of("regression", values[:, None], labels=labels)
    found = measured("regression", rows, rows.before, all_of(rows))
    assert found["mse"] == pytest.approx(np.mean((values - labels) ** 2), rel=1e-5)
    assert found["correlation"] == pytest.approx(np.corrcoef(values, labels)[0, 1], rel=1e-5)


def test_a_correlation_that_is_lost_is_an_infinite_fall() -> None:
    rows = rows_of("regression", [[1.0], [2.0]], [[1.5], [1.5]], [1.0, 2.0])
    group = groups.overall("regression", rows, {}, tasks.deciding("regression", None))
    assert math.isnan(group.after["correlation"])
    assert group.drop == math.inf
    assert group.agreement is None


def test_a_scale_that_is_lost_is_seen_though_the_correlation_stays() -> None:
    labels = np.arange(4.0)
    rows = rows_of("regression", labels[:, None], labels[:, None] * 3, labels)
    group = groups.overall("regression", rows, {}, tasks.deciding("regression", None))
    assert group.after["correlation"] == pytest.approx(1)
    assert group.drop == pytest.approx(np.mean((2 * labels) ** 2))


def test_tokens_without_a_label_do_not_count() -> None:
    logits = np.zeros((2, 3, 2), np.float32)
    logits[..., 1] = 1
    mask = np.array([[True, True, True], [True, False, False]])
    rows = rows_of(
        "token-classification", logits, labels=[[1, 0, -100], [1, -100, -100]], mask=mask
    )
    assert rows.example.tolist() == [0, 0, 1]
    found = measured("token-classification", rows, rows.before, all_of(rows))
    assert found["accuracy"] == pytest.approx(2 / 3)
    unlabelled = rows_of("token-classification", logits, mask=mask)
    assert unlabelled.example.tolist() == [0, 0, 0, 1]


def test_each_token_of_a_text_predicts_the_next_one() -> None:
    logits = np.zeros((1, 3, 4), np.float32)
    logits[0, 0, 2] = logits[0, 1, 3] = 5  # after the first token 2, after the second 3
    rows = rows_of("causal-lm", logits, labels=[[1, 2, 0]])
    assert rows.label.tolist() == [2, 0]
    found = measured("causal-lm", rows, rows.before, all_of(rows))
    assert found["accuracy"] == 0.5
    log = math.log(math.exp(5) + 3)
    assert found["loss"] == pytest.approx((log - 5 + log) / 2)
    masked = rows_of("fill-mask", logits, labels=[[-100, 3, -100]])
    assert masked.label.tolist() == masked.before.value.tolist() == [3]


def test_answers_are_compared_by_their_positions() -> None:
    start, end = np.eye(6, dtype=np.float32)[[1, 2]], np.eye(6, dtype=np.float32)[[3, 2]]
    outputs = {"start_logits": start, "end_logits": end}
    rows = rows_of("question-answering", outputs, labels=[[1, 3], [2, 4]])
    found = measured("question-answering", rows, rows.before, all_of(rows))
    assert found["exact"] == 0.5
    assert found["f1"] == pytest.approx((1 + 2 / 4) / 2)
    padded = np.arange(6) < np.array([[2], [6]])
    masked = rows_of("question-answering", outputs, labels=[[1, 1], [2, 2]], mask=padded)
    assert masked.same.all()
    with pytest.raises(InputError, match="example 1 has its answer at position 6"):
        rows_of("question-answering", outputs, labels=[[1, 3], [2, 6]])


def test_falling_metrics_are_worse_where_they_rise() -> None:
    before, after = {"mse": 1.0, "accuracy": 0.9}, {"mse": 1.5, "accuracy": 0.8}
    assert fall(before, after, ["mse"]) == pytest.approx(0.5)
    assert fall(before, after, ["accuracy"]) == pytest.approx(0.1)
    assert fall(before, after, ["accuracy", "mse"]) == pytest.approx(0.5)
    assert fall(after, before, ["accuracy", "mse"]) == pytest.approx(-0.1)
    assert fall({"f1": math.nan}, {"f1": 0.5}, ["f1"]) == 0
    assert fall({"f1": 0.5}, {"f1": math.nan}, ["f1"]) == math.inf


# --- thresholds ---------------------------------------------------------------------------------


def test_decisions_that_cross_a_threshold_are_counted() -> None:
    def logits(*probabilities: float) -> list[list[float]]:
        return [[0.0, math.log(p / (1 - p))] for p in probabilities]

    rows = rows_of("classification", logits(0.4, 0.6, 0.95, 0.2), logits(0.6, 0.4, 0.85, 0.1))
    half, high = groups.flips("classification", rows, [0.5, 0.9])
    assert (half.up, half.down, half.decisions) == (1, 1, 4)
    assert (high.up, high.down) == (0, 1)
    several = rows_of("multi-label", [[-1.0, 1.0]], [[1.0, 1.0]])
    (flip,) = groups.flips("multi-label", several, [0.5])
    assert (flip.up, flip.down, flip.decisions) == (1, 0, 2)


def test_probabilities_are_no_logits() -> None:
    before = {"probabilities": np.array([[0.3, 0.7], [0.8, 0.2]], np.float32)}
    rows = rows_of("classification", before)
    assert rows.before.probability == pytest.approx([0.7, 0.2])
    named = rows_of("classification", {"logits": before["probabilities"]})
    assert named.before.probability[0] == pytest.approx(1 / (1 + math.exp(-0.4)), rel=1e-6)


def test_the_surest_changes_come_first() -> None:
    before = [[0, 1.0, 0], [0, 9.0, 0], [5.0, 0, 0]]
    after = [[2.0, 1, 0], [0, 0, 1.0], [5.0, 0, 0]]
    rows = rows_of("classification", before, after, [1, 1, 0])
    count, changes = groups.changes("classification", rows, {0: "red", 1: "green"})
    assert count == 2
    assert [(c.example, c.label, c.before, c.after) for c in changes] == [
        (1, "green", "green", "2"),
        (0, "green", "green", "red"),
    ]


# --- which task it is ---------------------------------------------------------------------------

FLAT, RANK_3 = np.zeros((2, 3), np.float32), np.zeros((2, 4, 3), np.float32)


@pytest.mark.parametrize(
    ("config", "outputs", "labels", "expected"),
    [
        ("BertForSequenceClassification", {"logits": FLAT}, None, "classification"),
        ("BertForSequenceClassification", {"logits": FLAT}, np.zeros((2, 3)), "multi-label"),
        ("BertForSequenceClassification", {"logits": FLAT[:, :1]}, np.zeros(2), "regression"),
        ("BertForTokenClassification", {"logits": RANK_3}, None, "token-classification"),
        ("GPT2LMHeadModel", {"logits": RANK_3}, None, "causal-lm"),
        ("LlamaForCausalLM", {"logits": RANK_3, "present.0.key": RANK_3}, None, "causal-lm"),
        ("BertForMaskedLM", {"logits": RANK_3}, None, "fill-mask"),
        ("T5ForConditionalGeneration", {"decoder_model/logits": RANK_3}, None, "seq2seq-lm"),
        ("ViTForImageClassification", {"logits": FLAT}, None, "classification"),
        ("BertForSequenceClassification", {"last_hidden_state": RANK_3, "b": FLAT}, None, None),
        ("", {"logits": FLAT}, None, "classification"),
        ("", {"logits": FLAT}, np.eye(3)[:2], "multi-label"),
        ("", {"scores": FLAT}, np.zeros(2, int), "classification"),
        ("", {"scores": FLAT}, None, None),
        ("", {"logits": RANK_3}, None, "token-classification"),
        ("", {"start_logits": FLAT, "end_logits": FLAT}, None, "question-answering"),
        ("", {"y": FLAT[:, 0]}, np.zeros(2), "regression"),
        ("", {"last_hidden_state": RANK_3, "pooled": FLAT}, None, None),
    ],
)
def test_the_task_follows_from_what_is_known(
    config: str, outputs: dict[str, Array], labels: Array | None, expected: str | None
) -> None:
    said = {"architectures": [config]} if config else {}
    assert tasks.task_of(None, said, outputs, labels) == expected


def test_a_task_whose_outputs_are_not_there_is_told() -> None:
    with pytest.raises(InputError, match="the model has no output for token-classification"):
        tasks.task_of("token-classification", {}, {"logits": FLAT}, None)


@pytest.mark.parametrize(
    ("task", "logits", "labels", "message"),
    [
        ("classification", FLAT, [0.5, 1.0], r"shape \[2\] and type float64 do not fit"),
        ("classification", FLAT, [[0, 1], [1, 0]], "do not fit the model"),
        ("classification", FLAT, [0, -1], "example 1 has the label -1, which is no class"),
        ("multi-label", FLAT, [[0, 1], [1, 0]], "do not fit the model"),
        (
            "multi-label",
            FLAT,
            [[0, 1, 2], [1, 0, 0]],
            "example 0 has the label 2, which is no class",
        ),
        ("regression", FLAT[:, :1], [[0.0, 1.0], [1.0, 1.0]], "do not fit the model"),
        ("regression", FLAT[:, :1], [0.0, np.inf], "example 1 has a label that is no finite"),
        ("token-classification", RANK_3, [0, 1], "do not fit the model"),
        ("token-classification", RANK_3, [[0] * 5] * 2, "example 0 has labels behind its end"),
        ("token-classification", RANK_3, [[0, 9]] * 2, "example 0 has the label 9"),
    ],
)
def test_labels_that_do_not_fit_are_told(
    task: str, logits: Array, labels: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        rows_of(task, logits, labels=labels)
