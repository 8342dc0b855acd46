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
from ortrain.frontend.form import AGAIN

pytestmark = pytest.mark.usefixtures("graph_wins")
STEPS = 300
# What two orders of summation make of a loss after three hundred steps of gradient descent.
RELATIVE = 2e-4

Losses = Iterator[Tensor]


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
    count, largest = 0, 0.0
    for count, (mine, eager) in enumerate(runs, 1):
        # A loss near zero is a difference of larger terms, and rounded as they are.
        largest = max(largest, float(eager.abs().max()))
        torch.testing.assert_close(
            mine,
            eager,
            rtol=0,
            atol=RELATIVE * largest,
            msg=lambda text, n=count: f"step {n}: {text}",
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
        assert last.report.reason == str(AGAIN)
    else:
        assert last.report.graph_calls > 100, "the calls that are differentiated once"


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_weights_that_are_computed_by_a_step_of_descent() -> None:
    assert_losses_agree(meta_learning, (layers(2, 8, 1),))


class Rounded(torch.autograd.Function):
    """Rounds, and lets the gradient through as if it had not."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return (value * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class Through(nn.Module):
    """Layers with a function of one's own in between, reached by a name that was bound before."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.body, self.head = layers(4, 8, 8), nn.Linear(8, 1)
        self.between = function.apply

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.head(self.between(self.body(value)))
        return result


def regression(network: nn.Module) -> Losses:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    for number in range(STEPS):
        value = rows(8, 4, seed=number)
        yield stepped(
            (network(value) - value.sum(1, keepdim=True).sin()).square().mean(), optimizer
        )


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("function", [Rounded, Reversed])
def test_functions_with_a_backward_of_their_own(function: type[torch.autograd.Function]) -> None:
    assert_losses_agree(regression, (Through(function),))


class Curriculum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers(4, 8, 1)
        self.share = 0.0

    def forward(self, value: Tensor, share: float | None = None) -> Tensor:
        share = self.share if share is None else share
        result: Tensor = self.body(value) * share + value.mean(1, keepdim=True) * (1 - share)
        return result


def growing_argument(network: nn.Module) -> Losses:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    for number in range(STEPS):
        value = rows(8, 4, seed=number)
        yield stepped(network(value, number / STEPS).square().mean(), optimizer)


def growing_attribute(network: Any) -> Losses:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    for number in range(STEPS):
        network.share = number / STEPS
        yield stepped(network(rows(8, 4, seed=number)).square().mean(), optimizer)


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("script", [growing_argument, growing_attribute])
def test_a_number_that_changes_at_every_step(script: Callable[..., Losses]) -> None:
    (model,) = assert_losses_agree(script, (Curriculum(),))
    if script is growing_argument:
        assert model.report.captures == 2  # the first number, and any
        assert model.report.graph_calls > STEPS // 2


def thawing(network: Any) -> Losses:
    """The first layer is frozen for twenty steps of every forty."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    for number in range(STEPS):
        network[0].requires_grad_(number // 20 % 2 == 0)
        value = rows(8, 4, seed=number)
        yield stepped((network(value) - value[:, :1]).square().mean(), optimizer)


def test_layers_that_are_frozen_and_thawed() -> None:
    (model,) = assert_losses_agree(thawing, (layers(4, 8, 8, 1),))
    assert model.report.captures == 2  # with the layer, and without
    assert model.report.graph_calls > STEPS // 2


class Judged(nn.Module):
    """Layers and a loss of PyTorch's."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.body, self.loss = layers(4, 8, 5), loss

    def forward(self, value: Tensor, *others: Any) -> Tensor:
        result: Tensor = self.loss(self.body(value), *others)
        return result


def classes(number: int) -> Tensor:
    return torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(number))


def signs(number: int, *shape: int) -> Tensor:
    return rows(*shape, seed=number).sign()


class Pairwise(nn.Module):
    """A loss of several tensors, of which the first is what the layers return."""

    def __init__(self, loss: nn.Module, first: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.loss, self.first = loss, first

    def forward(self, hidden: Tensor, *others: Any) -> Tensor:
        result: Tensor = self.loss(*self.first(hidden), *others)
        return result


def halves(hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden[:3], hidden[3:]


def thirds(hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden[:2], hidden[2:4], hidden[4:]


def chances(hidden: Tensor) -> tuple[Tensor, ...]:
    return (hidden.sigmoid(),)


def log_chances(hidden: Tensor) -> tuple[Tensor, ...]:
    return (hidden.log_softmax(-1),)


def columns(hidden: Tensor) -> tuple[Tensor, ...]:
    return hidden[:, 0], hidden[:, 1]


def frames(hidden: Tensor) -> tuple[Tensor, ...]:
    return (hidden[:, None].log_softmax(-1),)


# What else each loss takes, by the number of the step.
LOSSES: dict[str, tuple[nn.Module, Callable[[int], tuple[Any, ...]]]] = {
    "L1": (nn.L1Loss(), lambda n: (rows(6, 5, seed=n),)),
    "MSE": (nn.MSELoss(), lambda n: (rows(6, 5, seed=n),)),
    "SmoothL1": (nn.SmoothL1Loss(), lambda n: (rows(6, 5, seed=n),)),
    "Huber": (nn.HuberLoss(delta=0.5), lambda n: (rows(6, 5, seed=n),)),
    "CrossEntropy": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda n: (classes(n),)),
    "NLL": (Pairwise(nn.NLLLoss(), log_chances), lambda n: (classes(n),)),
    "KLDiv": (
        Pairwise(nn.KLDivLoss(reduction="batchmean"), log_chances),
        lambda n: (rows(6, 5, seed=n).softmax(-1),),
    ),
    "BCE": (Pairwise(nn.BCELoss(), chances), lambda n: (rows(6, 5, seed=n).sigmoid(),)),
    "BCEWithLogits": (nn.BCEWithLogitsLoss(), lambda n: (rows(6, 5, seed=n).sigmoid(),)),
    "PoissonNLL": (nn.PoissonNLLLoss(), lambda n: (rows(6, 5, seed=n).abs().round(),)),
    "GaussianNLL": (
        nn.GaussianNLLLoss(),
        lambda n: (rows(6, 5, seed=n), rows(6, 5, seed=n + 1).square() + 0.1),
    ),
    "SoftMargin": (nn.SoftMarginLoss(), lambda n: (signs(n, 6, 5),)),
    "HingeEmbedding": (nn.HingeEmbeddingLoss(), lambda n: (signs(n, 6, 5),)),
    "MultiMargin": (nn.MultiMarginLoss(), lambda n: (classes(n),)),
    "MultiLabelMargin": (
        nn.MultiLabelMarginLoss(),
        lambda n: (torch.stack([torch.tensor([(n + i) % 5, -1, 0, 0, 0]) for i in range(6)]),),
    ),
    "MultiLabelSoftMargin": (
        nn.MultiLabelSoftMarginLoss(), lambda n: ((rows(6, 5, seed=n) > 0).float(),)
    ),
    "CosineEmbedding": (Pairwise(nn.CosineEmbeddingLoss(), halves), lambda n: (signs(n, 3),)),
    "MarginRanking": (Pairwise(nn.MarginRankingLoss(0.1), columns), lambda n: (signs(n, 6),)),
    "TripletMargin": (Pairwise(nn.TripletMarginLoss(), thirds), lambda n: ()),
    "TripletMarginWithDistance": (
        Pairwise(nn.TripletMarginWithDistanceLoss(), thirds), lambda n: ()
    ),
    "CTC": (
        Pairwise(nn.CTCLoss(), frames),
        lambda n: (torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_pytorch(name: str) -> None:
    loss, others = LOSSES[name]

    def script(network: nn.Module) -> Losses:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
        for number in range(STEPS):
            yield stepped(network(rows(6, 4, seed=number), *others(number)), optimizer)

    assert_losses_agree(script, (Judged(loss),))


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
