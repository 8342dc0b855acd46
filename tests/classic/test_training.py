"""Training by the names of 2020 is the training that plain PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ortrain.classic import ORTTrainer, first, optim
from ortrain.errors import InputError
from tests.classic import models

NAMES = ["AdamOptimizer", "LambOptimizer", "SGDOptimizer"]
# Of weights of size 1 after 50 updates; measured are up to 5e-7 and 3e-16.
CLOSE = {torch.float32: 5e-6, torch.float64: 1e-13}


def expect_equal(ours: nn.Module, plain: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for name, parameter in plain.named_parameters():
        other = dict(ours.named_parameters())[name]
        torch.testing.assert_close(other, parameter, rtol=0, atol=CLOSE[dtype], msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_200_steps_of_the_second_generation_are_plain_pytorchs(
    name: str, dtype: torch.dtype
) -> None:
    model, plain = (models.classifier(dtype=dtype) for _ in range(2))
    data = list(models.batches(200, dtype=dtype))
    schedule = optim.lr_scheduler.LinearWarmupLRScheduler(50, 0.1)
    trainer = models.second(
        model,
        models.config_of(name, model),
        batch={"gradient_accumulation_steps": 4},
        lr_scheduler=schedule,
    )
    losses = [trainer.train_step(x, y)[0].item() for x, y in data]
    expected = models.train_plain(
        plain,
        models.plain_optimizer(name, plain),
        data,
        4,
        lambda t: models.RATE * (t / 5 if t < 5 else (50 - t) / 45),
        clip=None if name == "SGDOptimizer" else 1.0,
    )
    assert losses == pytest.approx(expected, abs=10 * CLOSE[dtype])
    assert expected[-1] < 0.9 * expected[0]
    expect_equal(model, plain, dtype)
    assert trainer._train_step_info.optimization_step == 50
    assert trainer._train_step_info.step == 200


@pytest.mark.parametrize("name", NAMES)
def test_200_steps_of_the_first_generation_are_plain_pytorchs(name: str) -> None:
    model, plain = models.classifier(), models.classifier()
    data = list(models.batches(200))

    def attributes(weight: str) -> dict[str, Any]:
        return {"lambda": 0.01 if models.decays(weight) else 0.0} if name[:3] != "SGD" else {}

    trainer = models.of_first(model, name, attributes, gradient_accumulation_steps=4)
    losses = []
    for i, (x, y) in enumerate(data):
        rate = torch.tensor([0.01 + 1e-4 * (i // 4)])
        losses.append(trainer(x, y, rate)[0].item())
    expected = models.train_plain(
        plain,
        models.plain_optimizer(name, plain),
        data,
        4,
        lambda t: 0.01 + 1e-4 * t,
        clip=None if name == "SGDOptimizer" else 1.0,
    )
    assert losses == pytest.approx(expected, abs=10 * CLOSE[torch.float32])
    expect_equal(model, plain)
    assert trainer.global_step_ == 50


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [True, False])
def test_gradients_are_averaged_and_clipped_by_the_norm_of_them_all(
    accumulation: int, clip: bool
) -> None:
    model, plain = models.classifier(), models.classifier()
    data = [(10 * x, y) for x, y in models.batches(6)]
    trainer = models.second(
        model,
        optim.SGDConfig(lr=0.1) if not clip else optim.AdamConfig(lr=0.1, max_norm_clip=0.3),
        batch={"gradient_accumulation_steps": accumulation},
        utils={"grad_norm_clip": clip},
    )
    for x, y in data:
        trainer.train_step(x, y)
    kind: Any = torch.optim.AdamW if clip else torch.optim.SGD
    more = {"weight_decay": 0.0} if clip else {}
    optimizer = kind(plain.parameters(), lr=0.1, **more)
    models.train_plain(plain, optimizer, data, accumulation, lambda _: 0.1, 0.3 if clip else None)
    expect_equal(model, plain)


def test_adam_that_decays_afterwards_is_that_of_transformers() -> None:
    model, plain = models.classifier(), models.classifier()
    mode = optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    config = optim.AdamConfig(lr=0.05, lambda_coef=0.1, weight_decay_mode=mode, epsilon=1e-3)
    trainer = models.second(model, config, utils={"grad_norm_clip": False})
    moments: dict[str, Any] = {}
    for t, (x, y) in enumerate(models.batches(5), 1):
        trainer.train_step(x, y)
        nn.functional.cross_entropy(plain(x), y).backward()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                assert p.grad is not None
                m, v = moments.get(name, (0, 0))
                m, v = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2
                moments[name] = m, v
                length = 0.05 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
                p -= length * m / (v.sqrt() + 1e-3)
                p -= 0.05 * 0.1 * p
                p.grad = None
    expect_equal(model, plain)


def test_frozen_weights_stay_as_they_are() -> None:
    model = models.classifier()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = models.second(model, utils={"frozen_weights": ["hidden.weight", "output.bias"]})
    for x, y in models.batches(3):
        trainer.train_step(x, y)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"hidden.bias", "LayerNorm.weight", "LayerNorm.bias", "output.weight"}


@pytest.mark.parametrize("given", ["positions", "names", "a list", "both"])
def test_inputs_come_by_position_by_name_or_as_one_list(given: str) -> None:
    trainer = models.second(models.classifier())
    x, y = next(models.batches(1))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "positions": ((x, y), {}),
        "names": ((), {"y": y, "x": x}),
        "a list": (([x, y],), {}),
        "both": ((x,), {"y": y}),
    }
    args, kwargs = calls[given]
    expected = trainer.eval_step(x, y)
    found = trainer.eval_step(*args, **kwargs)
    assert torch.equal(found[0], expected[0])
    loss, logits = trainer.train_step(*args, **kwargs)
    assert loss.shape == ()
    assert logits.shape == (8, 4)
    assert not loss.requires_grad


def test_fetches_choose_the_outputs_and_change_no_number() -> None:
    data = list(models.batches(4))
    ours, other = models.classifier(), models.classifier()
    trainer, all_of_them = models.of_first(ours), models.of_first(other)
    for x, y in data:
        logits = trainer.train_step(x, y, 0.01, fetches=["logits"])
        expected = all_of_them.train_step(x, y, 0.01)
        assert torch.equal(logits, expected[1])
        both = trainer.eval_step(x, y, fetches=["logits", "loss"])
        assert [t.shape for t in both] == [(8, 4), ()]
    expect_equal(ours, other)
    with pytest.raises(InputError, match="'logit'"):
        trainer.train_step(*data[0], 0.01, fetches=["logit"])


def test_without_a_label_evaluation_gives_the_models_own_outputs() -> None:
    model = models.classifier()
    x, y = next(models.batches(1))
    for trainer in (models.second(model), models.of_first(model)):
        torch.testing.assert_close(trainer.eval_step(x), model(x))
        assert len(trainer.eval_step(x, y)) == 2
    with pytest.raises(InputError, match="needs the label"):
        trainer.eval_step(x, fetches=["loss"])


def test_a_model_with_its_own_loss_needs_no_function() -> None:
    ours, plain = models.classifier(models.WithOwnLoss), models.classifier()
    trainer = models.second(ours, loss_fn=None)
    data = list(models.batches(8))
    for x, y in data:
        trainer.train_step(x, y)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    models.train_plain(plain, optimizer, data, 1, lambda _: 0.01)
    expect_equal(ours, plain)


def test_evaluation_is_without_dropout_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    description = {
        "inputs": [("input", ["rows", 6]), ("y", ["rows"])],
        "outputs": [("loss", [], True)],
    }
    trainer = models.second(model, description=description)
    x, y = next(models.batches(1))
    trainer.train_step(x, y)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert torch.equal(trainer.eval_step(x, y), trainer.eval_step(x, y))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model[2].num_batches_tracked == 1


def test_a_loss_function_with_parameters_trains_them() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(prediction * self.scale, label)

    loss_fn = Scaled()
    trainer = models.second(models.classifier(), loss_fn=loss_fn)
    trainer.train_step(*next(models.batches(1)))
    assert loss_fn.scale != 1.0
    assert "loss_fn.scale" in trainer.state_dict(pytorch_format=True)


def test_what_the_script_has_done_with_the_model_is_no_gradient_of_ours() -> None:
    ours, plain = models.classifier(), models.classifier()
    trainer = models.second(ours)
    data = list(models.batches(2))
    for x, y in data:
        ours(x).sum().backward()
        trainer.train_step(x, y)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    models.train_plain(plain, optimizer, data, 1, lambda _: 0.01)
    expect_equal(ours, plain)


def test_a_step_that_fails_leaves_the_accumulation_as_it_was() -> None:
    ours, other = models.classifier(), models.classifier()
    batch = {"gradient_accumulation_steps": 2}
    trainer, undisturbed = models.second(ours, batch=batch), models.second(other, batch=batch)
    for x, y in models.batches(6):
        with pytest.raises(InputError):
            trainer.train_step(x[:, :5], y)
        with pytest.raises(InputError):
            trainer.train_step(x, y[:-1])
        trainer.train_step(x, y)
        undisturbed.train_step(x, y)
    expect_equal(ours, other)
    assert trainer._train_step_info.step == 6


# -- mixed precision -------------------------------------------------------------------------------


class Recorder(optim.lr_scheduler._LRScheduler):
    """A schedule of a script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def get_lr(self, train_step_info: Any) -> list[float]:
        self.seen.append((train_step_info.step, train_step_info.optimization_step))
        return [0.5**train_step_info.optimization_step]


def test_a_schedule_of_ones_own_hears_of_every_step_and_every_update() -> None:
    schedule = Recorder()
    trainer = models.second(
        models.classifier(), batch={"gradient_accumulation_steps": 2}, lr_scheduler=schedule
    )
    for x, y in models.batches(5):
        trainer.train_step(x, y)
    assert schedule.seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    assert schedule.get_last_lr() == [0.25]


class Overflowing(nn.Module):
    """A loss whose gradient is infinite in every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


OVERFLOWING = {"inputs": [("x", [3])], "outputs": [("loss", [], True)]}


def overflowing(**more: Any) -> tuple[Overflowing, ORTTrainer]:
    model = Overflowing()
    trainer = models.second(
        model,
        optim.SGDConfig(lr=1.0),
        OVERFLOWING,
        None,
        mixed_precision={"enabled": True, **more},
    )
    return model, trainer


def test_a_step_that_overflows_is_left_out_and_halves_the_scale() -> None:
    from ortrain.classic.amp import DynamicLossScaler

    scaler = DynamicLossScaler(loss_scale=8.0, up_scale_window=2)
    model, trainer = overflowing(loss_scaler=scaler)
    scales = []
    for i in range(7):
        before = model.weight.detach().clone()
        trainer.train_step(torch.full((3,), float("inf") if i % 3 == 2 else 1.0))
        moved = before - model.weight.detach()
        torch.testing.assert_close(moved, torch.full((3,), 0.0 if i % 3 == 2 else 1.0))
        scales.append(scaler.loss_scale)
        assert trainer._train_step_info.all_finite is (i % 3 != 2)
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0, 8.0, 8.0]
    assert trainer._train_step_info.optimization_step == 5


def test_a_scaler_that_a_script_updates_itself_stays_as_it_is() -> None:
    from ortrain.classic.amp import DynamicLossScaler

    scaler = DynamicLossScaler(automatic_update=False, loss_scale=8.0, up_scale_window=1)
    _, trainer = overflowing(loss_scaler=scaler)
    trainer.train_step(torch.full((3,), float("inf")))
    assert scaler.loss_scale == 8.0
    scaler.update(trainer._train_step_info)
    assert scaler.loss_scale == 4.0
    scaler.reset()
    assert scaler.loss_scale == 8.0


def test_mixed_precision_of_the_first_generation_tells_whether_gradients_are_finite() -> None:
    io = first.IODescription
    trainer = first.ORTTrainer(
        Overflowing(),
        None,
        first.ModelDescription([io("x", [3])], [io("loss", [], torch.float32)]),
        "SGDOptimizer",
        None,
        io("Learning_Rate", [1], torch.float32),
        "cpu",
        gradient_accumulation_steps=2,
        use_mixed_precision=True,
        options=models.GRAPH,
    )
    good, bad = torch.ones(3), torch.full((3,), float("inf"))
    assert trainer.train_step(good, 0.1, 8.0).shape == ()
    _, finite = trainer.train_step(good, 0.1, 8.0)
    assert finite.tolist() == [True]
    trainer.train_step(good, 0.1, **{trainer.loss_scale_input_name: 4.0})
    with pytest.raises(InputError, match="within an accumulation"):
        trainer.train_step(good, 0.1, 8.0)
    _loss, finite = trainer.train_step(bad, 0.1, 4.0)
    assert finite.tolist() == [False]
    assert trainer.global_step_ == 1


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("generation", [1, 2])
def test_lamb_corrects_its_moments_only_if_asked(generation: int, asked: bool | None) -> None:
    model, plain, data = models.classifier(), models.classifier(), list(models.batches(12))
    given = {} if asked is None else {"do_bias_correction": asked}
    if generation == 1:
        trainer = models.of_first(model, "LambOptimizer", lambda _: given)
        losses = [trainer.train_step(x, y, models.RATE)[0].item() for x, y in data]
    else:
        ours = models.second(model, optim.LambConfig(lr=models.RATE, **given))
        losses = [ours.train_step(x, y)[0].item() for x, y in data]
    optimizer = models.plain_optimizer("LambOptimizer", plain, 0.0, corrects=bool(asked))
    expected = models.train_plain(plain, optimizer, data, 1, lambda _: models.RATE)
    assert losses == pytest.approx(expected, abs=1e-5)
    other = models.classifier()
    optimizer = models.plain_optimizer("LambOptimizer", other, 0.0, corrects=not asked)
    models.train_plain(other, optimizer, data, 1, lambda _: models.RATE)
    expect_equal(model, plain)
    apart = [
        float((p - q).detach().abs().max())
        for p, q in zip(plain.parameters(), other.parameters(), strict=True)
    ]
    assert max(apart) > 1e-3


@pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer"])
def test_mixed_precision_is_near_float32_and_not_equal_to_it(name: str) -> None:
    model, plain = models.classifier(), models.classifier()
    data = list(models.batches(20))
    trainer = models.second(model, models.config_of(name, model), mixed_precision={"enabled": True})
    losses = [trainer.train_step(x, y)[0].item() for x, y in data]
    optimizer = models.plain_optimizer(name, plain)
    expected = models.train_plain(plain, optimizer, data, 1, lambda _: models.RATE)
    assert losses == pytest.approx(expected, abs=0.03)
    assert losses != pytest.approx(expected, abs=1e-4)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_deterministic_compute_repeats_dropout_and_leaves_pytorchs_switch_alone() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
        description = {
            "inputs": [("input", ["rows", 6]), ("y", ["rows"])],
            "outputs": [("loss", [], True)],
        }
        trainer = models.second(
            model, description=description, debug={"deterministic_compute": True}, ortrain=None
        )
        runs.append([trainer.train_step(x, y).item() for x, y in models.batches(6)])
        assert not torch.are_deterministic_algorithms_enabled()
    assert runs[0] == runs[1]
