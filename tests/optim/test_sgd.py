"""``SGD`` is torch's with its fused kernel, and minds the order of elements in memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.optim import SGD
from tests.devices import DEVICES
from tests.optim import formulas

SHAPES = [(5, 7), (33,), (2, 3, 4)]


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(device)) for shape in SHAPES]


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("device", DEVICES)
def test_it_is_its_formula(
    device: str, weight_decay: float, momentum: float, dampening: float, nesterov: bool
) -> None:
    options: dict[str, Any] = {
        "lr": 0.1,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
    }
    targets = parameters(device)
    optimizer = SGD(targets, **options)
    expected = [(target.detach().double(), None) for target in targets]
    for _ in range(6):
        for index, target in enumerate(targets):
            target.grad = torch.randn(target.shape).to(device)
            value, buffer = expected[index]
            expected[index] = formulas.sgd(value, target.grad, buffer, **options)  # type: ignore[call-overload]
        optimizer.step()
    for target, (value, _) in zip(targets, expected, strict=True):
        torch.testing.assert_close(target.detach().double(), value, rtol=1e-6, atol=1e-6)


def test_it_is_torchs_with_the_fused_kernel() -> None:
    optimizer = SGD(parameters(), 0.1)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["fused"] is True


def test_state_dicts_go_both_ways_bit_for_bit() -> None:
    one = SGD(parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(
        [nn.Parameter(p.detach().clone()) for p in one.param_groups[0]["params"]], fused=True
    )
    for source, target in ((one, other), (other, one)):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        for a, b in zip(
            one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True
        ):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        one.step()
        other.step()
        for a, b in zip(
            one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_in_another_memory_order_gives_the_same(momentum: float) -> None:
    value, gradient = torch.randn(3, 4), torch.randn(4, 3).t()
    target = nn.Parameter(value.clone())
    optimizer = SGD([target], 0.1, momentum=momentum)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    target.grad = gradient
    optimizer.step()
    torch.testing.assert_close(target.detach(), value - 0.1 * gradient, rtol=1e-6, atol=1e-6)
    assert calls == ["after"]


def test_a_parameter_with_holes_is_refused() -> None:
    base = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"shape \(4, 3\) is a view with strides \(6, 2\)"):
        SGD([base[:, ::2].requires_grad_()], 0.1)
    SGD([torch.zeros(4, 6).t().requires_grad_()], 0.1)


def test_a_grad_scaler_leaves_unscaling_to_the_kernel_also_of_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unscale(*_: Any) -> None:
        raise AssertionError("a pass of its own over the gradients")

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale)
    for optimizer in (
        original := SGD([nn.Parameter(torch.zeros(3))], 0.1),
        copy.deepcopy(original),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        (target,) = optimizer.param_groups[0]["params"]
        target.grad = torch.full((3,), 16.0)
        scaler.step(optimizer)
        torch.testing.assert_close(target.detach(), torch.full((3,), -0.2))


def test_a_closure_is_called_and_its_loss_returned() -> None:
    target = nn.Parameter(torch.ones(3))

    def closure() -> Tensor:
        target.grad = None
        loss = target.square().sum()
        loss.backward()
        return loss

    assert SGD([target], 0.1).step(closure) == 3.0
    torch.testing.assert_close(target.detach(), torch.full((3,), 0.8))
