"""Models in 16 bits whose optimizer has the weights in float32, as DeepSpeed trains them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.trainer.models import bert, collate, texts

BY_ATEN = Options(engine="aten", fallback="raise")
STEPS, SLACK = 8, 3.0


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))


def rows_loss(model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
    return nn.functional.cross_entropy(model(x).float(), x[:, :3].argmax(-1))


def text_loss(model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    loss: Tensor = model(**collate(texts()[8 * (step % 6) :][:8]))["loss"]
    return loss.float()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "perceptron": (perceptron, rows_loss),
    "BERT": (bert, text_loss),
}


def flattened(model: nn.Module) -> None:
    """Puts all parameters into one buffer, of which they become views."""
    parameters = list(model.parameters())
    buffer = torch.cat([p.detach().reshape(-1) for p in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = buffer[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def trained(
    name: str, dtype: torch.dtype, graph: bool, *, flat: bool = False, late: bool = False
) -> tuple[list[float], Any]:
    """Losses, and the model.

    Args:
        name: of the model.
        dtype: of its weights.
        graph: whether ORTModule is around it.
        flat: whether the weights lie in one buffer.
        late: whether the weights are converted behind a first call in float32.
    """
    make, loss_of = MODELS[name]
    model: Any = ORTModule(make(), options=BY_ATEN) if graph else make()
    if late:
        loss_of(model, 0, torch.float32).backward()
        model.zero_grad()
    masters = [p.detach().clone() for p in model.parameters()]
    model.to(dtype)
    if flat:
        flattened(model)
    optimizer = torch.optim.AdamW(masters, 1e-2, weight_decay=0.01)
    scale = 1024.0 if dtype is torch.float16 else 1.0
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, dtype)
        (loss * scale).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float() / scale
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses, model


def distance(one: list[float], other: list[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one))


@pytest.mark.parametrize("flat", [False, True], ids=["apart", "one buffer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_is_as_close_to_float32_as_eagers(
    name: str, dtype: torch.dtype, flat: bool
) -> None:
    exact, _ = trained(name, torch.float32, graph=False)
    eager, _ = trained(name, dtype, graph=False, flat=flat)
    found, model = trained(name, dtype, graph=True, flat=flat)
    assert 0 < distance(found, exact) < SLACK * distance(eager, exact)
    assert model.report.eager_calls == 0
    # BERT's first call notes the kind of its labels in its configuration, which the others read.
    assert model.report.captures == (2 if name == "BERT" else 1)
    assert model.report.certificate
    assert all(p.dtype is dtype for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_that_becomes_narrow_later_is_captured_again(dtype: torch.dtype) -> None:
    found, model = trained("perceptron", dtype, graph=True, late=True)
    expected, _ = trained("perceptron", dtype, graph=True)
    assert found == expected
    assert model.report.captures == 2
    assert copy.deepcopy(model)(torch.randn(4, 8, dtype=dtype)).dtype is dtype
