"""A module and what its users do with it: calls, in which nothing may show of a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Network(nn.Module):
    """Parameters, a table, dropout, and buffers that a forward updates."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm: nn.Module = nn.BatchNorm1d(6)
        self.hidden, self.output = nn.Linear(6, 8), nn.Linear(8, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        h = self.norm(self.table(ids).sum(1)) + x
        return self.dropout(self.output(self.dropout(torch.tanh(self.hidden(h)))))


def batch(model: nn.Module, rows: int, seed: int = 0, **more: Any) -> tuple[Tensor, Tensor]:
    """Indices and numbers, on the device of the model."""
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (rows, 3), generator=generator)
    x = torch.randn(rows, 6, generator=generator)
    return ids.to(device), x.to(device).requires_grad_(more.get("requires_grad", False))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


Found = Iterator[Tensor]
Scenario = Callable[[nn.Module], Found]


def steps(model: nn.Module, sizes: list[int]) -> Found:
    """Training steps of an optimizer; outputs and gradients as they come, none of them copied."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, rows in enumerate(sizes):
        optimizer.zero_grad()
        y = model(*batch(model, rows, number))
        y.square().mean().backward()
        yield y
        yield from gradients(model)
        optimizer.step()


def one_size(model: nn.Module) -> Found:
    yield from steps(model, [4] * 6)


def many_sizes(model: nn.Module) -> Found:
    yield from steps(model, [4, 3, 4, 7, 3, 4, 4, 3, 7, 7])


def accumulated(model: nn.Module) -> Found:
    for number in range(6):
        model(*batch(model, 4, number)).square().mean().backward()
        yield from [g.clone() for g in gradients(model)]


def accumulated_in_place(model: nn.Module) -> Found:
    """Without a copy: autograd adds to what it was given first."""
    for number in range(6):
        model(*batch(model, 4, number)).square().mean().backward()
    yield from gradients(model)


def two_forwards(model: nn.Module) -> Found:
    for number in range(5):
        first, second = model(*batch(model, 4, number)), model(*batch(model, 4, number + 50))
        (first * second).mean().backward()
        yield from (first, second, *gradients(model))
        model.zero_grad()


def backwards_in_the_other_order(model: nn.Module) -> Found:
    for number in range(5):
        outputs = [model(*batch(model, 4, 3 * number + i)) for i in range(3)]
        for output in outputs[:: -1 if number % 2 else 1]:
            output.square().mean().backward()
        yield from (*outputs, *gradients(model))
        model.zero_grad()


def twice(model: nn.Module) -> Found:
    """A graph that stays, with other forwards between its backwards."""
    for number in range(5):
        y = model(*batch(model, 4, number))
        y.square().mean().backward(retain_graph=True)
        yield model(*batch(model, 4, number + 9))
        y.square().mean().backward()
        yield from gradients(model)
        model.zero_grad()


def never_backward(model: nn.Module) -> Found:
    kept = None
    for number in range(5):
        kept = model(*batch(model, 4, number))
        yield kept
    assert kept is not None
    kept.sum().backward()
    yield from gradients(model)


def changed_outputs(model: nn.Module) -> Found:
    """Whoever gets an output may write into it."""
    with torch.no_grad():
        for number in range(5):
            y = model(*batch(model, 4, number))
            yield y.clone()
            yield y.mul_(2)


def evaluation(model: nn.Module) -> Found:
    for number in range(4):
        model.train()
        model(*batch(model, 4, number)).mean().backward()
        model.eval()
        with torch.inference_mode():
            yield model(*batch(model, 4, number))
        with torch.no_grad():
            yield model(*batch(model, 4, number + 1))
    yield from gradients(model)


def moved_parameters(model: nn.Module) -> Found:
    for number in range(9):
        if number % 3 == 2:
            for p in model.parameters():
                p.data = p.data.clone()
        yield model(*batch(model, 4, number))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)


def gradients_of_inputs(model: nn.Module) -> Found:
    for number in range(5):
        ids, x = batch(model, 4, number, requires_grad=True)
        model(ids, x).square().mean().backward()
        assert x.grad is not None
        yield x.grad


def other_strides(model: nn.Module) -> Found:
    for number in range(8):
        ids, x = batch(model, 6, number)
        x = x.t().contiguous().t() if number % 2 else x
        y = model(ids, x)
        (y.sum() if number % 3 else y.square().mean()).backward()  # of which one is expanded
        yield from (y, *gradients(model))
        model.zero_grad()


def run_again(model: nn.Module) -> Found:
    for number in range(5):
        checkpoint(
            model, *batch(model, 4, number, requires_grad=True), use_reentrant=False
        ).sum().backward()
        yield from gradients(model)
        model.zero_grad()


SCENARIOS: list[Scenario] = [
    one_size, many_sizes, accumulated, accumulated_in_place, two_forwards,
    backwards_in_the_other_order, twice, never_backward, changed_outputs, evaluation,
    moved_parameters, gradients_of_inputs, other_strides, run_again,
]  # fmt: skip
