"""What cannot become a graph is refused in words of the user's code: what, where, because, help."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.capture.export import capture
from ortrain.errors import OrtrainError

# What a user can do nothing with: internals of the exporter, and of ours.
INTERNAL = (
    "u0", "zuf0", "unhinted", "FakeTensor", "fake tensor", "pytree", "github", "Unsupported",
    "SymFloat", "SymInt", " at 0x", "proxy", "ortrain itself", "non-strict", "GeneratedBackward",
    "functorch",
)  # fmt: skip

Forward = Callable[[Any, torch.Tensor], Any]


class Linear(nn.Module):
    """What the forwards below work with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


REFUSED: dict[str, tuple[type[nn.Module], str]] = {}
SERVED: dict[str, type[nn.Module]] = {}


def refused(what: str) -> Callable[[Forward], Forward]:
    """A forward that is refused so; the line is the one that says `here`, or else its first."""

    def add(forward: Forward) -> Forward:
        REFUSED[forward.__name__] = (module_of(forward), what)
        return forward

    return add


def served(forward: Forward) -> Forward:
    """A forward that looks as if it could be no graph, and is one."""
    SERVED[forward.__name__] = module_of(forward)
    return forward


def module_of(forward: Any) -> type[nn.Module]:
    # A trace records the lines of functions of this name.
    forward.__code__ = forward.__code__.replace(co_name="forward")
    return type(forward.__name__, (Linear,), {"forward": forward})


# -- values of tensors in Python -------------------------------------------------------------------

BRANCH, NUMBER = "branches on the values of a tensor", "needs a number out of a tensor"


@served
def a_branch(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    if y.sum() > 0:  # here
        return y
    return -y


@served
def a_loop_until(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    while y.norm() > 1:  # here
        y = y / 2
    return y


@served
def a_branch_on_a_number_of_rows(self: Any, x: torch.Tensor) -> Any:
    y, found = self.linear(x), x[x > 0]
    if found.numel() == 0:  # here
        return y
    return y + found.mean()


@refused(BRANCH)
def a_comparison_of_tensors(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return x if torch.equal(x, y) else y  # here


@refused(BRANCH)
def a_comparison_up_to_rounding(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return x if torch.allclose(x, y) else y  # here


@served
def a_sorted_list(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return torch.stack(sorted(y.unbind(), key=lambda row: row.sum()))  # here


@refused(NUMBER)
def a_float(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y * float(y.sum())  # here


@refused(NUMBER)
def an_index(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y[int(y.sum().abs()) % 3]  # here


@refused(NUMBER)
def a_count_of_rounds(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    for _ in range(int(x.abs().sum())):  # here
        y = y + 1
    return y


@refused(NUMBER)
def a_root_by_math(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y / math.sqrt(y.pow(2).sum())  # here


@refused(NUMBER)
def a_line_of_json(self: Any, x: torch.Tensor) -> Any:
    json.dumps({"sum": x.sum().item()})  # here
    return self.linear(x)


@served
def a_slice_up_to_a_value(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x)[: x[0, 0].abs().long()]  # here


@served
def a_caught_branch(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    with contextlib.suppress(ValueError):
        try:
            if y.sum() > 0:  # here
                return y
        except RuntimeError:
            pass
    return -y


@refused("catches an error of the trace")
def a_caught_comparison(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    try:
        same = torch.equal(x, y)  # here
    except RuntimeError:
        same = False
    return x if same else y


# -- beyond PyTorch --------------------------------------------------------------------------------

NUMPY = "turns a tensor into a numpy array"


@refused(NUMPY)
def an_array(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y * torch.from_numpy(y.detach().numpy())  # here


@refused(NUMPY)
def a_mean_by_numpy(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x) * np.mean(x.numpy())  # here


@refused(NUMPY)
def a_function_of_numpy(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x) * float(np.asarray(x).mean())  # here


@refused(NUMPY)
def an_array_beside_the_output(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y, y.detach().numpy()  # here


@refused("draws random numbers from 'random'")
def a_draw_of_python(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x) * random.random()


@refused("draws random numbers from 'numpy.random'")
def a_draw_of_numpy(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x) * np.random.rand()  # noqa: NPY002


@refused("reads a tensor's memory")
def an_address(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y + y.data_ptr() * 0  # here


@refused("reads a tensor's memory")
def a_copied_module(self: Any, x: torch.Tensor) -> Any:
    return copy.deepcopy(self.linear)(x)  # here


@refused("in a way that the trace does not see")
def a_thread(self: Any, x: torch.Tensor) -> Any:
    rows: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: rows.append(self.linear(x)))  # here
    thread.start()
    thread.join()
    return rows[0]


@refused("sets the .data of a tensor")
def an_assignment_to_data(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    y.data = y.data * 2  # here
    return y


@refused("makes a tensor of a class of its own")
def a_subclass(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x.as_subclass(Marked))  # here


@refused("makes a parameter or a sub-module")
def a_module_made_on_the_way(self: Any, x: torch.Tensor) -> Any:
    layer = nn.Linear(4, 4)  # here
    return layer(self.linear(x))


@refused("puts a tensor on meta")
def another_device(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x).to("meta")  # here


# -- derivatives inside of the forward -------------------------------------------------------------


@refused("computes gradients")
def a_gradient(self: Any, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(self.linear(x).sum(), x, create_graph=True)  # here
    return g.pow(2).sum()


@refused("computes gradients")
def a_backward(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x).sum()
    y.backward()  # here
    return y.detach()


@refused("a transform of torch.func")
def a_functional_gradient(self: Any, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda t: self.linear(t).pow(2).sum())(x)  # here


@refused("a transform of torch.func")
def a_vectorized_map_that_draws(self: Any, x: torch.Tensor) -> Any:
    return torch.vmap(lambda row: row * torch.rand([]), randomness="different")(x)  # here


@refused("control-flow operator 'cond'")
def a_conditional(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return torch.cond(y.sum() > 0, lambda t: t * 2, lambda t: -t, (y,))  # here


# -- inputs and parameters changed -----------------------------------------------------------------


@refused("writes into an argument")
def a_changed_input(self: Any, x: torch.Tensor) -> Any:
    x.mul_(2)  # here
    return self.linear(x)


@refused("writes into an argument")
def a_column_of_the_input(self: Any, x: torch.Tensor) -> Any:
    x[:, 0] = 0  # here
    return self.linear(x)


@refused("writes into a parameter")
def a_clamped_parameter(self: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        self.linear.weight.clamp_(-1, 1)  # here
    return self.linear(x)


# -- outputs ---------------------------------------------------------------------------------------


@refused("returns an object of type generator")
def a_generator(self: Any, x: torch.Tensor) -> Any:
    return (row for row in self.linear(x))


@refused("returns an object of type set")
def a_set(self: Any, x: torch.Tensor) -> Any:
    return {self.linear(x)}


@refused("returns an object of type function")
def a_function(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y, lambda: y


@refused("returns an object of type torch.device")
def a_device(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x), x.device


@refused("returns an object of type tuple_iterator")
def an_object(self: Any, x: torch.Tensor) -> Any:
    return Holder(self.linear(x))


@refused("returns a size of its input as a number")
def a_size(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x), x.shape[0]


# -- kinds of tensors ------------------------------------------------------------------------------


@refused("computes with a sparse tensor")
def a_sparse_input(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x.to_sparse().to_dense())  # here


@refused("computes with a sparse tensor")
def a_sparse_product(self: Any, x: torch.Tensor) -> Any:
    a = torch.eye(3).to_sparse()
    return torch.sparse.mm(a, self.linear(x))  # here


@refused("computes with a sparse tensor")
def a_sparse_matrix_of_its_own(self: Any, x: torch.Tensor) -> Any:
    places = torch.tensor([[0, 1], [1, 0]])
    a = torch.sparse_coo_tensor(places, torch.ones(2), (3, 3))
    return a @ self.linear(x)  # here


@refused("computes with a quantized tensor")
def a_quantized_tensor(self: Any, x: torch.Tensor) -> Any:
    q = torch.quantize_per_tensor(self.linear(x), 0.1, 0, torch.qint8)
    return q.dequantize()  # here


@refused("computes with a nested or jagged tensor")
def a_nested_tensor(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    n = torch.nested.nested_tensor([y[0], y[1]])  # here
    return torch.nested.to_padded_tensor(n, 0.0)


@refused("computes with a nested or jagged tensor")
def a_jagged_tensor(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    n = torch.nested.as_nested_tensor([y[:1], y[1:]], layout=torch.jagged)  # here
    return n.values()


@refused("a packed sequence cannot be captured")
def a_packed_sequence(self: Any, x: torch.Tensor) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(  # here
        x[None], torch.tensor([3]), batch_first=True
    )
    return self.linear(packed.data)


@refused("onnxruntime refuses the graph")
def an_autocast_region(self: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(x)  # here


@refused("onnxruntime refuses the graph")
def a_dtype_without_kernels(self: Any, x: torch.Tensor) -> Any:
    return (self.linear(x).bfloat16() * 2).float()  # here


# -- operators -------------------------------------------------------------------------------------


@refused("no translation to ONNX for aten::_linalg_eigh")
def an_operator_without_translation(self: Any, x: torch.Tensor) -> Any:
    w = self.linear.weight
    return torch.linalg.eigh(w @ w.T).eigenvalues.sum() + self.linear(x)  # here


@refused("aten::histc cannot be translated")
def a_form_without_translation(self: Any, x: torch.Tensor) -> Any:
    return torch.histc(x).sum() + self.linear(x)  # here


@refused("aten::poisson draws random numbers")
def a_draw_of_torch(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x) + torch.poisson(x.abs())  # here


@refused(r"the custom autograd function .*Triple")
def a_wrong_backward(self: Any, x: torch.Tensor) -> Any:
    return Triple.apply(self.linear(x))  # here


@refused("the custom operator ortrain_tests_twice of torch.library")
def an_operator_of_a_library(self: Any, x: torch.Tensor) -> Any:
    return twice(self.linear(x))  # here


# -- side effects ----------------------------------------------------------------------------------


class CountsCalls(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # here
        return self.linear(x)


class KeepsOutputs(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen.append(y)  # here
        return y


REFUSED["a_counter"] = (CountsCalls, "assigns 'calls'")
REFUSED["a_list_of_outputs"] = (KeepsOutputs, "changes what 'seen' holds")


# -- what looks like these, and is served ----------------------------------------------------------


@served
def an_item(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y * x.max().item()


@served
def a_list_of_numbers(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x) * sum(x[0].tolist())


@served
def rows_that_are_not_zero(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x)[(x > 0).nonzero()[:, 0]].sum()


@served
def rows_of_a_mask(self: Any, x: torch.Tensor) -> Any:
    return self.linear(x)[x > 0].mean()


@served
def parts_from_a_generator(self: Any, x: torch.Tensor) -> Any:
    return torch.stack([self.linear(row) for row in (part for part in x)])


@served
def a_registered_dataclass(self: Any, x: torch.Tensor) -> Any:
    return Result(self.linear(x))


class Marked(torch.Tensor):
    pass


class Holder:
    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.handle = value, iter(())


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    count: int = 3


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


@torch.library.custom_op("ortrain_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def line_of(kind: type[nn.Module]) -> int:
    """The line marked `here`, or else the forward's first."""
    lines, first = inspect.getsourcelines(kind.forward)
    return first + next((i for i, text in enumerate(lines) if "# here" in text), 0)


KEPT = {"an_operator_without_translation", "a_form_without_translation", "a_wrong_backward",
        "an_operator_of_a_library"}  # fmt: skip


def _captured(module: nn.Module, x: torch.Tensor) -> None:
    capture(module, (x,))


# torch tells of its plans for these.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, :UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_and_where_and_what_to_do(name: str) -> None:
    kind, what = REFUSED[name]
    module, x = kind(), torch.randn(3, 4)
    call: Any = ORTModule(module, options=Options(engine="onnxruntime", fallback="raise"))
    if name in KEPT:  # in a step it is a node that PyTorch runs
        call = functools.partial(_captured, module)
    with pytest.raises(OrtrainError, match=what) as caught:
        call(x)
    error = caught.value
    assert f"{__file__.rpartition('/')[2]}:{line_of(kind)}" in error.where
    assert error.because
    assert error.help
    assert not [text for text in INTERNAL if text in str(error)]


@pytest.mark.parametrize("name", SERVED)
def test_what_only_looks_uncapturable_has_eagers_numbers(name: str) -> None:
    module = SERVED[name]()
    model = ORTModule(module, options=Options(engine="onnxruntime", fallback="raise"))
    for _ in range(3):
        x = torch.randn(3, 4)
        found, expected = model(x), module(x)
        if isinstance(expected, Result):
            found, expected = found.value, expected.value
        torch.testing.assert_close(found, expected)


def test_a_failed_trace_leaves_hooks_on_saved_tensors_allowed() -> None:
    kind, _ = REFUSED["a_functional_gradient"]
    model = ORTModule(kind(), options=Options(engine="onnxruntime", fallback="raise"))
    with pytest.raises(OrtrainError):
        model(torch.randn(3, 4))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        pass
    fine = ORTModule(nn.Linear(4, 4), options=Options(engine="onnxruntime", fallback="raise"))
    fine(torch.randn(3, 4))
    assert fine.report.mode == "graph"
