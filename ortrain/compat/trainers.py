"""Optimum's trainers, as scripts and their subclasses know them, with their arguments."""

from __future__ import annotations

from ortrain.extras import require

require("hf", __name__)

from typing import Any

from transformers.trainer_utils import (
    compare_trainer_and_checkpoint_args,
    rotate_checkpoints,
    sort_checkpoints,
)

from ortrain.compat.arguments import (
    ORTOptimizerNames,
    ORTSeq2SeqTrainingArguments,
    ORTTrainingArguments,
)
from ortrain.compat.overrides import adopt, backward_divides
from ortrain.trainer import ORTSeq2SeqTrainer as _Seq2SeqTrainer
from ortrain.trainer import ORTTrainer as _Trainer

__all__ = [
    "ORTOptimizerNames",
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainingArguments",
]

# Trainer's parameters as they stood in Optimum, for calls by position.
_POSITIONS = (
    "data_collator",
    "train_dataset",
    "eval_dataset",
    "tokenizer",
    "model_init",
    "compute_metrics",
    "callbacks",
    "optimizers",
    "preprocess_logits_for_metrics",
)


class _AsThen(_Trainer):
    """What scripts and their subclasses know of Trainer that transformers no longer has."""

    use_apex = False
    use_cpu_amp = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ != __name__:
            adopt(cls)

    def __init__(self, model: Any = None, args: Any = None, *positional: Any, **kwargs: Any):
        if len(positional) > len(_POSITIONS):
            raise TypeError(f"{type(self).__name__} takes at most {len(_POSITIONS) + 2} positions")
        named = dict(zip(_POSITIONS, positional, strict=False))
        if both := sorted(named.keys() & kwargs.keys()):
            raise TypeError(f"{type(self).__name__} got {both[0]} by position and by name")
        super().__init__(model, args, **named, **kwargs)

    @property
    def tokenizer(self) -> Any:
        """``processing_class``, by its name of then."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.processing_class = tokenizer

    @property
    def callback_handler(self) -> Any:
        """Trainer's; callbacks are given the tokenizer by its name of then as well."""
        return self.__dict__["callback_handler"]

    @callback_handler.setter
    def callback_handler(self, handler: Any) -> None:
        call = handler.call_event

        def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("tokenizer", handler.processing_class)
            return call(event, args, state, control, **kwargs)

        handler.call_event = call_event
        self.__dict__["callback_handler"] = handler

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As ortrain's; it divides the loss itself, also where an old override called it."""
        with backward_divides(self, 1):
            return super().training_step(*args, **kwargs)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        given: Any = super()
        given._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
        )

    def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
        if metrics is not None:
            # An override that evaluated itself; today the best metric is noted before.
            self._determine_best_metric(metrics=metrics, trial=trial)
        super()._save_checkpoint(model, trial)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        return None if tensors is None else self.accelerator.gather(tensors)

    def _sorted_checkpoints(
        self, output_dir: Any = None, checkpoint_prefix: str = "checkpoint", use_mtime: bool = False
    ) -> list[str]:
        return sort_checkpoints(
            str(output_dir), checkpoint_prefix, use_mtime, self.state.best_model_checkpoint
        )

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: Any = None) -> None:
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        rotate_checkpoints(str(output_dir), limit, best, use_mtime)

    def compare_trainer_and_checkpoint_args(self, training_args: Any, trainer_state: Any) -> None:
        """Warns of arguments that are others than those of a checkpoint."""
        compare_trainer_and_checkpoint_args(training_args, trainer_state)

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """The tokens of a loader's batches, or of that many times its first one."""
        tokens = 0
        for batch in train_dl:
            count: int = batch["input_ids"].numel()
            if max_steps is not None:
                return count * max_steps
            tokens += count
        return tokens


class ORTTrainer(_AsThen):
    """`ortrain.ORTTrainer` as scripts for Optimum know it.

    Positions are those of Optimum's, and subclasses may override methods with the signatures that
    these had then, up to those of transformers 4.45 (:mod:`ortrain.compat.overrides`).
    """


class ORTSeq2SeqTrainer(ORTTrainer, _Seq2SeqTrainer):
    """`ortrain.ORTSeq2SeqTrainer` as scripts for Optimum know it: see :class:`ORTTrainer`."""
