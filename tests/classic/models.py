"""Models, data and plain PyTorch for the tests of `ortrain.classic`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ortrain import Options
from ortrain.classic import ORTTrainer, ORTTrainerOptions, first, optim

GRAPH = Options(engine="aten", fallback="raise")


class Classifier(nn.Module):
    """Two layers and a normalization, whose bias and weights some attributes tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 12)
        self.LayerNorm = nn.LayerNorm(12)
        self.output = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.LayerNorm(torch.tanh(self.hidden(x))))


class WithOwnLoss(Classifier):
    """The same with its loss."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return nn.functional.cross_entropy(logits, y), logits


DESCRIPTION: dict[str, Any] = {
    "inputs": [("x", ["rows", 6]), ("y", ["rows"])],
    "outputs": [("loss", [], True), ("logits", ["rows", 4])],
}


def classifier(kind: type[nn.Module] = Classifier, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype)


def batches(
    count: int, rows: int = 8, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches that can be learned: the largest of four numbers, with some noise."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
        yield x.to(dtype), x[:, :4].argmax(1)


def options(**more: Any) -> ORTTrainerOptions:
    return ORTTrainerOptions({"device": {"id": "cpu"}, "ortrain": GRAPH, **more})


def second(
    model: nn.Module,
    config: Any = None,
    description: dict[str, Any] = DESCRIPTION,
    loss_fn: Any = nn.functional.cross_entropy,
    **more: Any,
) -> ORTTrainer:
    """A trainer of the second generation."""
    config = config or optim.AdamConfig(lr=0.01)
    return ORTTrainer(model, description, config, loss_fn, options(**more))


def of_first(
    model: nn.Module,
    name: str = "AdamOptimizer",
    attributes: Any = None,
    loss_fn: Any = nn.functional.cross_entropy,
    device: str = "cpu",
    **more: Any,
) -> first.ORTTrainer:
    """A trainer of the first generation."""
    io = first.IODescription
    described = first.ModelDescription(
        [io("x", ["rows", 6]), io("y", ["rows"], torch.int64, 4)],
        [io("loss", [], torch.float32), io("logits", ["rows", 4], torch.float32)],
    )
    rate = io("Learning_Rate", [1], torch.float32)
    more = {"options": GRAPH, **more}
    return first.ORTTrainer(model, loss_fn, described, name, attributes, rate, device, **more)


# -- plain PyTorch ---------------------------------------------------------------------------------


class PlainLamb(torch.optim.Optimizer):
    """LAMB, a parameter at a time, as the paper and the original's kernels have it."""

    def __init__(self, groups: Any, betas: tuple[float, float], eps: float, corrects: bool) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.betas, self.eps, self.corrects = betas, eps, corrects

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = state.get("m", 0) * self.betas[0] + p.grad * (1 - self.betas[0])
                v = state["v"] = state.get("v", 0) * self.betas[1] + p.grad**2 * (1 - self.betas[1])
                c1, c2 = (1 - b**t if self.corrects else 1.0 for b in self.betas)
                r = m / c1 / ((v / c2).sqrt() + self.eps) + group["weight_decay"] * p
                lengths = p.norm(), r.norm()
                ratio = lengths[0] / lengths[1] if lengths[0] and lengths[1] else 1.0
                p -= group["lr"] * ratio * r


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[tuple[Tensor, Tensor]],
    accumulation: int,
    lr_of: Callable[[int], float],
    clip: float | None = 1.0,
) -> list[float]:
    """The losses of a training that anybody would write."""
    losses, updates = [], 0
    for i, (x, y) in enumerate(data):
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (i + 1) % accumulation:
            continue
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        if clip is not None and norm > clip:
            for gradient in gradients:
                gradient *= clip / norm
        for group in optimizer.param_groups:
            group["lr"] = lr_of(updates)
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
    return losses


def plain_optimizer(
    name: str, model: nn.Module, decay: float = 0.01, corrects: bool = False
) -> torch.optim.Optimizer:
    """Adam, LAMB or SGD with a decay of all but biases and normalizations."""
    if name == "SGDOptimizer":
        return torch.optim.SGD(model.parameters(), lr=0.0)
    decayed = {n: decays(n) for n, _ in model.named_parameters()}
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if decayed[n] == which],
            "weight_decay": decay if which else 0.0,
        }
        for which in (True, False)
    ]
    if name == "LambOptimizer":
        return PlainLamb(groups, (0.9, 0.999), 1e-6, corrects=corrects)
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8)


def decays(name: str) -> bool:
    return "bias" not in name and "LayerNorm" not in name


def config_of(name: str, model: nn.Module, decay: float = 0.01) -> Any:
    """The same for the second generation."""
    if name == "SGDOptimizer":
        return optim.SGDConfig(lr=RATE)
    names = [n for n, _ in model.named_parameters() if not decays(n)]
    kind = optim.LambConfig if name == "LambOptimizer" else optim.AdamConfig
    groups = [{"params": names, "lambda_coef": 0.0}]
    return kind(groups, lr=RATE, lambda_coef=decay)


RATE = 0.02
