"""What of the predictions is judged by itself: all examples, each class, each slice, thresholds."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ortrain.deploy.equivalence.entities import Tags, in_rows, scores
from ortrain.deploy.equivalence.metrics import OF_A_CLASS, fall, measured, measured_of_class
from ortrain.deploy.equivalence.predictions import Rows, spans
from ortrain.deploy.equivalence.report import Change, Flips, Group
from ortrain.deploy.equivalence.tasks import OF_ENTITIES
from ortrain.errors import InputError, listing

Array = np.ndarray

_OF_CLASSES = {"classification", "multi-label", "token-classification"}
# More make a table that nobody reads; vocabularies have tens of thousands.
_MOST_CLASSES = 1000
# Of the list of changed predictions.
_MOST_CHANGES = 50


def overall(task: str, rows: Rows, names: Mapping[int, str], deciding: Sequence[str]) -> Group:
    """All rows as one group.

    Raises:
        InputError: what decides needs tags of entities, and the classes are none.
    """
    return _group(task, rows, names, np.ones(len(rows.label), np.bool_), deciding)


def by_slice(
    task: str,
    rows: Rows,
    names: Mapping[int, str],
    slices: Mapping[str, Sequence[int]],
    deciding: Sequence[str],
) -> dict[str, Group]:
    """The rows of the examples of each slice."""
    return {
        name: _group(task, rows, names, np.isin(rows.example, np.asarray(members)), deciding)
        for name, members in slices.items()
    }


def by_class(task: str, rows: Rows, names: Mapping[int, str]) -> dict[str, Group]:
    """Each class: the rows that have it as their label, or as the prediction before.

    Where all classes of tokens are tags of entities, each kind of entity instead, by whole entities
    (:mod:`.entities`).

    Args:
        task: one of ``TASKS``.
        rows: of the predictions.
        names: of the classes.

    Returns:
        Name → group, in the order of the classes; empty where a task has none.
    """
    if task not in _OF_CLASSES or rows.classes > _MOST_CLASSES:
        return {}
    if task == "token-classification" and (tags := Tags.of(names, rows.classes)) is not None:
        return _by_kind(rows, tags)
    found: dict[str, Group] = {}
    for number in range(rows.classes):
        if task == "multi-label":
            own = rows.column == number
            counted = own & (rows.label == 1) if rows.labelled else own
        else:
            own = counted = (rows.label if rows.labelled else rows.before.value) == number
        if not counted.any():
            continue
        group = Group(count=int(counted.sum()), agreement=float(rows.same[own].mean()))
        if rows.labelled:
            before, after = (
                measured_of_class(task, rows, side, number) for side in (rows.before, rows.after)
            )
            group = _measured(group, before, after)
        found[name_of(number, names, found)] = group
    return found


def _by_kind(rows: Rows, tags: Tags) -> dict[str, Group]:
    """Each kind of entity; ``agreement`` is over the tokens of its tags."""
    label, before, after = in_rows(rows, tags)
    counted = label if rows.labelled else before
    found: dict[str, Group] = {}
    for kind, name in enumerate(tags.kinds):
        tokens = tags.kind[(rows.label if rows.labelled else rows.before.value)] == kind
        if not tokens.any():
            continue
        group = Group(count=counted.count(kind), agreement=float(rows.same[tokens].mean()))
        if rows.labelled:
            group = _measured(group, *(scores(side, label, kind) for side in (before, after)))
        found[name] = group
    return found


def _measured(group: Group, before: Mapping[str, float], after: Mapping[str, float]) -> Group:
    """The group of a class with its metrics."""
    drop = fall(before, after, OF_A_CLASS)
    return dataclasses.replace(group, before=before, after=after, drop=drop)


def name_of(number: int, names: Mapping[int, str], taken: Collection[str] = ()) -> str:
    """The name of a class: its own, or its number; both where another class has it already."""
    name = str(names.get(number, number))
    return f"{name} ({number})" if name in taken else name


def flips(task: str, rows: Rows, thresholds: Sequence[float]) -> tuple[Flips, ...]:
    """Decisions that cross a threshold.

    Of two classes, whether it is class 1; of more, whether the model is as sure of what it
    predicts; where an example may have several labels, each of them.
    """
    before, after = rows.before.probability, rows.after.probability
    if task not in _OF_CLASSES:
        return ()
    found = []
    for threshold in thresholds:
        was, now = before >= threshold, after >= threshold
        found.append(
            Flips(
                threshold=float(threshold),
                up=int((~was & now).sum()),
                down=int((was & ~now).sum()),
                decisions=len(was),
            )
        )
    return tuple(found)


def changes(task: str, rows: Rows, names: Mapping[int, str]) -> tuple[int, tuple[Change, ...]]:
    """How many predictions have changed, and those of which the model before was surest."""
    if task == "regression":
        return 0, ()
    changed = np.flatnonzero(~rows.same)
    sure = rows.before.probability[changed]
    sure = np.where(np.isnan(sure), 0.0, sure)
    if rows.classes == 2 or task == "multi-label":
        sure = np.maximum(sure, 1 - sure)
    order = changed[np.argsort(-sure, kind="stable")[:_MOST_CHANGES]]

    def told(value: int, row: int) -> str:
        if task == "question-answering":
            return "–".join(str(int(position)) for position in spans(np.asarray(value)))
        if task == "multi-label":
            name = name_of(int(rows.column[row]), names)
            return name if value else f"not {name}"
        return name_of(value, names)

    return len(changed), tuple(
        Change(
            example=int(rows.example[row]),
            label=told(int(rows.label[row]), row) if rows.labelled else None,
            before=told(int(rows.before.value[row]), row),
            after=told(int(rows.after.value[row]), row),
        )
        for row in order
    )


def _group(
    task: str, rows: Rows, names: Mapping[int, str], chosen: Array, deciding: Sequence[str]
) -> Group:
    count = int(chosen.sum())
    agreement = None
    if task != "regression" and count:
        agreement = float(rows.same[chosen].mean())
    if not rows.labelled or not count:
        return Group(count=count, agreement=agreement)
    before, after = (measured(task, rows, side, chosen) for side in (rows.before, rows.after))
    tags = Tags.of(names, rows.classes) if task == "token-classification" else None
    if tags is not None:
        label, *sides = in_rows(rows, tags, chosen)
        for metrics, side in zip((before, after), sides, strict=True):
            metrics[OF_ENTITIES] = scores(side, label)["f1"]
    elif OF_ENTITIES in deciding:
        told = listing([str(names.get(number, number)) for number in range(rows.classes)])
        raise InputError(
            f"the metric {OF_ENTITIES} is for tags of entities, which the classes are not",
            because=f"they are {told}; expected O, B-… and I-…",
            help="give id2label, GoldenSet(…, id2label=…), or another metric",
        )
    return Group(
        count=count,
        agreement=agreement,
        before=before,
        after=after,
        drop=fall(before, after, deciding),
    )


def doubts(task: str | None, rows: Rows | None, slices: Mapping[str, Group]) -> list[str]:
    """What makes the figures worth less than they look."""
    if rows is None or not rows.labelled:
        return []
    found = [
        f"the slice {name} has no labels: nothing was measured"
        for name, group in slices.items()
        if not group.count
    ]
    if task == "classification" and len(rows.label):
        most = float(np.bincount(rows.label.astype(np.int64)).max() / len(rows.label))
        right = float((rows.before.value == rows.label).mean())
        if len(np.unique(rows.label)) > 1 and right < most:
            found.append(
                f"the model before is right on {right:.2%}, less than the most frequent class "
                f"({most:.2%}): are the labels in the order of its classes?"
            )
    return found
