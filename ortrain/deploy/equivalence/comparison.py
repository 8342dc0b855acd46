"""``compare``: two models on one golden set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnxruntime

from ortrain.deploy.equivalence import facts, groups, verdict
from ortrain.deploy.equivalence.budgets import Budgets
from ortrain.deploy.equivalence.differences import Difference
from ortrain.deploy.equivalence.golden_set import GoldenSet
from ortrain.deploy.equivalence.memory import peak_memory
from ortrain.deploy.equivalence.predictions import Predictions
from ortrain.deploy.equivalence.report import Change, EquivalenceReport, Flips, Group, Side
from ortrain.deploy.equivalence.sessions import Answer, File, Runnable, opened
from ortrain.deploy.equivalence.speed import Times, timed
from ortrain.deploy.equivalence.tasks import TASKS, deciding, heads, task_of
from ortrain.deploy.model_folder import ModelFolder, published_at
from ortrain.deploy.progress import tracked
from ortrain.errors import InputError, listing
from ortrain.kinds import NONE, expect, expect_flag, expect_path, expect_whole

Array = np.ndarray
Outputs = dict[str, Array]

_MASKS = ("decoder_attention_mask", "attention_mask")
_OF_POSITIONS = ("start_logits", "end_logits")


def compare(
    before: str | os.PathLike[str] | ModelFolder,
    after: str | os.PathLike[str] | ModelFolder,
    golden: GoldenSet,
    budgets: Budgets | None = None,
    *,
    provider: str = "CPUExecutionProvider",
    threads: int | None = None,
    latency_runs: int = 20,
    memory: bool = True,
    thresholds: Sequence[float] = (0.5,),
) -> EquivalenceReport:
    """Runs both models on a golden set.

    Args:
        before: the folder of the model, or one ONNX file.
        after: the same of the rewritten one. Files of folders belong together that have the same
            name, a suffix behind ``_`` aside: ``model.onnx`` and ``model_quantized.onnx``.
        golden: the examples.
        budgets: to keep; by default none.
        provider: execution provider of onnxruntime.
        threads: of a session; by default as many as onnxruntime takes.
        latency_runs: how often each model is timed, in turn; 0: not at all.
        memory: whether the peak of memory is measured, in a process of its own for each model.
        thresholds: probabilities at which decisions are compared.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the provider is not there, or a number is out of its range.
        InputError: the models cannot be compared on these examples.
        ExecutionError: onnxruntime cannot run one of them.
    """
    _expect(before, after, golden, budgets, provider, threads, latency_runs, memory, thresholds)
    budgets = Budgets() if budgets is None else budgets
    old, new = (m if isinstance(m, ModelFolder) else ModelFolder.open(m) for m in (before, after))
    known = [facts.files_of(folder) for folder in (old, new)]
    sides = opened(old, new, provider, threads)
    _expect_same_outputs(*sides)
    seen = _Seen(golden, old)
    for index, batch in enumerate(tracked(golden.batches, "comparing", "batch")):
        seen.add(sides, batch, f"batch {index}")
    _expect_numbers(seen, old)
    task, chosen = seen.task, deciding(seen.task, golden.metric)
    rows = None if seen.predictions is None else seen.predictions.rows()
    names = golden.id2label or _names_of(old)
    overall = Group(count=golden.examples)
    classes: dict[str, Group] = {}
    slices: dict[str, Group] = {}
    flips: tuple[Flips, ...] = ()
    changes: tuple[Change, ...] = ()
    changed = 0
    if rows is not None:
        assert task is not None
        overall = groups.overall(task, rows, names, chosen)
        classes = groups.by_class(task, rows, names)
        slices = groups.by_slice(task, rows, names, golden.slices, chosen)
        flips = groups.flips(task, rows, thresholds)
        changed, changes = groups.changes(task, rows, names)
    outputs = {name: each.found() for name, each in seen.differences.items()}
    failed = verdict.reasons(budgets, outputs, task, chosen, overall, classes, slices)
    notes = [*_notes(seen, sides), *groups.doubts(task, rows, slices)]
    latency: tuple[Times, Times] = ({}, {})
    if latency_runs:
        was, now, untimed = timed(*sides, golden.batches, latency_runs)
        latency, notes = (was, now), [*notes, *untimed]
    peaks: list[int | None] = [None, None]
    if memory:
        largest = max(golden.batches, key=lambda b: sum(array.size for array in b.values()))
        for number, side in enumerate(tracked(sides, "measuring memory", "model")):
            peaks[number], trouble = peak_memory(side, largest, provider, threads)
            notes += [trouble] if trouble and trouble not in notes else []
    made = [
        Side(
            path=os.fspath(published_at(folder.path)),
            files=files,
            sha256=checksums,
            operators=operators,
            latency=latency[number],
            peak_memory=peaks[number],
        )
        for number, (folder, (files, checksums, operators)) in enumerate(
            zip((old, new), known, strict=True)
        )
    ]
    return EquivalenceReport(
        before=made[0],
        after=made[1],
        examples=golden.examples,
        outputs=outputs,
        task=task,
        metrics=chosen,
        overall=overall,
        classes=classes,
        slices=slices,
        flips=flips,
        changed=changed,
        changes=changes,
        budgets=budgets,
        reasons=failed,
        environment=facts.environment(provider, threads),
        notes=tuple(notes),
    )


@dataclass
class _Seen:
    """What has been seen of both models so far."""

    golden: GoldenSet
    folder: ModelFolder
    task: str | None = None
    differences: dict[str, Difference] = field(default_factory=dict)
    predictions: Predictions | None = None
    types: dict[str, tuple[str, str]] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    examples: int = 0

    def add(self, sides: tuple[Runnable, Runnable], batch: Mapping[str, Array], where: str) -> None:
        """Runs both models on a batch."""
        several = len(sides[0].files) > 1
        outputs: tuple[Outputs, Outputs] = ({}, {})
        masks: dict[str, Array | None] = {}
        taken: set[str] = set()
        for old, new in zip(*(side.answer(batch, where) for side in sides), strict=True):
            file, feeds = old.file, old.feeds
            taken |= {*feeds, *new.feeds}
            for side, answer in zip(outputs, (old, new), strict=True):
                side.update({_named(answer, k, several): v for k, v in answer.outputs.items()})
            for name, array in old.outputs.items():
                masks[_named(old, name, several)] = _mask(file, name, array, feeds)
        stand_for = {"decoder_input_ids"}
        if "encoder_attention_mask" in taken:
            stand_for.add("attention_mask")
        self.unused |= set(batch) - taken - stand_for
        _expect_same_shapes(*outputs, self.folder, where)
        if not self.differences:
            self.task = task_of(
                self.golden.task, self.folder.config, outputs[0], self.golden.labels
            )
            if self.task is not None and TASKS[self.task]:
                self.predictions = Predictions(self.task, self.golden.labels)
        for name, array in outputs[0].items():
            difference = self.differences.setdefault(name, Difference())
            difference.add(array, outputs[1][name], masks[name], self.examples)
            self.types[name] = (str(array.dtype), str(outputs[1][name].dtype))
        if self.predictions is not None:
            names = heads(self.predictions.task, outputs[0])
            if names is None:
                raise InputError(
                    f"the outputs of {where} are not those of {self.predictions.task}",
                    because=f"they are {listing([*outputs[0]])}",
                    help="give batches of one kind",
                )
            self.predictions.add(*outputs, masks[names[0]], self.examples)
        self.examples += self.golden.size_of(batch)


def _named(answer: Answer, output: str, several: bool) -> str:
    return (f"{answer.file.role}/{output}" if several else output) + answer.step


def _mask(file: File, name: str, output: Array, feeds: Mapping[str, Array]) -> Array | None:
    """Which positions of an output are not padding; None where it has no positions."""
    ports = {port.name: port for port in (*file.inputs, *file.outputs)}
    shape = ports[name].shape
    for each in _MASKS:
        mask = feeds.get(each)
        if mask is None or mask.ndim != 2 or output.shape[:2] != mask.shape:
            continue
        if output.ndim == 2 and name not in _OF_POSITIONS:
            continue  # [batch, classes], as many as there are positions
        length, own = ports[each].shape[1], shape[1] if len(shape) > 1 else None
        if isinstance(own, int) and not isinstance(length, int):
            continue
        # Where there is a cache, the mask covers it too, and is as long as the words where it is
        # empty.
        words = ports.get("input_ids")
        named = [length]
        if words is not None and feeds[words.name].shape == mask.shape:
            named.append(words.shape[1])
        if isinstance(own, str) and isinstance(length, str) and own not in named:
            continue  # positions of something else, as of a decoder
        if length is None and own is None and "encoder_hidden_states" in feeds:
            continue
        return mask != 0
    return None


def _expect_same_outputs(before: Runnable, after: Runnable) -> None:
    for old, new in zip(before.files, after.files, strict=True):
        was, now = ([port.name for port in file.outputs] for file in (old, new))
        gone = [name for name in was if name not in now]
        come = [name for name in now if name not in was]
        if gone or come:
            told = [f"{listing(gone)} vanished"] if gone else []
            told += [f"{listing(come)} appeared"] if come else []
            raise InputError(
                f"{new.path} has other outputs than {old.path}: {' and '.join(told)}",
                because=f"before they are {listing(was)}, after {listing(now)}",
                help="compare models with the same outputs",
            )


def _expect_same_shapes(before: Outputs, after: Outputs, folder: ModelFolder, where: str) -> None:
    for name, array in before.items():
        other = after[name]
        if array.shape == other.shape:
            if (array.dtype.kind in "UOS") != (other.dtype.kind in "UOS"):
                raise InputError(
                    f"the output {name} is {array.dtype} before and {other.dtype} after",
                    help="compare models whose outputs are of one kind",
                )
            continue
        what = f"the output {name} has the shape {list(array.shape)} before and "
        what += f"{list(other.shape)} after"
        if name.rpartition("/")[2] == "logits" and array.shape[:-1] == other.shape[:-1]:
            what = f"the models tell {array.shape[-1]} classes apart before and {other.shape[-1]} "
            what += f"after (output {name})"
        raise InputError(what, where=where, help=f"compare {folder.path} with what was made of it")


def _expect_numbers(seen: _Seen, folder: ModelFolder) -> None:
    """Raises where both models give nothing but NaN: any two such models are equivalent."""
    nothing = [name for name, each in seen.differences.items() if each.undefined]
    judged = any(each.elements or each.new_nonfinite for each in seen.differences.values())
    if nothing and not judged:
        raise InputError(
            f"{folder.path} gives nothing but NaN on the golden set",
            because=f"so does what was made of it, in {listing(nothing)}",
            help="mend the model before it is rewritten, or give examples that it can answer",
        )


def _names_of(folder: ModelFolder) -> dict[int, str]:
    names = folder.config.get("id2label")
    if not isinstance(names, Mapping):
        return {}
    return {int(key): str(name) for key, name in names.items() if str(key).isdecimal()}


def _notes(seen: _Seen, sides: tuple[Runnable, Runnable]) -> list[str]:
    found = []
    left_out = sum(each.left_out for each in seen.differences.values())
    if left_out:
        found.append(f"{left_out} elements at padded positions were checked for NaN alone")
    for name, each in seen.differences.items():
        if each.undefined:
            found.append(
                f"{each.undefined} elements of {name} are NaN in both models: nothing is compared "
                "there, and predictions from them say nothing"
            )
    filled = sorted(set().union(*(file.filled for file in sides[0].files)))
    if filled:
        found.append(f"inputs that the golden set has not followed from others: {listing(filled)}")
    if seen.unused:
        found.append(f"no model takes {listing(sorted(seen.unused))} of the golden set")
    for name, (old, new) in seen.types.items():
        if old != new:
            found.append(f"output {name} is {old} before and {new} after")
    if seen.task is None or not TASKS[seen.task]:
        found.append("the model predicts nothing that is known; outputs alone were compared")
        if seen.golden.slices:
            found.append(f"nothing is measured of {listing([*seen.golden.slices])}: no predictions")
    elif seen.golden.labels is None:
        found.append("without labels, predictions were compared with each other alone")
    return found


def _expect(
    before: object,
    after: object,
    golden: object,
    budgets: object,
    provider: object,
    threads: int | None,
    latency_runs: int,
    memory: object,
    thresholds: Sequence[float],
) -> None:
    expect_path("before", before, ModelFolder, expected="a path or a ModelFolder")
    expect_path("after", after, ModelFolder, expected="a path or a ModelFolder")
    expect("golden", golden, GoldenSet, "a GoldenSet", "GoldenSet.from_file reads one of a file")
    expect("budgets", budgets, (Budgets, NONE), "Budgets or None")
    expect("provider", provider, str, "the name of an execution provider")
    there = onnxruntime.get_available_providers()
    if provider not in there:
        raise ValueError(f"provider={provider!r}: this onnxruntime has {listing(there)}")
    expect_whole("threads", threads, NONE)
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: expected a whole number from 1 up")
    expect_whole("latency_runs", latency_runs)
    if latency_runs < 0:
        raise ValueError(f"latency_runs={latency_runs}: expected a whole number from 0 up")
    expect_flag("memory", memory)
    expect("thresholds", thresholds, Sequence, "a list of probabilities")
    for threshold in thresholds:
        expect("thresholds", threshold, (float, int), "a list of probabilities")
        if not 0 < threshold < 1:
            raise ValueError(f"thresholds has {threshold}: expected probabilities between 0 and 1")
