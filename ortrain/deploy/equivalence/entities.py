"""Entities of tagged texts, each right as a whole or not at all.

A model of tokens tags each one: ``B-PER`` begins a person, ``I-PER`` goes on with it, ``O`` is
outside; in BIOES, ``E-PER`` ends one and ``S-PER`` is one by itself (``L`` and ``U`` in BILOU,
``M`` for ``I`` in BMES). Where one tag of four is wrong the entity is, which the share of right
tags does not tell. Counted as by conlleval (Tjong Kim Sang and Buchholz 2000), which seqeval
follows (Nakayama 2018): tags out of order, as an ``I`` behind an ``O``, begin an entity, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ortrain.deploy.equivalence.predictions import Rows

Array = np.ndarray

_TAG = re.compile(r"([BIESLUM])-(.+)", re.DOTALL)
_ALONE = {"L": "E", "U": "S", "M": "I"}
_OUTSIDE = -1


@dataclass(frozen=True)
class Tags:
    """The classes of a model, where they are tags of entities.

    Attributes:
        kinds: names of the kinds of entities, in the order of the classes.
        kind: class → index of its kind, -1 for what is outside.
        goes_on: class → whether it may go on with an entity (I and E).
        ends: class → whether nothing goes on behind it (E and S).
    """

    kinds: tuple[str, ...]
    kind: Array
    goes_on: Array
    ends: Array

    @classmethod
    def of(cls, names: Mapping[int, str], classes: int) -> Tags | None:
        """The tags of a model's classes; None where any of them is none.

        Args:
            names: of the classes.
            classes: how many there are.
        """
        kinds: dict[str, int] = {}
        columns: list[tuple[int, bool, bool]] = []
        for number in range(classes):
            name = names.get(number)
            if name == "O":
                columns.append((_OUTSIDE, False, False))
                continue
            found = None if name is None else _TAG.fullmatch(name)
            if found is None:
                return None
            prefix = _ALONE.get(found[1], found[1])
            columns.append((kinds.setdefault(found[2], len(kinds)), prefix in "IE", prefix in "ES"))
        if not kinds:
            return None
        kind, goes_on, ends = (np.asarray(column) for column in zip(*columns, strict=True))
        return cls(tuple(kinds), kind, goes_on, ends)


@dataclass(frozen=True)
class Entities:
    """The entities of tagged texts.

    Attributes:
        first: row of the first token of each.
        last: row of the last one.
        kind: its index.
    """

    first: Array
    last: Array
    kind: Array

    @classmethod
    def of(cls, classes: Array, example: Array, tags: Tags) -> Entities:
        """Those of a row of tokens.

        Args:
            classes: of each token.
            example: that each token is of; an entity ends with its example.
            tags: of the classes.
        """
        kind = tags.kind[classes]
        inside = kind != _OUTSIDE
        same = np.zeros(len(kind), np.bool_)
        same[1:] = (kind[1:] == kind[:-1]) & (example[1:] == example[:-1]) & inside[1:]
        same[1:] &= tags.goes_on[classes[1:]] & ~tags.ends[classes[:-1]]
        first = np.flatnonzero(inside & ~same)
        # An entity reaches to before the next token that does not go on with one.
        others = np.append(np.flatnonzero(~same), len(kind))
        last = others[np.searchsorted(others, first, side="right")] - 1
        return cls(first, last, kind[first])

    def count(self, kind: int | None = None) -> int:
        """How many there are, of a kind or of all."""
        return len(self.kind) if kind is None else int((self.kind == kind).sum())

    def common(self, other: Entities, kind: int | None = None) -> int:
        """How many are in both, from the same token to the same token and of the same kind."""
        mine, others = (
            {
                (first, last, of)
                for first, last, of in zip(
                    each.first.tolist(), each.last.tolist(), each.kind.tolist(), strict=True
                )
                if kind is None or of == kind
            }
            for each in (self, other)
        )
        return len(mine & others)


def scores(found: Entities, right: Entities, kind: int | None = None) -> dict[str, float]:
    """Recall, precision and F1 of entities, of one kind or of all (micro-averaged).

    Args:
        found: what a model says.
        right: what is true.
        kind: index of a kind; None for all of them.

    Returns:
        Metric → value; the recall of what is nowhere is NaN.
    """
    hits, said, true = found.common(right, kind), found.count(kind), right.count(kind)
    return {
        "recall": hits / true if true else math.nan,
        "precision": hits / said if said else 0.0,
        "f1": 2 * hits / (said + true) if said + true else 0.0,
    }


def in_rows(
    rows: Rows, tags: Tags, chosen: Array | None = None
) -> tuple[Entities, Entities, Entities]:
    """The entities of the labels, and those that the models before and after say.

    Args:
        rows: of the predictions.
        tags: of the classes.
        chosen: which rows, of type bool, of whole examples; by default all.
    """
    part = np.ones(len(rows.label), np.bool_) if chosen is None else chosen
    label, before, after = (
        Entities.of(classes[part].astype(np.int64), rows.example[part], tags)
        for classes in (rows.label, rows.before.value, rows.after.value)
    )
    return label, before, after
