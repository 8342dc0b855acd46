"""What a model predicts, which of its outputs says it, and which metrics judge it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortrain.errors import InputError, listing

Array = np.ndarray

OF_ENTITIES = "entity_f1"
"""The metric of whole entities, where all classes are tags of them."""

TASKS: Mapping[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1"),
    "multi-label": ("f1", "accuracy"),
    "regression": ("mse", "correlation"),
    "token-classification": ("accuracy", "f1", OF_ENTITIES),
    "question-answering": ("exact", "f1"),
    "fill-mask": ("accuracy", "loss"),
    "causal-lm": ("accuracy", "loss"),
    "seq2seq-lm": ("accuracy", "loss"),
    "feature-extraction": (),
}
"""Task → its metrics, the first one decides; of regression both do."""

OF_TOKENS = frozenset({"token-classification", "fill-mask", "causal-lm", "seq2seq-lm"})
"""Those that predict one class for each position."""

FALLING = frozenset({"mse", "loss"})
"""Metrics that are better where they are smaller."""

# Parts of names of outputs that are no predictions.
_FEATURES = ("hidden_state", "embed", "pooler")

_ARCHITECTURES = {
    "ForSequenceClassification": "classification",
    "ForImageClassification": "classification",
    "ForAudioClassification": "classification",
    "ForMultipleChoice": "classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForSpeechSeq2Seq": "seq2seq-lm",
    "MTModel": "seq2seq-lm",
}


def deciding(task: str | None, metric: str | None) -> tuple[str, ...]:
    """The metrics that budgets are for.

    Raises:
        InputError: the one that is asked for is none of the task's.
    """
    if task is None or not TASKS[task]:
        return ()
    if metric is not None:
        if metric not in TASKS[task]:
            raise InputError(
                f"the metric {metric} is none of {task}",
                because=f"its metrics are {listing(list(TASKS[task]))}",
                help="name one of these, or another task: GoldenSet(…, task=…, metric=…)",
            )
        return (metric,)
    return TASKS[task] if task == "regression" else TASKS[task][:1]


def task_of(
    asked: str | None, config: Mapping[str, Any], outputs: Mapping[str, Array], labels: Array | None
) -> str | None:
    """What a model predicts.

    Args:
        asked: of the golden set; None where it follows from all else.
        config: of the model.
        outputs: of one batch.
        labels: of the golden set.

    Returns:
        One of ``TASKS``; None where there are outputs and no predictions.

    Raises:
        InputError: there are labels and nothing that they could be compared with, or the outputs
            are not those of the task.
    """
    found = asked or _of_config(config, labels) or _of_outputs(outputs, labels)
    if found is None or found == "feature-extraction":
        if labels is not None:
            raise InputError(
                "there are labels, and the model predicts nothing that they could be compared with",
                because=f"its outputs are {listing([*outputs])}",
                help="leave the labels out, or name the task: GoldenSet(…, task=…)",
            )
        return found
    missing = heads(found, outputs) is None
    if missing and asked is None and labels is None:
        return None  # as a model that was exported without its head
    if missing:
        raise InputError(
            f"the model has no output for {found}",
            because=f"its outputs are {listing([*outputs])}",
            help="export it with its head, or name another task: GoldenSet(…, task=…)",
        )
    return found


def heads(task: str, outputs: Mapping[str, Array]) -> tuple[str, ...] | None:
    """The outputs that say what is predicted; None where they are not there.

    Args:
        task: one of ``TASKS``.
        outputs: of one batch; of models of several files ``file/name``.
    """

    def named(name: str) -> str | None:
        return next((key for key in outputs if key.rpartition("/")[2] == name), None)

    if task == "question-answering":
        start, end = named("start_logits"), named("end_logits")
        return None if start is None or end is None else (start, end)
    name = named("logits") or (next(iter(outputs)) if len(outputs) == 1 else None)
    if name is None or outputs[name].dtype.kind not in "fiu":
        return None
    rank = outputs[name].ndim
    if task in OF_TOKENS:
        return (name,) if rank == 3 else None
    return (name,) if rank == 2 or (task == "regression" and rank == 1) else None


def _of_config(config: Mapping[str, Any], labels: Array | None) -> str | None:
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    task = next((task for end, task in _ARCHITECTURES.items() if name.endswith(end)), None)
    if name.endswith("ForSequenceClassification"):
        problem = config.get("problem_type")
        names = config.get("id2label")
        if problem == "regression" or (isinstance(names, Mapping) and len(names) == 1):
            return "regression"
        if problem == "multi_label_classification" or (labels is not None and labels.ndim == 2):
            return "multi-label"
        if problem is None and labels is not None and labels.dtype.kind == "f":
            return "regression"
    return task


def _of_outputs(outputs: Mapping[str, Array], labels: Array | None) -> str | None:
    names = {key.rpartition("/")[2] for key in outputs}
    if {"start_logits", "end_logits"} <= names:
        return "question-answering"
    name = next((key for key in outputs if key.rpartition("/")[2] == "logits"), None)
    if name is None and labels is not None and len(outputs) == 1:
        only = next(iter(outputs))
        name = None if any(part in only for part in _FEATURES) else only
    if name is None or outputs[name].dtype.kind not in "fiu":
        return None
    array = outputs[name]
    if array.ndim == 3:
        return "token-classification"
    floating = labels is not None and labels.dtype.kind == "f"
    if array.ndim == 1 or (array.ndim == 2 and (array.shape[1] == 1 or floating)):
        if array.ndim == 2 and array.shape[1] > 1 and _are_flags(labels):
            return "multi-label"
        return "regression"
    if array.ndim == 2:
        return "multi-label" if labels is not None and labels.ndim == 2 else "classification"
    return None


def _are_flags(labels: Array | None) -> bool:
    return labels is not None and labels.ndim == 2 and bool(np.isin(labels, (0, 1)).all())
