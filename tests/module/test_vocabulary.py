"""Training where the logits of a large vocabulary are there for some rows at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.frontend import backend
from ortrain.frontend.graph import Graph
from ortrain.frontend.key import Table
from ortrain.graph import shapes
from ortrain.passes import linear_loss
from ortrain.step import tokens
from tests.breadth import crossed, sampled
from tests.module.test_tokens import loss_of, quiet
from tests.tensors_held import TensorsHeld
from tests.token_cases import CASES, LENGTHS, WORDS, batch

# Those with a loss over words.
NAMES = [name for name, case in CASES.items() if case.shown == "loss" and name != "answers"]
ENGINES = ["aten", "onnxruntime"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of this size are large, a block has eight rows, and tokens are left out."""
    monkeypatch.setattr(linear_loss, "CLASSES", WORDS)
    monkeypatch.setattr(linear_loss, "BLOCK", 0)
    monkeypatch.setattr(linear_loss, "NARROW_BLOCK", 0)
    monkeypatch.setattr(linear_loss, "ROWS", 8)
    monkeypatch.setattr(tokens, "LEAST", 0)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return quiet(CASES[name].make())


def given(name: str, lengths: str = "some") -> dict[str, Tensor]:
    case = CASES[name]
    return case.given(batch(LENGTHS[lengths], case.left))


def wrapped(module: nn.Module, engine: Any = "aten", **options: Any) -> ORTModule:
    options = {"fallback": "raise", **options}
    model = ORTModule(copy.deepcopy(module), options=Options(engine=engine, **options))
    model.only_loss_is_read = True
    return model


@contextmanager
def dense() -> Iterator[None]:
    before = linear_loss.CLASSES
    linear_loss.CLASSES = 1 << 30
    try:
        yield
    finally:
        linear_loss.CLASSES = before


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, other: nn.Module, rtol: float = 1e-3) -> None:
    mine, theirs = gradients(model), gradients(other)
    assert mine.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            mine[name], gradient, rtol=rtol, atol=2e-3 * rtol * largest, msg=name
        )


def in_program(model: ORTModule) -> list[str | None]:
    """Values of the running programs that have a row of all words, and more rows than a weight."""
    plan = model._runner.graphs.last.graphs[-1].step.plan
    width = {WORDS}
    return [
        value.name
        for program in plan.lowered
        for node in program.graph
        for value in node.outputs
        if (known := shapes.dims(value)) and len(known) > 1 and known[-1] in width
    ]


@pytest.mark.parametrize(
    ("name", "skip", "engine"),
    crossed(NAMES, [None, False], ENGINES, one_in=2, sample=["gpt2", "masked words", "t5"]),
)
def test_training_is_eagers(name: str, skip: Any, engine: str) -> None:
    eager = made(name)
    model = wrapped(eager, engine, skip_padding=skip)
    model(**given(name, next(iter(LENGTHS))))  # whose loss is known from then on
    for lengths in LENGTHS:
        kwargs = given(name, lengths)
        expected, output = loss_of(eager(**kwargs)), model(**kwargs)
        torch.testing.assert_close(output[0], expected, rtol=1e-5, atol=1e-6)
        assert output.logits.shape[-1] == WORDS
        assert not output.logits.any()
        assert output.logits.view(-1, WORDS).shape == (output.logits[..., 0].numel(), WORDS)
        output[0].backward()
        expected.backward()
        assert_same(model, eager)
        model.zero_grad()
        eager.zero_grad()
    assert not in_program(model)
    assert model.report.captures == 1
    assert f"{WORDS} classes" in str(model.report)


@pytest.mark.parametrize(
    ("name", "engine"),
    crossed(
        [name for name in CASES if name not in NAMES],
        ENGINES,
        one_in=2,
        sample=["bert", "left-padded bert spelled out", "choices", "answers"],
    ),
)
def test_classes_of_a_text_are_in_blocks_while_its_padding_is_left_out(
    monkeypatch: pytest.MonkeyPatch, name: str, engine: str
) -> None:
    """The logits of a text, which nobody reads, are no token's: they are hidden all the same."""
    monkeypatch.setattr(linear_loss, "CLASSES", 0)
    monkeypatch.setattr(linear_loss, "ROWS", 2)
    eager = made(name)
    model = wrapped(eager, engine)
    for lengths in LENGTHS:
        kwargs = given(name, lengths)
        expected, found = (loss_of(each(**kwargs)) for each in (eager, model))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        found.backward()
        expected.backward()
        assert_same(model, eager)
        model.zero_grad()
        eager.zero_grad()
    assert model.report.captures in (1, 2)  # a first call may set the config's problem_type


@pytest.mark.parametrize("name", sampled(["gpt2", "masked words"], ["masked words"]))
def test_in_bfloat16_it_is_what_the_dense_graph_is(name: str) -> None:
    module = made(name)
    with dense():
        other = wrapped(module, precision="bf16")
        theirs = other(**given(name))[0]
    model = wrapped(module, precision="bf16")
    ours = model(**given(name))[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)
    ours.backward()
    theirs.backward()
    assert not in_program(model)
    mine, dense_ones = gradients(model), gradients(other)
    for key, gradient in dense_ones.items():
        assert (mine[key] - gradient).norm() <= 0.02 * gradient.norm() + 1e-6, key


@pytest.mark.parametrize("engine", sampled(ENGINES, ["onnxruntime"]))
def test_gradients_accumulate_by_what_arrives(engine: str) -> None:
    eager = made("gpt2")
    model = wrapped(eager, engine)
    for scale, lengths in zip((0.25, 1.0, -3.0, 1.0), LENGTHS, strict=True):
        kwargs = given("gpt2", lengths)
        (scale * model(**kwargs)[0]).backward()
        (scale * eager(**kwargs)[0]).backward()
    assert_same(model, eager)


@pytest.mark.parametrize("engine", sampled(ENGINES, ["aten"]))
def test_a_second_backward_gives_the_same(engine: str) -> None:
    model, kwargs = wrapped(made("gpt2"), engine), given("gpt2")
    loss = model(**kwargs)[0]
    (2 * loss).backward(retain_graph=True)
    first = gradients(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))  # what an optimizer may do
    model.zero_grad()
    (2 * loss).backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, first[name]), name


@pytest.mark.parametrize(
    ("frozen", "engine"), crossed(["head", "all else", "embedding"], ENGINES, one_in=2)
)
def test_frozen_parts_have_no_gradients(frozen: str, engine: str) -> None:
    eager = CASES["llama"].make()
    for name, parameter in eager.named_parameters():
        is_head = name.startswith("lm_head")
        chosen = {"head": is_head, "all else": not is_head, "embedding": "embed" in name}
        parameter.requires_grad_(not chosen[frozen])
    model = wrapped(eager, engine)
    kwargs = given("llama")
    model(**kwargs)[0].backward()
    eager(**kwargs)[0].backward()
    assert_same(model, eager)


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_without_a_label_the_loss_is_no_number_and_gradients_are_eagers(engine: str) -> None:
    eager = made("gpt2")
    model, kwargs = wrapped(eager, engine), given("gpt2")
    model(**kwargs)[0].backward()
    model.zero_grad()
    kwargs["labels"] = torch.full_like(kwargs["labels"], -100)
    output, expected = model(**kwargs), eager(**kwargs)
    assert output[0].isnan()
    assert expected[0].isnan()
    output[0].backward()
    expected[0].backward()
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True, msg=name)


@pytest.mark.parametrize(("label", "engine"), crossed([WORDS, -1], ENGINES, one_in=2))
def test_a_label_that_is_no_word_raises_pytorchs_error(label: int, engine: str) -> None:
    eager = made("gpt2")
    model, kwargs = wrapped(eager, engine, fallback="torch"), given("gpt2")
    model(**kwargs)[0].backward()
    kwargs["labels"] = kwargs["labels"].clone()
    kwargs["labels"][0, 3] = label
    with pytest.raises(Exception, match=r".") as expected:
        eager(**kwargs)
    with pytest.raises(type(expected.value), match="out of bounds"):
        model(**kwargs)


@pytest.mark.parametrize(("budget", "engine"), crossed([0.98, "least"], ENGINES, one_in=2))
def test_a_budget_changes_no_number(
    budget: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_KNOWN", Table())  # none that knows its loss already
    module, kwargs = made("gpt2"), given("gpt2")
    plain = wrapped(module, engine, skip_padding=False)
    frugal = wrapped(module, engine, skip_padding=False, memory_budget=budget)
    for model in (plain, frugal):
        model(**kwargs)[0].backward()
    found, expected = gradients(frugal), gradients(plain)
    if engine == "onnxruntime":  # whose own fusions depend on what is computed again
        torch.testing.assert_close(found, expected)
    else:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert frugal.report.peak_bytes <= plain.report.peak_bytes


class Layer(nn.Module):
    """Rows, a large vocabulary, and nothing but the loss."""

    def __init__(self, classes: int = 4000, width: int = 16) -> None:
        super().__init__()
        self.output = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.output(torch.tanh(x)), labels)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("count", [64, 513])
def test_the_peak_is_the_predicted_one(
    count: int, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_loss, "ROWS", 128)
    monkeypatch.setattr(backend, "_KNOWN", Table())  # an equal graph without blocks is another
    x, labels = torch.randn(count, 16), torch.randint(4000, (count,))
    model = wrapped(Layer(), precision=precision)
    model(x, labels).backward()
    model.zero_grad()
    calls: list[Any] = []
    run = Graph.run
    monkeypatch.setattr(Graph, "run", lambda *args: (calls.append(args), run(*args))[1])
    model(x, labels)
    with TensorsHeld() as held:
        (loss,) = run(*calls[-1])
        loss.backward()
    assert model.report.peak_bytes == pytest.approx(held.most, rel=0.1)
    with dense(), monkeypatch.context() as patched:
        patched.setattr(backend, "_KNOWN", Table())
        other = wrapped(Layer(), precision=precision)
        other(x, labels).backward()
    share = 0.5 if count > 128 else 1.0
    assert model.report.peak_bytes < share * other.report.peak_bytes


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_a_loss_alone_is_all_that_evaluation_makes(engine: str) -> None:
    module = Layer().eval()
    model = wrapped(module, engine)
    for count in (1, 7, 8, 9, 40):
        x, labels = torch.randn(count, 16), torch.randint(4000, (count,))
        with torch.no_grad():
            torch.testing.assert_close(model(x, labels), module(x, labels), rtol=1e-5, atol=1e-6)
    assert not in_program(model)


def test_logits_that_nobody_reads_end_no_way_of_a_gradient() -> None:
    """Keys and values are outputs as well, which the loss is computed from by way of the logits."""
    eager, kwargs = made("gpt2"), given("gpt2")
    eager.config.use_cache = True
    model = wrapped(eager)
    for _ in range(3):
        found, expected = (
            torch.autograd.grad(loss_of(each(**kwargs)), [*each.parameters()])
            for each in (model, eager)
        )
        torch.testing.assert_close(found, expected)


def test_a_model_that_shows_its_logits_shows_them() -> None:
    eager = made("gpt2")
    model = wrapped(eager)
    model.only_loss_is_read = False
    kwargs = given("gpt2")
    torch.testing.assert_close(model(**kwargs).logits, eager(**kwargs).logits, rtol=1e-4, atol=1e-5)
    model.only_loss_is_read = True
    assert not model(**kwargs).logits.any()
    model.only_loss_is_read = False
    assert model(**kwargs).logits.any()
