"""Results lie in memory as PyTorch's kernels leave them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ortrain import Options, ORTModule
from tests.frontend.compiling import compiled


def _normalized(training: bool) -> Callable[[Tensor], Tensor]:
    def batch_norm(x: Tensor) -> Tensor:
        mean, variance = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
        return functional.batch_norm(x, mean, variance, training=training)

    return batch_norm


CODES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    **{f"batch norm {d}, training": (d, _normalized(True)) for d in (3, 4, 5)},
    **{f"batch norm {d}": (d, _normalized(False)) for d in (3, 4, 5)},
    "instance norm": (3, functional.instance_norm),
    "group norm": (4, lambda x: functional.group_norm(x, 2)),
    "log sigmoid": (3, functional.logsigmoid),
    "rrelu": (3, functional.rrelu),
    "unfold": (4, lambda x: functional.unfold(x, 1)),
    "nearest": (3, lambda x: functional.interpolate(x, scale_factor=2)),
    "bilinear": (4, lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")),
    "pixel shuffle": (4, lambda x: functional.pixel_shuffle(x, 2)),
    "average": (4, lambda x: functional.avg_pool2d(x, 2)),
}
SIZES = (2, 4, 6, 2, 5)


def _order(tensor: Tensor) -> list[int]:
    """Of the axes in memory, along which there is more than one value."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    return sorted(axes, key=lambda axis: -tensor.stride(axis))


def _laid(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """A tensor in some orders of its axes, the first as they are."""
    orders = [*itertools.permutations(range(len(shape)))]
    last = (0, *range(2, len(shape)), 1)
    for order in [*orders[:: max(len(orders) // 5, 1)], last]:
        back = [order.index(axis) for axis in range(len(shape))]
        yield torch.randn([shape[axis] for axis in order]).permute(back)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CODES)
def test_axes_have_the_order_in_memory_that_they_have_in_pytorch(name: str, grad: bool) -> None:
    dims, code = CODES[name]
    for given in _laid(SIZES[:dims]):

        def scaled(x: Tensor) -> Any:
            return code(x * 2)

        call, made = compiled(scaled)
        with torch.set_grad_enabled(grad):
            x = given.detach().requires_grad_(grad)
            assert _order(call(x)) == _order(scaled(x))
        assert all(made)


LAST = torch.channels_last
WEIGHTS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": (lambda: torch.randn(6, 4).t(), functional.linear),
    "product": (lambda: torch.randn(4, 6).t(), lambda x, w: x @ w),
    "as it is": (lambda: torch.randn(4, 6), functional.linear),
    "convolution": (
        lambda: torch.randn(4, 6, 1, 1).repeat(1, 1, 2, 2).contiguous(memory_format=LAST),
        lambda x, w: functional.conv2d(x.view(1, 6, 2, 2), w, padding=1),
    ),
    "factor": (lambda: torch.randn(6, 4).t(), lambda x, w: (x[:, None] * w).sum(1)),
}


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_of_weights_lie_as_in_pytorch(name: str, engine: str) -> None:
    make, code = WEIGHTS[name]
    weight, x = make().requires_grad_(), torch.randn(4, 6)
    call, made = compiled(code, engine)
    losses = [f(x, weight).square().sum() for f in (call, code)]
    (ours,), (eager,) = (torch.autograd.grad(loss, weight) for loss in losses)
    torch.testing.assert_close(ours, eager)
    assert _order(ours) == _order(eager)
    assert all(made)


@pytest.mark.parametrize("first", [2, 3])
def test_what_is_a_view_at_some_sizes_alone_lies_as_in_pytorch_at_all(first: int) -> None:
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = functional.pixel_shuffle(x.tanh().transpose(1, 2).unflatten(2, (-1, 1)), 2)
            return torch.tanh(x.reshape(len(x), -1, 8)), x

    module = Shuffled()
    for model in (ORTModule(module, options=Options(engine="aten")), compiled(module)[0]):
        for length in (first, 2, 3, 5, 2):
            x = torch.randn(4, length, 8, requires_grad=True)
            for ours, theirs in zip(model(x), module(x), strict=True):
                assert ours.stride() == theirs.stride()
        if isinstance(model, ORTModule):
            assert model.report.graph_calls == 5


def test_a_part_of_the_rows_that_is_reshaped_leaves_sizes_open() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh((x * 2)[:, :-1].reshape(-1, 8))

    module = Shifted()
    model = ORTModule(module, options=Options(engine="aten"))
    for length in (4, 3, 6, 5):
        x = torch.randn(3, length, 8, requires_grad=True)
        torch.testing.assert_close(model(x), module(x))
    assert (model.report.graph_calls, model.report.captures) == (4, 1)


@pytest.mark.parametrize("certificate", ["first", "off"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_axis_of_one_at_first_is_none_for_good(batch_first: bool, certificate: Any) -> None:
    module = nn.GRU(3, 4, batch_first=batch_first)
    options = Options(engine="aten", certificate=certificate)
    model = ORTModule(copy.deepcopy(module), options=options)
    for rows, length in [(5, 2), (3, 1), (2, 2), (1, 3), (4, 4)]:
        x = torch.randn(rows, length, 3)
        for ours, expected in zip(model(x), module(x), strict=True):
            assert ours.stride() == expected.stride()
    assert model.report.graph_calls == 5


def test_slopes_that_are_drawn_leave_a_result_that_lies_row_by_row() -> None:
    module = nn.RReLU()
    model = ORTModule(nn.RReLU(), options=Options(engine="aten"))
    x = torch.randn(5, 2, 3).transpose(0, 1)
    assert model(x).stride() == module(x).stride()


def test_attention_lies_as_that_of_the_kernel_which_evaluation_has() -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    model = ORTModule(copy.deepcopy(module), options=Options(engine="aten"))
    with torch.no_grad():
        for rows in (2, 3):
            x = torch.randn(rows, 5, 8)
            assert model(x, x, x)[0].stride() == module(x, x, x)[0].stride()
    assert model.report.graph_calls == 2


class Sounds(nn.Module):
    """Convolutions leave nothing of few samples; what is left is parted into heads."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Sequential(nn.Conv1d(1, 8, 10, 5), nn.Conv1d(8, 8, 3, 2))

    def forward(self, sounds: Tensor) -> Tensor:
        """The sum of products of neighbours."""
        x = self.narrow(sounds[:, None]).transpose(1, 2)
        heads = x.reshape(x.shape[0], -1, 2, 4).transpose(1, 2)
        return (heads @ heads.transpose(2, 3)).sum()


def test_what_convolutions_leave_is_reshaped() -> None:
    plain = Sounds()
    options = Options(engine="aten", fallback="raise", certificate="first")
    model = ORTModule(copy.deepcopy(plain), options=options)
    for rows, samples in ((2, 100), (3, 213), (1, 65)):
        given = torch.randn(rows, samples)
        loss, expected = model(given), plain(given)
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert model.report.graph_calls == 3
    assert model.report.captures == 1
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-4)
