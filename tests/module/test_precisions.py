"""Every architecture in every precision: trained, accumulated, evaluated, on each engine.

Dropout is on: eager is given the graph's draws, so a mask that differed in one bit would show.
In 16 bits everything differs, and eager's own distance from float32 is the yardstick, taken over
all batches of a case, so that one lucky rounding decides nothing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.step.agreement import FEW, FLOOR, LUCK, TOLERANCES
from ortrain.step.draws import replayed_draws
from ortrain.step.seeds import draw_seed
from tests.architectures import ARCHITECTURES
from tests.breadth import sampled
from tests.models import MODELS, Batch, ModelCase
from tests.module.agreement import (
    DRIFTED,
    Outcome,
    assert_agree,
    double,
    largest_gradient,
    loss_of,
    step,
)

# The first two train; the third is of sizes that no capture has seen, and has the least of all.
SIZES = ((3, 7), (2, 5), (1, 1))
# A gradient below this part of the largest is zero but for the roundings of float32.
VAIN = 1e-6


@dataclass(frozen=True)
class Precision:
    """What a model computes in, and who says so.

    Attributes:
        dtype: of 16 bits; None is float32 throughout.
        place: who asks for it: the call stands under autocast, autocast is in the module's own
            forward, ``Options(precision=…)`` has it, or it is the parameters' own dtype.
    """

    dtype: torch.dtype | None = None
    place: Literal["call", "forward", "options", "parameters"] = "call"

    @property
    def option(self) -> Any:
        """Of Options."""
        if self.place != "options":
            return None
        return "bf16" if self.dtype == torch.bfloat16 else "fp16"

    def around(self, *, eager: bool) -> contextlib.AbstractContextManager[Any]:
        """What the call stands under."""
        by_caller = self.place == "call" or (eager and self.place == "options")
        return torch.autocast("cpu", self.dtype, enabled=self.dtype is not None and by_caller)

    def of(self, value: Any) -> Any:
        """A module or a batch with its floating tensors in the precision's dtype."""
        if self.place != "parameters":
            return value
        return _converted(value, self.dtype)


def _converted(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, nn.Module):
        return value.to(dtype)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in value.items()}


PRECISIONS = {
    "float32": Precision(),
    "autocast to bfloat16": Precision(torch.bfloat16),
    "autocast to float16": Precision(torch.float16),
    "autocast to bfloat16 inside": Precision(torch.bfloat16, "forward"),
    "autocast to float16 inside": Precision(torch.float16, "forward"),
    "Options of bf16": Precision(torch.bfloat16, "options"),
    "Options of fp16": Precision(torch.float16, "options"),
    "parameters in bfloat16": Precision(torch.bfloat16, "parameters"),
    "parameters in float16": Precision(torch.float16, "parameters"),
}


class Inside(nn.Module):
    """A model whose forward turns autocast on by itself."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, **inputs: torch.Tensor) -> Any:
        if self.dtype is None:
            return self.model(**inputs)
        with torch.autocast("cpu", self.dtype):
            return self.model(**inputs)


class Subject:
    """One architecture as a graph, in eager, and in a wider dtype, with the same weights."""

    def __init__(self, case: ModelCase, precision: Precision, engine: Any) -> None:
        self.case, self.precision = case, precision
        plain = precision.of(case.build(dropout=0.1))
        wide = torch.float64 if precision.dtype is None else torch.float32
        self.truth: nn.Module = _converted(copy.deepcopy(plain), wide)
        # PyTorch multiplies groups of rows in no wider dtype than float32.
        if hasattr(self.truth, "set_experts_implementation"):
            self.truth.set_experts_implementation("eager")
        if precision.place == "forward":
            plain, self.truth = Inside(plain, precision.dtype), Inside(self.truth, None)
        self.eager: nn.Module = plain
        # What one run of the certificate decides by luck, all batches decide here.
        options = Options(
            engine=engine, fallback="raise", precision=precision.option, certificate="off"
        )
        self.graph = ORTModule(copy.deepcopy(plain), options=options)
        self.numbers: list[int] = []
        self.ours: list[Outcome] = []
        self.theirs: list[Outcome] = []
        self.exact: list[Outcome] = []
        # Captures that were of evaluation.
        self.evaluations = 0

    @property
    def models(self) -> tuple[nn.Module, ...]:
        return self.graph, self.eager, self.truth

    def batch(self, number: int) -> Batch:
        rows, length = SIZES[number % len(SIZES)]
        inputs = self.case.batch(rows, max(length, self.case.shortest), number)
        return self.precision.of(inputs)

    def check(self, number: int, *, relative: float | None = None) -> None:
        """One step of all three on one batch, with the same draws; in float32 compares them."""
        inputs = self.batch(number)
        torch.manual_seed(number)
        with self.precision.around(eager=False):
            loss = self._forward(self.graph, inputs)
        self.ours.append(_backward(self.graph, loss))
        with eager_draws(number):
            with self.precision.around(eager=True):
                loss = self._forward(self.eager, inputs)
            self.theirs.append(_backward(self.eager, loss))
        wide = double(inputs) if self.precision.dtype is None else _converted(inputs, torch.float32)
        with eager_draws(number), _default_dtype(next(self.truth.parameters()).dtype):
            self.exact.append(_backward(self.truth, self._forward(self.truth, wide)))
        if _is_left_to_eager(self.graph):  # whose draws are its own
            for run in (self.ours, self.theirs, self.exact):
                run.pop()
            return
        self.numbers.append(number)
        assert self.graph.report.mode == "graph"
        if self.precision.dtype is None:
            more = {} if relative is None else {"relative": relative}
            assert_agree(self.ours[-1], self.theirs[-1], self.exact[-1], **more)

    def compare(self) -> None:
        """In 16 bits: all steps together are no further from the truth than eager's."""
        assert self.ours
        if self.precision.dtype is None:
            return
        try:
            assert_as_close(self.ours, [self.theirs], self.exact, self.precision.dtype)
        except AssertionError:
            # A number that tips at a bend makes any one run closer than the next.
            runs = [self.theirs, *map(self._rounded, range(TOLERANCES[torch.bfloat16].roundings))]
            assert_as_close(self.ours, runs, self.exact, self.precision.dtype)

    def _rounded(self, seed: int) -> list[Outcome]:
        """Eager's steps with parameters that another rounding to 16 bits might have made."""
        dtype, model = self.precision.dtype, copy.deepcopy(self.eager)
        assert dtype is not None
        step = torch.finfo(dtype).eps / (1 if self.precision.place == "parameters" else 2)
        generator, outcomes = torch.Generator().manual_seed(seed), []
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.copy_(parameter * (1 + step * noise))
        for number in self.numbers:
            with eager_draws(number):
                with self.precision.around(eager=True):
                    loss = self._forward(model, self.batch(number))
                outcomes.append(_backward(model, loss))
        return outcomes

    def _forward(self, model: nn.Module, inputs: Batch) -> torch.Tensor:
        model.zero_grad()
        return loss_of(model(**inputs))


def _backward(model: nn.Module, loss: torch.Tensor) -> Outcome:
    loss.backward()
    return Outcome.of(model, loss)


def _is_left_to_eager(graph: ORTModule) -> bool:
    """Whether a call met two equal scores, of which PyTorch alone says which comes first."""
    return graph.report.mode == "eager" and "equal values are ordered" in graph.report.reason


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What is made without a dtype, such as the positions of a rotary embedding, has this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def eager_draws(seed: int) -> Iterator[None]:
    """Eager draws what a graph draws whose call comes behind this seed of torch's generator."""
    torch.manual_seed(seed)
    with replayed_draws(int(draw_seed(1))):
        yield


def assert_as_close(
    ours: list[Outcome], eager: list[list[Outcome]], truth: list[Outcome], dtype: torch.dtype
) -> None:
    """Raises where some steps are further from float32 than eager's in a dtype of 16 bits.

    The distance is the root mean square over all steps; the factors are the certificate's own.

    Args:
        ours: of the graph.
        eager: one run of the same steps or several, of which the furthest counts.
        truth: in float32.
        dtype: of 16 bits.
    """
    largest = max(map(largest_gradient, truth))
    for name in _tensors(truth[0]):
        runs = [[_tensors(o)[name] for o in run] for run in (truth, ours, *eager)]
        for _, mine, its, *_ in zip(*runs, strict=True):
            assert (mine is None) is (its is None), name
            if mine is not None:
                assert (mine.dtype, mine.shape) == (its.dtype, its.shape), name
        if any(tensor is None for tensor in runs[0]):
            continue
        exact, mine, *others = (torch.cat([t.double().reshape(-1) for t in run]) for run in runs)
        assert torch.equal(mine.isfinite(), others[0].isfinite()), name
        known = mine.isfinite()
        error, *each = (float((t - exact)[known].norm()) for t in (mine, *others))
        own = max(each)
        few = runs[0][0].numel() < FEW or float(exact.abs().max()) <= VAIN * largest
        slack = TOLERANCES[dtype].slack * (LUCK if few else 1.0)
        scale = max(float(exact[known].norm()), FLOOR * largest)
        rounding = torch.finfo(dtype).eps / 2 * scale
        assert error <= max(slack * own, rounding), f"{name}: {error:.2e} away, eager {own:.2e}"


def _tensors(outcome: Outcome) -> dict[str, Any]:
    buffers = {n: b for n, b in outcome.buffers.items() if b.is_floating_point()}
    return {"loss": outcome.loss, **outcome.gradients, **buffers}


def _names(models: list[str], precisions: list[str], engines: list[str]) -> list[str]:
    return [f"{m}, {p}, {e}" for m in models for p in precisions for e in engines]


CASES = _names([*MODELS], ["float32"], ["onnxruntime", "aten"])
CASES += _names([*MODELS], [p for p in PRECISIONS if p != "float32"], ["aten"])
SAMPLE = [c for c in CASES if c.startswith(("mlp", "cnn"))]
SAMPLE += ["bert, autocast to bfloat16, aten", "llama, parameters in bfloat16, aten"]
SAMPLE += ["recurrent, autocast to bfloat16, aten", "t5, float32, aten"]


@pytest.fixture(scope="module", params=sampled(CASES, SAMPLE))
def subject(request: pytest.FixtureRequest) -> Subject:
    model, precision, engine = request.param.split(", ")
    made = Subject(MODELS[model], PRECISIONS[precision], engine)
    with made.precision.around(eager=True):
        try:
            copy.deepcopy(made.eager)(**made.batch(0))
        except RuntimeError as error:
            pytest.skip(f"PyTorch has no kernel of it on this CPU: {error}")
    return made


def test_a_step_with_dropout_is_eagers_with_the_same_draws(subject: Subject) -> None:
    for number in range(6):
        subject.check(number)
    subject.compare()
    assert subject.graph.report.captures - subject.evaluations == 1
    assert subject.graph.report.eager_calls == 0


def test_gradients_accumulate_to_their_sum(subject: Subject) -> None:
    apart = []
    for number in (0, 1):
        subject.check(number)
        apart.append(subject.ours[-1].gradients)
    held = copy.deepcopy(dict(subject.graph.named_buffers()))
    subject.graph.zero_grad()
    for number in (0, 1):
        torch.manual_seed(number)
        with subject.precision.around(eager=False):
            loss = loss_of(subject.graph(**subject.batch(number)))
        loss.backward()
    for name, parameter in subject.graph.named_parameters():
        first, second = (gradients[name] for gradients in apart)
        if first is not None and second is not None:
            assert torch.equal(parameter.grad, first + second), name
    for name, buffer in subject.graph.named_buffers():
        buffer.copy_(held[name])  # the other two have run no more steps


def test_evaluation_is_eagers(subject: Subject) -> None:
    models, before = subject.models, subject.graph.report.captures
    for model in models:
        model.eval()
    found: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for model, eager in ((models[0], False), (models[1], True), (models[2], True)):
            found.append([])
            for number in range(3):
                inputs = subject.batch(number)
                if model is subject.truth:
                    wide = torch.float64 if subject.precision.dtype is None else torch.float32
                    inputs = _converted(inputs, wide)
                around = subject.precision.around(eager=eager)
                with contextlib.nullcontext() if model is subject.truth else around:
                    found[-1].append(_logits(model(**inputs)))
    for model in models:
        model.train()
    subject.evaluations += subject.graph.report.captures - before
    assert subject.evaluations <= 1
    assert subject.graph.report.mode == "graph"
    dtype = subject.precision.dtype
    mine, its, exact = (torch.cat([t.double().reshape(-1) for t in run]) for run in found)
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    error, own, scale = float((mine - exact).norm()), float((its - exact).norm()), exact.norm()
    least = 1e-5 if dtype is None else torch.finfo(dtype).eps / 2
    slack = TOLERANCES[dtype or torch.float32].slack
    assert error <= max(slack * own, least * float(scale)), f"{error:.2e} away, eager {own:.2e}"


def _logits(output: Any) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, dict) else output[1]
    assert isinstance(logits, torch.Tensor)
    return logits


def test_trained_weights_are_as_close_as_eagers(subject: Subject) -> None:
    """AdamW; of 16-bit weights SGD, whose updates do not fall below the least of float16."""
    begun = copy.deepcopy([model.state_dict() for model in subject.models])
    start = [p.detach().double() for p in subject.truth.parameters()]
    kind: Any = torch.optim.AdamW
    if subject.precision.place == "parameters":
        kind = torch.optim.SGD
    optimizers = [kind(model.parameters(), lr=1e-3) for model in subject.models]
    for number in range(6):
        subject.check(number, relative=DRIFTED)
        for optimizer in optimizers:
            optimizer.step()
    weights = [[p.detach().double() for p in model.parameters()] for model in subject.models]
    for model, state in zip(subject.models, begun, strict=True):
        model.load_state_dict(state)
    error, own, way = (
        float(torch.stack([(a - b).norm() for a, b in zip(one, weights[2], strict=True)]).norm())
        for one in (weights[0], weights[1], start)
    )
    dtype = subject.precision.dtype
    least = DRIFTED if dtype is None else torch.finfo(dtype).eps / 2
    slack = TOLERANCES[dtype or torch.float32].slack
    assert error <= max(slack * own, least * way), f"{error:.2e} after {way:.2e}, eager {own:.2e}"
    assert subject.graph.report.captures <= 2  # evaluation is the other one


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "float32"])
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_onnxruntime_leaves_16_bits_to_eager_and_says_so(precision: str) -> None:
    case, asked = MODELS["mlp"], PRECISIONS[precision]
    eager: nn.Module = asked.of(case.build())
    if asked.place == "forward":
        eager = Inside(eager, asked.dtype)
    options = Options(engine="onnxruntime", precision=asked.option)
    graph = ORTModule(copy.deepcopy(eager), options=options)
    inputs = asked.of(case.batch())
    with asked.around(eager=False):
        ours = loss_of(graph(**inputs))
    if graph.report.mode == "graph":  # what a forward casts by itself, its kernels may have
        assert asked.place == "forward"
        assert graph.report.certificate
        return
    with asked.around(eager=True):
        theirs = step(eager, inputs)
    assert torch.equal(ours, theirs.loss)
    assert 'engine="aten" serves' in graph.report.reason


def test_options_and_autocast_are_one_precision_to_the_last_bit() -> None:
    case = MODELS["mlp"]
    found = []
    for place in ("options", "call"):
        precision = Precision(torch.bfloat16, place)  # type: ignore[arg-type]
        subject = Subject(case, precision, "aten")
        subject.check(0)
        found.append(subject.ours[0])
    assert torch.equal(found[0].loss, found[1].loss)
    for name, gradient in found[0].gradients.items():
        other = found[1].gradients[name]
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other), name


@pytest.mark.parametrize("part", ["loss", "layers.6.weight", "missing"])
def test_the_comparison_in_16_bits_notices_what_eager_has_not(part: str) -> None:
    subject = Subject(MODELS["mlp"], PRECISIONS["autocast to bfloat16"], "aten")
    for number in range(3):
        subject.check(number)
    subject.compare()
    for outcome in subject.ours:
        gradient = outcome.gradients["layers.6.weight"]
        assert gradient is not None
        if part == "loss":
            outcome.loss *= 1.1
        elif part == "missing":
            outcome.gradients["layers.6.weight"] = None
        else:
            gradient *= 1.1
    with pytest.raises(AssertionError):
        subject.compare()


FURTHER = _names([*ARCHITECTURES], ["float32"], ["onnxruntime", "aten"])
FURTHER += _names([*ARCHITECTURES], ["autocast to bfloat16"], ["aten"])


@pytest.mark.parametrize("name", sampled(FURTHER, ["qwen3, autocast to bfloat16, aten"]))
def test_further_kinds_of_models_step_as_eager_with_the_same_draws(name: str) -> None:
    model, precision, engine = name.split(", ")
    subject = Subject(ARCHITECTURES[model], PRECISIONS[precision], engine)
    for number in range(4):
        subject.check(number)
    subject.compare()
