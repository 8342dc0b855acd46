"""``FusedAdam`` with parameters of any precision, in any order of memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.optim import AdamWMode, FusedAdam
from tests.devices import DEVICES
from tests.optim.followed import TOLERANCE, Reference, give_gradients


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", AdamWMode)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_close_to_float64_as_torchs(
    mode: AdamWMode, dtype: torch.dtype, device: str
) -> None:
    """Torch's AdamW is measured against its own formula, each mode against its."""
    start = [torch.randn(400, 10).to(device, dtype) for _ in range(3)]
    errors = []
    for ours in (True, False):
        targets = [nn.Parameter(value.clone()) for value in start]
        optimizer: Any = (
            FusedAdam(targets, 0.01, eps=1e-4, adam_w_mode=mode, weight_decay=0.1)
            if ours
            else torch.optim.AdamW(targets, 0.01, eps=1e-4, weight_decay=0.1)
        )
        reference = Reference(optimizer, mode if ours else 2)
        for group in optimizer.param_groups:
            group.setdefault("bias_correction", True)
        generator = torch.Generator().manual_seed(3)
        for _ in range(5):
            for target in targets:
                target.grad = (torch.randn(target.shape, generator=generator) * 0.1).to(target)
            reference.step()
            optimizer.step()
        errors.append(
            sum(float((p.detach() - value).abs().mean()) for _, p, value, _ in reference.rows)
        )
    # The mean over 12 000 elements repeats to a percent.
    assert errors[0] <= 1.01 * errors[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", AdamWMode)
def test_dtypes_may_be_mixed(mode: AdamWMode, device: str) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
    targets = [nn.Parameter(torch.randn(40).to(device, dtype)) for dtype in dtypes]
    optimizer = FusedAdam(targets, 0.05, adam_w_mode=mode, weight_decay=0.1)
    reference = Reference(optimizer, mode)
    for _ in range(3):
        give_gradients(targets)
        reference.step()
        optimizer.step()
    for target, (_, _, value, _) in zip(targets, reference.rows, strict=True):
        tolerance = 1e-2 if target.dtype == torch.bfloat16 else TOLERANCE
        torch.testing.assert_close(target.detach().double(), value, rtol=tolerance, atol=tolerance)
        assert optimizer.state[target]["exp_avg"].dtype == target.dtype


def layouts(device: str = "cpu") -> dict[str, tuple[Tensor, Tensor]]:
    """Parameters and gradients whose memory is not in the same order, or has holes."""
    randn = partial(torch.randn, device=device)
    image = randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return {
        "gradient transposed": (randn(3, 4), randn(4, 3).t()),
        "parameter transposed": (randn(4, 3).t(), randn(3, 4)),
        "gradient expanded": (randn(3, 4), randn(3, 1).expand(3, 4)),
        "gradient of every second": (randn(3, 4), randn(3, 8)[:, ::2]),
        "channels last": (image, randn(2, 3, 4, 5)),
        "parameter with holes": (randn(3, 8)[:, ::2], randn(3, 4)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("clips", [False, True])
def test_memory_in_any_order_gives_the_same(name: str, clips: bool, device: str) -> None:
    value, gradient = layouts(device)[name]
    plain = nn.Parameter(value.clone(memory_format=torch.contiguous_format))
    strange = value.requires_grad_()
    optimizers = [FusedAdam([target], 0.05, weight_decay=0.1) for target in (plain, strange)]
    assert strange.stride() != plain.stride() or gradient.stride() != plain.stride()
    for _ in range(3):
        plain.grad, strange.grad = gradient.contiguous(), gradient
        for optimizer in optimizers:
            if clips:
                optimizer.clip_and_step(1.0)
            else:
                optimizer.step()
        # Sums go in another order, and so do the elements that vector instructions leave over.
        for one, other in ((strange.detach(), plain.detach()), (strange.grad, plain.grad)):
            torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_with_holes_writes_nothing_beside_itself(device: str) -> None:
    base = torch.zeros(4, 6, device=device)
    parameter = base[:, ::2].requires_grad_()
    parameter.grad = torch.ones(4, 3, device=device)
    FusedAdam([parameter], 0.1).step()
    assert not base[:, 1::2].any()
    assert (base[:, ::2] != 0).all()


def test_a_parameter_may_change_its_memory_order_between_steps() -> None:
    value, gradients = torch.randn(2, 3, 4, 5), torch.randn(4, 2, 3, 4, 5)
    results = []
    for changes in (False, True):
        parameter = nn.Parameter(value.clone())
        optimizer = FusedAdam([parameter], 0.05)
        for number, gradient in enumerate(gradients):
            if changes and number == 2:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
            parameter.grad = gradient.clone()
            optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()
        results.append(parameter.detach())
    torch.testing.assert_close(results[0], results[1], rtol=TOLERANCE, atol=TOLERANCE)
