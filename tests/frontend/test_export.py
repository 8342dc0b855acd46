"""``export``: a program of one call computes what the module does, under the module's names."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain.autodiff import differentiate
from ortrain.errors import CaptureError, UnsupportedInput, UnsupportedOutput
from ortrain.frontend.export import Exported, export
from ortrain.ops import expand
from ortrain.program import Program, Role, role_of, target_of
from tests.breadth import sampled
from tests.models import MODELS, SAMPLE

every_model = pytest.mark.parametrize("name", sampled(MODELS, SAMPLE))


def results_of(program: Program, feeds: dict[str, Tensor]) -> list[Tensor]:
    """What onnxruntime makes of a program, which has no random numbers."""
    own = program.clone()
    expand(own.graph, opset=own.opset)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        own.serialize(), options, providers=["CPUExecutionProvider"]
    )
    given = {v.name: feeds[v.name or ""].detach().numpy() for v in own.graph.inputs}
    return [torch.from_numpy(np.asarray(found)) for found in session.run(None, given)]


def shape_of(exported: Exported) -> list[Any]:
    """Of the first argument."""
    shape = exported.program.inputs(Role.USER_INPUT)[0].shape
    assert shape is not None
    return [*shape]


def check(exported: Exported, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The program takes this call, and gives what a copy of the module does."""
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    assert exported.accepts([tuple(tensor.shape) for tensor in given])
    feeds = dict(zip(exported.tensors, given, strict=True))
    feeds |= dict(module.named_buffers()) | dict(module.named_parameters())
    feeds["seed"] = torch.tensor(0)
    found = results_of(exported.program, feeds)
    outputs = [*zip(exported.program.graph.outputs, found, strict=True)]
    mine = exported.rebuild([t for v, t in outputs if role_of(v) is Role.USER_OUTPUT])
    buffers = {target_of(v): t for v, t in outputs if role_of(v) is Role.UPDATED_BUFFER}
    eager = copy.deepcopy(module)
    pairs = zip(pytree.tree_leaves(mine), pytree.tree_leaves(eager(*args, **kwargs)), strict=True)
    for one, other in pairs:
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other.detach(), atol=1e-5, rtol=1e-5)
        else:
            assert one == other
    for name, after in eager.named_buffers():
        before = dict(module.named_buffers())[name]
        torch.testing.assert_close(buffers.get(name, before), after, atol=1e-5, rtol=1e-5)


@functools.cache
def built(name: str, dropout: float = 0.0) -> tuple[nn.Module, Exported]:
    case = MODELS[name]
    module = case.build(dropout=dropout)
    return module, export(module, kwargs=case.batch(batch=3, length=7))


@every_model
def test_the_training_forward_is_the_modules_at_any_batch_and_length(name: str) -> None:
    case = MODELS[name]
    module, exported = built(name)
    for batch, length in ((3, 7), (5, 11), (1, 9), (4, case.shortest)):
        check(exported, module, **case.batch(batch, length, seed=batch))
    assert bool(exported.program.outputs(Role.UPDATED_BUFFER)) == case.buffers


@every_model
def test_inputs_come_in_order_under_the_names_of_the_module(name: str) -> None:
    case = MODELS[name]
    module, exported = built(name, 0.1)
    inputs = exported.program.graph.inputs
    order = [Role.USER_INPUT, Role.SEED, Role.BUFFER, Role.PARAMETER]
    roles = [order.index(role) for value in inputs if (role := role_of(value))]
    assert roles == sorted(roles)
    known = {
        Role.USER_INPUT: [*exported.tensors],
        Role.BUFFER: [name for name, _ in module.named_buffers()],
        Role.PARAMETER: [name for name, _ in module.named_parameters()],
    }
    assert {*exported.tensors} == {*case.batch()}
    for role, names in known.items():
        own = [value.name for value in exported.program.inputs(role)]
        assert own == [name for name in names if name in own]
    assert len({value.name for value in exported.program.graph}) == len([*exported.program.graph])


def test_a_tied_weight_is_one_input_under_its_first_name() -> None:
    module, exported = built("gpt2")
    names = [value.name for value in exported.program.inputs(Role.PARAMETER)]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len([*module.parameters()])


def test_nothing_of_the_module_changes() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    state, before = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    exported = export(module, (torch.randn(3, 4, generator=torch.Generator()),))
    assert torch.equal(before, torch.get_rng_state())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert [v.name for v in exported.program.outputs(Role.UPDATED_BUFFER)] == [
        "1.num_batches_tracked.updated", "1.running_mean.updated", "1.running_var.updated",
    ]  # fmt: skip


class Filling(nn.Module):
    """Notes at its first call what kind of call it is."""

    kind: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "flat" if x.dim() == 2 else "deep"
        return x * 2 if self.kind == "flat" else x


class Counting(nn.Module):
    """Computes with how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Collecting(nn.Module):
    """Keeps what it has seen, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return torch.stack(self.seen).sum(0)


def test_what_the_first_call_leaves_may_ask_for_another_graph() -> None:
    module = Filling()
    check(export(module, (torch.ones(3, 4),)), module, torch.ones(5, 2))
    assert module.kind is None


@pytest.mark.parametrize("kind", [Counting, Collecting])
def test_code_that_changes_from_call_to_call_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r"from call to call"):
        export(kind(), (torch.ones(3, 4),))


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line
            return x * 2
        return x


def test_the_error_names_the_line_that_ends_a_graph() -> None:
    with pytest.raises(CaptureError, match="one graph") as caught:
        export(Breaking(), (torch.ones(3),))
    file, line = re.findall(r"\((.*):(\d+)\)", caught.value.where)[0]
    assert file == __file__
    assert "# the line" in Path(file).read_text().splitlines()[int(line) - 1]


def test_a_call_that_fails_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        export(nn.Linear(4, 2), (torch.ones(3, 5),))


class Returning(nn.Module):
    """Returns what it is given, what it holds, the same twice, a view, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.plain = torch.randn(4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = x * self.weight
        return {
            "x": x, "weight": self.weight, "plain": self.plain, "y": y, "again": y,
            "view": y.view(-1), "row": y[0], "kind": "one", "none": None, "scaled": x * self.plain,
        }  # fmt: skip


def test_all_kinds_of_outputs_have_their_names() -> None:
    module = Returning()
    exported = export(module, (torch.randn(3, 4),))
    check(exported, module, torch.randn(5, 4))
    names = [value.name for value in exported.program.outputs(Role.USER_OUTPUT)]
    assert [name.rstrip("_") for name in names if name] == [
        "x", "weight", "plain", "y", "again", "view", "row", "scaled",
    ]  # fmt: skip
    assert exported.leaves.count(None) == 2
    assert [v.name for v in exported.program.inputs(Role.PARAMETER)] == ["weight"]


class Sizes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2, x.shape[0]


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1


def test_a_size_is_no_output() -> None:
    with pytest.raises(UnsupportedOutput, match="size"):
        export(Sizes(), (torch.ones(3, 4),))


def test_an_argument_that_is_written_to_is_refused() -> None:
    with pytest.raises(CaptureError, match="writes to x"):
        export(Writing(), (torch.ones(3, 4),))


def test_other_arguments_are_refused() -> None:
    with pytest.raises(UnsupportedInput, match="'input'"):
        export(nn.Identity(), (object(),))


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream.clamp(-0.1, 0.1)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Clipped.apply(x * self.weight)
        return found.sum()


def test_a_backward_of_the_users_is_in_the_program() -> None:
    module, x = Custom(), torch.randn(3, 4)
    program = differentiate(export(module, (x,)).program, ["weight"])
    feeds = {"x": x, "weight": module.weight}
    for value in program.inputs():  # the loss has a gradient of one
        feeds.setdefault(value.name or "", torch.tensor(1.0))
    names = [value.name for value in program.graph.outputs]
    found = dict(zip(names, results_of(program, feeds), strict=True))
    module(x).backward()
    gradient = next(value for value in program.outputs(Role.GRADIENT))
    torch.testing.assert_close(found[gradient.name], module.weight.grad)


@pytest.mark.parametrize("shape", [(1, 7), (3, 1), (1, 1)])
def test_a_batch_or_a_length_of_one_is_open(shape: tuple[int, int]) -> None:
    module = nn.Embedding(10, 4)
    exported = export(module, (torch.ones(shape, dtype=torch.long),))
    for other in ((1, 7), (3, 1), (1, 1), (4, 5)):
        check(exported, module, torch.randint(10, other))


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1).flip(1).reshape(x.shape)


def test_conditions_on_sizes_are_known() -> None:
    exported = export(Halves(), (torch.ones(3, 6),))
    check(exported, Halves(), torch.randn(2, 10))
    assert not exported.accepts([(3, 7)])
    assert not exported.accepts([(3, 6, 1)])


def test_sizes_of_which_the_code_allows_one_alone_are_constants() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x if x.shape[0] == 4 else x

    exported = export(Square(), (torch.ones(4, 4),))
    assert shape_of(exported) == [4, 4]


def test_sizes_of_images_may_be_constants() -> None:
    module = nn.Conv2d(3, 4, 3)
    exported = export(module, (torch.ones(2, 3, 8, 8),), still=True)
    assert shape_of(exported)[1:] == [3, 8, 8]
    check(exported, module, torch.randn(5, 3, 8, 8))
    check(export(module, (torch.ones(2, 3, 8, 9),)), module, torch.randn(3, 3, 5, 7))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_part_of_the_program(inside: bool) -> None:
    linear = nn.Linear(4, 4)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return self.linear(x)

    module: nn.Module = Cast() if inside else linear
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        exported = export(module, (torch.randn(3, 4),))
    (output,) = exported.program.outputs(Role.USER_OUTPUT)
    assert str(output.dtype) == "BFLOAT16"


def test_opset_18_is_written_as_such() -> None:
    case = MODELS["mlp"]
    exported = export(case.build(), kwargs=case.batch(), opset=18)
    assert exported.program.opset == 18
    assert "Gelu" not in exported.program.operators()
