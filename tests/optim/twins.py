"""Two optimizers on equal parameters, trained alike and compared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ortrain.optim import AdamWMode, FusedAdam

SETTINGS: dict[str, Any] = {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(40, 30), (7,), ()]


def network(seed: int = 0, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(value.to(device)) for value in values]


def train(optimizer: torch.optim.Optimizer, seeds: Sequence[int], scale: float = 1.0) -> None:
    """Steps with gradients that depend on the seed alone."""
    targets = [p for group in optimizer.param_groups for p in group["params"]]
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for target in targets:
            target.grad = scale * torch.randn(target.shape, generator=generator).to(target.device)
        optimizer.step()


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict as from a file: torch's own shares its tensors."""
    return copy.deepcopy(optimizer.state_dict())


def same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Bit for bit, parameters and moments."""
    for a, b in zip(values(one), values(other), strict=True):
        assert torch.equal(a, b)
    states = [[o.state[p] for g in o.param_groups for p in g["params"]] for o in (one, other)]
    for a, b in zip(*states, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(a[name], b[name])


def close(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for a, b in zip(values(one), values(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def torchs(targets: list[nn.Parameter], fused: bool | None) -> torch.optim.AdamW:
    return torch.optim.AdamW(targets, fused=fused, **SETTINGS)


def ours(
    targets: list[nn.Parameter], mode: AdamWMode = AdamWMode.ADAMW_TORCH, **more: Any
) -> FusedAdam:
    return FusedAdam(targets, adam_w_mode=mode, **{**SETTINGS, **more})
