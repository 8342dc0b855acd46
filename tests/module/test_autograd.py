"""Whatever autograd can be asked for gives what it gives for the module itself."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional

from ortrain import Options, ORTModule
from ortrain.errors import NotServed, OrtrainWarning, UnsupportedGradient
from ortrain.frontend.form import AGAIN
from tests.module.agreement import GRAPH

# Two orders of summation, of gradients of gradients as well, relative to the largest value.
AGREES = 2e-5


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- small modules --------------------------------------------------------------------------------


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 3, 3, padding=1, bias=False)  # the norm would take it out
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.body(image)).tanh().mean((2, 3)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mixed = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        query, key, value = self.mixed(self.embedding(tokens)).chunk(3, -1)
        scores = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)
        return self.head(scores @ value * weights)


class Heads(nn.Module):
    """Two outputs that are differentiable and one that is not, by name and nested."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.one, self.two = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, value: Tensor, *, scale: Tensor) -> dict[str, Any]:
        hidden = self.trunk(value).tanh() * scale
        one = self.one(hidden).sin()
        return {"one": one, "rest": (one.argmax(-1), self.two(hidden.square()))}


def frozen() -> nn.Module:
    module = perceptron()
    module[0].requires_grad_(False)
    return module


def perceptron() -> Any:
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 3)
    )


@dataclass
class Case:
    """A module with arguments for it.

    Attributes:
        build: makes the module.
        arguments: makes positional ones and those by name.
    """

    build: Callable[[], nn.Module]
    arguments: Callable[[], tuple[list[Tensor], dict[str, Tensor]]]


CASES = {
    "perceptron": Case(perceptron, lambda: ([rows(5, 4)], {})),
    "convolution": Case(Convolution, lambda: ([rows(4, 2, 5, 5)], {})),
    "attention": Case(Attending, lambda: ([torch.arange(12).view(2, 6) % 11, rows(2, 6, 8)], {})),
    "heads": Case(Heads, lambda: ([rows(5, 4)], {"scale": rows(5, seed=1)})),
    "frozen": Case(frozen, lambda: ([rows(5, 4)], {})),
}


# --- what autograd is asked for -------------------------------------------------------------------

Found = dict[str, Any]


class Asked:
    """One call of one module, and what an inquiry needs of it."""

    def __init__(self, case: Case, model: nn.Module, kind: str) -> None:
        self.model = model
        args, kwargs = case.arguments()
        self.leaves: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.args = [self._prepared(t, kind) for t in args]
        self.kwargs = {name: self._prepared(t, kind) for name, t in kwargs.items()}
        if kind == "computed":
            # From a parameter of the module itself, as a recurrent use of it would.
            first = next(p for p in model.parameters() if p.requires_grad)
            self.inputs = [t + first.mean() for t in self.inputs]
            ready = iter(self.inputs)
            self.args = [next(ready) if t.requires_grad else t for t in self.args]
            self.kwargs = {n: next(ready) if t.requires_grad else t for n, t in self.kwargs.items()}
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def _prepared(self, tensor: Tensor, kind: str) -> Tensor:
        if kind == "plain" or not tensor.is_floating_point():
            return tensor
        leaf = tensor.requires_grad_()
        self.leaves.append(leaf)
        self.inputs.append((leaf * 1.5).sin() if kind == "computed" else leaf)
        return self.inputs[-1]

    def outputs(self) -> list[Tensor]:
        """The differentiable outputs of one call."""
        output = self.model(*self.args, **self.kwargs)
        if isinstance(output, dict):
            return [output["one"], output["rest"][1]]
        return [output]

    def loss(self) -> Tensor:
        """A number whose second derivatives are not zero."""
        return sum(o.pow(3).mean() for o in self.outputs())  # type: ignore[return-value]

    @property
    def all(self) -> list[Tensor]:
        """Whatever has a gradient."""
        return [*self.leaves, *self.parameters]

    def accumulated(self) -> Found:
        """The gradients that a backward has left."""
        return {str(i): t.grad for i, t in enumerate(self.all)}


def total(tensors: Iterable[Tensor | None]) -> Tensor:
    """The sum of the squares of those that are there."""
    return torch.stack([t.square().sum() for t in tensors if t is not None]).sum()


def numbered(tensors: Sequence[Tensor | None]) -> Found:
    return {str(i): t for i, t in enumerate(tensors)}


def backward(asked: Asked) -> Found:
    asked.loss().backward()
    return asked.accumulated()


def gradients(asked: Asked) -> Found:
    return numbered(torch.autograd.grad(asked.loss(), asked.all, allow_unused=True))


def backward_twice(asked: Asked) -> Found:
    loss = asked.loss()
    loss.backward(retain_graph=True)
    first = {
        f"first {k}": g.clone() if g is not None else g for k, g in asked.accumulated().items()
    }
    loss.backward()
    return {**first, **asked.accumulated()}


def outputs_one_by_one(asked: Asked) -> Found:
    found: Found = {}
    outputs = asked.outputs()
    for number, output in enumerate(outputs):
        found |= {
            f"{number} {key}": gradient
            for key, gradient in numbered(
                torch.autograd.grad(
                    output.pow(2).sum(), asked.all, retain_graph=True, allow_unused=True
                )
            ).items()
        }
    return found


def one_parameter(asked: Asked) -> Found:
    asked.loss().backward(inputs=[asked.parameters[-1]])
    return asked.accumulated()


def hooks(asked: Asked) -> Found:
    seen: Found = {}
    outputs = asked.outputs()
    outputs[0].register_hook(lambda g: g * 2)
    for number, tensor in enumerate([*asked.inputs, *asked.parameters]):
        tensor.register_hook(lambda g, number=number: seen.setdefault(f"seen {number}", g.clone()))
    for tensor in asked.inputs:
        tensor.retain_grad()
    outputs[0].retain_grad()
    sum(o.pow(3).mean() for o in outputs).backward()  # type: ignore[union-attr]
    kept = {f"kept {i}": t.grad for i, t in enumerate([*asked.inputs, outputs[0]])}
    return {**seen, **kept, **asked.accumulated()}


def batches_of_gradients(asked: Asked) -> Found:
    output = asked.outputs()[0]
    directions = rows(3, *output.shape, seed=7)
    return numbered(
        torch.autograd.grad(output, asked.all, directions, is_grads_batched=True, allow_unused=True)
    )


def mapped_backward(asked: Asked) -> Found:
    output = asked.outputs()[0]

    def pull(direction: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, asked.parameters[:1], direction, retain_graph=True)

    return numbered(torch.func.vmap(pull)(rows(3, *output.shape, seed=7)))


def with_anomalies_detected(asked: Asked) -> Found:
    with torch.autograd.set_detect_anomaly(True):
        return backward(asked)


def offloaded(asked: Asked) -> Found:
    with torch.autograd.graph.save_on_cpu():
        loss = asked.loss()
    loss.backward()
    return asked.accumulated()


def in_another_thread(asked: Asked) -> Found:
    loss = asked.loss()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return asked.accumulated()


def several_forwards(asked: Asked) -> Found:
    losses = [asked.loss() * factor for factor in (1.0, 2.0, 3.0)]
    for place in (1, 2, 0):
        losses[place].backward(retain_graph=True)  # what comes before the module is shared
    return asked.accumulated()


def changed_output(asked: Asked) -> Found:
    outputs = asked.outputs()
    outputs[-1] += 1.0
    sum(o.pow(3).mean() for o in outputs).backward()  # type: ignore[union-attr]
    return asked.accumulated()


FIRST: dict[str, Callable[[Asked], Found]] = {
    function.__name__: function
    for function in (
        backward, gradients, backward_twice, outputs_one_by_one, one_parameter, hooks,
        batches_of_gradients, mapped_backward, with_anomalies_detected, offloaded,
        in_another_thread, several_forwards, changed_output,
    )
}  # fmt: skip


def penalty(asked: Asked) -> Found:
    loss = asked.loss()
    found = torch.autograd.grad(loss, asked.all, create_graph=True, allow_unused=True)
    (loss + total(found)).backward()
    return {**{f"first {k}": g for k, g in numbered(found).items()}, **asked.accumulated()}


def accumulated_with_graph(asked: Asked) -> Found:
    asked.loss().backward(create_graph=True)
    first = {f"first {k}": g for k, g in asked.accumulated().items()}
    for tensor in asked.all:  # or they would hold the graph
        tensor.grad = None
    total(first.values()).backward()
    return {
        **{k: None if g is None else g.detach() for k, g in first.items()},
        **asked.accumulated(),
    }


def product_with_hessian(asked: Asked) -> Found:
    found = torch.autograd.grad(asked.loss(), asked.all, create_graph=True)
    along = torch.stack([(g * rows(*g.shape, seed=i)).sum() for i, g in enumerate(found)]).sum()
    return numbered(torch.autograd.grad(along, asked.all, materialize_grads=True))


def third_derivative(asked: Asked) -> Found:
    value = asked.loss()
    for _ in range(3):
        found = torch.autograd.grad(value, asked.all, create_graph=True, allow_unused=True)
        value = total(found)
    return numbered(found)


def by_upstream(asked: Asked) -> Found:
    """Twice backward gives the product with the Jacobian: the gradient is linear upstream."""
    output = asked.outputs()[0]
    direction = torch.ones_like(output).requires_grad_()
    found = torch.autograd.grad(output, asked.all, direction, create_graph=True, allow_unused=True)
    along = torch.stack([g.sum() for g in found if g is not None]).sum()
    return numbered(torch.autograd.grad(along, [direction]))


def output_by_output_again(asked: Asked) -> Found:
    found: Found = {}
    for number, output in enumerate(asked.outputs()):
        first = torch.autograd.grad(
            output.pow(3).sum(), asked.parameters, create_graph=True, allow_unused=True
        )
        second = torch.autograd.grad(total(first), asked.all, allow_unused=True, retain_graph=True)
        found |= {f"{number} {key}": g for key, g in numbered(second).items()}
    return found


def hooks_once(asked: Asked) -> Found:
    calls: list[int] = []
    loss = asked.loss()
    handles = [
        t.register_hook(lambda g, i=i: calls.append(i))  # type: ignore[misc]
        for i, t in enumerate([*asked.inputs, *asked.parameters])
    ]
    found = torch.autograd.grad(loss, asked.all, create_graph=True, allow_unused=True)
    for handle in handles:
        handle.remove()
    return {
        "calls": torch.tensor(sorted(calls)),
        **numbered([g.detach() for g in found if g is not None]),
    }


def curved_backward(asked: Asked) -> Found:
    """Batches of gradients that are differentiated again, as a vectorized Hessian takes them."""
    output = asked.outputs()[0]
    found = torch.autograd.grad(
        output, asked.parameters[:1], rows(3, *output.shape, seed=7),
        is_grads_batched=True, create_graph=True,
    )  # fmt: skip
    return numbered(torch.autograd.grad(found[0].square().sum(), asked.all, allow_unused=True))


SECOND: dict[str, Callable[[Asked], Found]] = {
    function.__name__: function
    for function in (
        penalty, accumulated_with_graph, product_with_hessian, third_derivative, by_upstream,
        output_by_output_again, hooks_once, curved_backward,
    )
}  # fmt: skip


def assert_same(ours: Found, eager: Found) -> None:
    assert ours.keys() == eager.keys()
    for name, expected in eager.items():
        found = ours[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            expected = expected.detach()
            bound = AGREES * float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(
                found.detach(), expected, rtol=0.0, atol=max(bound, 1e-9),
                msg=lambda text, name=name: f"{name}: {text}",
            )  # fmt: skip


def compare(case: Case, inquiry: Callable[[Asked], Found], kind: str) -> ORTModule:
    eager = case.build()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    assert_same(inquiry(Asked(case, model, kind)), inquiry(Asked(case, eager, kind)))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, dict(eager.named_buffers())[name])
    assert model.report.graph_calls > 0
    return model


KINDS = ["plain", "leaf", "computed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_first_derivatives_are_eagers(name: str, kind: str) -> None:
    eager = CASES[name].build()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for inquiry in FIRST.values():
        for each in (model, eager):
            each.zero_grad()
            for parameter in each.parameters():
                parameter._backward_hooks = None
        ours = inquiry(Asked(CASES[name], model, kind))
        try:
            assert_same(ours, inquiry(Asked(CASES[name], eager, kind)))
        except AssertionError as error:
            raise AssertionError(f"{inquiry.__name__}: {error}") from error
        assert model.report.mode == "graph"
    for buffer_name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, dict(eager.named_buffers())[buffer_name])


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("inquiry", SECOND)
@pytest.mark.parametrize("name", CASES)
def test_higher_derivatives_are_eagers(name: str, inquiry: str) -> None:
    for kind in ("leaf", "computed") if name in ("perceptron", "heads") else ("computed",):
        compare(CASES[name], SECOND[inquiry], kind)


# --- forward mode and transforms ------------------------------------------------------------------


def dual_input(asked: Asked) -> Found:
    value, tangent = rows(5, 4), rows(5, 4, seed=3)
    with forward_ad.dual_level():
        output = asked.model(forward_ad.make_dual(value, tangent))
        return numbered(forward_ad.unpack_dual(output))


def dual_parameters(asked: Asked) -> Found:
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(p.detach(), rows(*p.shape, seed=3))
            for name, p in asked.model.named_parameters()
        }
        output = torch.func.functional_call(asked.model, duals, (rows(5, 4),))
        return numbered(forward_ad.unpack_dual(output))


def dual_upstream(asked: Asked) -> Found:
    """A backward whose gradients have tangents, through a forward that had none."""
    output = asked.outputs()[0]
    with forward_ad.dual_level():
        direction = forward_ad.make_dual(torch.ones_like(output), rows(*output.shape, seed=3))
        (found,) = torch.autograd.grad(output, asked.parameters[:1], direction)
        return numbered(forward_ad.unpack_dual(found))


def functional_gradient(asked: Asked) -> Found:
    def loss(parameters: dict[str, Tensor], value: Tensor) -> Tensor:
        return torch.func.functional_call(asked.model, parameters, (value,)).pow(3).sum()

    parameters = {name: p.detach() for name, p in asked.model.named_parameters()}
    return dict(torch.func.grad(loss)(parameters, rows(5, 4)))


def gradients_of_each_row(asked: Asked) -> Found:
    def loss(parameters: dict[str, Tensor], value: Tensor) -> Tensor:
        return torch.func.functional_call(asked.model, parameters, (value[None],)).pow(3).sum()

    parameters = {name: p.detach() for name, p in asked.model.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    return dict(each(parameters, rows(5, 4)))


def transforms_of_the_module(asked: Asked) -> Found:
    model, value = asked.model, rows(4)
    output, pull = torch.func.vjp(model, value)
    return {
        "jacrev": torch.func.jacrev(model)(value),
        "jacfwd": torch.func.jacfwd(model)(value),
        "hessian": torch.func.hessian(lambda x: model(x).pow(2).sum())(value),
        "vmap": torch.func.vmap(model)(rows(5, 4)),
        "jvp": torch.func.jvp(model, (value,), (rows(4, seed=3),))[1],
        "vjp": pull(torch.ones_like(output))[0],
    }


def an_ensemble(asked: Asked) -> Found:
    others = [copy.deepcopy(dict(asked.model.named_parameters())) for _ in range(2)]
    stacked = {
        n: torch.stack([o[n].detach() * (i + 1) for i, o in enumerate(others)]) for n in others[0]
    }

    def call(parameters: dict[str, Tensor], value: Tensor) -> Tensor:
        return torch.func.functional_call(asked.model, parameters, (value,))

    return {"": torch.func.vmap(call, in_dims=(0, None))(stacked, rows(5, 4))}


def inner_loop(asked: Asked) -> Found:
    """A step of gradient descent that is differentiated, as in meta-learning."""
    fast = dict(asked.model.named_parameters())
    for number in range(3):
        output = torch.func.functional_call(asked.model, fast, (rows(5, 4, seed=number),))
        found = torch.autograd.grad(output.pow(2).mean(), list(fast.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), found, strict=True)}
    loss = torch.func.functional_call(asked.model, fast, (rows(5, 4, seed=9),)).pow(2).mean()
    return numbered(torch.autograd.grad(loss, asked.parameters))


def autograds_own_functions(asked: Asked) -> Found:
    model, value, direction = asked.model, rows(2, 4), rows(2, 4, seed=3)

    def number(value: Tensor) -> Tensor:
        return model(value).pow(3).sum()

    return {
        "jacobian": functional.jacobian(model, value),
        "vectorized jacobian": functional.jacobian(model, value, vectorize=True),
        "forward jacobian": functional.jacobian(
            model, value, vectorize=True, strategy="forward-mode"
        ),
        "hessian": functional.hessian(number, value),
        "vectorized hessian": functional.hessian(number, value, vectorize=True),
        "hessian forward": functional.hessian(
            number, value, vectorize=True, outer_jacobian_strategy="forward-mode"
        ),
        "hvp": functional.hvp(number, value, direction)[1],
        "vhp": functional.vhp(number, value, direction)[1],
        "jvp": functional.jvp(model, value, direction)[1],
        "vjp": functional.vjp(model, value, torch.ones(2, 3))[1],
    }


TRANSFORMED: dict[str, Callable[[Asked], Found]] = {
    function.__name__: function
    for function in (
        dual_input, dual_parameters, dual_upstream, functional_gradient, gradients_of_each_row,
        transforms_of_the_module, an_ensemble, inner_loop, autograds_own_functions,
    )
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["auto", "onnxruntime"])
@pytest.mark.parametrize("inquiry", TRANSFORMED)
def test_tangents_and_transforms_are_eagers(inquiry: str, engine: Any) -> None:
    eager = perceptron()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine=engine))
    asked = [Asked(CASES["perceptron"], each, "leaf") for each in (model, eager)]
    if engine == "onnxruntime":
        asked[0].loss().backward()
        assert model.report.mode == "graph"
    function = TRANSFORMED[inquiry]
    for _ in range(2):
        assert_same(function(asked[0]), function(asked[1]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_gradcheck_passes_in_double_precision() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = ORTModule(plain, options=Options(engine="onnxruntime"))
    value = rows(2, 4).double().requires_grad_()
    model(value).sum().backward()
    assert model.report.mode == "graph"
    checks: dict[str, Any] = {"check_batched_grad": True, "check_forward_ad": True}
    assert torch.autograd.gradcheck(model, value, **checks)
    assert torch.autograd.gradgradcheck(model, value)


def test_a_transform_leaves_the_graph_of_other_calls_alone() -> None:
    eager = perceptron()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    model(rows(5, 4)).sum().backward()
    asked = Asked(CASES["perceptron"], model, "plain")
    with pytest.warns(OrtrainWarning, match="a transform of torch.func"):
        gradients_of_each_row(asked)
    for _ in range(20):
        gradients_of_each_row(asked)
    model(rows(5, 4)).sum().backward()
    assert model.report.mode == "graph"
    assert model.report.captures == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused_where_no_fallback_is_allowed() -> None:
    model = ORTModule(perceptron(), options=GRAPH)
    with forward_ad.dual_level(), pytest.raises(NotServed, match="forward-mode derivatives"):
        model(forward_ad.make_dual(rows(5, 4), rows(5, 4)))


def test_parameters_that_are_computed_are_refused_where_no_fallback_is_allowed() -> None:
    model = ORTModule(perceptron(), options=GRAPH)
    computed = {name: p * 2 for name, p in model.named_parameters()}
    with pytest.raises(NotServed, match="functional_call sets them"):
        torch.func.functional_call(model, computed, (rows(5, 4),))


def test_hooks_that_change_what_is_saved_are_heard() -> None:
    eager = perceptron()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for each in (model, eager):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.round(decimals=1)):
            if each is model:
                with pytest.warns(OrtrainWarning, match="hooks are set on saved tensors"):
                    loss = each(rows(5, 4)).pow(2).sum()
            else:
                loss = each(rows(5, 4)).pow(2).sum()
        loss.backward()
    assert_same(Asked(CASES["perceptron"], model, "plain").accumulated(),
                Asked(CASES["perceptron"], eager, "plain").accumulated())  # fmt: skip


@pytest.mark.parametrize("side", ["input", "upstream"])
def test_a_view_that_stands_for_its_negative_is_read_as_such(side: str) -> None:
    eager = perceptron()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for each in (model, eager):
        value = torch.complex(rows(5, 4), rows(5, 4, seed=1)).conj().imag
        direction = torch.complex(rows(5, 3), rows(5, 3, seed=1)).conj().imag
        assert value.is_neg()
        if side == "input":
            each(value).pow(2).sum().backward()
        else:
            each(rows(5, 4)).backward(direction)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# --- gradients of gradients: what they may not do -------------------------------------------------


def gradient_with_graph(model: nn.Module, value: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(model(value).pow(3).sum(), value, create_graph=True)
    return found


def test_the_form_runs_in_pytorch_once_its_gradients_are_differentiated() -> None:
    model = ORTModule(perceptron(), options=GRAPH)
    model(rows(5, 4)).sum().backward()
    gradient_with_graph(model, rows(5, 4).requires_grad_()).sum().backward()
    model(rows(5, 4).requires_grad_())
    assert (model.report.mode, model.report.reason) == ("eager", str(AGAIN))
    model(rows(5, 4)).sum().backward()
    assert model.report.mode == "graph", "a call of another form goes on as it was"


class Scaled(nn.Module):
    """Reads an array, of which a guard sees what is in it and holds no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = np.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.elu(x * float(self.factors[0]))


def _renewed(model: Any) -> None:
    model.log[:] = [{"step": 2}]


def _replaced(model: Any) -> None:
    model.module[0] = nn.Linear(4, 4)


def _deleted(model: Any) -> None:
    del model.module[1].alpha


# What a script does to a module between a forward and a backward that runs the forward again.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number that the forward reads": lambda model: setattr(model[1], "alpha", 2.0),
    "a count": lambda model: setattr(model, "steps", model.steps + 1),
    "a new attribute": lambda model: setattr(model, "last", torch.zeros(2)),
    "a list": lambda model: model.log.append(torch.zeros(2)),
    "what a list holds": _renewed,
    "an ordered dictionary": lambda model: model.order.move_to_end("a"),
    "a counter": lambda model: model.counts.update("ab"),
    "a set": lambda model: model.names.add("c"),
    "a forward hook": lambda model: model.module[1].register_forward_hook(lambda *_: None),
    "a buffer": lambda model: model.register_buffer("mean", torch.zeros(2)),
    "another layer": _replaced,
    "no attribute any more": _deleted,
}


@pytest.mark.parametrize("change", CHANGES)
def test_second_derivatives_are_those_of_the_module_as_it_was_in_the_forward(change: str) -> None:
    def built() -> nn.Module:
        module: Any = nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 2))
        module.steps, module.log, module.names = 0, [], {"a", "b"}
        module.order = OrderedDict(a=1, b=2)
        module.counts = Counter("aab")
        return module

    eager = built()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    gradients, states = [], []
    for each in (model, eager):
        value = rows(5, 4).requires_grad_()
        held = [*each.parameters()]
        loss = each(value).pow(3).sum()
        CHANGES[change](each if each is model else Itself(eager))
        module: Any = getattr(each, "module", each)
        (found,) = torch.autograd.grad(loss, value, create_graph=True)
        found.pow(2).sum().backward()
        gradients.append([value.grad, *[p.grad for p in held]])
        states.append(
            (
                [name for name in module.__dict__ if name[0] != "_"],
                [*module[1].__dict__.items()][-1:] if "alpha" in module[1].__dict__ else None,
                len(module[1]._forward_hooks), len(module.log), [*module.order],
                module.counts, module.names, module.steps,
            )
        )  # fmt: skip
    for mine, theirs in zip(*gradients, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)
    assert states[0] == states[1]


class Itself:
    """A module where a test names the module of a wrapper."""

    def __init__(self, module: nn.Module) -> None:
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __getitem__(self, index: int) -> nn.Module:
        return self.module[index]


@pytest.mark.parametrize("change", ["weight", "memory"])
def test_what_has_changed_since_the_forward_is_an_error_only_of_second_derivatives(
    change: str,
) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 2))
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    value = rows(5, 4).requires_grad_()
    loss = model(value).pow(3).sum()
    if change == "weight":
        with torch.no_grad():
            model[0].bias.add_(1.0)  # the backward reads no bias
    else:
        model[0].bias.data = torch.ones(4)
    (found,) = torch.autograd.grad(loss, value, create_graph=True)
    other = value.detach().requires_grad_()
    (expected,) = torch.autograd.grad(eager(other).pow(3).sum(), other)
    torch.testing.assert_close(found.detach(), expected)
    with pytest.raises(UnsupportedGradient, match="changed"):
        torch.autograd.grad(found.sum(), value, materialize_grads=True)


@pytest.mark.parametrize("ask", ["leaf", "result", "parameter", "backward"])
def test_what_nobody_asks_for_need_not_fit_the_graph_that_autograd_holds(ask: str) -> None:
    """PyTorch keeps a parameter's node, and its size in it, while an older output is alive."""
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    found = []
    for each, layers in ((model, model.module), (eager, eager)):
        x = rows(5, 4).requires_grad_()
        older = each(x)
        last = layers[2]
        last.weight.data, last.bias.data = rows(6, 4, seed=1), rows(6, seed=2)
        given = x * 2 if ask == "result" else x
        loss = each(given).square().mean()
        if ask == "backward":
            loss.backward(inputs=[x, layers[0].weight])
            found.append([x.grad, layers[0].weight.grad, layers[2].weight.grad])
        else:
            asked = layers[0].weight if ask == "parameter" else given
            found.append(list(torch.autograd.grad(loss, asked)))
        del older
    torch.testing.assert_close(*found)


def test_training_mode_may_have_changed_since_the_forward() -> None:
    eager = CASES["convolution"].build()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for each in (model, eager):
        value = rows(4, 2, 5, 5).requires_grad_()
        loss = each(value).pow(3).sum()
        each.eval()
        each.requires_grad_(False)
        (found,) = torch.autograd.grad(loss, value, create_graph=True)
        found.pow(2).sum().backward()
        assert not any(part.training for part in each.modules())
    torch.testing.assert_close(model.norm.running_mean, eager.norm.running_mean)
    kept = {**dict(model.named_parameters())}
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(kept[name].grad, parameter.grad)


class Powered(nn.Module):
    """Normalizes its weight by a vector that each forward improves, as spectral_norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(4, 4))
        self.register_buffer("vector", torch.ones(4) / 2)
        self.vector: Tensor

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            image = self.weight.t() @ (self.weight @ self.vector)
            self.vector.copy_(image / image.norm())
        size = (self.weight @ self.vector.clone()).norm()
        return (value @ self.weight / size).tanh()


def test_buffers_are_those_from_before_the_forward() -> None:
    eager = Powered()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for each in (model, eager):
        value = rows(5, 4).requires_grad_()
        gradient_with_graph(each, value).pow(2).sum().backward()
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)
    torch.testing.assert_close(model.vector, eager.vector)


def test_dropout_keeps_its_masks_in_gradients_of_gradients() -> None:
    eager = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))
    model = ORTModule(eager, options=GRAPH)
    for again in (False, True):
        torch.manual_seed(5)
        value = rows(5, 4).requires_grad_()
        loss = model(value).pow(3).sum()
        found = torch.autograd.grad(loss, [value, *model.parameters()], create_graph=again)
        if not again:
            first = found
    for ours, expected in zip(found, first, strict=True):
        torch.testing.assert_close(ours.detach(), expected)
    # Along a direction, the second derivative is the difference of two first ones.
    direction = rows(5, 4, seed=3)
    (along,) = torch.autograd.grad((found[0] * direction).sum(), value)
    model = ORTModule(copy.deepcopy(eager).double(), options=GRAPH)
    sides = []
    for sign in (1, -1):
        torch.manual_seed(5)
        shifted = (value.detach().double() + sign * 1e-5 * direction).requires_grad_()
        sides += torch.autograd.grad(model(shifted).pow(3).sum(), shifted)
    torch.testing.assert_close(along, ((sides[0] - sides[1]) / 2e-5).float(), rtol=1e-3, atol=1e-5)


def test_hooks_of_parameters_run_once_and_buffers_and_random_states_stay() -> None:
    model = ORTModule(CASES["convolution"].build(), options=GRAPH)
    value = rows(4, 2, 5, 5).requires_grad_()
    loss = model(value).pow(3).sum()
    calls: list[Tensor] = []
    model.head.weight.register_hook(calls.append)
    before = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    (found, _) = torch.autograd.grad(loss, [value, model.head.weight], create_graph=True)
    assert len(calls) == 1
    found.pow(2).sum().backward()
    assert len(calls) == 2
    assert torch.equal(torch.get_rng_state(), state)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_an_input_that_is_given_twice_and_one_that_is_a_parameter() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(rows(4, 4))

        def forward(self, one: Tensor, two: list[Tensor], three: Tensor) -> Tensor:
            return ((one @ self.weight).sin() * two[0]).tanh() @ three

    eager = Sum()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    found = []
    for each in (model, eager):
        value = rows(5, 4).requires_grad_()
        loss = each(value, [value], each.weight).pow(3).mean()
        one, two = torch.autograd.grad(loss, [value, each.weight], create_graph=True)
        second = torch.autograd.grad(total([one, two]), [value, each.weight])
        found.append(numbered([one, two, *second]))
    assert_same(*found)


def test_a_module_that_is_applied_again_to_its_own_output() -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    found = []
    for each in (model, eager):
        value = rows(5, 4).requires_grad_()
        (first,) = torch.autograd.grad(
            each(each(each(value))).pow(3).sum(), value, create_graph=True
        )
        found.append(torch.autograd.grad(first.pow(2).sum(), [value, *each.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_function_around_it_may_call_its_backward_itself() -> None:
    class Around(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, model: nn.Module, value: Tensor) -> Tensor:
            with torch.enable_grad():
                ctx.value = value.detach().requires_grad_()
                ctx.output = model(ctx.value)
            return ctx.output.detach()

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Any:
            ctx.output.backward(upstream * 2)
            return None, ctx.value.grad

    eager = perceptron()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    found = []
    for each in (model, eager):
        value = rows(5, 4).requires_grad_()
        Around.apply(each, value).pow(2).sum().backward()
        found.append([value.grad, *(p.grad for p in each.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- two optimizers, one trunk --------------------------------------------------------------------


def test_one_heads_optimizer_may_step_before_the_other_heads_backward() -> None:
    eager = CASES["heads"].build()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for each in (model, eager):
        optimizer = torch.optim.SGD(each.one.parameters(), lr=0.1)
        for _ in range(6):
            asked = Asked(CASES["heads"], each, "plain")
            one, two = asked.outputs()
            optimizer.zero_grad()
            one.pow(2).sum().backward(retain_graph=True)
            optimizer.step()
            two.pow(2).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_graph_that_is_kept_is_freed_by_the_backward_that_does_not_keep_it() -> None:
    model = ORTModule(perceptron(), options=GRAPH)
    model(rows(5, 4)).sum().backward()
    value = rows(64, 4)
    array = value.numpy()
    alive = weakref.ref(array)
    loss = model(torch.from_numpy(array)).pow(2).sum()
    del value, array
    loss.backward(retain_graph=True)
    gc.collect()
    assert alive() is not None
    loss.backward()
    gc.collect()
    assert alive() is None


class Apart(nn.Module):
    """A layer of how far two inputs are from each other: one's gradient is the other's, negated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.layer(x - y)).abs().mean()


@pytest.mark.parametrize("pieces", [1, 2, 4, 99])
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_hooks_that_write_to_gradients_change_no_other(engine: Any, pieces: int) -> None:
    eager = Apart()
    options = Options(engine=engine, fallback="raise", backward_pieces=pieces)
    model = ORTModule(copy.deepcopy(eager), options=options)
    found = []
    for each in (eager, model):
        torch.manual_seed(1)
        leaves = [rows(5, 4).requires_grad_() for _ in range(2)]
        leaves += each.parameters()
        for leaf in leaves:
            leaf.register_hook(lambda gradient: gradient.mul_(3))
        each(*leaves[:2]).backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found)
