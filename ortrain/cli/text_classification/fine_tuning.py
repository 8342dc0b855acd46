"""The training loop: AdamW, a learning rate that falls in a line, checkpoints, interruption."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ortrain.cli import signals
from ortrain.cli.progress import Progress
from ortrain.cli.text_classification.batches import Batch, Batches
from ortrain.cli.text_classification.settings import Precision, Settings
from ortrain.cli.usage import UsageError


@dataclass
class History:
    """What has happened in a run so far; part of the checkpoint.

    Attributes:
        losses: The loss of each step.
        rates: The learning rate of each step.
        seconds: The time of each step, from making the batch to the optimizer's update.
        correct: Correct answers on the evaluation file after each epoch.
    """

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of steps that are done."""
        return len(self.losses)


class Training:
    """One run of the loop, from its first step or from a checkpoint.

    Args:
        model: The plain model, whose weights are trained.
        runner: The same model as it is to be called: itself, or behind ONNX.
        training: The batches to train on.
        evaluation: The batches to evaluate on after each epoch.
        settings: The settings of the run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        runner: torch.nn.Module,
        training: Batches,
        evaluation: Batches,
        settings: Settings,
    ) -> None:
        self._model = model
        self._runner = runner
        self._training = training
        self._evaluation = evaluation
        self._settings = settings
        self._optimizer = make_optimizer(model, settings.learning_rate, settings.weight_decay)
        self.history = History()

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run."""
        return self._training.in_epoch * self._settings.epochs

    def run(
        self,
        progress: Progress,
        save: Callable[[dict[str, Any]], None],
        evaluated: Callable[[int, int], None],
    ) -> None:
        """Train to the end.

        Args:
            progress: Is told of each step.
            save: Writes a checkpoint: every ``checkpoint_every`` steps, at the end of training,
                and at a signal that asks to end.
            evaluated: Is told the epoch, from 1, and the number of correct answers.

        Raises:
            Ended: A signal has asked to end; the checkpoint is that of the last full step.
            UsageError: The loss is no longer finite.
        """
        from ortrain import ORTModule

        if isinstance(self._runner, ORTModule):
            self._runner.steps_to_come = self.total_steps - self.history.steps
        with signals.held_back() as came:
            saved_at = self.history.steps
            while True:
                if self.history.steps > saved_at and self._is_time_to_save():
                    self._check_finite()
                    save(self.state())
                    saved_at = self.history.steps
                if (number := came()) is not None:
                    if self.history.steps > saved_at:
                        self._check_finite()
                        save(self.state())
                    raise signals.Ended(number)
                if self._is_time_to_evaluate():
                    progress.close()
                    self.history.correct.append(count_correct(self._runner, self._evaluation))
                    evaluated(len(self.history.correct), self.history.correct[-1])
                elif self.history.steps == self.total_steps:
                    return
                else:
                    self._step(progress)

    def _check_finite(self) -> None:
        """Raise a UsageError before weights are saved that no training could go on from."""
        # The loss of a step is that of the weights before its update.
        for name, weight in self._model.named_parameters():
            if not torch.isfinite(weight).all():
                raise self._diverged(f"after step {self.history.steps} {name} is not finite")

    def _diverged(self, what: str) -> UsageError:
        return UsageError(
            f"{what}; lower --learning-rate {self._settings.learning_rate:g} and start again"
        )

    def state(self) -> dict[str, Any]:
        """All that the rest of the run depends on; tensors and plain values only."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generators": _generators(),
            "history": asdict(self.history),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned, in this process or in another."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.history = History(**state["history"])
        _set_generators(state["generators"])

    def _step(self, progress: Progress) -> None:
        started = time.perf_counter()
        step = self.history.steps
        rate = self._settings.learning_rate * (1 - step / self.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = self._training.batch(step)
        loss = train_on(self._runner, self._optimizer, batch)
        self.history.losses.append(loss)
        self.history.rates.append(rate)
        self.history.seconds.append(time.perf_counter() - started)
        progress.update(step + 1, loss, len(batch["labels"]))
        if not math.isfinite(loss):
            progress.close()
            raise self._diverged(f"the loss of step {step + 1} is {loss}")

    def _is_time_to_save(self) -> bool:
        steps = self.history.steps
        return steps % self._settings.checkpoint_every == 0 or steps == self.total_steps

    def _is_time_to_evaluate(self) -> bool:
        return self.history.steps >= (len(self.history.correct) + 1) * self._training.in_epoch


def make_optimizer(
    model: torch.nn.Module, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW over all weights that are trained."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    # fused: torch's default loop over the tensors takes four times as long on a CPU.
    return torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay, fused=True)


def train_on(
    runner: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    precision: Precision = "fp32",
) -> float:
    """One step: forward, backward, update. Returns the loss of the batch.

    Args:
        runner: The model as it is to be called.
        optimizer: Updates the model's weights, which stay in float32.
        batch: What the forward takes, labels included.
        precision: ``"bf16"`` computes the forward under autocast, and the backward as it did.
    """
    runner.train()
    bf16 = precision == "bf16"
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        loss: torch.Tensor = runner(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def count_correct(runner: torch.nn.Module, batches: Batches) -> int:
    """The number of examples whose largest logit is that of their label."""
    runner.eval()
    correct = 0
    with torch.no_grad():
        for batch in batches.epoch():
            logits = runner(**batch).logits
            correct += int((logits.argmax(dim=-1) == batch["labels"]).sum())
    return correct


def _generators() -> dict[str, Any]:
    """The state of every random generator that a model might draw from."""
    numbers = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one, not one of ours
    assert isinstance(numbers, dict)
    numpy_state = {**numbers, "state": {**numbers["state"]}}
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy_state}


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = {**states["numpy"], "state": {**states["numpy"]["state"]}}
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)  # noqa: NPY002 - the global one, not one of ours
