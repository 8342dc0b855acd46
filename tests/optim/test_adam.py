"""``FusedAdam`` computes the three updates, and refuses what it cannot."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from ortrain.optim import AdamWMode, FusedAdam
from ortrain.optim.adam_mode import KernelTerms, kernel_terms
from tests.optim.followed import Reference, give_gradients, parameters


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("mode", AdamWMode)
def test_every_mode_is_its_formula(
    mode: AdamWMode, bias_correction: bool, weight_decay: float
) -> None:
    optimizer = FusedAdam(
        parameters(), 0.05, bias_correction, adam_w_mode=mode, weight_decay=weight_decay
    )
    reference = Reference(optimizer, mode)
    for _ in range(10):
        give_gradients(optimizer.param_groups[0]["params"])
        optimizer.step()
        reference.step()
    reference.agrees()


@pytest.mark.parametrize("changed", ["lr", "eps", "weight_decay", "bias_correction"])
@pytest.mark.parametrize("mode", AdamWMode)
def test_a_thousandth_in_a_hyperparameter_shows(mode: AdamWMode, changed: str) -> None:
    optimizer = FusedAdam(
        parameters(), 0.05, True, (0.9, 0.99), eps=1e-3, adam_w_mode=mode, weight_decay=0.1
    )
    reference = Reference(optimizer, mode)
    group = optimizer.param_groups[0]
    for _ in range(10):
        give_gradients(group["params"])
        reference.step()
        right = group[changed]
        group[changed] = False if changed == "bias_correction" else right * 1.001
        optimizer.step()
        group[changed] = right
    with pytest.raises(AssertionError, match="not close"):
        reference.agrees()


def test_the_modes_differ_without_weight_decay_by_where_eps_is_added() -> None:
    results = []
    for mode in AdamWMode:
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.full((4,), 1e-6)
        FusedAdam([parameter], 0.05, adam_w_mode=mode).step()
        results.append(parameter.detach())
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[1], results[2], rtol=1e-3)


def test_groups_have_hyperparameters_of_their_own() -> None:
    one, two, three = parameters()[:3]
    optimizer = FusedAdam(
        [
            {"params": [one], "lr": 0.1, "betas": (0.5, 0.6)},
            {"params": [two], "eps": 1e-2, "weight_decay": 0.3},
        ],
        lr=0.02,
    )
    optimizer.add_param_group({"params": [three], "bias_correction": False})
    reference = Reference(optimizer, 1)
    for _ in range(5):
        give_gradients([one, two, three])
        optimizer.step()
        reference.step()
    reference.agrees()


@pytest.mark.parametrize("mode", AdamWMode)
def test_a_parameter_without_gradient_stays_and_its_steps_are_its_own(mode: AdamWMode) -> None:
    targets = parameters()
    optimizer = FusedAdam(targets, 0.05, adam_w_mode=mode, weight_decay=0.1)
    reference = Reference(optimizer, mode)
    for number in range(9):
        give_gradients(targets)
        for index in range(len(targets)):
            if number % (index + 1) or index == 4:
                targets[index].grad = None
        before = targets[4].detach().clone()
        optimizer.step()
        reference.step()
        assert torch.equal(targets[4].detach(), before)
    reference.agrees()
    assert targets[4] not in optimizer.state
    assert [optimizer.state[p]["step"].item() for p in targets[:4]] == [9.0, 5.0, 3.0, 3.0]


@pytest.mark.parametrize("mode", AdamWMode)
@pytest.mark.parametrize(("lr", "weight_decay"), [(0.0, 0.1), (0.5, 2.0), (0.05, 40.0)])
def test_decay_that_takes_all_or_more_is_computed_too(
    mode: AdamWMode, lr: float, weight_decay: float
) -> None:
    optimizer = FusedAdam(parameters(), lr, adam_w_mode=mode, weight_decay=weight_decay)
    reference = Reference(optimizer, mode)
    for _ in range(3):
        give_gradients(optimizer.param_groups[0]["params"])
        optimizer.step()
        reference.step()
    reference.agrees(1e-5)


@pytest.mark.parametrize("mode", AdamWMode)
def test_the_learning_rate_may_be_a_tensor(mode: AdamWMode) -> None:
    optimizer = FusedAdam(parameters(), torch.tensor(0.05), adam_w_mode=mode, weight_decay=0.1)
    reference = Reference(optimizer, mode)
    for _ in range(5):
        give_gradients(optimizer.param_groups[0]["params"])
        optimizer.step()
        reference.step()
        optimizer.param_groups[0]["lr"].mul_(0.9)
    reference.agrees()


def test_a_sparse_gradient_is_refused_by_shape_and_with_a_remedy() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer = FusedAdam(embedding.parameters())
    with pytest.raises(RuntimeError, match=r"shape \(10, 3\) has one; .* sparse=False, or give it"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_a_parameter_that_is_no_float_is_refused(dtype: torch.dtype) -> None:
    parameter = torch.zeros(2, 3, dtype=dtype)
    with pytest.raises(TypeError, match=r"shape \(2, 3\) is torch.*view_as_real"):
        FusedAdam([parameter])
    optimizer = FusedAdam(parameters())
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [parameter]})
    assert len(optimizer.param_groups) == 1


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    "lr that is no number": ({"lr": float("nan")}, "Invalid learning rate: nan"),
    "lr of two": ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
    "eps": ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
    "beta1": ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    "beta2": ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
    "weight decay": ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_a_bad_hyperparameter_is_named_with_its_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdam(parameters(), **options)
    with pytest.raises(ValueError, match=message):
        FusedAdam([{"params": parameters(), **options}])


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_it_does_not_do_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"FusedAdam has no {option}"):
        FusedAdam([{"params": parameters(), option: True}])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="3 is not a valid AdamWMode"):
        FusedAdam(parameters(), adam_w_mode=3)


def test_the_numbers_of_the_modes_are_the_originals() -> None:
    assert [mode.value for mode in AdamWMode] == [0, 1, 2]
    assert AdamWMode(1) is AdamWMode.ADAMW_TRANSFORMERS


@pytest.mark.parametrize(
    ("constructed", "called", "frees"),
    [
        (*pair, pair[0] if pair[1] is None else pair[1])
        for pair in itertools.product((True, False), (None, True, False))
    ],
)
def test_zero_grad_does_what_it_is_told_and_else_what_the_constructor_was(
    constructed: bool, called: bool | None, frees: bool
) -> None:
    targets = parameters()
    optimizer = FusedAdam(targets, set_grad_none=constructed)
    give_gradients(targets)
    optimizer.zero_grad() if called is None else optimizer.zero_grad(set_to_none=called)
    assert all((target.grad is None) == frees for target in targets)
    assert frees or not any(target.grad.any() for target in targets if target.grad is not None)


def test_a_learning_rate_on_a_device_is_not_waited_for() -> None:
    """The meta device stands in for one whose values are not there yet."""
    group = {"lr": torch.tensor(0.1, device="meta"), "weight_decay": 0.1, "bias_correction": True}
    group |= {"eps": 1e-6, "betas": (0.9, 0.99)}
    for mode in AdamWMode:
        terms = kernel_terms(mode, group, 3)
        assert isinstance(terms.lr, torch.Tensor)
        transformers = mode == AdamWMode.ADAMW_TRANSFORMERS
        assert isinstance(terms.taken_off, torch.Tensor) == transformers
        assert terms.weight_decay == (0.0 if transformers else 0.1)


def terms_of(mode: AdamWMode, step: int, beta: float, rounds: bool) -> KernelTerms:
    group = {"lr": 0.1, "weight_decay": 0.0, "bias_correction": True}
    group |= {"eps": 1e-2, "betas": (0.9, beta)}
    return kernel_terms(mode, group, step, rounds_betas=rounds)


@pytest.mark.parametrize("step", [1, 2, 500])
@pytest.mark.parametrize("mode", AdamWMode)
def test_a_kernel_with_betas_in_float32_takes_steps_of_the_right_length(
    mode: AdamWMode, step: int
) -> None:
    exact, terms = (terms_of(mode, step, 0.999, rounds) for rounds in (False, True))
    if mode == AdamWMode.ADAMW_TORCH:
        assert terms == exact, "its own corrections are its own affair"
        return
    assert terms.betas == tuple(torch.tensor([0.9, 0.999]).tolist())
    assert exact.betas == (0.9, 0.999)

    # All gradients are 1, so that the moments are the corrections.
    def length(terms: KernelTerms) -> float:
        assert isinstance(terms.lr, float)
        first, second = (1 - beta**step for beta in terms.betas)
        return terms.lr * first / (math.sqrt(second) + terms.eps)

    assert length(terms) == pytest.approx(length(exact), rel=1e-12)
    assert terms.lr != pytest.approx(exact.lr, rel=1e-6), "it makes a difference"


def test_a_beta_that_is_1_in_float32_stays_what_it_is() -> None:
    assert terms_of(AdamWMode(1), 1, 1 - 1e-9, True).betas[1] == 1 - 1e-9


@pytest.mark.parametrize("mode", AdamWMode)
def test_the_default_device_is_not_asked(mode: AdamWMode) -> None:
    optimizer = FusedAdam(parameters(), 0.05, adam_w_mode=mode)
    reference = Reference(optimizer, mode)
    for _ in range(3):
        give_gradients(optimizer.param_groups[0]["params"])
        reference.step()
        with torch.device("meta"):
            optimizer.step()
    reference.agrees()


def test_a_graph_of_cuda_does_not_freeze_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    targets = parameters()
    give_gradients(targets)
    with pytest.raises(RuntimeError, match=r"use AdamWMode\.ADAMW_TORCH"):
        FusedAdam(targets).step()
    FusedAdam(targets, adam_w_mode=AdamWMode.ADAMW_TORCH).step()
