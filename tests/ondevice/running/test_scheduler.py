"""The linear schedule: what each update gets as its learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortrain.ondevice import CheckpointState, LinearLRScheduler, TrainStep
from tests.ondevice.artifacts import batch
from tests.ondevice.eager import assert_same, fused, load


def test_the_rate_rises_linearly_and_falls_linearly_to_zero(adamw: Path) -> None:
    _, _, optimizer = load(adamw)
    scheduler = LinearLRScheduler(optimizer, warmup_step_count=2, total_step_count=10, initial_lr=1)
    rates = []
    for _ in range(12):
        rates.append(optimizer.get_learning_rate())
        scheduler.step()
    assert rates == [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0]


@pytest.mark.parametrize(
    ("warmup", "total", "rates"),
    [
        (0, 4, [2, 1.5, 1, 0.5, 0]),
        (3, 3, [0, 2 / 3, 4 / 3, 0, 0]),
        (0, 0, [0, 0, 0, 0, 0]),
    ],
)
def test_the_warm_up_may_be_nothing_or_all(
    adamw: Path, warmup: int, total: int, rates: list[float]
) -> None:
    _, step = fused(adamw)
    scheduler = LinearLRScheduler(step, warmup, total, 2.0)
    found = []
    for _ in rates:
        found.append(step.get_learning_rate())
        scheduler.step()
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 2, 1.0), "a warm-up of 3 steps does not fit into 2 steps"),
        ((-1, 2, 1.0), "a warm-up of -1 steps"),
        ((1, 2, -0.5), "initial_lr is a finite number from 0 up, not -0.5"),
        ((1, 2, float("nan")), "initial_lr is a finite number"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(
    adamw: Path, arguments: tuple[int, int, float], message: str
) -> None:
    _, _, optimizer = load(adamw)
    with pytest.raises(ValueError, match=message):
        LinearLRScheduler(optimizer, *arguments)
    assert optimizer.get_learning_rate() == 0.001


def test_a_resumed_schedule_goes_on(adamw: Path, tmp_path: Path) -> None:
    def train(optimizer: TrainStep, numbers: range) -> None:
        scheduler = LinearLRScheduler(optimizer, 2, 6, 0.1)
        for number in numbers:
            optimizer(*batch(4, number))
            scheduler.step()

    straight, step = fused(adamw)
    train(step, range(5))
    state, step = fused(adamw)
    train(step, range(3))
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    resumed = CheckpointState.load_checkpoint(tmp_path / "saved")
    train(TrainStep(adamw / "train_step_model.onnx", resumed), range(3, 5))
    assert_same(resumed, straight)


def test_the_first_update_of_a_warm_up_moves_nothing(sgd: Path) -> None:
    state, module, optimizer = load(sgd)
    LinearLRScheduler(optimizer, 2, 6, 0.1)
    before = state.parameters["fc2.bias"].data.copy()
    module(*batch(4))
    optimizer.step()
    assert (state.parameters["fc2.bias"].data == before).all()
