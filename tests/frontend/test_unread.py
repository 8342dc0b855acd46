"""Outputs beside the loss, which are computed when somebody reads them."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ortrain import Options, ORTModule
from ortrain.errors import StateError
from ortrain.frontend import proof
from ortrain.frontend.call import Reads
from ortrain.frontend.form import Form
from ortrain.frontend.graph import Graph
from ortrain.passes import linear_loss
from ortrain.step import tokens
from ortrain.step.unread import Unread
from tests.frontend.compiling import Doubled

WORDS = 40
ENGINES = ("aten", "onnxruntime")


class Scored(nn.Module):
    """The loss of a head, its logits, and something else."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.body = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.drop(torch.tanh(self.body(self.words(ids))))
        logits = self.head(h)
        loss = cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))
        return {"loss": loss, "logits": logits, "mean": h.mean(1)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of this size are large, and few tokens are worth leaving out."""
    monkeypatch.setattr(linear_loss, "CLASSES", WORDS)
    monkeypatch.setattr(linear_loss, "BLOCK", 0)
    monkeypatch.setattr(linear_loss, "ROWS", 4)
    monkeypatch.setattr(tokens, "LEAST", 0)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (3, 6), generator=dice)
    return ids, ids.flip(1).masked_fill(torch.rand(3, 6, generator=dice) > 0.4, -100)


def wrapped(module: nn.Module, engine: Any = "aten") -> ORTModule:
    return ORTModule(module, options=Options(engine=engine, fallback="raise"))


def train(model: Any, calls: int = 4) -> list[Any]:
    """The losses of some calls, of whose outputs nobody reads more."""
    losses = []
    for call in range(calls):
        loss = model(*batch(call))["loss"]
        loss.backward()
        losses.append(loss.detach())
    return losses


Models = Callable[[Any], tuple[ORTModule, Scored]]


def reads_of(model: ORTModule) -> Reads:
    found: Reads = model._runner.graphs._reads
    return found


@pytest.fixture(scope="module")
def models() -> Models:
    """A module whose graph has been made, and the module: to make one takes the longest."""
    known: dict[Any, tuple[ORTModule, Scored]] = {}

    def of(engine: Any) -> tuple[ORTModule, Scored]:
        if engine not in known:
            plain = Scored()
            known[engine] = wrapped(copy.deepcopy(plain), engine), plain
            train(known[engine][0], 3)
        model, plain = known[engine]
        model._runner.graphs._reads = reads = Reads()
        reads.asked = True
        for each in (model, plain):
            each.zero_grad()
        return model, plain

    return of


# -- whoever reads one has what PyTorch gives -----------------------------------------------------


def _saved(logits: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(logits.detach(), file)
    file.seek(0)
    return torch.load(file)


def _hooked(out: dict[str, Tensor]) -> Any:
    seen: list[Tensor] = []
    out["logits"].register_hook(seen.append)
    out["logits"].retain_grad()
    (out["loss"] + out["logits"].square().mean()).backward()
    return [*seen, out["logits"].grad]


def _written(out: dict[str, Tensor]) -> Any:
    out["logits"][0] = 0.0
    out["logits"].add_(1.0)
    return out["logits"].sum(), out["logits"].argmax(-1)


def _penalty(out: dict[str, Tensor]) -> Tensor:
    (slope,) = torch.autograd.grad(out["loss"], out["logits"], create_graph=True)
    return out["loss"] + slope.square().sum()


class Hears(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return (x[0] if isinstance(x, list) else x).tanh()


HEARS = ORTModule(Hears(), options=Options(engine="aten"))
# What is read, and what of it is differentiated besides.
READERS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "its numbers": lambda out: out["logits"].detach().numpy().copy(),
    "a list of them": lambda out: torch.tensor(out["logits"].tolist()),
    "an element": lambda out: out["logits"][0, 1, 2].item(),
    "the best": lambda out: out["logits"].argmax(-1),
    "its text": lambda out: str(out["logits"].detach()),
    "its gradient function": lambda out: out["logits"].grad_fn is not None,
    "its shape": lambda out: (str(out["logits"].dtype), *out["logits"].shape, len(out["logits"])),
    "its strides": lambda out: (out["logits"].stride(), out["logits"].is_contiguous()),
    "the other output": lambda out: out["mean"] * 2,
    "both in one call": lambda out: torch.cat([out["logits"].sum(-1), out["mean"][:, :6]]),
    "a file": lambda out: _saved(out["logits"]),
    "what is written to it": _written,
    "a loss of it": lambda out: out["logits"].square().mean().backward(),
    "a loss beside the loss": lambda out: (
        (out["loss"] + out["logits"].square().mean() + out["mean"].sum()).backward()
    ),
    "a loss after the loss": lambda out: (
        out["loss"].backward(retain_graph=True), out["logits"].square().mean().backward(),
    )[0],
    "it after the loss": lambda out: (out["loss"].backward(), out["logits"].sum(-1))[1],
    "a function of the user's": lambda out: Doubled.apply(out["logits"]).sum().backward(),
    "compiled code": lambda out: torch.compile(lambda x: (x * 2).sum(), backend="eager")(
        out["logits"]
    ).backward(),
    "the gradient with respect to it": lambda out: torch.autograd.grad(
        out["loss"], out["logits"], retain_graph=True
    ),
    "its hooks": _hooked,
    "a second derivative": lambda out: _penalty(out).backward(),
    "it without gradients": lambda out: torch.no_grad()(torch.softmax)(out["logits"], -1),
    "a checkpoint": lambda out: torch.utils.checkpoint.checkpoint(
        lambda x: x.square().mean(), out["logits"], use_reentrant=False
    ).backward(),
    "a batch of functions": lambda out: torch.vmap(lambda row: row * 2)(out["logits"]),
    "another model": lambda out: HEARS(out["logits"]).sum().backward(),
    "another model, in a list": lambda out: HEARS([out["logits"]]).sum().backward(),
    "a conversion": lambda out: out["logits"].to(torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_who_reads_an_output_has_what_pytorch_gives(
    reader: str, engine: Any, models: Models
) -> None:
    model, plain = models(engine)
    read, found = READERS[reader], list[Any]()
    for each in (model, plain):
        out = each(*batch(7))
        if each is model:
            assert type(out["logits"]) is Unread
        result = read(out)
        found.append((result, [p.grad for p in each.parameters()]))
    (ours, gradients), (theirs, expected) = found
    if reader in ("its shape", "its text"):
        assert str(ours)[:10] == str(theirs)[:10]
    else:
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_it_has_the_draws_of_its_loss(engine: Any) -> None:
    model = wrapped(Scored(dropout=0.5), engine)
    train(model)
    ids, labels = batch(9)
    out = model(ids, labels)
    assert type(out["logits"]) is Unread
    again = cross_entropy(out["logits"].reshape(-1, WORDS), labels.reshape(-1))
    torch.testing.assert_close(again, out["loss"])


# -- when it is computed ---------------------------------------------------------------------------


def test_what_nobody_reads_is_not_computed_from_the_fourth_call_on() -> None:
    model, plain = wrapped(Scored()), Scored()
    torch.testing.assert_close(train(model, 6), train(plain, 6))
    assert reads_of(model).asked
    assert not reads_of(model).some
    assert model.report.blocks, "logits are made for some rows at a time"
    gradients = [[p.grad for p in each.parameters()] for each in (model, plain)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_program_of_less_is_compared_with_one_that_agrees(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PyTorch only where there is a doubt."""
    in_pytorch: list[tuple[int, ...]] = []
    eager, run = proof._Trial.eager, Graph.run

    def counted(trial: Any, *more: Any, **named: Any) -> Any:
        in_pytorch.append(trial.form.hidden)
        return eager(trial, *more, **named)

    def run_of(graph: Graph, form: Form, *more: Any) -> Any:
        results = run(graph, form, *more)
        return (results[0] * 1.01, *results[1:]) if wrong and form.hidden else results

    monkeypatch.setattr(proof._Trial, "eager", counted)
    monkeypatch.setattr(Graph, "run", run_of)
    model, plain = ORTModule(Scored(), options=Options(engine="aten")), Scored()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.testing.assert_close(train(model, 6), train(plain, 6))
    assert in_pytorch[0] == ()
    assert any(in_pytorch) == wrong
    assert any("does not compute what PyTorch does" in str(each.message) for each in told) == wrong


def test_another_loss_that_is_read_has_nothing_else_computed() -> None:
    class Weighted(Scored):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = super().forward(ids, labels)
            return {**out, "penalty": out["mean"].square().mean()}

    found = []
    for model in (wrapped(Weighted()), Weighted()):
        seen = list[Tensor]()
        for call in range(5):
            out = model(*batch(call))
            loss = out["loss"] + 0.1 * out["penalty"]
            kind = type(out.pop("logits"))
            del out
            loss.backward()
            seen += [
                loss.detach(),
                *(g.clone() for p in model.parameters() if (g := p.grad) is not None),
            ]
            model.zero_grad()
        found.append(seen)
        assert kind is (Unread if isinstance(model, ORTModule) else Tensor)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("when", ["at once", "behind the backward", "behind the optimizer's step"])
def test_whoever_reads_has_all_computed_from_then_on(when: str) -> None:
    plain = Scored()
    model = wrapped(copy.deepcopy(plain))
    found = []
    for each in (model, plain):
        optimizer, seen = torch.optim.SGD(each.parameters(), 0.5), list[Tensor]()
        for call in range(6):
            out = each(*batch(call))
            seen += [out["logits"].sum(-1)] * (when == "at once")
            if when != "behind the optimizer's step" or call != 4:
                out["loss"].backward()
            seen += [out["logits"].sum(-1)] * (when == "behind the backward")
            optimizer.step()
            optimizer.zero_grad()
            seen += [out["logits"].sum(-1)] * (when == "behind the optimizer's step")
        found.append(seen)
        if each is model:
            assert reads_of(model).some
            assert type(out["logits"]) is Tensor
    torch.testing.assert_close(*found)


def test_an_output_that_is_held_is_computed_as_the_backward_begins(
    models: Models,
) -> None:
    model, plain = models("aten")
    out, expected = model(*batch(5)), plain(*batch(5))
    out["loss"].backward()
    assert reads_of(model).some
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(out["logits"].detach(), expected["logits"].detach())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1.0)


def test_weights_that_are_changed_by_hand_before_it_is_read_are_an_error(
    models: Models,
) -> None:
    model, _ = models("aten")
    bias = model.get_parameter("module.head.bias")
    out = model(*batch(5))
    with torch.no_grad():
        bias.add_(1.0)
    with pytest.raises(StateError, match=r"head\.bias"):
        out["logits"].sum()
    with torch.no_grad():
        bias.sub_(1.0)


def test_nothing_of_a_call_is_held_by_an_output_that_is_gone(
    models: Models,
) -> None:
    model, _ = models("aten")
    gc.disable()
    try:
        out = model(*batch(5))
        gone = weakref.ref(out["logits"])
        loss = out["loss"]
        del out
        assert gone() is None
        loss.backward()
        assert not reads_of(model).some
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["option", "setting"])
def test_runs_that_are_equal_to_the_bit_compute_all_in_every_call(way: str) -> None:
    options = Options(engine="aten", deterministic=way == "option")
    model = ORTModule(Scored(), options=options)
    torch.use_deterministic_algorithms(way == "setting")
    try:
        train(model, 4)
        assert type(model(*batch())["logits"]) is Tensor
    finally:
        torch.use_deterministic_algorithms(False)


def test_outputs_of_a_graph_that_another_one_may_read_are_computed() -> None:
    class Branching(Scored):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = super().forward(ids, labels)
            return {**out, "logits": out["logits"] * 2} if out["loss"] > 1e9 else out

    model = wrapped(Branching())
    train(model, 4)
    assert type(model(*batch())["logits"]) is Tensor


def test_evaluation_has_all_outputs(models: Models) -> None:
    model, plain = models("aten")
    for each in (model, plain):
        each.eval()
    out, expected = model(*batch(3)), plain(*batch(3))
    with torch.no_grad():
        quiet, known = model(*batch(4)), plain(*batch(4))
    for each in (model, plain):
        each.train()
    for one, other in ((out, expected), (quiet, known)):
        assert type(one["logits"]) is Tensor
        torch.testing.assert_close(one["logits"], other["logits"])
