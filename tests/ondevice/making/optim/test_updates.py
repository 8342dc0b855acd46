"""Updates by an optimizer model are those of PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ortrain.ondevice.optim import SGD, Adam, AdamW, Group, Lion
from tests.ondevice.making.optim.stepping import FEW, SHAPES, Training


def groups(parameters, scale=1.0, **differing):
    """PyTorch's groups: what is no weight has hyperparameters of its own."""
    weights = [p for n, p in parameters.items() if n.endswith("weight")]
    others = [p for n, p in parameters.items() if not n.endswith("weight")]
    return [{"params": weights}, {"params": others, "scale": scale, **differing}]


class FormulaLion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, parameters, betas, weight_decay):
        super().__init__(parameters, {"lr": 0.0, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                average = first * m + (1 - first) * p.grad
                update = torch.sign(average)
                # Elements of which float32 cannot tell the sign.
                doubtful = self.state[p].setdefault("doubtful", torch.zeros_like(p).bool())
                doubtful |= average.abs() < 1e-6 * (m.abs() + p.grad.abs())
                p -= group["lr"] * (update + group["weight_decay"] * p)
                m.copy_(second * m + (1 - second) * p.grad)


NO_DECAY = {"*.weight": Group(), "*": Group(weight_decay=0.0, lr_scale=3.0)}

CASES = {
    "AdamW": (AdamW(), lambda ps: torch.optim.AdamW(ps.values())),
    "AdamW without decay": (
        AdamW(weight_decay=0.0),
        lambda ps: torch.optim.AdamW(ps.values(), weight_decay=0.0),
    ),
    "AdamW with other betas": (
        AdamW(betas=(0.3, 0.4), eps=1e-3),
        lambda ps: torch.optim.AdamW(ps.values(), betas=(0.3, 0.4), eps=1e-3),
    ),
    "AdamW without averages": (
        AdamW(betas=(0.0, 0.0), eps=1e-3),
        lambda ps: torch.optim.AdamW(ps.values(), betas=(0.0, 0.0), eps=1e-3),
    ),
    "AdamW, clipped": (AdamW(max_norm=1.0), lambda ps: torch.optim.AdamW(ps.values())),
    "AdamW, nothing to clip": (AdamW(max_norm=1e6), lambda ps: torch.optim.AdamW(ps.values())),
    "AdamW in groups": (
        AdamW(weight_decay=0.5, groups=NO_DECAY),
        lambda ps: torch.optim.AdamW(groups(ps, 3.0, weight_decay=0.0), weight_decay=0.5),
    ),
    "Adam": (Adam(), lambda ps: torch.optim.Adam(ps.values())),
    "Adam with decay, clipped, in groups": (
        Adam(weight_decay=0.1, max_norm=1.0, groups=NO_DECAY),
        lambda ps: torch.optim.Adam(groups(ps, 3.0, weight_decay=0.0), weight_decay=0.1),
    ),
    "SGD": (SGD(), lambda ps: torch.optim.SGD(ps.values())),
    "SGD with decay, clipped": (
        SGD(weight_decay=0.1, max_norm=1.0),
        lambda ps: torch.optim.SGD(ps.values(), weight_decay=0.1),
    ),
    "SGD with momentum": (SGD(momentum=0.9), lambda ps: torch.optim.SGD(ps.values(), momentum=0.9)),
    "SGD with dampening and decay": (
        SGD(momentum=0.9, dampening=0.3, weight_decay=0.1),
        lambda ps: torch.optim.SGD(ps.values(), momentum=0.9, dampening=0.3, weight_decay=0.1),
    ),
    "SGD with Nesterov's momentum, in groups": (
        SGD(momentum=0.9, nesterov=True, weight_decay=0.5, groups=NO_DECAY),
        lambda ps: torch.optim.SGD(
            groups(ps, 3.0, weight_decay=0.0), momentum=0.9, nesterov=True, weight_decay=0.5
        ),
    ),
    "Lion": (Lion(), lambda ps: FormulaLion(ps.values(), (0.9, 0.99), 0.0)),
    "Lion with decay, clipped, in groups": (
        Lion(betas=(0.95, 0.98), weight_decay=0.3, max_norm=1.0, groups=NO_DECAY),
        lambda ps: FormulaLion(groups(ps, 3.0, weight_decay=0.0), (0.95, 0.98), 0.3),
    ),
}


WITHOUT_STATE = {"SGD", "SGD with decay, clipped"}


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "not in place"])
@pytest.mark.parametrize("case", CASES)
def test_after_twenty_steps_parameters_are_those_of_pytorch(
    case: str, in_place: bool, small_pieces: None
) -> None:
    training = Training(*CASES[case], shapes=FEW, in_place=in_place)
    assert ("Scan" in training.program.operators()) == (case not in WITHOUT_STATE)
    for step in range(20):
        training.step(1e-2 / (1 + step % 5))
    assert training.error() < 1e-6


@pytest.mark.parametrize("case", ["AdamW, clipped", "SGD with Nesterov's momentum, in groups"])
def test_pieces_of_their_real_sizes_are_updated_as_exactly(case: str) -> None:
    training = Training(*CASES[case], shapes=SHAPES)
    for _ in range(5):
        training.step(1e-2)
    assert training.error() < 1e-6


@pytest.mark.parametrize("optimizer", [AdamW(), AdamW(betas=(0.99, 0.9999))])
def test_the_bias_correction_stays_exact(optimizer: AdamW) -> None:
    training = Training(
        optimizer,
        lambda ps: torch.optim.AdamW(ps.values(), betas=optimizer.betas),
        shapes={"weight": (40, 9)},
    )
    for _ in range(100):
        training.step(1e-2)
    assert training.error() < 1e-6


def test_without_bias_correction_the_first_step_is_that_of_the_raw_moments() -> None:
    training = Training(
        AdamW(bias_correction=False, weight_decay=0.0),
        lambda ps: torch.optim.SGD(ps.values()),
        shapes={"weight": (40, 9)},
    )
    before = training.tensors["weight"].astype(np.float64)
    training.step(1e-3)
    g = training.tensors["weight_grad"].astype(np.float64)
    expected = before - 1e-3 * 0.1 * g / (math.sqrt(0.001) * np.abs(g) + 1e-8)
    assert np.abs(training.tensors["weight"] - expected).max() < 1e-6


def test_states_are_those_of_pytorch(small_pieces: None) -> None:
    training = Training(*CASES["AdamW"], shapes=FEW)
    for _ in range(5):
        training.step(1e-2)
    for name, parameter in training.reference.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            expected = training.torch.state[parameter][kind].numpy()
            state = training.tensors[f"{name}.{kind}"].reshape(expected.shape)
            np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-7)
    assert training.tensors["step"] == 5


def test_the_norm_is_that_of_all_gradients_before_they_are_clipped() -> None:
    training = Training(*CASES["AdamW, clipped"], shapes=SHAPES)
    outputs = training.step(1e-2)
    gradients = [training.tensors[f"{n}_grad"].astype(np.float64) for n in SHAPES]
    norm = math.sqrt(sum((g**2).sum() for g in gradients))
    assert outputs["grad_norm"].shape == (1,)
    assert outputs["grad_norm"][0] == pytest.approx(norm, rel=2e-7)


def test_a_decay_that_leaves_nothing_leaves_the_step() -> None:
    training = Training(
        AdamW(weight_decay=2.0),
        lambda ps: torch.optim.AdamW(ps.values(), weight_decay=2.0),
        shapes={"weight": (40, 9)},
    )
    training.step(0.5)
    assert training.error() < 1e-6


@pytest.mark.parametrize("optimizer", [AdamW(max_norm=1.0), SGD(momentum=0.9), Lion()])
def test_a_gradient_that_is_nan_is_seen_in_the_parameter(optimizer, small_pieces: None) -> None:
    shapes = {"weight": (54, 57)}
    training = Training(optimizer, lambda ps: torch.optim.SGD(ps.values()), shapes=shapes)
    training._draw = lambda shape: np.full(shape, np.nan, np.float32)  # type: ignore[method-assign]
    training.step(1e-3)
    assert np.isnan(training.tensors["weight"]).all()
