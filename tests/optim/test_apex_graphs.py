"""Trainings as Apex AMP sets them up, with graphs in 16 bits, beside the same in eager.

Apex itself is not at hand: what its ``amp.initialize`` and ``amp.scale_loss`` do is written here
after its documentation, around the optimizers of `stand_ins`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain import Options, ORTModule
from ortrain.optim import FP16_Optimizer, FusedAdam
from tests.optim.stand_ins import LossScaler, amp
from tests.trainer.models import bert, collate, texts

BY_ATEN = Options(engine="aten", fallback="raise")
STEPS = 8


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def image_loss(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(step))
    return (model(x).float() - 1).square().mean()


def text_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(**collate(texts()[8 * (step % 6) :][:8]))["loss"]
    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "images": (images, image_loss),
    "texts": (bert, text_loss),
}


def halved(model: nn.Module) -> nn.Module:
    """O2: weights in float16 but for batch normalization's; arguments are cast, and outputs."""
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().half()))

    def cast(dtype: torch.dtype, values: Any) -> Any:
        def one(value: Any) -> Any:
            floats = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floats else value

        return pytree.tree_map(one, values)

    forward = model.forward

    @functools.wraps(forward)
    def patched(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(torch.float16, (args, kwargs))
        return cast(torch.float32, forward(*args, **kwargs))

    model.forward = patched
    return model


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


class Apex:
    """``amp.initialize``, and the dynamic scale of a loss.

    Args:
        model: changed in place.
        level: O1 or O2.
        replaces: whether `FP16_Optimizer` is called.
        graph: whether ORTModule is around the model.
    """

    def __init__(self, model: nn.Module, level: str, replaces: bool, graph: bool) -> None:
        self.level = level
        self.original = halved(model) if level == "O2" else model
        self.model = ORTModule(model, options=BY_ATEN) if graph else model
        optimizer = FusedAdam(self.original.parameters(), lr=1e-2, weight_decay=0.01)
        self.optimizer = amp(optimizer, masters=level == "O2")
        self.optimizer._amp_lazy_init()
        stash = self.optimizer._amp_stash
        if level == "O2":
            self.masters = dict(
                zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
            )
            for group in optimizer.param_groups:
                group["params"] = [self.masters.get(p, p) for p in group["params"]]
        if replaces:
            FP16_Optimizer(self.optimizer)
        self.scale, self.good = 2.0**17, 0

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.float16) if self.level == "O1" else nullcontext()

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Sets ``skips`` behind the backward."""
        scaler = LossScaler(self.scale, True, True)
        yield loss.float() * self.scale
        self.optimizer._post_amp_backward(scaler)
        self.skips = scaler.overflow()
        self.good = 0 if self.skips else self.good + 1
        self.scale *= 0.5 if self.skips else 2.0 if self.good % 2 == 0 else 1.0

    def step(self) -> None:
        if not self.skips:
            self.optimizer.step()
            if self.level == "O2":
                with torch.no_grad():
                    for parameter, master in self.masters.items():
                        parameter.copy_(master)
        for parameter in [*self.original.parameters(), *getattr(self, "masters", {}).values()]:
            parameter.grad = None


def trained(name: str, level: str, replaces: bool, graph: bool) -> tuple[Trace, Apex]:
    make, loss_of = MODELS[name]
    apex, trace = Apex(make(), level, replaces, graph), Trace()
    for step in range(STEPS):
        with apex.autocast():
            loss = loss_of(apex.model, step)
        with apex.scale_loss(loss) as scaled:
            scaled.backward()
        apex.step()
        trace.losses.append(loss.item())
        trace.scales.append(apex.scale)
        trace.skipped.append(apex.skips)
    return trace, apex


@pytest.mark.parametrize("replaces", [False, True], ids=["Apex's methods", "FP16_Optimizer"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_ends_where_eager_ends(name: str, level: str, replaces: bool) -> None:
    expected, _ = trained(name, level, replaces, graph=False)
    found, apex = trained(name, level, replaces, graph=True)
    assert found.scales == expected.scales
    assert found.skipped == expected.skipped
    assert any(found.skipped)
    assert not all(found.skipped)
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert found.losses[-1] < found.losses[0]
    report = apex.model.report
    assert (report.graph_calls, report.eager_calls) == (STEPS, 0)
    assert report.certificate
    wanted = torch.float16 if level == "O2" else torch.float32
    assert {p.dtype for n, p in apex.original.named_parameters() if "1" not in n} == {wanted}
