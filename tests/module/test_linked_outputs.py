"""Outputs that are computed from other outputs: what hooks hear of them, and what is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.hunt.modules import Attention, Memory, Mlp, Siamese

ENGINES = ("aten", "onnxruntime")
Grads = list[Tensor | None]


class Deep(nn.Module):
    """Returns a loss, what it is computed of, and what that is computed of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first) + first)
        logits = self.c(second) + first[:, :2]
        return logits.square().mean(), logits, first, second


def plain(model: Any, x: Tensor) -> Grads:
    loss, logits, *_ = model(x)
    (loss + logits.sum()).backward()
    return []


def kept(model: Any, x: Tensor) -> Grads:
    outputs = model(x)
    for output in outputs:
        output.retain_grad()
    (outputs[0] + outputs[2].sum()).backward()
    return [output.grad for output in outputs]


def heard(model: Any, x: Tensor) -> Grads:
    outputs, found = model(x), []
    for output in outputs:
        output.register_hook(lambda gradient: (found.append(gradient), gradient * 2)[1])
    total = outputs[0] + outputs[2].sum()
    del outputs, output  # hooks of tensors that nobody has are called all the same
    total.backward()
    return found


def heard_by_the_later_alone(model: Any, x: Tensor) -> Grads:
    outputs, found = model(x), []
    outputs[2].register_hook(found.append)
    outputs[3].sum().backward()
    return found


def asked_for(model: Any, x: Tensor) -> Grads:
    outputs = model(x)
    return [*torch.autograd.grad(outputs[0], [outputs[2], outputs[3]])]


def asked_for_with_parameters(model: Any, x: Tensor) -> Grads:
    outputs = model(x)
    return [*torch.autograd.grad(outputs[0], [outputs[1], outputs[2], *model.parameters(), x])]


def asked_for_before_a_backward(model: Any, x: Tensor) -> Grads:
    """What the first has left on its way must be nothing to the second."""
    outputs = model(x)
    found = torch.autograd.grad(outputs[0], [outputs[2]], retain_graph=True)
    outputs[2].sum().backward()
    return [*found]


def differentiated(model: Any, x: Tensor) -> Grads:
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs[0], [outputs[2]], create_graph=True)
    (gradient.square().sum() + outputs[0]).backward()
    return [gradient.detach()]


def twice(model: Any, x: Tensor) -> Grads:
    outputs = model(x)
    outputs[2].retain_grad()
    outputs[0].backward(retain_graph=True)
    outputs[0].backward()
    return [outputs[2].grad]


def after_a_write(model: Any, x: Tensor) -> Grads:
    outputs = model(x)
    outputs[1].mul_(2)
    outputs[1].register_hook(lambda gradient: gradient * 3)
    outputs[1].sum().backward()
    return []


INQUIRIES: list[Callable[[Any, Tensor], Grads]] = [
    plain, kept, heard, heard_by_the_later_alone, asked_for, asked_for_with_parameters,
    asked_for_before_a_backward, differentiated, twice, after_a_write,
]  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("inquiry", INQUIRIES, ids=lambda f: f.__name__)
def test_what_passes_between_outputs_is_what_passes_in_pytorch(inquiry: Any, engine: Any) -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model: Any = Deep().double()
        if wrapped:
            model = ORTModule(model, options=Options(engine=engine, fallback="raise"))
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        results = [inquiry(model, x) for _ in range(2)]
        found.append([*results[0], *results[1], x.grad, *(p.grad for p in model.parameters())])
        if wrapped:
            assert model.report.graph_calls > 0
    eager, ours = found
    assert len(eager) == len(ours)
    for mine, theirs in zip(eager, ours, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_the_backward_reads_and_that_was_written_to_spoils_no_gradient(
    engine: Any,
) -> None:
    """Where PyTorch raises an error, the graph's forward runs again for what it has lost."""
    model = ORTModule(Deep(), options=Options(engine=engine, fallback="raise"))
    model(torch.ones(3, 4))[0].backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    outputs = model(torch.ones(3, 4))
    outputs[3].mul_(2)
    outputs[0].backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_nothing_is_left_in_a_circle() -> None:
    model = ORTModule(Deep(), options=Options(engine="aten", fallback="raise"))
    model(torch.ones(3, 4))[0].backward()
    gc.disable()
    try:
        outputs = model(torch.ones(3, 4))
        gone = [weakref.ref(output) for output in outputs]
        outputs[0].backward()
        del outputs
        assert [each() for each in gone] == [None] * 4
        outputs = model(torch.ones(3, 4))
        gone = [weakref.ref(outputs[0].grad_fn), *map(weakref.ref, outputs)]
        del outputs  # without a backward
        assert [each() for each in gone] == [None] * 5
    finally:
        gc.enable()


def test_an_output_that_the_engine_has_as_a_view_may_be_written_to() -> None:
    model = Siamese()
    model.left.requires_grad_(False)
    wrapped = ORTModule(model, options=Options(engine="aten", fallback="raise"))
    output = wrapped(torch.randn(3, 6), torch.randn(3, 6))[2]
    output.mul_(2)
    output.sum().backward()
    assert model.mix.weight.grad is not None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [Mlp, Attention])
def test_a_product_of_two_dtypes_is_pytorchs_error_without_a_certificate(
    make: Callable[[], nn.Module], engine: Any
) -> None:
    model = ORTModule(make(), options=Options(engine=engine, certificate="off"))
    x = torch.randn(3, 6, dtype=torch.float64) if make is Mlp else torch.randn(3, 5, 8).double()
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model(x)


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_a_recurrent_layer_that_was_put_back_is_differentiated_by_torch_func() -> None:
    model: Any = ORTModule(Memory(), options=Options(engine="aten"))
    x, layer = torch.randn(5, 3, 6), model.lstm
    del model.lstm
    with pytest.raises(AttributeError):
        model(x)
    model.lstm = layer

    def total(values: dict[str, Tensor], of: Any) -> Tensor:
        result: Tensor = torch.func.functional_call(of, values, (x,))[0].sum()
        return result

    values = {name: p.detach() for name, p in model.named_parameters()}
    ours = torch.func.grad(total)(values, model)
    torch.testing.assert_close(ours, torch.func.grad(total)(values, model.module))
