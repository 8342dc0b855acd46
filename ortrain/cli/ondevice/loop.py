"""``Loop``: trains artifacts on arrays, epoch by epoch, and goes on where it was interrupted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ortrain.cli import signals
from ortrain.cli.progress import Progress
from ortrain.errors import InputError, listing
from ortrain.files.checksums import sha256
from ortrain.files.regular import expect_regular
from ortrain.ondevice import contract
from ortrain.ondevice.running.checkpoint import CheckpointState
from ortrain.ondevice.running.module import Module
from ortrain.ondevice.running.optimizer import Optimizer
from ortrain.ondevice.running.scheduler import LinearLRScheduler
from ortrain.ondevice.running.train_step import TrainStep

# What a checkpoint tells of the run that wrote it.
RUN, BATCHES = "ortrain.run", "ortrain.batches"
# Updates after which a learning rate that does not decay would be 0: too many to be seen.
NEVER = 1 << 40


@dataclass(frozen=True)
class Settings:
    """What to train, on what, and how.

    Attributes:
        folder: of the artifacts.
        prefix: of their names.
        data: an .npz file, of arrays with the names of the training model's inputs and a row for
            each sample.
        evaluation_data: the same, for an evaluation after each epoch.
        checkpoint: the file to write.
        epochs: passes over the data.
        batch_size: samples in a batch; an epoch's last one may have fewer.
        accumulate: batches whose gradients are added up for one update.
        learning_rate: the highest.
        warmup_steps: updates in which it rises from 0.
        decay: whether it then falls in a line to 0.
        seed: of the order of samples, and of the first run's random draws.
        checkpoint_every: updates between two checkpoints; None is once an epoch.
        resume: go on from the checkpoint that is there.
    """

    folder: Path
    data: Path
    checkpoint: Path
    prefix: str = ""
    evaluation_data: Path | None = None
    epochs: int = 1
    batch_size: int = 32
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay: bool = False
    seed: int = 0
    checkpoint_every: int | None = None
    resume: bool = False

    def file(self, name: str) -> Path:
        """An artifact's path."""
        return self.folder / f"{self.prefix}{name}"

    def identity(self) -> dict[str, str]:
        """All that the weights depend on, by option; a run resumes only where it is as it was.

        Raises:
            OSError: a file is missing.
        """
        models = (contract.TRAINING_MODEL, contract.OPTIMIZER_MODEL, contract.TRAIN_STEP_MODEL)
        files = {"--data": self.data} | {name: self.file(name) for name in models}
        numbers = {
            "--epochs": self.epochs,
            "--batch-size": self.batch_size,
            "--accumulate": self.accumulate,
            "--learning-rate": self.learning_rate,
            "--warmup-steps": self.warmup_steps,
            "--decay": self.decay,
            "--seed": self.seed,
        }
        digests = {name: sha256(path) for name, path in files.items() if path.exists()}
        return digests | {option: str(value) for option, value in numbers.items()}


class Loop:
    """A training.

    Args:
        settings: of it.

    Raises:
        InputError: a file is missing or damaged, its arrays are not those of the model, the
            checkpoint to resume is one of another training, or the one to write is there already.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if not settings.resume and os.path.lexists(settings.checkpoint):
            raise InputError(
                f"{settings.checkpoint} exists already",
                because="a training wrote it, or it is another file",
                help="go on from it with --resume, remove it, or name another --checkpoint",
            )
        self.state = self._state()
        training, evaluation = contract.TRAINING_MODEL, contract.EVAL_MODEL
        self.module = Module(settings.file(training), self.state, settings.file(evaluation))
        self.names = self.module.input_names()
        self.data = arrays(settings.data, self.names)
        self.evaluation_data = (
            None
            if settings.evaluation_data is None
            else arrays(settings.evaluation_data, self.names)
        )
        self.rows = len(next(iter(self.data.values())))
        self.batches_in_epoch = -(-self.rows // settings.batch_size)
        fused = settings.file(contract.TRAIN_STEP_MODEL)
        self.optimizer: Optimizer | TrainStep
        if settings.accumulate == 1 and fused.exists():
            self.optimizer = TrainStep(fused, self.state)
        else:
            self.optimizer = Optimizer(settings.file(contract.OPTIMIZER_MODEL), self.module)

    def run(self, stream: TextIO) -> float | None:
        """Trains to the end of the last epoch.

        Args:
            stream: gets the progress, and the losses of each epoch.

        Returns:
            The mean loss of the last epoch; None where there was nothing left to do.

        Raises:
            InputError: the loss or a weight is no longer finite; the last checkpoint is intact.
            Ended: a signal has asked to end; the checkpoint is that of the last update.
        """
        with signals.held_back() as came:
            return self._run(stream, came)

    def _run(self, stream: TextIO, came: Callable[[], int | None]) -> float | None:
        settings, state = self.settings, self.state
        total = settings.epochs * self.batches_in_epoch
        updates = settings.epochs * -(-self.batches_in_epoch // settings.accumulate)
        step = self._scheduled(updates)
        done = int(state.properties[BATCHES]) if BATCHES in state.properties else 0
        progress = Progress(stream, total, done=done)
        mean, saved = None, state.step
        for epoch in range(done // self.batches_in_epoch, settings.epochs):
            losses = []
            for number, batch in self._batches(epoch):
                at = epoch * self.batches_in_epoch + number + 1
                if at <= done:
                    continue
                last = number + 1 == self.batches_in_epoch
                update = last or (number + 1) % settings.accumulate == 0
                loss = step(batch, update)
                if not math.isfinite(loss):
                    progress.close()
                    raise self._diverged(f"the loss of batch {at} is {loss}")
                losses.append(loss)
                progress.update(at, loss, len(batch[0]))
                every = settings.checkpoint_every
                asked = came()
                if not update:
                    continue
                if last or asked or (every is not None and state.step - saved >= every):
                    saved = state.step
                    self._save(at)
                if asked is not None:
                    progress.close()
                    raise signals.Ended(asked)
            progress.close()
            if losses:
                mean = float(np.mean(losses))
                stream.write(self._summary(epoch, mean))
        return mean

    def export(self, path: Path, outputs: tuple[str, ...]) -> None:
        """Writes an inference model with the weights of now.

        Args:
            path: of the file.
            outputs: of the model; by default all results but the loss.
        """
        self.module.eval()
        names = list(outputs) or self.module.output_names()[1:]
        if not names:
            raise InputError(
                "the artifacts have no result besides the loss",
                help="name the inference model's outputs",
            )
        self.module.export_model_for_inferencing(path, names)
        self.module.train()

    def _state(self) -> CheckpointState:
        settings = self.settings
        if not settings.resume:
            state = CheckpointState.load_checkpoint(settings.file(contract.CHECKPOINT))
            state.seed = settings.seed
            state.properties[RUN] = json.dumps(settings.identity())
            return state
        state = CheckpointState.load_checkpoint(settings.checkpoint)
        saved = _identity(state)
        for option, value in settings.identity().items():
            if saved.get(option) == value:
                continue
            is_file = not option.startswith("--") or option == "--data"
            told = "is another file" if is_file else f"is {value}, and was {saved.get(option)}"
            raise InputError(
                f"the checkpoint {settings.checkpoint} is of another training: {option} {told}",
                help="resume with the files and options that it was begun with, or begin anew with "
                "another --checkpoint",
            )
        return state

    def _scheduled(self, updates: int) -> Callable[[list[np.ndarray], bool], float]:
        """A function of a batch, and whether an update follows, that returns the loss."""
        settings, optimizer = self.settings, self.optimizer
        scheduler = None
        if settings.decay or settings.warmup_steps:
            end = updates if settings.decay else NEVER
            rate = settings.learning_rate
            scheduler = LinearLRScheduler(optimizer, settings.warmup_steps, end, rate)
        else:
            optimizer.set_learning_rate(settings.learning_rate)

        def step(batch: list[np.ndarray], update: bool) -> float:
            if isinstance(optimizer, TrainStep):
                results = optimizer(*batch)
            else:
                results = self.module(*batch)
                if update:
                    optimizer.step()
                    self.module.lazy_reset_grad()
            if update and scheduler is not None:
                scheduler.step()
            return _loss(results)

        return step

    def _batches(self, epoch: int) -> Iterator[tuple[int, list[np.ndarray]]]:
        """The batches of an epoch; the order depends on seed and epoch alone."""
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(self.rows)
        for number in range(self.batches_in_epoch):
            size = self.settings.batch_size
            chosen = order[number * size : (number + 1) * size]
            yield number, [self.data[name][chosen] for name in self.names]

    def _summary(self, epoch: int, mean: float) -> str:
        text = f"epoch {epoch + 1}/{self.settings.epochs}  loss {mean:.4f}"
        if self.evaluation_data is not None:
            text += f"  evaluation loss {self._evaluate(self.evaluation_data):.4f}"
        return text + "\n"

    def _evaluate(self, data: dict[str, np.ndarray]) -> float:
        """The mean loss over all samples, in evaluation mode."""
        self.module.eval()
        rows = len(next(iter(data.values())))
        total = 0.0
        for start in range(0, rows, self.settings.batch_size):
            batch = [data[name][start : start + self.settings.batch_size] for name in self.names]
            total += _loss(self.module(*batch)) * len(batch[0])
        self.module.train()
        return total / rows

    def _diverged(self, what: str) -> InputError:
        kept = self.settings.checkpoint.exists()
        told = f"the checkpoint {self.settings.checkpoint} is one of before" if kept else ""
        return InputError(
            f"training has diverged: {what}",
            because=told,
            help=f"lower --learning-rate {self.settings.learning_rate:g} and start again",
        )

    def _save(self, batches: int) -> None:
        state = self.state
        changed = [state.tensors[spec.name] for spec in state.trained()]
        for tensor in (*changed, *state.optimizer_states.values()):
            # The loss is that of the weights before the update.
            if not np.isfinite(tensor.numpy()).all():
                raise self._diverged(f"{tensor.spec.name} is no longer finite")
        self.state.properties[BATCHES] = batches
        CheckpointState.save_checkpoint(
            self.state, self.settings.checkpoint, include_optimizer_state=True
        )


def arrays(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """The arrays of a file that a model takes.

    Args:
        path: of an .npz file.
        names: of the arrays.

    Raises:
        InputError: the file is missing or none such, or arrays are missing, empty or of different
            lengths.
    """
    try:
        expect_regular(path)
        # Opened here, as numpy leaves a damaged one open.
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            there = list(file)
            found = {name: file[name] for name in names if name in there}
    except InputError:
        raise
    except Exception as error:
        # What a damaged archive raises depends on where it is damaged.
        raise InputError(
            f"cannot read {path}",
            because=str(error) or type(error).__name__,
            help="give a file that numpy.savez has written",
        ) from error
    if missing := [name for name in names if name not in found]:
        raise InputError(
            f"{path} has no array {listing(missing)}",
            because=f"it has {listing(there)}",
            help=f"the model's inputs are {listing(names)}",
        )
    lengths = {name: len(array) if array.ndim else 0 for name, array in found.items()}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise InputError(
            f"the arrays of {path} do not have the same number of rows, above 0",
            because=told,
            help="each row is a sample",
        )
    return found


def _identity(state: CheckpointState) -> dict[str, str]:
    """What a checkpoint says of the training that wrote it."""
    try:
        found = json.loads(str(dict(state.properties).get(RUN)))
    except (RecursionError, ValueError):
        found = None
    return found if isinstance(found, dict) else {}


def _loss(results: Any) -> float:
    first = results[0] if isinstance(results, tuple) else results
    return float(np.asarray(first).reshape(-1)[0])
