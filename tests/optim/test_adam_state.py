"""State dicts of ``FusedAdam`` and ``torch.optim.AdamW`` go both ways, and copies go on alike."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ortrain.optim import AdamWMode
from tests.devices import DEVICES
from tests.optim.twins import close, network, ours, same, saved, torchs, train, values


@pytest.mark.parametrize("device", DEVICES)
def test_the_torch_mode_is_torchs_fused_adamw_bit_for_bit(device: str) -> None:
    one, other = ours(network(device=device)), torchs(network(device=device), True)
    for optimizer in (one, other):
        train(optimizer, range(6))
    same(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False, None])
def test_a_run_of_torchs_adamw_goes_on_in_fused_adam(fused: bool | None, device: str) -> None:
    other = torchs(network(device=device), fused)
    train(other, range(3))
    one = ours(network(1, device), lr=9.0, eps=9.0, weight_decay=9.0)
    with torch.no_grad():
        for target, value in zip(one.param_groups[0]["params"], values(other), strict=True):
            target.copy_(value)
    one.load_state_dict(saved(other))
    for optimizer in (one, other):
        train(optimizer, range(3, 6))
    (same if fused else close)(one, other)
    (group,) = one.state_dict()["param_groups"]
    assert group["bias_correction"] is True
    assert group["fused"] is True, "for when torch reads it back"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False, None])
def test_a_run_of_fused_adam_goes_on_in_torchs_adamw(fused: bool | None, device: str) -> None:
    one = ours(network(device=device))
    train(one, range(3))
    other = torchs([nn.Parameter(value.clone()) for value in values(one)], fused)
    other.load_state_dict(saved(one))
    assert other.param_groups[0]["fused"] is True, "torch takes the kernel from the state dict"
    for optimizer in (one, other):
        train(optimizer, range(3, 6))
    same(one, other)


def test_l2_regularization_goes_on_in_torchs_adam() -> None:
    one = ours(network(), AdamWMode.ADAM_L2_REGULARIZATION, eps=0.0)
    train(one, range(3))
    other = torch.optim.Adam([nn.Parameter(value.clone()) for value in values(one)])
    other.load_state_dict(saved(one))
    assert other.param_groups[0]["decoupled_weight_decay"] is False
    for optimizer in (one, other):
        train(optimizer, range(3, 6))
    close(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", AdamWMode)
def test_a_state_dict_of_its_own_goes_on_bit_for_bit_through_a_file(
    mode: AdamWMode, device: str, tmp_path: Any
) -> None:
    one = ours(network(device=device), mode)
    train(one, range(3))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other = ours([nn.Parameter(value.clone()) for value in values(one)], mode)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for optimizer in (one, other):
        train(optimizer, range(3, 6))
    same(one, other)


@pytest.mark.parametrize("mode", AdamWMode)
def test_the_originals_state_dict_with_one_step_for_a_group_is_read(mode: AdamWMode) -> None:
    one = ours(network(), mode)
    train(one, range(3))
    original = saved(one)
    (group,) = original["param_groups"]
    names = ("params", "lr", "betas", "eps", "weight_decay", "bias_correction")
    original["param_groups"] = [{name: group[name] for name in names} | {"step": 3}]
    for state in original["state"].values():
        del state["step"]
    other = ours([nn.Parameter(value.clone()) for value in values(one)], mode)
    other.load_state_dict(original)
    assert "step" not in other.param_groups[0]
    for optimizer in (one, other):
        train(optimizer, range(3, 6))
    same(one, other)


@pytest.mark.parametrize("mode", AdamWMode)
def test_the_step_is_kept_as_torch_keeps_it(mode: AdamWMode) -> None:
    one, other = ours(network(), mode), torchs(network(), True)
    for optimizer in (one, other):
        train(optimizer, range(2))
    pairs = zip(one.state.values(), other.state.values(), strict=True)
    for mine, its in pairs:
        assert list(mine) == list(its)
        assert (mine["step"].dtype, mine["step"].shape) == (its["step"].dtype, its["step"].shape)


BROKEN = {
    "amsgrad": (lambda: torch.optim.AdamW(network(), amsgrad=True), "has no amsgrad"),
    "maximize": (lambda: torch.optim.AdamW(network(), maximize=True), "has no maximize"),
    "of SGD": (lambda: torch.optim.SGD(network(), 0.1), "needs betas, eps in every .* another"),
}


@pytest.mark.parametrize(("make", "message"), BROKEN.values(), ids=BROKEN)
def test_a_state_dict_that_means_something_else_is_refused_and_changes_nothing(
    make: Any, message: str
) -> None:
    one, other = ours(network()), ours(network())
    for optimizer in (one, other):
        train(optimizer, range(2))
    with pytest.raises(ValueError, match=message):
        one.load_state_dict(make().state_dict())
    for optimizer in (one, other):
        train(optimizer, range(2, 4))
    same(one, other)


def test_moments_without_a_step_are_refused() -> None:
    one = ours(network())
    train(one, range(2))
    broken = one.state_dict()
    broken["state"] = {k: {"exp_avg": v["exp_avg"]} for k, v in broken["state"].items()}
    with pytest.raises(ValueError, match="has no step, and its group neither"):
        ours(network()).load_state_dict(broken)


# --- copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AdamWMode)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_a_copy_goes_on_alike(mode: AdamWMode, copied: Any) -> None:
    one = ours(network(), mode, set_grad_none=False)
    train(one, range(3))
    other = copied(one)
    for optimizer in (one, other):
        train(optimizer, range(3, 6))
    same(one, other)
    other.zero_grad()
    assert all(p.grad is not None for p in other.param_groups[0]["params"])
    assert other._step_supports_amp_scaling
