"""``Lamb`` computes the published update."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.optim import Lamb, lamb
from tests.devices import DEVICES
from tests.optim import formulas
from tests.optim.formulas import Moments

SHAPES = [(50, 7), (33,), (), (2, 3, 4)]
# Norms of a few hundred float32 squares, and ten steps of rounding; a step changes by about 0.05.
TOLERANCE = 2e-6


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(device)) for shape in SHAPES]


def run(optimizer: Lamb, steps: int = 10, size: float = 1.0) -> None:
    """Trains, and compares with the formula."""
    rows: list[list[Any]] = [
        [group, parameter, parameter.detach().double(), Moments()]
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    names = ("lr", "betas", "eps", "weight_decay", "ratio_min", "ratio_max", "bias_correction")
    for _ in range(steps):
        gradients: list[Tensor] = []
        for row in rows:
            row[1].grad = size * torch.randn(row[1].shape).to(row[1].device)
            gradients.append(row[1].grad.double())
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for row, gradient in zip(rows, gradients, strict=True):
            group, _, value, moments = row
            clip = group["max_norm_clip"]
            divided = gradient / max(1.0, norm / clip) if clip is not None else gradient
            row[2] = formulas.lamb(value, divided, moments, **{k: group[k] for k in names})
        optimizer.step()
    for _, parameter, value, _ in rows:
        torch.testing.assert_close(
            parameter.detach().double(), value, rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_norm_clip", [1.0, None])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_it_is_its_formula(
    size: float,
    max_norm_clip: float | None,
    bias_correction: bool,
    weight_decay: float,
    device: str,
) -> None:
    run(
        Lamb(
            parameters(device),
            0.05,
            weight_decay=weight_decay,
            max_norm_clip=max_norm_clip,
            bias_correction=bias_correction,
        ),
        size=size,
    )


@pytest.mark.parametrize("changed", ["lr", "eps", "weight_decay", "max_norm_clip", "ratio_max"])
def test_a_thousandth_in_a_hyperparameter_shows(changed: str) -> None:
    # A ratio would take the size of the direction out again.
    bounds = {"ratio_min": 0.3, "ratio_max": 0.3}
    optimizer = Lamb(parameters(), 0.05, eps=1e-2, weight_decay=0.1, **bounds)
    step = optimizer.step

    def altered(closure: Any = None) -> None:
        group = optimizer.param_groups[0]
        right = group[changed]
        group[changed] = right * 1.001
        if changed == "ratio_max":
            group["ratio_min"] = group[changed]
        step()
        group[changed], group["ratio_min"] = right, 0.3

    optimizer.step = altered  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="not close"):
        run(optimizer)


@pytest.mark.parametrize("bounds", [(0.9, 0.95), (2.0, 3.0), (-math.inf, 0.1)])
def test_the_ratio_is_kept_within_its_bounds(bounds: tuple[float, float]) -> None:
    run(Lamb(parameters(), 0.05, ratio_min=bounds[0], ratio_max=bounds[1]))


def test_groups_have_hyperparameters_of_their_own_and_share_the_norm() -> None:
    one, two, three, four = parameters()
    optimizer = Lamb([{"params": [one], "lr": 0.1}, {"params": [two], "max_norm_clip": 3.0}], 0.02)
    optimizer.add_param_group({"params": [three, four], "weight_decay": 0.3, "betas": (0.5, 0.6)})
    run(optimizer)


def test_large_parameters_are_updated_alone_and_small_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lamb, "PART", 60)
    optimizer = Lamb(parameters()[::-1], 0.05, weight_decay=0.1)
    run(optimizer)
    (scratch,) = optimizer._scratch.values()
    assert scratch.numel() == 350


def test_the_ratio_is_1_for_a_parameter_or_a_direction_of_zeros() -> None:
    zero, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    Lamb([zero, still], 0.1, max_norm_clip=None, bias_correction=True).step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1), rtol=1e-5, atol=0.0)
    assert torch.equal(still.detach(), torch.ones(3))


@pytest.mark.parametrize("advance", [lamb.advance_on_host, lamb.advance_on_device])
def test_on_any_device_parameters_advance_by_their_factors(advance: Any) -> None:
    targets, directions = (list(torch.randn(2, 3, 4).unbind()) for _ in range(2))
    expected = [targets[0] - 0.5 * directions[0], targets[1] + 2.0 * directions[1]]
    advance(targets, directions, torch.tensor([-0.5, 2.0]))
    for target, value in zip(targets, expected, strict=True):
        torch.testing.assert_close(target, value)


def test_gradients_hold_the_divided_values_afterwards() -> None:
    target = nn.Parameter(torch.ones(4))
    target.grad = torch.full((4,), 1.25)
    Lamb([target], max_norm_clip=2.0).step()
    torch.testing.assert_close(target.grad, torch.ones(4), rtol=1e-6, atol=0.0)


def test_memory_in_any_order_gives_the_same() -> None:
    value, gradient = torch.randn(3, 8), torch.randn(4, 3)
    plain = nn.Parameter(value[:, ::2].clone())
    strange = value[:, ::2].requires_grad_()
    for target, grad in ((plain, gradient.t().contiguous()), (strange, gradient.t())):
        target.grad = grad.clone(memory_format=torch.preserve_format)
        Lamb([target], 0.05, weight_decay=0.1).step()
    torch.testing.assert_close(strange.detach(), plain.detach(), rtol=TOLERANCE, atol=0.0)
    torch.testing.assert_close(strange.grad, plain.grad, rtol=TOLERANCE, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_follows_float64(dtype: torch.dtype) -> None:
    targets = [nn.Parameter(torch.randn(40, 10).to(dtype)) for _ in range(2)]
    moments = [Moments(), Moments()]
    expected = [target.detach().double() for target in targets]
    optimizer = Lamb(targets, 0.05, eps=1e-3, weight_decay=0.1, max_norm_clip=None)
    options = {k: v for k, v in optimizer.defaults.items() if k not in ("max_norm_clip", "fused")}
    for _ in range(5):
        for index, target in enumerate(targets):
            target.grad = torch.randn(40, 10).to(dtype)
            expected[index] = formulas.lamb(expected[index], target.grad, moments[index], **options)
        optimizer.step()
    for target, value in zip(targets, expected, strict=True):
        # Five roundings of values of size 3.
        atol = 5 * 3 * torch.finfo(dtype).eps
        torch.testing.assert_close(target.detach().double(), value, rtol=0.0, atol=atol)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_a_copy_goes_on_alike(copied: Any) -> None:
    one = Lamb(parameters(), 0.05, weight_decay=0.1)
    run(one, 3)
    other = copied(one)
    for optimizer in (one, other):
        torch.manual_seed(1)
        for target in optimizer.param_groups[0]["params"]:
            target.grad = torch.randn(target.shape)
        optimizer.step()
    pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_state_dict_goes_on_bit_for_bit() -> None:
    one = Lamb(parameters(), torch.tensor(0.05), bias_correction=True)
    for target in one.param_groups[0]["params"]:
        target.grad = torch.randn(target.shape)
    one.step()
    twins = [nn.Parameter(p.detach().clone()) for p in one.param_groups[0]["params"]]
    other = Lamb(twins)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for target, twin in zip(one.param_groups[0]["params"], twins, strict=True):
        target.grad = torch.randn(target.shape)
        twin.grad = target.grad.clone()
    one.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(one.param_groups[0]["params"], twins, strict=True))


def test_a_grad_scaler_unscales_and_skips() -> None:
    one, other = Lamb(parameters()), Lamb(parameters())
    twins = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    for a, b in twins:
        b.data.copy_(a.data)
        b.grad = torch.randn(b.shape)
        a.grad = b.grad * 1024.0
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    scaler.step(one)
    scaler.update()
    other.step()
    pairs = list(zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    for a, _ in pairs:
        a.grad = torch.full_like(a, math.inf)
    scaler.step(one)
    assert all(torch.equal(a, b) for a, b in pairs)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    "clip": ({"max_norm_clip": 0.0}, "Invalid max_norm_clip value: 0.0; None switches it off"),
    "ratio": ({"ratio_min": 2.0, "ratio_max": 1.0}, "Invalid ratio_min value: 2.0, above"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_a_bad_hyperparameter_is_named_with_its_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Lamb(parameters(), **options)


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    dense, embedding = nn.Parameter(torch.ones(2)), nn.Embedding(10, 3, sparse=True)
    dense.grad = torch.ones(2)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"Lamb takes no sparse gradients.* \(10, 3\)"):
        Lamb([{"params": [dense]}, {"params": [embedding.weight]}]).step()
    assert torch.equal(dense.detach(), torch.ones(2))


def test_a_closure_is_called_and_its_loss_returned() -> None:
    target = nn.Parameter(torch.ones(3))

    def closure() -> Tensor:
        target.grad = None
        loss = target.square().sum()
        loss.backward()
        return loss

    assert Lamb([target]).step(closure) == 3.0
