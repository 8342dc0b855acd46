"""``load_dataset`` of datasets, with the arguments of its version 2."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ortrain.compat.tokens import taking
from ortrain.errors import OrtrainWarning

# Tasks of an example and its class → the name of the example's column then, and its kind.
_CLASSIFYING = {
    "image-classification": ("image", "Image"),
    "audio-classification": ("audio", "Audio"),
    "text-classification": ("text", "Value"),
}
# Tasks whose columns only the scripts of datasets knew, which datasets no longer runs.
_OTHERS = (
    "automatic-speech-recognition",
    "language-modeling",
    "question-answering-extractive",
    "summarization",
)
_REMEDY = "leave task= out, and rename the columns: select_columns([…]).rename_columns({…})"


def extend(module: ModuleType) -> None:
    """Has ``load_dataset`` and ``load_dataset_builder`` take the arguments of then.

    Args:
        module: ``datasets.load``.
    """
    for name in ("load_dataset", "load_dataset_builder"):
        if (own := vars(module).get(name)) is None:
            continue
        extended = taking(_taking_tasks(own) if name == "load_dataset" else own)
        for place in (module, sys.modules["datasets"]):
            # The package has it already where it was imported before ortrain.compat.
            if vars(place).get(name) is own:
                setattr(place, name, extended)


def _taking_tasks(load: Callable[..., Any]) -> Callable[..., Any]:
    """``load_dataset``, with ``task`` and ``ignore_verifications``."""

    @functools.wraps(load)
    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        task = kwargs.get("task")
        if task is None or task in (*_CLASSIFYING, *_OTHERS):
            kwargs.pop("task", None)
        if task in _OTHERS:
            raise ValueError(f"load_dataset: task={task!r} is not here; {_REMEDY}")
        if kwargs.pop("ignore_verifications", False):
            message = "load_dataset: ignore_verifications is verification_mode='no_checks' now"
            warnings.warn(message, OrtrainWarning, stacklevel=3)
            kwargs["verification_mode"] = "no_checks"
        loaded = load(*args, **kwargs)
        if task is None or task not in _CLASSIFYING:
            return loaded
        if kwargs.get("streaming"):
            message = f"load_dataset: task={task!r} has no effect with streaming=True, as ever"
            warnings.warn(message, OrtrainWarning, stacklevel=3)
            return loaded
        return _prepared(loaded, task)

    return load_dataset


def _prepared(loaded: Any, task: str) -> Any:
    """The columns of a task alone, by its names: those of an example, and ``labels``.

    Args:
        loaded: a dataset or several splits.
        task: one of those that classify.

    Raises:
        ValueError: the data has not one column of each kind.
    """
    features = next(iter(loaded.values())).features if isinstance(loaded, dict) else loaded.features
    name, kind = _CLASSIFYING[task]
    example = _column(features, task, kind, (name,))
    label = _column(features, task, "ClassLabel", ("label", "labels"))
    others = [column for column in features if column not in (example, label)]
    names = {example: name, label: "labels"}
    return loaded.remove_columns(others).rename_columns(
        {old: new for old, new in names.items() if old != new}
    )


def _column(features: Any, task: str, kind: str, names: tuple[str, ...]) -> str:
    """The column of a kind: the one of a usual name, or else the only one."""
    found: list[str] = [
        column
        for column, feature in features.items()
        if type(feature).__name__ == kind and (kind != "Value" or feature.dtype == "string")
    ]
    usual = [column for column in found if column in names]
    if len(usual or found) != 1:
        what = f"one column of {kind}" + (f" is expected, not {found}" if found else ", not none")
        raise ValueError(f"load_dataset: task={task!r}: {what}; {_REMEDY}")
    return (usual or found)[0]
