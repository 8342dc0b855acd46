"""``torch.vmap`` inside of a forward is part of the graph; what no graph has of it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ortrain import Options, ORTModule
from ortrain.errors import CaptureError
from ortrain.frontend.export import export

Forward = Callable[["Mapped", Tensor, Tensor], Any]


class Mapped(nn.Module):
    """Calls what it is given, with layers of its own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.members = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.steps = [forward]

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.steps[0](self, x, mask)


def pairs(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    return torch.vmap(lambda a, b: a @ b.T)(model.linear(x), x)


def modules(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    return torch.vmap(lambda row: model.norm(torch.tanh(model.linear(row))))(x)


def other_axes(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    return torch.vmap(model.linear, in_dims=1, out_dims=-1)(x)


def nested(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    each = torch.vmap(torch.vmap(torch.dot, in_dims=(0, None)), in_dims=(None, 0))
    return torch.vmap(each)(model.linear(x), x)


def unmapped(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    weights, rows = torch.vmap(lambda a: (model.linear.weight.sum() + a.sum(), a), out_dims=(0, 1))(
        x
    )
    return weights.sum() * rows.softmax(-1)


def losses(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    return torch.vmap(cross_entropy)(model.linear(x[:, :4]), mask.long()[:, :4])


def an_ensemble(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    stacked = {
        name: torch.stack([dict(each.named_parameters())[name] for each in model.members])
        for name in ("weight", "bias")
    }
    first = model.members[0]
    return torch.vmap(lambda held: functional_call(first, held, (x,)))(stacked)


def masks(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    """As transformers makes masks: functions of whole numbers that read others by them."""

    def later(row: Any, place: Any) -> Any:
        return (row >= place) & mask[row, place]

    def every(row: Any, place: Any) -> Any:
        return mask[row, place]

    rows, places = torch.arange(len(x)), torch.arange(4)
    hidden = model.linear(x)
    with TransformGetItemToIndex():
        for seen in (later, every):
            of_row = torch.vmap(seen, in_dims=(None, 0))
            shown = torch.vmap(of_row, in_dims=(0, None))(rows, places)
            hidden = hidden.masked_fill(~shown.unsqueeze(1), 0.5)
    return hidden


def without_gradients(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    with torch.no_grad():
        seen = torch.vmap(model.linear)(x)
    return seen * model.linear(x)


def in_other_precision(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return torch.vmap(model.linear)(x)


# Sizes that PyTorch's rules for batches ask as numbers have a capture each.
BY_SIZE = {modules, losses, an_ensemble}
GRAPHS: list[Forward] = [
    pairs, modules, other_axes, nested, unmapped, losses, an_ensemble, masks, without_gradients,
    in_other_precision,
]  # fmt: skip


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4 + rows, 4), torch.rand(rows, 4) > 0.4


def step(model: nn.Module, x: Tensor, mask: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss = model(x, mask).float().square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def names(forward: Forward) -> str:
    return forward.__name__


@pytest.mark.parametrize("forward", GRAPHS, ids=names)
def test_a_map_is_part_of_the_graph(forward: Forward) -> None:
    model = Mapped(forward)
    options = Options(engine="aten", fallback="raise")
    compiled = ORTModule(copy.deepcopy(model), options=options)
    for rows in (3, 5, 2):
        x, mask = batch(rows)
        torch.testing.assert_close(step(compiled, x, mask), step(model, x, mask))
    assert compiled.report.captures == (3 if forward in BY_SIZE else 1)


@pytest.mark.parametrize("forward", [pairs, modules, in_other_precision], ids=names)
def test_a_map_under_autocast_casts_as_pytorch_does(forward: Forward) -> None:
    model = Mapped(forward)
    compiled = ORTModule(copy.deepcopy(model), options=Options(engine="aten", fallback="raise"))
    for rows in (3, 5):
        x, mask = batch(rows)
        with torch.autocast("cpu", torch.bfloat16):
            ours, eager = compiled(x, mask), model(x, mask)
        assert ours.dtype == eager.dtype
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


def drawn(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    return torch.vmap(lambda row: model.linear(row) * torch.rand(4), randomness="different")(x)


def written(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    return torch.vmap(lambda row: model.linear(row).mul_(2))(x)


class Doubled(torch.autograd.Function):
    """Has another backward than its forward says."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 100


def a_custom_function(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    return torch.vmap(Doubled.apply)(model.linear(x))


WEIGHT = nn.Parameter(torch.ones(5))


class Looked(torch.autograd.Function):
    """Given whole numbers, it reads a parameter, to which PyTorch sends no gradient through it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(index: Tensor) -> Tensor:
        return torch.ops.aten.index(WEIGHT, [index])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def a_table(model: Mapped, x: Tensor, mask: Tensor) -> Any:
    return model.linear(x) * torch.vmap(Looked.apply)(mask.long()).sum()


@pytest.mark.parametrize("forward", [drawn, written, a_custom_function, a_table], ids=names)
def test_a_map_that_no_graph_has_is_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError):
        export(Mapped(forward), batch(3))


@pytest.mark.filterwarnings("ignore:ORTModule runs")
@pytest.mark.parametrize("forward", [drawn, written, a_custom_function, a_table], ids=names)
def test_pytorch_runs_a_map_that_no_graph_has(forward: Forward) -> None:
    model = Mapped(forward)
    compiled = ORTModule(copy.deepcopy(model), options=Options(engine="aten"))
    for rows in (3, 5, 3):
        x, mask = batch(rows)
        found = []
        for each in (compiled, model):
            torch.manual_seed(rows)
            found.append(step(each, x, mask))
        torch.testing.assert_close(*found)
