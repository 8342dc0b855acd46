"""Scripts of three hundred steps with default options: the losses are eager's at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule
from ortrain.step.captures import DIFFERENTIATED_AGAIN

STEPS = 300
# What two orders of summation make of a loss after three hundred steps of gradient descent.
RELATIVE = 2e-4

Losses = Iterator[Tensor]


@pytest.fixture(autouse=True)
def graph_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contest is short, and the graph wins it, whatever the clock says."""
    monkeypatch.setattr("ortrain.step.contest.MOST_STEPS", 5)
    monkeypatch.setattr("ortrain.step.contest.MARGIN", 1e9)


def rows(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(*sizes: int, between: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    parts: list[nn.Module] = []
    for one, two in pairwise(sizes):
        parts += [nn.Linear(one, two), between()]
    return nn.Sequential(*parts[:-1])


def stepped(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_losses_agree(
    script: Callable[..., Losses], modules: tuple[nn.Module, ...]
) -> list[ORTModule]:
    ours = [ORTModule(copy.deepcopy(module)) for module in modules]
    runs = zip(script(*ours), script(*modules), strict=True)
    count = 0
    for count, (mine, eager) in enumerate(runs, 1):
        torch.testing.assert_close(
            mine, eager, rtol=RELATIVE, atol=1e-6, msg=lambda text, n=count: f"step {n}: {text}"
        )
    assert count == STEPS
    return ours


def gan_with_a_penalty(generator: nn.Module, critic: nn.Module) -> Losses:
    """The critic's gradient at points between real and made ones is held at length 1."""
    makers = torch.optim.SGD(generator.parameters(), lr=0.01)
    judges = torch.optim.SGD(critic.parameters(), lr=0.01)
    for number in range(STEPS):
        real = rows(8, 3, seed=number) * 0.5 + 1
        made = generator(rows(8, 2, seed=number + 1000)).detach()
        share = rows(8, 1, seed=number + 2000).sigmoid()
        between = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        loss = critic(made).mean() - critic(real).mean() + penalty
        judged = stepped(loss, judges)
        fooled = stepped(-critic(generator(rows(8, 2, seed=number))).mean(), makers)
        yield torch.stack([judged, fooled])


def physics(network: nn.Module) -> Losses:
    """Burgers' equation: u_t + u u_x = 0.1 u_xx."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for number in range(STEPS):
        place, time = rows(10, 1, seed=number), rows(10, 1, seed=number + 1000)
        place, time = place.requires_grad_(), time.requires_grad_()
        u = network(torch.cat([place, time], 1))
        u_x, u_t = torch.autograd.grad(u.sum(), [place, time], create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), place, create_graph=True)
        at_start = network(torch.cat([place.detach(), torch.zeros(10, 1)], 1))
        loss = (u_t + u * u_x - 0.1 * u_xx).square().mean()
        loss = loss + (at_start + place.detach().sin()).square().mean()
        yield stepped(loss, optimizer)


class Energy(nn.Module):
    """Of atoms of several kinds, from their distances."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, 4)
        self.pair = layers(9, 16, 1, between=nn.SiLU)

    def forward(self, positions: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        apart = positions[:, None, :] - positions[None, :, :]
        near = torch.exp(-apart.square().sum(-1, keepdim=True))
        own = self.kinds(kinds)
        count = own.shape[0]
        one, two = own[:, None, :].expand(count, count, 4), own[None].expand(count, count, 4)
        each = self.pair(torch.cat([near, one, two], -1)) * near
        return {"energy": each.sum(), "atoms": each.sum((1, 2))}


def force_field(network: nn.Module) -> Losses:
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    kinds = torch.arange(6) % 3
    for number in range(STEPS):
        positions = rows(6, 3, seed=number).requires_grad_()
        energy = network(positions, kinds)["energy"]
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        loss = (-slope - positions.detach().tanh()).square().mean() + energy.square() * 1e-3
        yield stepped(loss, optimizer)


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.one, self.two = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(value)
        return self.one(hidden), self.two(hidden)


def two_heads(network: Any) -> Losses:
    """Each head has a backward and an optimizer of its own, and the trunk a third."""
    parts = [network.one, network.two, network.body]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]
    for number in range(STEPS):
        one, two = network(rows(8, 4, seed=number))
        losses = [(one - 1).square().mean(), (two + 0.5).pow(4).mean()]
        network.zero_grad()
        losses[0].backward(retain_graph=True)
        optimizers[0].step()
        losses[1].backward(retain_graph=number % 2 == 0)
        optimizers[1].step()
        optimizers[2].step()
        yield torch.stack(losses).detach()


def meta_learning(network: nn.Module) -> Losses:
    """A step of descent on each task, from weights that are learned for it."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for number in range(STEPS):
        value = rows(6, 2, seed=number)
        wanted = (value.sum(1, keepdim=True) * (1 + number % 3)).sin()
        own = dict(network.named_parameters())
        before = torch.func.functional_call(network, own, (value,))
        first = torch.autograd.grad(
            (before - wanted).square().mean(), list(own.values()), create_graph=True
        )
        fast = {name: p - 0.1 * g for (name, p), g in zip(own.items(), first, strict=True)}
        after = torch.func.functional_call(network, fast, (value,))
        yield stepped((after - wanted).square().mean(), optimizer)


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        (gan_with_a_penalty, (layers(2, 8, 3), layers(3, 8, 8, 1, between=nn.Softplus))),
        (physics, (layers(2, 12, 12, 1),)),
        (force_field, (Energy(),)),
        (two_heads, (Trunk(),)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_losses_are_eagers_at_every_step(
    script: Callable[..., Losses], modules: tuple[nn.Module, ...]
) -> None:
    *_, last = assert_losses_agree(script, modules)
    if script is two_heads:
        assert last.report.graph_calls > STEPS // 2
    elif script is force_field:
        assert last.report.reason == DIFFERENTIATED_AGAIN
    else:
        assert last.report.graph_calls > 100, "the calls that are differentiated once"


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_weights_that_are_computed_by_a_step_of_descent() -> None:
    assert_losses_agree(meta_learning, (layers(2, 8, 1),))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_checkpointing_around_it_runs_both_times_alike(reentrant: bool, p: float) -> None:
    model = ORTModule(nn.Sequential(nn.Linear(8, 64), nn.Dropout(p)))
    for number in range(60):
        model.zero_grad()
        value = rows(16, 8, seed=number).requires_grad_()
        output = checkpoint(model, value, use_reentrant=reentrant)
        output.sum().backward()
        kept = (output != 0).sum(0) / (1 - p)
        torch.testing.assert_close(model[0].bias.grad, kept.float())
        model(value.detach()).sum().backward()  # calls of its own in between
