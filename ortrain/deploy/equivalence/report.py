"""``EquivalenceReport``: what a comparison has found, and whether it is inside the budgets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortrain.deploy.equivalence.budgets import Budgets
from ortrain.errors import ParityError


@dataclass(frozen=True, kw_only=True)
class OutputDifference:
    """One output before and after.

    Attributes:
        largest: the largest absolute difference of an element that is finite on both sides.
        mean: their mean.
        relative: the largest difference over the largest absolute value before.
        elements: that were compared; those of padding are left out.
        histogram: how many differences are in each decade, from below 1e-8 to 10 and more.
        new_nonfinite: elements that are NaN or infinite on one side alone, or another such value.
        example: the index of the example with the largest difference.
    """

    largest: float
    mean: float
    relative: float
    elements: int
    histogram: tuple[int, ...]
    new_nonfinite: int
    example: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """Some of the examples (all, those of a class, those of a slice), before and after.

    Attributes:
        count: of labels, or of predictions where there are no labels.
        agreement: the share of predictions that stay; None where there are none.
        before: metric → its value; without labels empty.
        after: the same.
        drop: by how much the metric that decides is worse, the worst one where several do; None
            without labels.
    """

    count: int
    agreement: float | None = None
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    drop: float | None = None


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Decisions at a threshold of the probability that are not what they were.

    Attributes:
        threshold: the probability.
        up: that have come over it.
        down: that have fallen below it.
        decisions: how many there are.
    """

    threshold: float
    up: int
    down: int
    decisions: int


@dataclass(frozen=True, kw_only=True)
class Side:
    """What a model is on one side of the comparison.

    Attributes:
        path: of its folder or file, as given.
        files: name → bytes, of ONNX files and of those with their weights.
        sha256: name → checksum of these files.
        operators: operator → how many nodes have it, in all graphs.
        latency: batch → median and 95th percentile of a run, in milliseconds; {} if not measured.
        peak_memory: bytes at the peak of loading and running, of a process of its own, above what
            it had before; None if not measured.
    """

    path: str
    files: Mapping[str, int]
    sha256: Mapping[str, str]
    operators: Mapping[str, int]
    latency: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    peak_memory: int | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    @property
    def nodes(self) -> int:
        """Of all graphs."""
        return sum(self.operators.values())


@dataclass(frozen=True, kw_only=True)
class EquivalenceReport:
    """What a comparison has found.

    Attributes:
        before: the model before.
        after: the model after.
        examples: how many were compared.
        outputs: name → how it differs; where there are several files, ``file/name``.
        task: what was predicted; None where there are no predictions.
        metrics: those that decide, the first one first.
        overall: all examples.
        classes: class → the examples that have it as their label, or as the prediction before.
        slices: name → the examples of the slice.
        flips: decisions at thresholds.
        budgets: that were to be kept.
        reasons: one sentence for each budget that was not; empty if it passed.
        environment: versions, processor, provider, threads.
        notes: what could not be measured, and why; what was left out.
    """

    before: Side
    after: Side
    examples: int
    outputs: Mapping[str, OutputDifference]
    task: str | None = None
    metrics: tuple[str, ...] = ()
    overall: Group
    classes: Mapping[str, Group] = field(default_factory=dict)
    slices: Mapping[str, Group] = field(default_factory=dict)
    flips: tuple[Flips, ...] = ()
    budgets: Budgets = field(default_factory=Budgets)
    reasons: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every budget was kept and no NaN or infinity has come."""
        return not self.reasons

    @property
    def max_abs_diff(self) -> float:
        """The largest difference of any output; infinite where NaN or an infinity has come."""
        if any(each.new_nonfinite for each in self.outputs.values()):
            return float("inf")
        return max((each.largest for each in self.outputs.values()), default=0.0)

    @property
    def worst_class(self) -> str | None:
        """The class whose metric falls most; None where there are no labels or no classes."""
        return _worst(self.classes)

    @property
    def worst_slice(self) -> str | None:
        """The slice whose metric falls most."""
        return _worst(self.slices)

    @property
    def fused(self) -> Mapping[str, int]:
        """Operators of which there are more after than before, and by how many."""
        before, after = self.before.operators, self.after.operators
        more = {name: count - before.get(name, 0) for name, count in after.items()}
        return {name: count for name, count in sorted(more.items()) if count > 0}

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, as ``equivalence.json`` has them."""
        raise NotImplementedError

    def summary(self) -> str:
        """The report in a few lines of text."""
        raise NotImplementedError

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Writes ``equivalence.json`` and ``equivalence.html``, a page that needs nothing else.

        Args:
            folder: to write to.

        Returns:
            The paths of both.

        Raises:
            SaveError: they could not be written.
        """
        raise NotImplementedError


class EquivalenceError(ParityError):
    """A rewritten model is outside the budgets, and was not published.

    Attributes:
        report: what the comparison has found.
    """

    report: EquivalenceReport

    @classmethod
    def of(cls, report: EquivalenceReport, what: str) -> EquivalenceError:
        """The error of a report that has not passed.

        Args:
            report: that has not passed.
            what: the model that was to be published: ``"quantized model"``.
        """
        raise NotImplementedError


def _worst(groups: Mapping[str, Group]) -> str | None:
    drops = {name: group.drop for name, group in groups.items() if group.drop is not None}
    return max(drops, key=lambda name: drops[name]) if drops else None
