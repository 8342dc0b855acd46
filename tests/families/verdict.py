"""What becomes of one family's file of one exporter at each level of the optimizer."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from ortrain.deploy.models.exporting import export_folder
from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer
from tests.deploy.optimization.exports import Named, dynamo, torchscript
from tests.families.calls import Batch, batches_of
from tests.families.models import Family, drawn

EXPORTERS = ("torchscript 14", "torchscript 17", "dynamo", "ortrain")
LEVELS = ("O1", "O2", "O3", "O4")
ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention")
# Of float32, relative to the largest number; O3 has GELU by tanh, O4 numbers of 11 bits.
_LIMITS = {"O1": 2e-4, "O2": 2e-4, "O3": 5e-3, "O4": 4e-2}
_ORTRAIN = 1e-3

Arrays = list[np.ndarray | None]


class Outcome(StrEnum):
    """Of a file."""

    SAME = "same"
    WRONG = "wrong"
    REFUSED = "refused"
    NOT_RUN = "not run"
    NOT_EXPORTED = "not exported"
    NOT_BUILT = "not built"


@dataclass
class Verdict:
    """What was found.

    Attributes:
        outcome: of the file.
        reason: of an outcome that is not "same"; of one that is, what else was seen.
        attention: nodes of attention that O2 leaves.
        softmax: nodes of softmax that O2 leaves, those that are no attention's too.
        nodes: before and after O2.
    """

    outcome: Outcome
    reason: str = ""
    attention: int = 0
    softmax: int = 0
    nodes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Verdict:
        """The opposite of ``asdict``."""
        return cls(**{**row, "outcome": Outcome(row["outcome"])})


def of_file(family: Family, exporter: str) -> Verdict:
    """The verdict on one family's file of one exporter."""
    torch.set_num_threads(1)
    try:
        model = drawn(family)
        batches = batches_of(model)
        answers = [_answer(model, family.task.output, batch) for batch in batches]
        if not all(np.isfinite(answer).any() and answer.std() > 0 for answer in answers[:1]):
            raise ValueError("its answers do not vary")
    except Exception as error:
        return Verdict(Outcome.NOT_BUILT, _said(error))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = Path(folder) / "source"
        source.mkdir()
        try:
            path, batches, answers = _exported(
                family, model, exporter, source / "model.onnx", batches, answers
            )
        except Exception as error:
            return Verdict(Outcome.NOT_EXPORTED, _said(error))
        return _judged(path, batches, answers, own=exporter == "ortrain")


def _answer(model: Any, output: str, batch: Batch) -> np.ndarray:
    with torch.no_grad():
        result = model(**batch)
    found = result[output] if output in result else result[0]
    assert isinstance(found, torch.Tensor)
    return np.asarray(found.numpy())


def _exported(
    family: Family, model: Any, exporter: str, path: Path, batches: list[Batch], answers: Arrays
) -> tuple[Path, list[Batch], Arrays]:
    output = family.task.output
    if exporter == "ortrain":
        from ortrain.deploy import models

        kind = getattr(models, family.task.loads)
        export_folder(model, path.parent, kind.form)
        return path, batches, answers
    names = tuple(batches[0])
    model.config.use_cache = False
    # What the exporter sees first is what it has run: several rows, no size like another.
    module = Named(model, names, output)
    sample = batches[0]
    text = {name for name in names if name.endswith(("_ids", "_mask", "values"))}
    axes = {
        name: {0: "batch"}
        if name not in text or name == "pixel_values"
        else {0: "batch", 1: "target" if name.startswith("decoder") else "length"}
        for name in names
    }
    if exporter == "dynamo":
        dims = {
            label: torch.export.Dim(label)
            for label in {n for a in axes.values() for n in a.values()}
        }
        given = {n: {i: dims[label] for i, label in a.items()} for n, a in axes.items()}
        dynamo(module, sample, path, 18, dimensions=given)
    else:
        opset = int(exporter.split()[-1])
        torchscript(module, sample, path, opset, dimensions=axes)
    return path, batches, answers


def session(path: Path) -> onnxruntime.InferenceSession:
    """The file as it stands, or as an optimizer has left it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(path: Path, batches: list[Batch]) -> tuple[Arrays, str]:
    """The first output of each batch, None where onnxruntime refuses it; and the last refusal."""
    loaded, found, why = session(path), [], ""
    names = [value.name for value in loaded.get_inputs()]
    for batch in batches:
        feeds = {name: tensor.numpy() for name, tensor in batch.items() if name in names}
        rows, length = next(iter(batch.values())).shape[:2]
        for value in loaded.get_inputs():
            if value.name.startswith("past_key_values"):
                sizes = [rows, value.shape[1], 0, value.shape[3]]
                feeds[value.name] = np.zeros(sizes, np.float32)
            elif value.name == "position_ids" and "position_ids" not in feeds:
                feeds[value.name] = np.tile(np.arange(length), (rows, 1))
            elif value.name == "token_type_ids":
                feeds[value.name] = np.zeros((rows, length), np.int64)
        try:
            found.append(loaded.run(None, feeds)[0])
        except Exception as error:
            found.append(None)
            why = _said(error)
    return found, why


def distance(found: Arrays, expected: Arrays) -> float:
    """The largest difference, relative to the largest number; infinite where NaNs or sizes are."""
    worst = 0.0
    for mine, its in zip(found, expected, strict=True):
        if its is None:
            continue
        if mine is None or mine.shape != its.shape or not _alike(mine, its):
            return float("inf")
        finite = np.isfinite(its)
        scale = max(1.0, float(np.abs(its[finite]).max(initial=0.0)))
        gap = np.abs(mine[finite].astype(np.float64) - its[finite]).max(initial=0.0)
        worst = max(worst, float(gap) / scale)
    return worst


def _alike(mine: np.ndarray, its: np.ndarray) -> bool:
    return bool((np.isnan(mine) == np.isnan(its)).all())


def _judged(path: Path, batches: list[Batch], answers: Arrays, own: bool) -> Verdict:
    try:
        before, why = run(path, batches)
    except Exception as error:
        return Verdict(Outcome.REFUSED if own else Outcome.NOT_RUN, _said(error))
    if all(each is None for each in before):
        return Verdict(Outcome.REFUSED if own else Outcome.NOT_RUN, why)
    notes = []
    if not own and (count := sum(each is None for each in before)):
        notes.append(f"the file runs on {len(before) - count} of {len(before)} batches")
    unpadded = [i for i, b in enumerate(batches) if _unpadded(b)]
    gap = distance([before[i] for i in unpadded], [answers[i] for i in unpadded])
    if own and gap > _ORTRAIN:
        return Verdict(Outcome.WRONG, f"as exported, {gap:.1e} from PyTorch")
    if gap > _ORTRAIN:
        notes.append("the exporter's own file answers otherwise than PyTorch")
    counts: Counter[str] = Counter()
    was = sum(_operators(path).values())
    nodes: list[int] = []
    for level in LEVELS:
        target = path.parent.parent / level
        try:
            optimizer = ORTOptimizer.from_pretrained(path)
            config = AutoOptimizationConfig.with_optimization_level(level)
            optimizer.optimize(config, target)
            written = target / f"{path.stem}_optimized.onnx"
            after, why = run(written, batches)
        except Exception as error:
            return Verdict(Outcome.REFUSED, f"{level}: {_said(error)}", nodes=[was])
        gap = distance(after, before)
        if gap > _LIMITS[level]:
            return Verdict(Outcome.WRONG, f"{level}: off by {gap:.1e} {why}".strip(), nodes=[was])
        if level == "O2":
            counts = _operators(written)
            nodes = [was, sum(counts.values())]
            refused = optimizer.reports[path.name].refused
            if counts["Softmax"] and refused:
                notes.append(str(refused)[:200])
    attention = sum(counts[kind] for kind in ATTENTION)
    return Verdict(Outcome.SAME, "; ".join(notes), attention, counts["Softmax"], nodes)


def _unpadded(batch: Batch) -> bool:
    mask = batch.get("attention_mask")
    return mask is None or bool(mask.all())


def _operators(path: Path) -> Counter[str]:
    model = ir.load(path)
    return Counter(node.op_type for graph in model.graphs() for node in graph)


def _said(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__
