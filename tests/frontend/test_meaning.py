"""What graphs of Dynamo's could lose: weights, shared memory, regions, gradients of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as sizes
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from ortrain.errors import UnsupportedGradient
from ortrain.frontend.form import Form
from ortrain.frontend.graph import Graph
from ortrain.frontend.original import in_pytorch
from tests.frontend.compiling import compiled, expect_equal, expect_equal_steps, left

# Dynamo's own, of gradients that it looks at and of numbers that it does not trace.
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHT = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
BUFFER = torch.zeros(3, 4)


def cut() -> None:
    """Ends a graph, and lets another one begin."""
    torch._dynamo.graph_break()


class Block(nn.Module):
    """A layer between two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x))
        cut()
        return torch.tanh(x)


class Blocks(nn.Module):
    """Three layers, whose code and graphs are the same; the first is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_every_instance_has_its_own_weights_and_buffers(engine: str) -> None:
    torch.manual_seed(0)
    module = Blocks()
    eager = copy.deepcopy(module)
    call, made = compiled(module, engine)
    for rows in (5, 6, 9):
        x = torch.randn(rows, 4)
        expect_equal_steps(module, call, eager, lambda run, x=x: run(x))
    assert all(made)


def view_written_behind_a_break(x: Tensor) -> Tensor:
    h = x @ WEIGHT
    y = h.view(-1)
    cut()
    y.clamp_(min=0)
    return h.sum()


def two_parts_of_one(x: Tensor) -> Tensor:
    h = x @ WEIGHT
    first, second = h[:2], h[2:]
    cut()
    first.mul_(2)
    return h.sum() + second.sum()


def row_of_a_buffer(x: Tensor) -> Tensor:
    row = BUFFER[1]
    cut()
    row.add_(x.sum(0))
    return torch.tanh(torch.tanh(BUFFER.sum() * WEIGHT) * 2).sum()


def transposed(x: Tensor) -> Tensor:
    h = (x @ WEIGHT).t()
    cut()
    return h.t().view(-1).sum() * h.stride()[0]


def size_handed_on(x: Tensor) -> Tensor:
    size, y = x.shape[0], x @ WEIGHT
    cut()
    return y.sum() * size


def view_without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        k = (x @ WEIGHT).view(-1)
    h = k * WEIGHT.sum()
    cut()
    return h.sum() + k.sum()


def argument_flattened(x: Tensor) -> Tensor:
    y, z = x.flatten(), x + 0
    cut()
    z.add_(1)
    return y.sum() + z.sum() * WEIGHT.sum()


def argument_written(x: Tensor) -> Tensor:
    x.mul_(2)
    y = x.view(-1)
    cut()
    y.add_(1)
    return (x @ WEIGHT).sum()


def expanded(x: Tensor) -> Tensor:
    h = x @ WEIGHT
    cut()
    g = h.expand(2, *h.shape)
    cut()
    return g.sum()


ALIASES = [
    view_written_behind_a_break, two_parts_of_one, row_of_a_buffer, transposed, size_handed_on,
    view_without_gradients, argument_flattened, argument_written, expanded,
]  # fmt: skip


@pytest.mark.parametrize("function", ALIASES, ids=lambda function: function.__name__)
def test_memory_is_shared_across_breaks_as_in_pytorch(function: Callable[..., Any]) -> None:
    call, made = compiled(function)
    for rows in (4, 6, 8):
        x, found = torch.randn(rows, 4), []
        for run in (call, function):
            BUFFER.zero_()
            WEIGHT.grad, given = None, x.clone()
            result = run(given)
            result.backward()
            found.append((result.detach(), WEIGHT.grad, BUFFER.clone(), given))
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager)
    assert any(made)


def _number_of_no_tensor(x: Tensor) -> Tensor:
    number, y = x.shape[0] * 2 + 1, x @ WEIGHT
    cut()
    return (y[:, :1] * number).sum() + torch.arange(number).sum()


def test_a_number_that_no_tensor_has_as_a_size_is_an_input() -> None:
    call, made = compiled(_number_of_no_tensor)
    for rows in (4, 6, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(call(x), _number_of_no_tensor(x))
    assert all(made)


def _loss_and_hidden(x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x @ WEIGHT)
    return (h * h).sum(), h


def test_gradients_of_gradients_are_pytorchs() -> None:
    call, made = compiled(_loss_and_hidden)
    x, found = torch.randn(3, 4, requires_grad=True), []
    for run in (call, _loss_and_hidden):
        WEIGHT.grad = None
        loss, h = run(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (slope.pow(2).sum() + h.sum()).backward()
        found.append(WEIGHT.grad)
    torch.testing.assert_close(*found)
    assert made == [True]


@pytest.mark.parametrize("copied", ["by the graph", "by its first product"])
def test_gradients_of_gradients_reach_an_argument_that_is_copied(copied: str) -> None:
    def forward(x: Tensor) -> Tensor:
        y = x.clone() if copied == "by the graph" else x
        return torch.tanh(nn.functional.linear(y, WEIGHT)).pow(2).sum()

    call, made = compiled(forward)
    found = []
    for run in (call, forward):
        x = torch.linspace(-1, 1, 24).view(3, 2, 4).transpose(0, 1).requires_grad_()
        (slope,) = torch.autograd.grad(run(x), x, create_graph=True)
        found.append((slope.detach(), *torch.autograd.grad(slope.pow(2).sum(), x)))
    torch.testing.assert_close(*found)
    assert made == [True]


def test_gradients_are_asked_for_one_output_after_another() -> None:
    call, _ = compiled(_loss_and_hidden)
    x, found = torch.randn(3, 4, requires_grad=True), []
    for run in (call, _loss_and_hidden):
        loss, h = run(x)
        found.append(
            [
                *torch.autograd.grad(loss, [x, WEIGHT], retain_graph=True),
                *torch.autograd.grad(h.sum(), [x, WEIGHT], retain_graph=True),
                *torch.autograd.grad(loss + h.sum(), [x, WEIGHT]),
            ]
        )
    torch.testing.assert_close(*found)


def _dropout_inside_a_checkpoint(x: Tensor) -> Tensor:
    def inside(x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(x @ WEIGHT), 0.5)

    return checkpoint(inside, x, use_reentrant=False).sum()


@pytest.mark.parametrize("way", ["graph", "in PyTorch"])
def test_a_checkpoint_repeats_its_masks(way: str) -> None:
    if way == "graph":
        call, made = compiled(_dropout_inside_a_checkpoint)
    else:
        torch._dynamo.reset()
        call = torch.compile(
            _dropout_inside_a_checkpoint, backend=lambda module, _: in_pytorch(module)
        )
    x = torch.ones(300, 4, requires_grad=True)
    loss = call(x)
    loss.backward()
    # Of a function that is linear where it is not zero, the gradient gives the value.
    torch.testing.assert_close((x.grad * x).sum(), loss)
    if way == "graph":
        assert made == [True]


def test_a_checkpoint_around_the_call_counts_what_pytorch_saves() -> None:
    call, made = compiled(_loss_and_hidden)
    x, found = torch.randn(3, 4, requires_grad=True), []
    for run in (call, _loss_and_hidden):
        WEIGHT.grad = x.grad = None
        checkpoint(lambda x, run=run: run(x)[0], x, use_reentrant=False).backward()
        found.append((WEIGHT.grad, x.grad))
    torch.testing.assert_close(*found)
    assert made == [True]


def _bfloat16_inside(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ WEIGHT
    return (y.float() @ WEIGHT).sum(), y


def test_autocast_between_statements_is_kept() -> None:
    call, made = compiled(_bfloat16_inside)
    x, found = torch.randn(3, 4), []
    for run in (call, _bfloat16_inside):
        WEIGHT.grad = None
        loss, y = run(x)
        loss.backward()
        found.append((loss.detach(), y.detach(), WEIGHT.grad))
    torch.testing.assert_close(*found)
    assert found[0][1].dtype is torch.bfloat16
    assert made == [True]


def _float32_inside(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        y = x @ WEIGHT
    return y, x @ WEIGHT


def test_autocast_that_is_off_inside_stays_off() -> None:
    call, made = compiled(_float32_inside)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = call(x), _float32_inside(x)
    torch.testing.assert_close(ours, eager)
    assert [each.dtype for each in ours] == [torch.float32, torch.bfloat16]
    assert made == [True]


class Squared(torch.autograd.Function):
    """A function with a backward of its own, which is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return upstream * x * 3


def _custom(x: Tensor) -> Tensor:
    return Squared.apply(x @ WEIGHT).sum()


def test_a_custom_function_keeps_its_own_backward() -> None:
    call, _ = compiled(_custom)
    x, found = torch.randn(3, 4), []
    for run in (call, _custom):
        WEIGHT.grad = None
        run(x).backward()
        found.append(WEIGHT.grad)
    torch.testing.assert_close(*found)


def test_code_without_a_graph_runs_in_pytorch() -> None:
    def reads_a_number(x: Tensor) -> Tensor:
        return (x @ WEIGHT).sum() * x[0, 0].item()

    call, _ = compiled(reads_a_number)
    x = torch.randn(3, 4)
    torch.testing.assert_close(call(x), reads_a_number(x))


def test_an_argument_may_be_written_to_where_pytorch_has_not_saved_it() -> None:
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh((x * scale) @ WEIGHT).sum()

    call, made = compiled(forward)
    found = []
    for run in (call, forward):
        x, scale = torch.ones(3, 4), torch.full((3, 4), 2.0)
        WEIGHT.grad = None
        loss = run(x, scale)
        x.zero_()
        scale.zero_()
        loss.backward()
        found.append(WEIGHT.grad)
    torch.testing.assert_close(*found)
    assert made == [True]


def test_what_a_transform_has_left_in_a_module_is_pytorchs() -> None:
    left_behind: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        left_behind.append(x)
        return x.sum()

    torch.func.grad(keep)(torch.ones(4, 4))
    call, made = compiled(lambda x: torch.tanh(x @ left_behind[0]))
    x = torch.randn(3, 4)
    ours, eager = call(x), torch.tanh(x @ left_behind[0])
    torch.testing.assert_close(ours, eager)
    assert ours.requires_grad == eager.requires_grad
    assert made == [False]


class Moving(nn.Module):
    """Its buffer moves at every forward, also at one that a checkpoint repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        x = torch.where(x > 0, x, x * 0.1) - self.mean
        return (torch.tanh(x) * x).sum()


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("twice", [False, True])
def test_a_checkpoint_around_it_repeats_what_pytorch_repeats(engine: str, twice: bool) -> None:
    module = Moving()
    eager = copy.deepcopy(module)
    call, made = compiled(module, engine)
    x = torch.randn(3, 4)
    for _ in range(2):
        expect_equal_steps(
            module, call, eager, lambda run: checkpoint(run, x, use_reentrant=False), twice=twice
        )
    assert made == [True]


class Counting(nn.Module):
    """Counts its calls, and computes with the count: a tensor, or a number of its code."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind
        self.calls: Any = 0 if kind == "number" else torch.zeros(())
        if kind in ("buffer", "in place"):
            del self.calls
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "in place":
            self.calls += 1
        else:
            self.calls = self.calls + 1
        share = 1 + 0.1 * self.calls if self.kind == "number" else self.calls.to(x.dtype)
        hidden = torch.tanh(self.layer(x))
        if self.kind == "other output":
            return hidden.sum(), (self.layer(hidden) * share).square().sum(-1)
        if self.kind == "in place":
            found = self.layer(hidden) * (self.calls % 2 + 1)
            return found.mean(), found.square()
        return (self.layer(hidden) * share).square().sum()


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("kind", ["number", "tensor", "buffer", "other output", "in place"])
def test_a_repeated_forward_that_counts_gives_what_it_gives_in_pytorch(
    engine: str, kind: str
) -> None:
    module = Counting(kind)
    eager = copy.deepcopy(module)

    def last(run: Callable[..., Any], x: Tensor) -> Tensor:
        found = run(x)
        return found[-1].sum() if isinstance(found, tuple) else found

    call, made = compiled(module, engine, dynamic=True)
    for step in range(3):
        found = []
        for owner, run in ((module, call), (eager, eager)):
            owner.zero_grad()
            owner.calls = 5 * step if kind == "number" else torch.full((), step)
            x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                loss = checkpoint(last, run, x, use_reentrant=False)
                loss.backward()
            found.append([loss, x.grad, owner.layer.weight.grad])
        torch.testing.assert_close(*found)
    assert all(made)


def test_a_gradient_that_no_graph_gives_is_an_error_where_it_is_asked_for_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ WEIGHT)
        return h.sum(), h * 2

    made: list[Any] = []
    call, _ = compiled(forward, into=made)
    own = Form._way

    def way(self: Form, upstream: tuple[str, ...]) -> Any:
        if len(upstream) > 1:
            raise UnsupportedGradient("of both")
        return own(self, upstream)

    monkeypatch.setattr(Form, "_way", way)
    found = []
    for run in (call, forward):
        WEIGHT.grad, x = None, torch.linspace(-1, 1, 12).view(3, 4)
        checkpoint(lambda x, run=run: run(x)[0], x, use_reentrant=False).backward()
        found.append(WEIGHT.grad)
    torch.testing.assert_close(*found)
    assert isinstance(made[0], Graph)


class Keeping(nn.Module):
    """Keeps what it has made at its first call: at the second that is another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None]
        return (torch.tanh(self.layer(x)) + self.kept[len(x)]).sum()


def test_a_repeated_forward_may_take_what_the_first_has_left() -> None:
    module = Keeping()
    eager = copy.deepcopy(module)
    call, made = compiled(module)
    x = torch.randn(3, 4)
    expect_equal_steps(module, call, eager, lambda run: checkpoint(run, x, use_reentrant=False))
    assert made == [True, True]


DERIVED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "times a number": lambda x, n: x * n,
    "less a number": lambda x, n: x - n,
    "negated": lambda x, n: -x,
    "as it is": lambda x, n: x,
    "a view": lambda x, n: x.flip(0).flip(0).view(3, 4),
    "compared": lambda x, n: (x > n).float(),
    "of whole numbers": lambda x, n: (x.to(torch.int64) % 2).float(),
    "bounded": lambda x, n: x.clamp(max=n),
    "two ways": lambda x, n: x * n + torch.where(x > n, 1.0, x),
}


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", DERIVED)
def test_an_argument_may_be_written_to_where_pytorchs_backward_does_not_read_it(
    name: str, engine: str
) -> None:
    def forward(x: Tensor, n: float) -> Tensor:
        return torch.tanh(DERIVED[name](x, n) @ WEIGHT).sum()

    class Model(nn.Module):
        def forward(self, x: Tensor, n: float) -> Tensor:
            return forward(x, n)

    model = ORTModule(Model(), options=Options(engine=engine))
    for step in range(6):
        found: list[Any] = []
        for run in (forward, model):
            x, WEIGHT.grad = torch.arange(12.0).view(3, 4) / 4, None
            loss = run(x, 0.5 + step)
            x.zero_()
            try:
                loss.backward()
            except RuntimeError as error:
                found.append("inplace" in str(error))
            else:
                found.append(WEIGHT.grad)
        assert type(found[0]) is type(found[1])
        torch.testing.assert_close(*found)
    assert model.report.graph_calls


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_an_argument_may_be_written_to_where_other_outputs_receive_gradients(
    before: int, turned: bool
) -> None:
    def forward(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        h = functional.linear(x, WEIGHT) if turned else torch.tanh((x * scale) @ WEIGHT)
        return (scale * 2).sum() * WEIGHT.sum() if turned else h.sum(), h * 2

    call, made = compiled(forward)
    for step in range(before + 2):
        found = []
        for run in (call, forward):
            x, scale, WEIGHT.grad = torch.ones(3, 4), torch.full((3, 4), 0.5), None
            if turned:  # PyTorch's products read a copy of such
                x = torch.ones(3, 2, 4).transpose(0, 1)
            results = run(x, scale)
            if step >= before:
                x.zero_()
                scale.zero_()
            results[min(step, 1)].sum().backward()
            found.append(WEIGHT.grad)
        torch.testing.assert_close(*found)
    assert made == [True]


def test_an_argument_that_pytorch_has_saved_may_not_be_written_to() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2) @ WEIGHT, x @ WEIGHT

    call, _ = compiled(forward)
    for run in (call, forward):
        x = torch.ones(3, 4)
        results = run(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[1].sum().backward()


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_reads_what_is_there_in_the_backward(engine: str, reentrant: bool) -> None:
    scale, inner = torch.full((4,), 2.0), torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()

    def forward(x: Tensor) -> Tensor:
        x = torch.tanh(x @ WEIGHT)
        return checkpoint(
            lambda x: torch.tanh(torch.tanh(x @ inner) * scale) @ inner, x, use_reentrant=reentrant
        )

    call, made = compiled(forward, engine)
    for changed in (inner, scale, WEIGHT, inner):
        found: list[Any] = []
        for run in (call, forward):
            WEIGHT.grad, inner.grad, before = None, None, changed.detach().clone()
            loss = run(torch.linspace(-1, 1, 12).view(3, 4)).sum()
            with torch.no_grad():
                changed.mul_(1.5)
            loss.backward()
            found.append([WEIGHT.grad, inner.grad])
            changed.detach().copy_(before)
        torch.testing.assert_close(*found)
    assert all(made)


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_what_code_beside_a_checkpoint_reads_as_well_may_not_be_written_to(engine: str) -> None:
    def forward(x: Tensor) -> Tensor:
        x = torch.tanh(torch.tanh(x @ WEIGHT) @ WEIGHT)
        return checkpoint(lambda x: torch.tanh(x @ WEIGHT), x, use_reentrant=False)

    call, made = compiled(forward, engine)
    for run in (call, forward):
        loss = run(torch.ones(3, 4)).sum()
        with torch.no_grad():
            WEIGHT.mul_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert all(made)


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_the_backward_reads_what_hooks_have_kept_and_nothing_else(engine: str) -> None:
    def region(x: Tensor) -> Tensor:
        x = torch.tanh(torch.tanh(x @ WEIGHT) @ WEIGHT)
        cut()
        return torch.tanh(torch.tanh(x @ WEIGHT) @ WEIGHT).sum()

    call, made = compiled(region, engine)
    for unpack in (torch.clone, torch.zeros_like):
        found = []
        for run in (call, region):
            WEIGHT.grad, x = None, torch.linspace(-1, 1, 12).view(3, 4)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
                loss = run(x)
            loss.backward()
            found.append(WEIGHT.grad)
        torch.testing.assert_close(*found)
    assert found[0].eq(0).all()
    assert all(made)


class Counted(nn.Module):
    """A checkpoint around what a forward counts, and around statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def counted(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.tanh(self.norm(self.layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(torch.tanh(torch.tanh(x) * x) * x)
        x = checkpoint(self.counted, x, use_reentrant=False)
        return (torch.tanh(torch.tanh(x) * x) * x).sum()


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_what_a_checkpoint_writes_it_writes_again_where_it_is_repeated(engine: str) -> None:
    module = Counted()
    eager = copy.deepcopy(module)
    call, made = compiled(module, engine)
    x = torch.randn(3, 4)
    for _ in range(2):
        expect_equal_steps(module, call, eager, lambda run: run(x))
    assert int(module.count) == 4
    assert made == [True]


def test_gradients_that_are_switched_on_inside_are_there() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(torch.tanh(torch.tanh(x * 2) * x) * x) * 2
        with torch.enable_grad():
            y = torch.tanh(h @ WEIGHT).sum()
        return y, torch.tanh(torch.tanh(torch.tanh(y) * h) * h) * h

    call, made = compiled(forward)
    found = []
    for run in (call, forward):
        WEIGHT.grad = None
        with torch.no_grad():
            y, z = run(torch.ones(3, 4))
        assert not z.requires_grad
        y.backward()
        found.append((y.detach(), WEIGHT.grad))
    torch.testing.assert_close(*found)
    assert made == [True]


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_a_call_without_rows_is_pytorchs(engine: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Tanh())
    eager = copy.deepcopy(module)
    with sizes.patch(backed_size_oblivious=True):  # so that one graph serves the sizes
        call, made = compiled(module, engine, dynamic=True)
        for rows in (3, 0, 4):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(call(x), eager(x))
            expect_equal(left(module, x.sum()), left(eager, x.sum()))
    assert all(made)


def test_which_outputs_receive_gradients_is_learned() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh((x * 2) @ WEIGHT)
        return (h * h).sum(), h * 2

    made: list[Any] = []
    call, _ = compiled(forward, into=made)
    for step in range(3):
        found = []
        for run in (call, forward):
            WEIGHT.grad, x = None, torch.linspace(-1, 1, 12).view(3, 4) + step
            h = run(x)[1]
            x.zero_()  # in the first step the forward runs again, on what it was given
            h.sum().backward()
            found.append(WEIGHT.grad)
        torch.testing.assert_close(*found)
    assert len(made[0].form.ways) == 2


def test_arguments_that_share_memory_without_a_guard_are_pytorchs() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return torch.tanh(torch.tanh(x @ WEIGHT) + torch.tanh(y)).sum()

    made: list[Any] = []
    call, _ = compiled(forward, into=made)
    for shared in (False, True):
        found = []
        for run in (call, forward):
            memory = torch.linspace(-1, 1, 16).view(4, 4)
            loss = run(memory, memory.view(4, 4) if shared else memory.clone())
            found.append((loss.detach(), memory))
        torch.testing.assert_close(*found)
    assert isinstance(made[0], Graph)


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_margin_that_is_just_kept_has_no_gradient(engine: str, p: int, reduction: str) -> None:
    weight, target = torch.rand(4), torch.tensor([0, 3, 1, 1, 2])

    def forward(x: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(
            x, target, p=p, margin=0.5, weight=weight, reduction=reduction
        )

    call, made = compiled(forward, engine)
    found = []
    for run in (call, forward):
        x = ((torch.arange(20.0).view(5, 4) % 7) / 4).requires_grad_()
        loss = run(x)
        loss.sum().backward()
        found.append((loss.detach(), x.grad))
    torch.testing.assert_close(*found)
    assert made == [True]


# -- code that is another one where it is compiled -------------------------------------------------


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x * 2 if torch.compiler.is_compiling() and not self.training else x


def test_no_call_without_gradients_has_what_code_computes_only_where_it_is_compiled() -> None:
    module = Asking()
    model = ORTModule(copy.deepcopy(module), options=Options(engine="aten"))
    for _ in range(3):
        for mode in (True, False):
            model.train(mode), module.train(mode)
            with torch.set_grad_enabled(mode):
                x = torch.randn(3, 4)
                torch.testing.assert_close(model(x), module(x))
    assert model.report.graph_calls == 3


@pytest.mark.parametrize("engine", ["aten", "auto"])
@pytest.mark.parametrize("inside", [False, True])
def test_padding_that_an_evaluated_encoder_leaves_out_is_zero(engine: Any, inside: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder: Any = nn.TransformerEncoder(layer, 2)
    whole = torch.zeros(3, 5, dtype=torch.bool)
    padded = whole.clone()
    padded[0, 3:] = True

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = encoder, nn.Linear(8, 2)

        def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
            with torch.no_grad():
                x = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
            return self.head(x)

    module = Frozen() if inside else encoder
    held = copy.deepcopy(module)
    model = ORTModule(held, options=Options(engine=engine))
    for _ in range(3):
        for mode in (True, False):
            for each in (module, held):
                each.train(mode)
                getattr(each, "encoder", each).train(mode and not inside)
            with torch.set_grad_enabled(mode):
                for mask in (whole, None, padded):
                    x = torch.randn(3, 5, 8)
                    ours = model(x, src_key_padding_mask=mask)
                    theirs = module(x, src_key_padding_mask=mask)
                    torch.testing.assert_close(ours, theirs)
