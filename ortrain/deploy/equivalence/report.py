"""``EquivalenceReport``: what a comparison has found, and whether it is inside the budgets."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ortrain.deploy.equivalence import page, summary
from ortrain.deploy.equivalence.budgets import Budgets
from ortrain.deploy.model_folder import REPORTS
from ortrain.errors import InputError, ParityError
from ortrain.files.regular import expect_regular
from ortrain.files.replacing import staged
from ortrain.kinds import expect_path

JSON_NAME, HTML_NAME = REPORTS


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
class Change:
    """A prediction that has changed.

    Attributes:
        example: its index.
        label: what is right; None without labels.
        before: what was predicted.
        after: what is now.
    """

    example: int
    label: str | None
    before: str
    after: str


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
        changed: how many predictions are others than before.
        changes: those of which the model before was surest, up to 50.
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
    changed: int = 0
    changes: tuple[Change, ...] = ()
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

    @property
    def vanished(self) -> Mapping[str, int]:
        """Operators of which there are fewer after than before, and by how many."""
        before, after = self.before.operators, self.after.operators
        fewer = {name: count - after.get(name, 0) for name, count in before.items()}
        return {name: count for name, count in sorted(fewer.items()) if count > 0}

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, as ``equivalence.json`` has them.

        JSON has no NaN and no infinity: they are the texts ``"nan"``, ``"inf"`` and ``"-inf"``.
        """
        found = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for side, made in ((self.before, found["before"]), (self.after, found["after"])):
            made["size"], made["nodes"] = side.size, side.nodes
        return {
            "passed": self.passed,
            **found,
            "max_abs_diff": _plain(self.max_abs_diff),
            "worst_class": self.worst_class,
            "worst_slice": self.worst_slice,
            "fused": dict(self.fused),
            "vanished": dict(self.vanished),
        }

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> EquivalenceReport:
        """Reads what :meth:`save` wrote.

        Args:
            folder: that ``equivalence.json`` is in, or that file.

        Raises:
            InputError: there is none, or it is of another version.
        """
        expect_path("folder", folder)
        path = Path(folder)
        path = path / JSON_NAME if path.is_dir() else path
        expect_regular(path)
        try:
            return _made(cls, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} is no report of equivalence",
                because=str(error) or type(error).__name__,
                help="give a folder that a tool of ortrain has written, or compare again",
            ) from error

    def summary(self) -> str:
        """The report in a few lines of text."""
        return summary.text(self)

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Writes ``equivalence.json`` and ``equivalence.html``, a page that needs nothing else.

        Args:
            folder: to write to; made where it does not exist.

        Returns:
            The paths of both.

        Raises:
            SaveError: they could not be written.
        """
        expect_path("folder", folder)
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        names = (JSON_NAME, HTML_NAME)
        with staged(Path(folder), "equivalence", "report of equivalence") as unfinished:
            for name, content in zip(names, (text, page.html(self)), strict=True):
                # A name of a class may have half a surrogate pair, as a damaged file gives it.
                (unfinished / name).write_bytes(content.encode(errors="backslashreplace"))
        return Path(folder, names[0]), Path(folder, names[1])


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
        parts = [sentence.rpartition("; ") for sentence in report.reasons]
        error = cls(
            f"the {what} is outside its budgets: nothing was written",
            because="; ".join(told or whole for told, _, whole in parts),
            help="; ".join(dict.fromkeys(remedy for _, _, remedy in parts if remedy)),
        )
        error.report = report
        return error


def _worst(groups: Mapping[str, Group]) -> str | None:
    drops = {name: group.drop for name, group in groups.items() if group.drop is not None}
    return max(drops, key=lambda name: drops[name]) if drops else None


def _plain(value: Any) -> Any:
    """A value in terms of JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _made(kind: Any, value: Any) -> Any:
    """What ``_plain`` made plain, as the kind that a field is declared to be."""
    arguments = get_args(kind)
    if kind is float or (float in arguments and type(None) in arguments):
        return None if value is None else float(value)
    if dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind)
        given = {f.name: _made(kinds[f.name], value[f.name]) for f in dataclasses.fields(kind)}
        build: Any = kind
        return build(**given)
    if get_origin(kind) is tuple:
        each = arguments[0]
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise ValueError(f"expected {len(arguments)} values, and there are {len(value)}")
        return tuple(_made(each, part) for part in value)
    if get_origin(kind) is Mapping:
        return {str(name): _made(arguments[1], part) for name, part in value.items()}
    return value
