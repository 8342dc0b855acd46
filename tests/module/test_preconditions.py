"""What operators treat apart: NaN, minus infinity, masked rows, equals. PyTorch runs such calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain import Options, ORTModule
from tests.module.agreement import GRAPH, Called

ANY = Options(engine="onnxruntime", fallback="torch")


class Attending(nn.Module):
    """Attention under a mask that is added to its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            *self.project(x)[:, None].chunk(3, -1), mask
        )


@pytest.mark.parametrize("bias", [0.0, -1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_rows_of_attention_that_are_masked_have_pytorchs_gradients(bias: float) -> None:
    """The fused kernel of PyTorch has no normalizer left of a row whose scores are that low."""
    eager = Attending()
    ours = copy.deepcopy(eager)
    model = ORTModule(ours, options=ANY)
    for masked in (False, True, False):
        x, mask = torch.randn(2, 5, 4), torch.zeros(2, 1, 5, 5)
        mask[0, :, :, 3:] = bias
        if masked:
            mask[1, :, 2] = bias
        for module, run in ((eager, eager), (ours, model)):
            module.zero_grad()
            run(x, mask).square().sum().backward()
        for mine, its in zip(ours.parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-3, atol=1e-3)
    unsure = -torch.inf < bias < -1e5
    assert (model.report.graph_calls, model.report.astray) == ((2, 1) if unsure else (3, 0))


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda h: h.max(-1).values,
    "max of all": lambda h: h.max(),
    "min": lambda h: h.min(0).values,
    "amax": lambda h: h.amax(-1),
    "amin of all": lambda h: h.amin(),
    "argmax": lambda h: h * h.argmax(-1, keepdim=True),
    "topk": lambda h: h.topk(2).values,
    "sort": lambda h: h.sort(-1).values,
    "msort": lambda h: h.msort(),
    "quantile": lambda h: h.quantile(0.3, -1),
    "max_pool1d": lambda h: nn.functional.max_pool1d(h[None], 2),
    "max_pool2d": lambda h: nn.functional.max_pool2d(h[None], 2),
    "adaptive_max_pool1d": lambda h: nn.functional.adaptive_max_pool1d(h[None], 2),
    "scatter_reduce": lambda h: h.new_zeros(4, 6).scatter_reduce(
        1, torch.zeros(4, 6, dtype=torch.long), h, "amax"
    ),
    "sign": lambda h: h.sign() * h.detach().nan_to_num(1.0),
    "infinity norm": lambda h: torch.linalg.vector_norm(h, float("inf"), -1),
    "infinity norm of tensors": lambda h: h.norm(float("inf"), -1),
    "logit": lambda h: h.logit(0.1),
    "log_softmax of float64": lambda h: h.double().log_softmax(-1),
    "adaptive_avg_pool1d": lambda h: nn.functional.adaptive_avg_pool1d(h, 4),
}


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", ORDERS)
def test_what_is_no_number_comes_out_as_in_pytorch(name: str, value: float) -> None:
    """Kernels of onnxruntime leave NaNs out, and the lowest number stands for minus infinity."""
    module = Called(ORDERS[name])
    model = ORTModule(copy.deepcopy(module), options=ANY)
    for number in range(3):
        x = torch.randn(4, 6)
        if number == 1:
            x[1, 2] = x[2, 0] = value
            x[3] = value
        torch.testing.assert_close(model(x), module(x), equal_nan=True)
    assert model.report.graph_calls >= 2


@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_a_recurrent_layer_loses_no_nan(
    layer: Callable[[int, int], nn.Module], value: float, engine: str
) -> None:
    """onnxruntime's gates are between 0 and 1, whatever they are made from."""
    module = layer(6, 3)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -2, 2)
    model = ORTModule(copy.deepcopy(module), options=replace(ANY, engine=engine))
    for number in range(3):
        x = torch.randn(4, 6)
        if number == 1:
            x[1, 2], x[1, 3] = value, -value
        mine, its = pytree.tree_leaves(model(x)), pytree.tree_leaves(module(x))
        torch.testing.assert_close(mine, its, equal_nan=True)
    assert model.report.graph_calls >= 2


def test_a_sum_that_float16_has_not_is_no_overflow() -> None:
    module = Called(lambda x: nn.functional.adaptive_avg_pool2d(x, 5))
    model = ORTModule(module, options=replace(ANY, engine="aten"))
    x = torch.full((8, 256, 7, 7), 2.0, dtype=torch.float16)
    torch.testing.assert_close(model(x), module(x))
    assert model.report.graph_calls == 1


def test_without_gradients_no_argument_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 3)
    model = ORTModule(Called(lambda x: layer(x * 2)), options=GRAPH)
    x, copied, clone = torch.randn(5, 4), [], Tensor.clone
    with torch.no_grad():
        model(x)
        monkeypatch.setattr(Tensor, "clone", lambda t, **given: copied.append(t) or clone(t))
        model(x)
    assert not copied


SORTED: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda h: h.sort(-1).values * ranks(h),
    "sort, places": lambda h: h.sort(0, descending=True).indices * h,
    "argsort": lambda h: h.argsort(-1) * h,
    "msort": lambda h: h.t().msort().t() * ranks(h),
    "topk": lambda h: h.topk(3).values * ranks(h)[:3],
    "topk, places": lambda h: h.topk(2, 0, largest=False).indices * h[:2],
    "quantile": lambda h: h.quantile(0.3, -1),
    "quantile of all": lambda h: h.quantile(0.5),
}


def ranks(h: Tensor) -> Tensor:
    return torch.arange(h.shape[-1], dtype=h.dtype)


@pytest.mark.parametrize("name", SORTED)
def test_equals_come_in_pytorchs_order(name: str) -> None:
    """Which of two equals comes first decides where the gradient goes."""
    model = ORTModule(Called(SORTED[name]), options=ANY)
    for number in range(4):
        x = torch.randn(40, 50)
        if number % 2:
            x = x.mul(3).round()
        gradients = []
        for module in (model, model.module):
            given = x.clone().requires_grad_()
            output = module(given)
            output.backward(torch.linspace(0, 1, output.numel()).view_as(output))
            gradients.append((output.detach(), given.grad))
        torch.testing.assert_close(*gradients)
    assert (model.report.graph_calls, model.report.astray) == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.long, torch.int32, torch.uint8])
@pytest.mark.parametrize("descending", [False, True])
def test_a_stable_order_is_in_the_graph(descending: bool, dtype: torch.dtype) -> None:
    def ordered(h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sort(h, dim=0, descending=descending, stable=True)

    model = ORTModule(Called(ordered), options=GRAPH)  # type: ignore[arg-type]
    for rows in (40, 7):
        x = torch.randint(0, 9, (rows, 5)).to(dtype)
        for mine, its in zip(model(x), ordered(x), strict=True):
            assert mine.dtype == its.dtype
            assert torch.equal(mine, its)


def test_only_the_values_of_what_has_no_gradient_may_have_equals() -> None:
    model = ORTModule(Called(lambda h: h.sort(-1).values + h.topk(4).values[:, :1]), options=GRAPH)
    x = torch.randint(0, 9, (40, 50))
    assert torch.equal(model(x), model.module(x))
    assert model.report.astray == 0
