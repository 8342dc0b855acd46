"""Outputs lie in memory as eager's do: who views them there can view them here."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.module.agreement import GRAPH, SAME

Step = Callable[[Tensor], Tensor]


class Ends(nn.Module):
    """Doubles its input and takes some views of it."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for step in self.steps:
            x = step(x)
        return x


class Permuted:
    def __init__(self, *axes: int) -> None:
        self.axes = axes

    def __call__(self, x: Tensor) -> Tensor:
        return x.permute(self.axes)

    def __repr__(self) -> str:
        return f"permuted{self.axes}"


def every_second(x: Tensor) -> Tensor:
    return x[:, ::2]


def first(x: Tensor) -> Tensor:
    return x[..., :1]


def repeated(x: Tensor) -> Tensor:
    return x[:, :, :1].expand(-1, -1, 3, -1)


def computed(x: Tensor) -> Tensor:
    return x.tanh()


def drawn(seed: int) -> list[Step]:
    """Up to four views of a tensor of rank 4, and now and then a computation between."""
    generator = random.Random(seed)
    found: list[Step] = []
    for _ in range(generator.randint(1, 4)):
        axes = generator.sample(range(4), 4)
        found.append(
            generator.choice([Permuted(*axes)] * 3 + [every_second, first, repeated, computed])
        )
    return found


def merged(shape: torch.Size) -> Iterator[tuple[int, ...]]:
    """The shapes of a tensor's views with neighbouring axes in one."""
    for count in range(1, len(shape)):
        for ends in itertools.combinations(range(1, len(shape)), len(shape) - count):
            cuts = [0, *ends, len(shape)]
            yield tuple(shape[a:b].numel() for a, b in itertools.pairwise(cuts))


def assert_lies_alike(ours: Tensor, eagers: Tensor) -> None:
    reach = sum((n - 1) * s for n, s in zip(eagers.shape, eagers.stride(), strict=True)) + 1
    if 0 not in eagers.stride() and reach == eagers.numel():  # without gaps
        pairs = zip(ours.stride(), eagers.stride(), eagers.shape, strict=True)
        assert [(a, b) for a, b, size in pairs if a != b and size > 1] == []
    rank = eagers.ndim
    for axes in itertools.permutations(range(rank)):
        theirs, mine = eagers.permute(axes), ours.permute(axes)
        for shape in merged(theirs.shape):
            try:
                wanted = theirs.view(shape)
            except RuntimeError:
                continue
            torch.testing.assert_close(mine.view(shape), wanted, rtol=SAME, atol=SAME)


def assert_alike(eager: nn.Module, *inputs: Tensor) -> None:
    """At each of the inputs: outputs, their places in memory, gradients."""
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for x in inputs:
        found = []
        for run in (model, eager):
            run.zero_grad()
            output = run(x)
            output = output[0] if isinstance(output, tuple) else output
            (output * output.detach().cos()).sum().backward()
            found.append((output, [p.grad for p in run.parameters()]))
        (ours, our_gradients), (eagers, its_gradients) = found
        torch.testing.assert_close(ours, eagers, rtol=SAME, atol=SAME)
        assert_lies_alike(ours, eagers)
        for a, b in zip(our_gradients, its_gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=10 * SAME, atol=10 * SAME)


@pytest.mark.parametrize("seed", range(24))
def test_views_at_the_end_of_a_module(seed: int) -> None:
    assert_alike(Ends(drawn(seed)), torch.randn(2, 5, 4, 3), torch.randn(3, 5, 4, 3))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LSTM(3, 4, batch_first=True), (2, 5, 3)),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (2, 5, 4)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2)), (2, 3, 8, 8)),
    ],
    ids=["lstm", "transformer", "convolution"],
)
def test_layers(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    assert_alike(make(), torch.randn(shape), torch.randn(4, *shape[1:]))


def test_channels_last() -> None:
    last = torch.channels_last
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(memory_format=last)
    inputs = [torch.randn(n, 3, 8, 8).to(memory_format=last) for n in (2, 3)]
    assert_alike(module, *inputs)


def test_what_is_written_to_such_an_output_has_its_gradient() -> None:
    eager = Ends([Permuted(1, 0)])
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    x, found = torch.randn(3, 4), []
    for run in (model, eager):
        output: Any = run(x)
        output[0] = 0
        output.mul_(3).square().sum().backward()
        found.append(run.get_parameter("scale").grad)
    torch.testing.assert_close(*found, rtol=SAME, atol=SAME)


LAST = torch.channels_last
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "reversed": lambda x: (
        x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    ),
    "batch second": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
}


class Computes(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(x * self.scale)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 1)),
        (2, 3, 6, 5),
    ),
    "one channel": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 1)), (2, 1, 6, 5)),
    "volumes": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 3, 5)),
    "weights in channels last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()).to(memory_format=LAST),
        (2, 3, 6, 5),
    ),
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh()), (2, 3, 5)),
    "product": (lambda: Computes(lambda x: x), (3, 4, 5)),
    "permuted": (lambda: Computes(lambda x: x.permute(0, 2, 3, 1).tanh()), (2, 3, 4, 5)),
    "a sum": (lambda: Computes(lambda x: x.sum(1)), (2, 3, 4, 5)),
    "several": (
        lambda: Computes(lambda x: (x, (x * 9).int(), x > 0, x.to(torch.float64))),
        (2, 3, 4, 5),
    ),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *[(name, "channels last") for name in MODULES],
        *[(name, "reversed") for name in ("convolutions", "linear", "product", "a sum")],
        *[(name, "batch second") for name in ("convolutions", "permuted", "several")],
        *[(name, "with gaps") for name in ("convolutions", "product")],
        *[(name, "expanded") for name in ("convolutions", "product")],
    ],
)
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_outputs_and_gradients_of_an_input_that_lies_otherwise(
    name: str, layout: str, engine: Any
) -> None:
    make, shape = MODULES[name]
    eager = make()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine=engine, fallback="raise"))
    for count in (shape[0], shape[0] + 1):
        x = LAYOUTS[layout](torch.randn(count, *shape[1:]))
        found = []
        for run in (model, eager):
            given = x.detach().requires_grad_()
            outputs = run(given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            floats = [each for each in outputs if each.requires_grad]
            loss = torch.stack([(each * each.detach().cos()).sum() for each in floats]).sum()
            gradient, *others = torch.autograd.grad(loss, [given, *run.parameters()])
            found.append(([*outputs, gradient], others))
        (ours, our_gradients), (eagers, its_gradients) = found
        for one, other in zip(ours, eagers, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            assert_lies_alike(one, other)
        for one, other in zip(our_gradients, its_gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert model.report.graph_calls == 2


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("certificate", ["first", "off"])
def test_each_order_of_axes_has_a_graph_of_its_own(engine: Any, certificate: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 1))
    model = ORTModule(net, options=Options(engine=engine, certificate=certificate))
    for number in range(4):
        x = torch.randn(2, 3, 6, 5)
        last = bool(number % 2)
        output = model(x.to(memory_format=LAST) if last else x)
        rows = output.permute(0, 2, 3, 1).view(-1, 6) if last else output.view(-1)
        rows.sum().backward()
    assert model.report.graph_calls == 4
    assert model.report.captures == 2


def test_a_network_outside_finds_images_of_one_channel_as_eagers_lie() -> None:
    generator = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 1))
    discriminator = nn.Conv2d(1, 4, 3)
    for own in (generator, generator.to(memory_format=LAST)):
        model = ORTModule(own, options=Options(engine="aten"))
        x = torch.randn(2, 2, 8, 8)
        assert discriminator(model(x)).stride() == discriminator(own(x)).stride()
        assert model.report.graph_calls == 1


def test_the_output_of_an_expanded_batch_of_images_in_channels_last_lies_as_eagers() -> None:
    model = ORTModule(nn.Conv2d(3, 4, 3), options=Options(engine="aten"))
    x = torch.randn(1, 3, 6, 5).to(memory_format=LAST).expand(4, -1, -1, -1)
    output, its = model(x), model.module(x)
    assert output.stride() == its.stride()
    torch.testing.assert_close(output, its, rtol=SAME, atol=SAME)
    assert model.report.mode == "graph"
