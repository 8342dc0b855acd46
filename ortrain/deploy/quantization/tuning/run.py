"""``fine_tune``: the weights of a model, trained to bear their quantization."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortrain.deploy.equivalence import GoldenSet
from ortrain.deploy.equivalence.sessions import File, Runnable
from ortrain.deploy.equivalence.tasks import task_of
from ortrain.deploy.model_folder import ModelFolder
from ortrain.deploy.quantization import preparation
from ortrain.deploy.quantization.configuration import QuantizationConfig
from ortrain.deploy.quantization.rewriting import Ranges
from ortrain.deploy.quantization.tuning.insertion import insert
from ortrain.deploy.quantization.tuning.objective import Objective
from ortrain.deploy.quantization.tuning.ranges import RATES, LearntRanges
from ortrain.deploy.quantization.tuning.roundings import followed, roundings, trained
from ortrain.deploy.quantization.tuning.rows import Rows
from ortrain.deploy.quantization.tuning.settings import FineTuning
from ortrain.errors import GraphError, InputError, OrtrainWarning
from ortrain.ondevice import contract
from ortrain.ondevice.making.artifacts import make
from ortrain.ondevice.making.forward import Forward
from ortrain.ondevice.making.onnx_source import from_onnx
from ortrain.ondevice.making.optim import AdamW, Group
from ortrain.ondevice.running.checkpoint import CheckpointState
from ortrain.ondevice.running.session import default_options
from ortrain.ondevice.running.train_step import TrainStep

Array = np.ndarray
Arrays = dict[str, Array]

_WARM_UP = 0.1
# Of the batches on which the loss is measured before and after, at most.
_MEASURED = 32
# Bytes of the original's answers that are kept from one round to the next.
_KEPT = 1 << 28

OnStep = Callable[[int, float, int], None]
"""Is told of each update: how many there were, the loss of its batch, and the batch's rows."""
Enough = Callable[[Mapping[str, Array], Mapping[str, tuple[float, float]]], bool]
"""Whether weights and ranges keep the budgets on a part of the training data."""
# Of all steps, one of so many is followed by the question whether it is enough.
_ASKED = 8


@dataclass(frozen=True)
class FineTuned:
    """What a training run has given.

    Attributes:
        weights: initializer → its new value.
        ranges: activation → its new range.
        settings: of the run.
        objective: the kind of its loss.
        rows: how many examples there were.
        left_out: examples that were not taken, being in the golden set.
        steps: updates that were done; fewer than were asked for where the loss was no number, or
            where that was enough.
        loss_before: of the rounded model on the training data, before the first update.
        loss_after: the same after the last.
        enough: whether it ended early, with the budgets kept on a part of the training data.
    """

    weights: Mapping[str, Array]
    ranges: Mapping[str, tuple[float, float]]
    settings: FineTuning
    objective: str
    rows: int
    left_out: int
    steps: int
    loss_before: float
    loss_after: float
    enough: bool = False

    def told(self) -> str:
        """The run in a sentence."""
        settings, left = self.settings, ""
        early = f" of {settings.steps}, enough for its own data" if self.enough else ""
        if self.left_out:
            left = f" ({self.left_out} more are in the golden set, and were left out)"
        return (
            f"fine-tuned with rounded weights and activations on {self.rows} rows{left}: "
            f"{self.steps} steps{early}, learning rate {settings.learning_rate:g}"
            f"{self._of_ranges()}, seed {settings.seed}, "
            f"{self.objective} {self.loss_before:.4g} → {self.loss_after:.4g}"
        )

    def _of_ranges(self) -> str:
        rate = f", of ranges {self.settings.range_learning_rate:g}"
        return rate if self.settings.ranges == "learnt" else ""

    def to_dict(self) -> dict[str, Any]:
        """All but weights and ranges, in plain values; a loss that is no number is None."""
        losses = {"loss_before": self.loss_before, "loss_after": self.loss_after}
        return {
            **asdict(self.settings),
            "asked_steps": self.settings.steps,
            "enough": self.enough,
            "steps": self.steps,
            "objective": self.objective,
            "rows": self.rows,
            "left_out": self.left_out,
            "weights": len(self.weights),
            "learnt_ranges": len(self.ranges),
            **{name: value if math.isfinite(value) else None for name, value in losses.items()},
        }


def fine_tune(
    source: ModelFolder,
    config: QuantizationConfig,
    ranges: Ranges | None,
    rows: Rows,
    settings: FineTuning,
    on_step: OnStep | None = None,
    enough: Enough | None = None,
) -> FineTuned:
    """Trains the weights that a configuration quantizes, and biases and norms beside them.

    The forward rounds where the quantized model does: weights by the range that they have in each
    step, activations by that of the batch or by the calibrated one. It runs on the stock
    onnxruntime, as artifacts for on-device training do.

    Args:
        source: a folder of which one ONNX file is taken.
        config: of the quantization.
        ranges: of activations, for static quantization.
        rows: the training data.
        settings: of the training.
        on_step: is told of each update.
        enough: asked now and then where training may end early.

    Raises:
        InputError: the data do not fit the model.
        GraphError: nothing of it can be trained.
        GradientError: an operator between the loss and a weight has no gradient.
        ExecutionError: onnxruntime cannot run it.
    """
    (file,) = source.files
    original = Runnable(
        (File.open(source.path / file, file.removesuffix(".onnx"), "CPUExecutionProvider", None),)
    )
    teacher = _Teacher(original, rows)
    _, outputs = teacher.answer(0)
    labels = None if rows.labels is None else rows.labels[0]
    task = task_of(rows.task, source.config, outputs, labels)
    objective = Objective.of(settings, task, outputs, labels)
    for index, own in enumerate(rows.labels or ()):
        with _at_batch(index):
            objective.expect(own, outputs)
    forward, learnt = _forward(source, file, config, ranges, objective, settings)
    faster = settings.range_learning_rate / settings.learning_rate
    groups = {name: Group(lr_scale=RATES[name] * faster) for name in learnt.tensors()}
    optimizer = AdamW(weight_decay=0.0, max_norm=settings.max_norm, groups=groups)
    with warnings.catch_warnings():
        # Of weights that the loss does not depend on, as those of a pooler that no output reads.
        warnings.filterwarnings("ignore", "the loss does not depend on", OrtrainWarning)
        programs, content = make(forward, optimizer, [], [])
    state = CheckpointState(content)
    with tempfile.TemporaryDirectory(prefix="ortrain-fine-tuning-") as folder:
        paths = {}
        for name in (contract.TRAIN_STEP_MODEL, contract.EVAL_MODEL):
            paths[name] = Path(folder, name)
            programs[name].save(paths[name])
        measure = _Measure(paths[contract.EVAL_MODEL], state, teacher, objective)
        before = measure()
        step = TrainStep(paths[contract.TRAIN_STEP_MODEL], state)

        def found() -> tuple[Arrays, dict[str, tuple[float, float]]]:
            weights = {n.name: state.tensors[n.name].numpy().copy() for n in state.trained()}
            parameters = {name: weights.pop(name) for name in learnt.tensors()}
            return learnt.cut(weights, parameters), learnt.ranges(parameters)

        def ends() -> bool:
            return enough is not None and enough(*found())

        done, ended = _run(step, teacher, objective, settings, on_step, ends)
        after = measure()
    weights, new_ranges = found()
    return FineTuned(
        weights=weights,
        ranges=new_ranges,
        settings=settings,
        objective=objective.told,
        rows=rows.count,
        left_out=rows.left_out,
        steps=done,
        loss_before=before,
        loss_after=after,
        enough=ended,
    )


def _forward(
    source: ModelFolder,
    file: str,
    config: QuantizationConfig,
    ranges: Ranges | None,
    objective: Objective,
    settings: FineTuning,
) -> tuple[Forward, LearntRanges]:
    """The model with its roundings and the loss, in both modes."""
    model = named(source.load(file))
    places = roundings(named(source.load(file)), config, ranges, file)
    learnt = LearntRanges()
    if settings.ranges == "learnt":
        decided = followed(named(source.load(file)), config, ranges, file)
        symmetric = config.activations_symmetric
        learnt, places = LearntRanges.of(model, places, decided, ranges, symmetric)
    weights = trained(model, places)
    if not weights:
        raise GraphError(
            f"nothing of {file} can be trained",
            because="no weight that is quantized is a float32 initializer of the graph",
            help="train a float32 model, as it was exported",
        )
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            tensor = value.const_value
            value.const_value = ir.Tensor(tensor.numpy(), tensor.dtype, name=value.name)
    forward = from_onnx(ir.to_proto(model), weights)
    for program in (forward.training, forward.evaluation):
        insert(program, places, learnt)
        objective.attach(program)
    forward.tensors |= learnt.tensors()
    forward.trainable += tuple(learnt.tensors())
    return forward, learnt


def named(model: ir.Model) -> ir.Model:
    """A model whose nodes all have names, and whose constants are initializers; changed."""
    preparation.prepare(model, gemm=False, wanted=lambda _: False)
    return model


def _run(
    step: TrainStep,
    teacher: _Teacher,
    objective: Objective,
    settings: FineTuning,
    on_step: OnStep | None,
    ends: Callable[[], bool],
) -> tuple[int, bool]:
    """Trains; how many updates were done, and whether that was enough."""
    asked = max(1, settings.steps // _ASKED)
    names = step.input_names()
    order = _order(len(teacher.rows.batches), settings.seed)
    for done in range(settings.steps):
        index = next(order)
        feeds = teacher.feeds(index, objective)
        step.set_learning_rate(_rate(settings, done))
        loss = step(*(feeds[name] for name in names))
        if not np.isfinite(np.asarray(loss)).all():
            return done, False
        if on_step is not None:
            rows = GoldenSet.size_of(teacher.rows.batches[index])
            on_step(done + 1, float(np.asarray(loss)), rows)
        if (done + 1) % asked == 0 and done + 1 < settings.steps and ends():
            return done + 1, True
    return settings.steps, False


def _rate(settings: FineTuning, done: int) -> float:
    """The learning rate after some updates: up in a line, and down to zero in another one."""
    up = max(1, round(settings.steps * _WARM_UP))
    rising, falling = (done + 1) / up, (settings.steps - done) / (settings.steps - up + 1)
    return settings.learning_rate * min(rising, falling)


def _order(count: int, seed: int) -> Iterator[int]:
    """Batches in an order of their own in each round."""
    generator = np.random.default_rng(seed)
    while True:
        yield from (int(index) for index in generator.permutation(count))


class _Teacher:
    """What the original answers, batch by batch; asked once for each, as far as there is room."""

    def __init__(self, original: Runnable, rows: Rows) -> None:
        self._original, self.rows = original, rows
        self._kept: dict[int, tuple[Arrays, Arrays]] = {}
        self._room = _KEPT

    def answer(self, index: int) -> tuple[Arrays, Arrays]:
        """The inputs of a batch as the model takes them, and what the original gives."""
        if index in self._kept:
            return self._kept[index]
        try:
            answer = next(self._original.answer(self.rows.batches[index], f"batch {index}"))
        except InputError as error:
            # The gate's own words are about the golden set.
            told = (error.what, error.help)
            what, help = (text.replace("golden set", "training data") for text in told)
            raise InputError(what, where=error.where, because=error.because, help=help) from error
        found = dict(answer.feeds), answer.outputs
        size = sum(array.nbytes for arrays in found for array in arrays.values())
        if size <= self._room:
            self._kept[index], self._room = found, self._room - size
        return found

    def feeds(self, index: int, objective: Objective) -> Arrays:
        """What a step takes of a batch."""
        feeds, outputs = self.answer(index)
        labels = None if self.rows.labels is None else self.rows.labels[index]
        with _at_batch(index):
            return {**feeds, **objective.targets(outputs, labels)}


@contextmanager
def _at_batch(index: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise error.at(f"batch {index} of the training data") from error


class _Measure:
    """The mean loss of the rounded model, on batches that stay the same."""

    def __init__(
        self,
        path: Path,
        state: CheckpointState,
        teacher: _Teacher,
        objective: Objective,
    ) -> None:
        self._session = onnxruntime.InferenceSession(
            path, default_options(state), providers=["CPUExecutionProvider"]
        )
        self._names = [value.name for value in self._session.get_inputs()]
        self._state, self._teacher, self._objective = state, teacher, objective

    def __call__(self) -> float:
        total, count = 0.0, 0
        tensors = self._state.tensors
        held = {name: tensors[name].numpy() for name in self._names if name in tensors}
        for index, batch in enumerate(self._teacher.rows.batches[:_MEASURED]):
            feeds = {**held, **self._teacher.feeds(index, self._objective)}
            given = {name: feeds[name] for name in self._names}
            (loss,) = self._session.run([contract.LOSS], given)
            size = next((len(a) for a in batch.values() if a.ndim), 1)
            total, count = total + float(loss) * size, count + size
        return total / count
