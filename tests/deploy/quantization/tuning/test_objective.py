"""The loss that a model is trained on: of labels, or of what the original answers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from ortrain.deploy.quantization import FineTuning
from ortrain.deploy.quantization.tuning.objective import Objective
from ortrain.errors import InputError
from ortrain.program import Role, set_role
from tests.programs import program, run

LOGITS = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
ORIGINAL = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)


def loss(objective: Objective, said: np.ndarray, targets: dict[str, np.ndarray], **more) -> float:
    shapes = {"x": list(said.shape)}
    subject = program(lambda op, x: {"logits": op.Identity(x)}, shapes)
    for name, array in more.items():
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=kind)
        subject.graph.inputs.append(set_role(value, Role.USER_INPUT))
    objective.attach(subject)
    return float(run(subject, {"x": said, **targets, **more})["loss"])


def test_labels_of_classes_are_learnt_by_cross_entropy() -> None:
    labels = np.array([0, 2, 1, 1])
    found = Objective.of(FineTuning(loss="labels"), "classification", {"logits": ORIGINAL}, labels)
    targets = found.targets({"logits": ORIGINAL}, labels)
    wanted = F.cross_entropy(torch.tensor(LOGITS), torch.tensor(labels))
    assert found.kind == "cross entropy"
    assert loss(found, LOGITS, targets) == pytest.approx(float(wanted), rel=1e-5)


def test_the_original_is_learnt_beside_labels() -> None:
    labels = np.array([0, 2, 1, 1])
    outputs = {"logits": ORIGINAL}
    losses = []
    for settings in (
        FineTuning(loss="labels"),
        FineTuning(loss="distillation"),
        FineTuning(distillation=0.25),
        FineTuning(distillation=0),
    ):
        found = Objective.of(settings, "classification", outputs, labels)
        losses.append(loss(found, LOGITS, found.targets(outputs, labels)))
    assert losses[0] != pytest.approx(losses[1], rel=0.1)
    assert losses[2] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1], rel=1e-5)
    assert losses[3] == losses[0]
    assert Objective.of(FineTuning(), "classification", outputs, labels).told == (
        "0.5 cross entropy + 0.5 divergence"
    )


def test_labels_of_tokens_may_be_narrower_than_the_logits() -> None:
    logits = np.random.default_rng(2).standard_normal((2, 4, 3)).astype(np.float32)
    labels = np.array([[0, 1, -100], [2, -100, -100]])
    found = Objective.of(
        FineTuning(loss="labels"), "token-classification", {"logits": logits}, labels
    )
    targets = found.targets({"logits": logits}, labels)
    wide = torch.full((2, 4), -100)
    wide[:, :3] = torch.tensor(labels)
    wanted = F.cross_entropy(torch.tensor(logits).transpose(1, 2), wide)
    assert loss(found, logits, targets) == pytest.approx(float(wanted), rel=1e-5)


def test_without_labels_the_divergence_of_softened_classes_is_learnt() -> None:
    settings = FineTuning(temperature=3.0)
    found = Objective.of(settings, "classification", {"logits": ORIGINAL}, None)
    targets = found.targets({"logits": ORIGINAL}, None)
    said, wanted = (torch.tensor(each) / 3 for each in (LOGITS, ORIGINAL))
    divergence = 9 * F.kl_div(said.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
    assert found.kind == "divergence"
    assert loss(found, LOGITS, targets) == pytest.approx(float(divergence), rel=1e-4)
    assert loss(found, ORIGINAL, targets) == pytest.approx(0, abs=1e-6)


def test_features_are_learnt_by_the_mean_square_without_padding() -> None:
    features = np.random.default_rng(3).standard_normal((2, 3, 5)).astype(np.float32)
    other = np.random.default_rng(4).standard_normal((2, 3, 5)).astype(np.float32)
    found = Objective.of(FineTuning(), None, {"logits": features}, None)
    assert found.kind == "mean square"
    targets = found.targets({"logits": features}, None)
    whole = loss(found, other, targets)
    assert whole == pytest.approx(float(((other - features) ** 2).mean()), rel=1e-5)
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    kept = loss(found, other, targets, attention_mask=mask)
    apart = ((other - features) ** 2).mean(-1)
    assert kept == pytest.approx(float(apart[mask != 0].mean()), rel=1e-5)


def test_numbers_are_learnt_by_the_mean_square() -> None:
    labels = np.array([1.0, 2.0, 3.0, 4.0])
    outputs = {"logits": ORIGINAL[:, :1]}
    found = Objective.of(FineTuning(loss="labels"), "regression", outputs, labels)
    targets = found.targets(outputs, labels)
    wanted = float(((LOGITS[:, 0] - labels) ** 2).mean())
    assert loss(found, LOGITS[:, :1], targets) == pytest.approx(wanted, rel=1e-5)


def test_the_original_is_learnt_in_spite_of_labels_where_that_is_asked_for() -> None:
    settings = FineTuning(loss="distillation")
    found = Objective.of(settings, "classification", {"logits": ORIGINAL}, np.zeros(4, np.int64))
    assert found.kind == "divergence"


def test_labels_that_are_not_there_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="have none that there is a loss for"):
        Objective.of(FineTuning(loss="labels"), "classification", {"logits": ORIGINAL}, None)
    wide = {"logits": ORIGINAL[None]}
    with pytest.raises(InputError, match="the task is causal-lm"):
        Objective.of(FineTuning(loss="labels"), "causal-lm", wide, np.zeros((1, 4)))


@pytest.mark.parametrize("wrong", [3, -1, -100])
def test_a_label_that_is_no_class_is_told(wrong: int) -> None:
    labels = np.array([0, 1, wrong, 2])
    found = Objective.of(FineTuning(), "classification", {"logits": ORIGINAL}, labels)
    with pytest.raises(InputError, match=f"row 2 .* has the label {wrong}, which is no class"):
        found.expect(labels, {"logits": ORIGINAL})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps=0: expected a whole number from 1 up"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: expected a finite number above 0"),
        ({"distillation": 1.5}, "distillation=1.5: expected a share, 0 to 1"),
        ({"ranges": "open"}, "ranges='open': expected one of learnt, fixed"),
        ({"range_learning_rate": 0}, "range_learning_rate=0: expected a finite number above 0"),
        ({"loss": "both"}, "loss='both': expected one of auto, labels, distillation"),
    ],
)
def test_settings_out_of_their_range_are_told(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FineTuning(**given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="steps='a'"):
        FineTuning(steps="a")  # type: ignore[arg-type]
