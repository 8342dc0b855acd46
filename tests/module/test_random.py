"""Modules that draw random numbers train as graphs, with the numbers that the seed gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers.integrations.neftune import neftune_post_forward_hook

from ortrain import Options, ORTModule
from ortrain.errors import CaptureError
from ortrain.frontend.export import export
from ortrain.program import Role

# Each graph is compared with the module, run on the same numbers, before it is used.
CERTIFIED = Options(engine="onnxruntime", fallback="raise", certificate="first")


class Calls(nn.Module):
    """Calls a function with what a linear layer makes of the argument."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = [function]
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function[0](self.linear(x))


def drop_path(x: torch.Tensor) -> torch.Tensor:
    """Stochastic depth as transformers spells it."""
    keep = 0.8 + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
    return x.div(0.8) * keep.floor_()


def drop_path_in_place(x: torch.Tensor) -> torch.Tensor:
    """Stochastic depth as timm spells it."""
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
    mask.div_(0.7)
    return x * mask


def first_of(values: tuple[Any, ...]) -> Any:
    return values[0]


DRAWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand": lambda x: x * torch.rand(x.shape[0], 6),
    "randn": lambda x: x * torch.randn(4, 6, dtype=torch.float32),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x) * x.exp(),
    "in float64": lambda x: x.double() * torch.randn_like(x, dtype=torch.float64),
    "uniform_": lambda x: x * x.new_empty(x.shape[0], 1).uniform_(-1, 2),
    "normal_": lambda x: x * torch.empty(4, 6).normal_(1, 2),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(2.0),
    "uniform_ between tensors": lambda x: (
        x * torch.empty_like(x).uniform_(-x.detach().abs().max(), x.detach().exp().sum())
        + torch.empty_like(x).uniform_(to=x.detach().exp().sum())
    ),
    "normal_ by tensors": lambda x: (
        x * torch.empty_like(x).normal_(std=x.detach().exp().sum())
        + x * torch.empty_like(x).normal_(x.detach().mean(), 2.0)
    ),
    "exponential_ by a tensor": lambda x: (
        x + torch.empty_like(x).exponential_(x.detach().exp().sum())
    ),
    "uniform_ between tensors, in bfloat16": lambda x: (
        x * torch.empty_like(x, dtype=torch.bfloat16).uniform_(-x.detach().abs().max(), 2.0)
    ),
    "log_normal_, geometric_, cauchy_": lambda x: (
        x + torch.empty_like(x).log_normal_() * torch.empty_like(x).geometric_(0.3)
        + torch.empty_like(x).cauchy_(1, 2)
    ),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli of detached": lambda x: x * torch.bernoulli(x.detach(), p=0.3),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: x * torch.empty_like(x).bernoulli_(x.sigmoid().detach()),
    "random_": lambda x: x * torch.empty_like(x).random_(7),
    "randint": lambda x: x[torch.randint(0, 4, (3,))] * torch.randint(3, 9, (3, 6)),
    "randint_like": lambda x: x * torch.randint_like(x, 7) + torch.randint_like(x, 2, 5),
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "normal of tensors": lambda x: (
        x + torch.normal(x, 0.5) + torch.normal(0.0, x.exp()) + torch.normal(x, x.exp())
        + torch.normal(1.0, 2.0, (4, 6))
    ),
    "one of many": lambda x: x * torch.multinomial(x.softmax(-1), 1),
    "some of many": lambda x: x[:, :3] * torch.multinomial(x.softmax(-1), 3),
    "some of many, put back": lambda x: x[:, :3] * torch.multinomial(x.softmax(-1), 3, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[None, :, :, None], 0.3, True),
    "dropout, dropout2d": lambda x: F.dropout2d(F.dropout(x, 0.1)[None, :, :, None], 0.3),
    "dropout_": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "native_dropout": lambda x: first_of(torch.native_dropout(x, 0.2, True)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.4),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "hard gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5, hard=True),
    "rsample": lambda x: torch.distributions.Normal(x, x.exp(), validate_args=False).rsample(),
    "stochastic depth": drop_path,
    "stochastic depth in place": drop_path_in_place,
    "random_ between two numbers": lambda x: (
        x * torch.empty_like(x).random_(2, 7) + torch.empty(x.shape).random_(to=3, **{"from": -2})
        + torch.empty(x.shape, dtype=torch.int8).random_(-128, 128)
    ),
    "over an activation": lambda x: (x * 2).uniform_() + x,
}  # fmt: skip


@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_that_of_the_module_on_the_same_numbers(draws: Any) -> None:
    """The certificate compares output and gradients with eager's, its draws replaced in order."""
    torch.manual_seed(1)
    module = Calls(draws)
    graph = ORTModule(module, options=CERTIFIED)
    x = torch.randn(4, 6, requires_grad=True)
    output = graph(x)
    output.float().sum().backward()
    assert graph.report.certificate.startswith("outputs")
    wanted = Calls(draws)(x)
    assert (output.shape, output.dtype) == (wanted.shape, wanted.dtype)
    assert any(not torch.equal(graph(x), output) for _ in range(5))  # other steps, other numbers


WITHOUT_GENERATOR: dict[str, Callable[..., Any]] = {
    "randn": lambda x, **g: torch.randn(x.shape, dtype=x.dtype, layout=torch.strided, **g),
    "randn of numbers": lambda x, **g: torch.randn(*x.shape, **g),
    "rand": lambda x, **g: torch.rand(x.shape, **g),
    "randint": lambda x, **g: torch.randint(3, x.shape, **g) + torch.randint(3, 5, x.shape, **g),
    "randn_like": lambda x, **g: torch.randn_like(x, **g),
    "rand_like": lambda x, **g: torch.rand_like(x, **g),
    "randint_like": lambda x, **g: torch.randint_like(x, 3, **g) + torch.randint_like(x, 2, 4, **g),
    "randperm": lambda x, **g: x[torch.randperm(x.shape[0], **g)],
    "normal": lambda x, **g: torch.normal(0.0, 1.0, x.shape, **g) + torch.normal(x, 1.0, **g),
    "bernoulli": lambda x, **g: torch.bernoulli(x.sigmoid(), **g),
    "multinomial": lambda x, **g: torch.multinomial(x.softmax(-1), 1, **g),
    "in place": lambda x, **g: (
        torch.empty_like(x).normal_(**g) + torch.empty_like(x).uniform_(-1, 1, **g)
        + torch.empty_like(x).exponential_(**g) + torch.empty_like(x).bernoulli_(0.3, **g)
        + torch.empty_like(x).random_(4, **g) + torch.empty_like(x).random_(4, 6, **g)
    ),
}  # fmt: skip


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "uniform_": (lambda x: x * torch.empty_like(x).uniform_(-x[0, 0].detach(), 1.0), "from, to"),
    "normal_": (lambda x: x * torch.empty_like(x).normal_(0.0, x[0, 0].detach() + 2), "std >= 0"),
    "exponential_": (
        lambda x: x * torch.empty_like(x).exponential_(x[0, 0].detach() + 2),
        "lambda",
    ),
}


@pytest.mark.parametrize(("draws", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
def test_a_parameter_that_pytorch_refuses_is_its_error(
    engine: Any, draws: Any, message: str
) -> None:
    graph = ORTModule(Calls(draws), options=Options(engine=engine, fallback="raise"))
    graph.linear.weight.data.copy_(torch.eye(6))
    graph.linear.bias.data.zero_()
    graph(torch.ones(4, 6)).sum().backward()
    wrong = torch.full((4, 6), -3.0)
    with pytest.raises(RuntimeError, match=message):
        graph(wrong)
    graph(torch.ones(4, 6)).sum().backward()
    assert (graph.report.graph_calls, graph.report.eager_calls) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_noise_of_neftunes_hook_follows_lengths_its_strength_and_the_mode(
    dtype: torch.dtype,
) -> None:
    """The hook of transformers adds uniform numbers up to alpha / sqrt(length * width)."""
    table = nn.Embedding(10, 8).to(dtype)
    table.neftune_noise_alpha = 4.0
    hook = table.register_forward_hook(neftune_post_forward_hook)
    graph = ORTModule(table, options=Options(engine="aten", fallback="raise"))

    def largest(length: int) -> float:
        ids = torch.arange(10).repeat(100 // 10, 1).T.reshape(1, -1)[:, :length]
        return float((graph(ids).detach() - table.weight.detach()[ids]).abs().max())

    assert 0.45 < largest(8) <= 0.51
    assert 0.24 < largest(32) <= 0.26
    table.neftune_noise_alpha = 8.0
    assert 0.49 < largest(32) <= 0.51
    graph.eval()
    assert largest(32) == 0
    graph.train()
    hook.remove()
    assert largest(32) == 0
    assert graph.report.eager_calls == 0


def test_draws_that_nothing_reads_do_not_shift_the_numbers_of_others() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        F.dropout(x)
        y = torch.empty_like(x).normal_()
        y.uniform_()  # what it held before is lost
        return x * y + F.dropout(x, 0.2)

    graph = ORTModule(Calls(function), options=CERTIFIED)
    graph(torch.randn(4, 6)).sum().backward()
    exported = export(Calls(function), (torch.randn(4, 6),))
    streams = [n.attributes["stream"].as_int() for n in exported.program.graph if n.domain]
    assert streams == [3, 4]


def test_what_draws_nothing_in_pytorch_takes_no_number() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, 0.0) + F.dropout(x, 1.0) + F.dropout(x, 0.3, training=False)
        y = y + F.rrelu(x) + F.alpha_dropout(x, 0.3) + torch.empty_like(x).zero_()
        return y * torch.rand_like(x)

    graph = ORTModule(Calls(function), options=CERTIFIED)
    graph(torch.randn(4, 6)).sum().backward()
    exported = export(Calls(function), (torch.randn(4, 6),))
    streams = [
        n.attributes["stream"].as_int() for n in exported.program.graph if "Random" in n.op_type
    ]
    assert streams == [0]


def test_layers_of_an_lstm_and_what_follows_have_numbers_of_their_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 5, 3, dropout=0.4, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lstm(F.dropout(x))[0]
            return y * torch.randn_like(y)

    graph = ORTModule(Model(), options=CERTIFIED)
    graph(torch.randn(4, 3, 6)).sum().backward()
    assert graph.report.certificate.startswith("outputs")


class AutoEncoder(nn.Module):
    """A variational one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, logarithm = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logarithm)
        divergence = -0.5 * (1 + logarithm - mean.pow(2) - logarithm.exp()).sum(-1).mean()
        return F.mse_loss(self.decoder(z), x) + 0.01 * divergence


class Categories(nn.Module):
    """A discrete bottleneck with Gumbel noise, and noise on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 5), nn.Linear(5, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noisy = x + 0.1 * torch.randn(x.shape[0], 12)
        return F.mse_loss(self.decoder(F.gumbel_softmax(self.encoder(noisy), hard=True)), x)


@pytest.mark.parametrize("model", [AutoEncoder, Categories])
def test_a_model_with_noise_learns_as_in_eager_at_any_batch(model: type[nn.Module]) -> None:
    torch.manual_seed(3)
    plain = model()
    graph = ORTModule(model(), options=CERTIFIED)
    graph.load_state_dict(plain.state_dict())
    data = torch.randn(64, 12) @ torch.randn(12, 12) * 0.3
    losses = []
    for module in (plain, graph):
        optimizer = torch.optim.Adam(module.parameters(), 1e-2)
        losses.append([])
        for step in range(150):
            optimizer.zero_grad()
            loss = module(data[: 64 - step % 2])
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    eager, ours = (torch.tensor(each) for each in losses)
    assert eager[:10].mean() > 1.3 * eager[-30:].mean()
    assert abs(ours[-30:].mean() / eager[-30:].mean() - 1) < 0.1
    assert graph.report.captures == 1
    assert graph.report.eager_calls == 0


def test_an_evaluation_that_draws_runs_as_a_graph() -> None:
    torch.manual_seed(1)
    graph = ORTModule(AutoEncoder().eval(), options=CERTIFIED)
    with torch.no_grad():
        losses = {float(graph(torch.ones(3, 12))) for _ in range(5)}
    assert len(losses) == 5


def test_numbers_follow_from_pytorchs_seed() -> None:
    graph = ORTModule(Calls(torch.rand_like), options=CERTIFIED)
    x = torch.randn(50, 6)
    graph(x)

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        result: torch.Tensor = graph(x)
        return result.detach()

    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(6))
    assert abs(float(drawn(7).mean()) - 0.5) < 5 / math.sqrt(12 * 300)


class Seeded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return x * torch.rand_like(x)


class Forked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            noise = torch.rand_like(x)
        return x * noise * torch.rand_like(x)


@pytest.mark.parametrize("kind", [Seeded, Forked])
def test_a_forward_that_sets_the_state_of_the_generator_is_refused(kind: type[nn.Module]) -> None:
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="cannot become one graph") as raised:
        export(kind(), (torch.ones(3),))
    assert "seed outside of the forward" in raised.value.help
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_its_own_is_refused() -> None:
    generator = torch.Generator()
    module = Calls(lambda x: x * torch.rand(3, 6, generator=generator))
    with pytest.raises(CaptureError, match="cannot become one graph"):
        export(module, (torch.ones(3, 6),))


def test_a_program_that_draws_takes_a_seed_and_one_that_does_not_takes_none() -> None:
    for function, count in ((torch.rand_like, 1), (torch.relu, 0)):
        exported = export(Calls(function), (torch.ones(3, 6),))
        assert len(exported.program.inputs(Role.SEED)) == count
