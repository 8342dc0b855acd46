"""What is wrong with data, arguments or a checkpoint is said before anything has changed.

What transformers itself says early and clearly is left to it.
"""

from __future__ import annotations

import base64
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from ortrain.aside import copied, random_states
from ortrain.errors import InputError, OrtrainWarning, listing
from ortrain.pytorch.hooks import forward_hooks_of
from ortrain.trainer.checkpoints import check_complete, check_fits, last_complete

# Metrics of every evaluation, with or without labels.
_OF_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class ChecksInput(Trainer):
    """A Trainer that refuses what it cannot train on, before it changes anything."""

    _batch_came = False

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As Trainer's.

        Raises:
            InputError: labels are missing, a checkpoint is incomplete or of another model, or no
                batch came.
        """
        if resume_from_checkpoint is True:
            output_dir = Path(str(self.args.output_dir))
            found = last_complete(output_dir, whole=self._writes_all())
            # Where there is nothing to resume from, Trainer says so.
            resume_from_checkpoint = True if found is None else str(found)
        check_evaluation(self)
        self._batch_came = False
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.is_in_train = False
        if not self._batch_came and self.state.global_step < self.state.max_steps:
            raise InputError(
                "nothing was trained: no batch came from train_dataset",
                because="it has no rows, or with dataloader_drop_last=True fewer than one batch",
                help="give the trainer more rows, or take a smaller batch",
            )
        return result

    def get_train_dataloader(self) -> Any:
        """As Trainer's.

        Raises:
            InputError: the data set is empty.
        """
        if has_length(self.train_dataset) and len(self.train_dataset) == 0:
            raise InputError(
                "train_dataset is empty",
                because="it has a length of 0",
                help="look at what filters or splits the data",
            )
        return super().get_train_dataloader()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; the first batch is looked at before a graph is made for it."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        if batches and not self._batch_came:
            self._batch_came = True
            check_labels(self, batches[0])
        return batches, items

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        folder = Path(resume_from_checkpoint)
        if folder.is_dir() and self._writes_all():
            if self.is_in_train:
                check_complete(folder, whole=self._writes_all())
            check_fits(folder, self.model if model is None else model)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # The file that is written last says that the others are there; here it may be of a run that
        # came as far before.
        folder = Path(self._get_output_dir(trial))
        folder /= f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _writes_all(self) -> bool:
        """Whether Trainer itself writes weights and optimizer, not FSDP or DeepSpeed."""
        return not (
            self.is_fsdp_enabled
            or self.is_deepspeed_enabled
            or getattr(self, "is_distributed_loading_by_transformers", False)
        )


def check_labels(trainer: Trainer, inputs: Any) -> None:
    """Raises where a batch has no labels and the model returns no loss without them.

    Only a batch that lacks one of ``trainer.label_names`` is looked at closer: the model is asked
    what it returns, since some have a loss of their own. Where the loss is the user's
    (``compute_loss_func``, a ``compute_loss`` of a subclass), nothing is known about it.

    Args:
        trainer: about to train.
        inputs: its first batch.

    Raises:
        InputError: the model returns no loss.
    """
    missing = _missing(trainer, inputs)
    if (
        not missing
        or trainer.compute_loss_func is not None
        or not _is_trainers(trainer, "compute_loss")
        or trainer.is_fsdp_enabled
        or trainer.is_deepspeed_enabled
        or _returns_loss(trainer, inputs)
    ):
        return
    raise InputError(
        f"train_dataset has no labels: {type(trainer.model).__name__} returns no loss",
        because=f"the first batch has {listing(list(inputs))} and no {listing(missing)}"
        f"{_dropped(trainer, trainer.train_dataset)}",
        help="rename the column with the labels, take a data_collator that makes them, or compute "
        "the loss with compute_loss_func=",
    )


def reads_only_loss(trainer: Trainer, model: nn.Module) -> bool:
    """Whether a training step reads nothing of the model's outputs but their loss.

    Args:
        trainer: that trains.
        model: what it calls.
    """
    own = vars(trainer)  # methods that somebody has put on the instance
    inside = getattr(trainer, "_loss_of_module_with_loss", None)
    theirs = (
        _is_trainers(trainer, "compute_loss")
        and "compute_loss" not in own
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
    )
    steps = _is_trainers(trainer, "training_step") and "training_step" not in own
    with_loss = inside is not None and own.get("compute_loss") == inside
    return steps and (theirs or with_loss) and not forward_hooks_of(model)


def check_evaluation(trainer: Trainer) -> None:
    """Raises where evaluations in training cannot find what the best checkpoint is chosen by.

    Evaluation without labels has no loss, and calls no ``compute_metrics``: a warning where only
    the latter is lost. Streams are not looked at, as that would take their first rows.

    Args:
        trainer: about to train.

    Raises:
        InputError: there will be no such metric.
    """
    args = trainer.args
    best = (args.metric_for_best_model or "").removeprefix("eval_")
    theirs = all(
        _is_trainers(trainer, n) for n in ("evaluate", "evaluation_loop", "prediction_step")
    )
    needed = bool(best) or trainer.compute_metrics is not None
    if args.eval_strategy == "no" or not needed or not theirs or trainer.eval_dataset is None:
        return
    data: Any = trainer.eval_dataset
    for name, dataset in data.items() if isinstance(data, dict) else [("", data)]:
        fault = _without_labels(trainer, name, dataset)
        if not fault:
            continue
        what = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        metric = best.removeprefix(f"{name}_") if name else best
        of_another = bool(name) and metric == best
        if best and not of_another and metric not in _OF_SPEED:
            if metric == "loss" or trainer.compute_metrics is not None:
                raise InputError(
                    f"{what} {fault}, so that there is no eval_{best} to choose the best model by",
                    because=f"metric_for_best_model={args.metric_for_best_model!r}",
                    help="add the labels, or evaluate without load_best_model_at_end and "
                    "metric_for_best_model",
                )
        elif trainer.compute_metrics is not None:
            warnings.warn(
                f"{what} {fault}: compute_metrics will not be called for it",
                OrtrainWarning,
                stacklevel=4,
            )


def check_deepspeed_config(config: Any) -> None:
    """Raises where a configuration of DeepSpeed cannot be read, whether it is installed or not.

    Args:
        config: the training argument ``deepspeed``: a path, JSON, JSON in base64, or a dictionary.

    Raises:
        ValueError: there is no such file, or it holds no JSON object.
    """
    if not isinstance(config, str | os.PathLike):
        return
    text = str(config)
    path = Path(text)
    if text.startswith("{"):
        content = text
    elif len(text) < 4096 and path.is_file():
        content = path.read_text(encoding="utf-8")
    else:
        try:
            content = base64.urlsafe_b64decode(text).decode()
            json.loads(content)
        except ValueError:
            raise ValueError(
                f"deepspeed={text!r}: there is no such file, and it is not JSON itself"
            ) from None
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ValueError(f"deepspeed={text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"deepspeed={text!r} holds no JSON object but a {type(found).__name__}")


def _is_trainers(trainer: Trainer, method: str) -> bool:
    """Whether a method is that of transformers or ortrain, not of a user's class."""
    found = getattr(type(trainer), method)
    return found.__module__.split(".")[0] in ("transformers", "ortrain")


def _missing(trainer: Trainer, batch: Any) -> list[str]:
    """The names of labels that are not in a batch."""
    if not isinstance(batch, Mapping):
        return []
    return [name for name in trainer.label_names if batch.get(name) is None]


def _returns_loss(trainer: Trainer, inputs: Any) -> bool:
    """Whether the model returns a loss for a batch, or cannot be asked."""
    model: Any = trainer.model
    model.train()  # as the step is about to do
    try:
        with torch.no_grad(), random_states(), trainer.accelerator.autocast():
            outputs = copied(model)(**dict(trainer._prepare_inputs(inputs)))
    except Exception:  # which the step itself will raise
        return True
    if isinstance(outputs, dict):
        return "loss" in outputs
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else None
    return isinstance(first, torch.Tensor) and first.numel() == 1


def _without_labels(trainer: Trainer, name: str, dataset: Any) -> str:
    """Why evaluation on a data set has no loss; empty where it has one, or may have."""
    loader: Any = trainer.get_eval_dataloader(name or dataset)
    rows: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not _has_rows(rows):
        return ""
    if len(rows) == 0:
        return "is empty"
    try:
        with random_states():
            batch = loader.collate_fn([rows[0]])
    except Exception:  # which evaluation itself will raise
        return ""
    if not isinstance(batch, Mapping):
        return ""
    if not trainer.label_names:
        alone = batch.get("return_loss") or trainer.can_return_loss
        return "" if alone else "has no labels, as the model names none (label_names=)"
    missing = _missing(trainer, batch)
    return f"has no {listing(missing)}{_dropped(trainer, dataset)}" if missing else ""


def _has_rows(dataset: Any) -> bool:
    """Whether a data set has a length and rows by their number; a stream has not."""
    stream = isinstance(dataset, IterableDataset)
    return not stream and has_length(dataset) and hasattr(dataset, "__getitem__")


def _dropped(trainer: Trainer, dataset: Any) -> str:
    """The columns of a data set that do not reach the model, for an error message."""
    columns = getattr(dataset, "column_names", None)
    if columns is None and _has_rows(dataset) and isinstance(row := dataset[0], Mapping):
        columns = list(row)
    if not trainer.args.remove_unused_columns or not columns:
        return ""
    trainer._set_signature_columns_if_needed()
    taken: Any = trainer._signature_columns
    dropped = [name for name in columns if name not in taken]
    return f" ({listing(dropped)} dropped: the model takes no such columns)" if dropped else ""
