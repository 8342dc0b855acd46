"""Losses on a graph are torch's, in value and gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortrain.autodiff import differentiate
from ortrain.errors import ExecutionError, GraphError
from ortrain.ondevice import losses
from ortrain.program import Program, Role, set_role
from ortrain.runtime.onnxruntime.executor import OnnxRuntimeExecutor
from tests.programs import program, run

WEIGHT = np.array([1.0, 0.5, 2.0], np.float32)


def compared(loss: losses.Loss, reference: Any, x: np.ndarray, target: np.ndarray) -> None:
    """Checks value and gradient against torch's."""
    subject: Program = program(lambda op, x: loss(op, op.Identity(x)), {"x": x.shape})
    (output,) = subject.graph.outputs
    name = subject.graph.inputs[-1].name
    set_role(output, Role.LOSS)
    trained = differentiate(subject, ["x"], ["y"])
    wanted = torch.tensor(x, requires_grad=True)
    value = reference(wanted, torch.tensor(target))
    seed = torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape)
    value.backward(seed)
    feeds = {"x": x, name: target, "y.gradient": seed.numpy()}
    found = run(trained, feeds)
    np.testing.assert_allclose(found["y"], value.detach(), rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(found["x.gradient"], wanted.grad, rtol=2e-6, atol=1e-7)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
@pytest.mark.parametrize("name", ["MSELoss", "L1Loss", "BCEWithLogitsLoss"])
def test_a_loss_of_each_element(name: str, reduction: str) -> None:
    target = np.random.default_rng(4).uniform(size=(4, 3)).astype(np.float32)
    reference = getattr(nn, name)(reduction=reduction)
    compared(getattr(losses, name)(reduction=reduction), reference, floats(4, 3), target)


def test_binary_cross_entropy_of_logits_of_any_size() -> None:
    x = np.array([-1000, -100, -18, -1, 0, 1, 18, 100, 1000] * 2, np.float32)
    target = np.repeat(np.array([0, 1], np.float32), 9)
    compared(losses.BCEWithLogitsLoss("none"), nn.BCEWithLogitsLoss(reduction="none"), x, target)


def test_binary_cross_entropy_with_weights() -> None:
    target = np.random.default_rng(4).integers(0, 2, (4, 3)).astype(np.float32)
    weights = {"weight": WEIGHT, "pos_weight": WEIGHT[::-1].copy()}
    reference = nn.BCEWithLogitsLoss(**{key: torch.tensor(w) for key, w in weights.items()})
    compared(losses.BCEWithLogitsLoss(**weights), reference, floats(4, 3), target)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_cross_entropy_of_rows_sequences_and_images(
    shape: tuple[int, ...], reduction: str, weight: np.ndarray | None
) -> None:
    labels = np.random.default_rng(4).integers(0, 3, (shape[0], *shape[2:]))
    of_torch = None if weight is None else torch.tensor(weight)
    reference = nn.CrossEntropyLoss(of_torch, reduction=reduction)
    compared(losses.CrossEntropyLoss(weight, reduction), reference, floats(*shape), labels)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("ignored", [None, -100, 1, -1])
def test_labels_to_ignore_take_no_part(ignored: int | None, weight: np.ndarray | None) -> None:
    label = -100 if ignored is None else ignored
    of_torch = None if weight is None else torch.tensor(weight)
    reference = nn.CrossEntropyLoss(of_torch, ignore_index=label)
    loss = losses.CrossEntropyLoss(weight, ignore_index=ignored)
    compared(loss, reference, floats(4, 3), np.array([0, label, 2, label]))
    compared(loss, reference, floats(2, 3), np.array([label, label]))  # the mean of none is NaN


def test_torchs_own_label_is_ignored_by_default() -> None:
    compared(losses.CrossEntropyLoss(), nn.CrossEntropyLoss(), floats(3, 3), np.array([0, -100, 2]))


@pytest.mark.parametrize("label", [-1, -3, 3, -101])
def test_a_label_that_is_no_class_is_an_error(label: int) -> None:
    subject = program(lambda op, x: losses.CrossEntropyLoss()(op, op.Identity(x)), {"x": (2, 3)})
    executor = OnnxRuntimeExecutor()
    compiled = executor.compile(executor.lower(subject))
    with pytest.raises(ExecutionError, match=r"(?i)out of .*bounds|within bounds|out of range"):
        compiled.run([floats(2, 3), np.array([0, label])])


def test_an_unknown_reduction_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="reduction='average': expected one of mean, sum, none"):
        losses.MSELoss("average")


def test_scores_of_one_axis_are_refused() -> None:
    with pytest.raises(GraphError, match=r"needs scores .* has 1 axes"):
        program(lambda op, x: losses.CrossEntropyLoss()(op, x), {"x": (4,)})


def test_a_target_of_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(GraphError, match="has an input 'target' already"):
        program(lambda op, target: losses.MSELoss()(op, target), {"target": (4,)})
