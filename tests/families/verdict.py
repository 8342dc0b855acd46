"""What becomes of one family's file of one exporter at each level of the optimizer."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from ortrain.deploy import models
from ortrain.deploy.models import export_folder
from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer
from tests.deploy.optimization.exports import Named, dynamo, torchscript
from tests.families.calls import Batch, batches_of
from tests.families.models import Family, drawn

EXPORTERS = ("torchscript 14", "torchscript 17", "dynamo", "ortrain")
LEVELS = ("O1", "O2", "O3", "O4")
ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention")
# Of float32, relative to the largest number; O3 has GELU by tanh, O4 numbers of 11 bits.
_LIMITS = {"O1": 1e-3, "O2": 1e-3, "O3": 5e-3, "O4": 4e-2}
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
        own = exporter == "ortrain"
        try:
            if own:
                export_folder(model, source, _class(family).form)
            else:
                _exported(family, model, exporter, source / "model.onnx", batches[0])
        except Exception as error:
            return Verdict(Outcome.NOT_EXPORTED, _said(error))
        verdict = _judged(family, source, batches, answers, own=own)
        if own and verdict.outcome is Outcome.SAME and family.task.name.startswith("text"):
            return _written(family, model, source, verdict)
        return verdict


def _class(family: Family) -> Any:
    return getattr(models, family.task.loads)


def _answer(model: Any, output: str, batch: Batch) -> np.ndarray:
    with torch.no_grad():
        result = model(**batch)
    found = result[output] if output in result else result[0]
    assert isinstance(found, torch.Tensor)
    return np.asarray(found.numpy())


def _exported(family: Family, model: Any, exporter: str, path: Path, sample: Batch) -> None:
    """What one of PyTorch's exporters writes; the sample has no size like another."""
    model.config.use_cache = False
    module = Named(model, tuple(sample), family.task.output)
    axes = {name: {0: "batch", **_open(name)} for name in sample}
    if exporter == "dynamo":
        names = {label for each in axes.values() for label in each.values()}
        dims = {label: torch.export.Dim(label) for label in names}
        given = {n: {i: dims[label] for i, label in a.items()} for n, a in axes.items()}
        dynamo(module, sample, path, 18, dimensions=given)
    else:
        torchscript(module, sample, path, int(exporter.split()[-1]), dimensions=axes)


def _open(name: str) -> dict[int, str]:
    """Lengths that may be others: of tokens, and of sounds."""
    if name.startswith("decoder"):
        return {1: "target"}
    return {} if name in ("pixel_values", "input_features") else {1: "length"}


def session(path: Path) -> onnxruntime.InferenceSession:
    """The file as it stands, or as an optimizer has left it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(family: Family, place: Path, batches: list[Batch], own: bool) -> tuple[Arrays, str]:
    """The output of each batch, None where onnxruntime refuses it; and the last refusal."""
    found: Arrays = []
    why, call = "", _loaded(family, place, own)
    for batch in batches:
        try:
            found.append(call(batch))
        except Exception as error:
            found.append(None)
            why = _said(error)
    return found, why


def _loaded(family: Family, place: Path, own: bool) -> Callable[[Batch], np.ndarray]:
    if own:
        model = _class(family).from_pretrained(place)
        return lambda batch: _answer(model, family.task.output, batch)
    loaded = session(next(place.glob("*.onnx")))
    names = {value.name for value in loaded.get_inputs()}
    return lambda batch: np.asarray(
        loaded.run(None, {n: t.numpy() for n, t in batch.items() if n in names})[0]
    )


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


def _real(found: Arrays, batches: list[Batch]) -> Arrays:
    """The numbers of tokens that are no padding, where there is one row of them for each."""
    chosen: Arrays = []
    for array, batch in zip(found, batches, strict=True):
        mask = batch.get("attention_mask")
        if array is not None and mask is not None and array.shape[:2] == tuple(mask.shape):
            array = array[mask.numpy() == 1]
        chosen.append(array)
    return chosen


def _alike(mine: np.ndarray, its: np.ndarray) -> bool:
    return bool((np.isnan(mine) == np.isnan(its)).all())


def _judged(
    family: Family, source: Path, batches: list[Batch], answers: Arrays, own: bool
) -> Verdict:
    try:
        before, why = run(family, source, batches, own)
    except Exception as error:
        return Verdict(Outcome.REFUSED if own else Outcome.NOT_RUN, _said(error))
    if all(each is None for each in before):
        return Verdict(Outcome.REFUSED if own else Outcome.NOT_RUN, why)
    notes = []
    if count := sum(each is None for each in before):
        if own:
            return Verdict(Outcome.REFUSED, why)
        notes.append(f"the file runs on {len(before) - count} of {len(before)} batches")
    # Of padding on the left an exporter and PyTorch may make different things.
    places = [i for i, batch in enumerate(batches) if own or _unpadded(batch)]
    gap = distance(
        *(_real([a[i] for i in places], [batches[i] for i in places]) for a in (before, answers))
    )
    if own and gap > _ORTRAIN:
        return Verdict(Outcome.WRONG, f"as exported, {gap:.1e} from PyTorch")
    if gap > _ORTRAIN:
        notes.append("the exporter's own file answers otherwise than PyTorch")
    counts: Counter[str] = Counter()
    was = sum(_operators(source).values())
    nodes: list[int] = []
    for level in LEVELS:
        target = source.parent / level
        try:
            optimizer = ORTOptimizer.from_pretrained(source)
            optimizer.optimize(AutoOptimizationConfig.with_optimization_level(level), target)
            after, why = run(family, target, batches, own)
        except Exception as error:
            return Verdict(Outcome.REFUSED, f"{level}: {_said(error)}", nodes=[was])
        # In float16 a row that is masked as a whole may make another thing of its scores.
        both = (_real(a, batches) if level == "O4" else a for a in (after, before))
        gap = distance(*both)
        if gap > _LIMITS[level]:
            return Verdict(Outcome.WRONG, f"{level}: off by {gap:.1e} {why}".strip(), nodes=[was])
        if level == "O2":
            counts = _operators(target)
            nodes = [was, sum(counts.values())]
            refused = [str(r.refused) for r in optimizer.reports.values() if r.refused]
            if counts["Softmax"] and refused:
                notes.append(refused[0][:200])
    attention = sum(counts[kind] for kind in ATTENTION)
    return Verdict(Outcome.SAME, "; ".join(notes), attention, counts["Softmax"], nodes)


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20},
    "no cache": {"use_cache": False},
}


def _written(family: Family, model: Any, source: Path, verdict: Verdict) -> Verdict:
    """The same verdict, or another where generated tokens are others than PyTorch's."""
    batches = [b for b in batches_of(model) if _generates(b)]
    for place in (source, source.parent / "O2"):
        ours = _class(family).from_pretrained(place)
        for search, arguments in SEARCHES.items():
            for batch in batches:
                given = {n: t for n, t in batch.items() if not n.startswith("decoder")}
                found = []
                for each in (model, ours):
                    torch.manual_seed(7)
                    try:
                        made = each.generate(
                            **given, max_new_tokens=6, min_new_tokens=6, **arguments
                        )
                    except Exception as error:
                        if each is model:
                            break
                        return Verdict(Outcome.REFUSED, f"{search}: {_said(error)}")
                    found.append(made)
                if len(found) == 2 and not torch.equal(found[0], found[1]):
                    what = f"{search} of {place.name}, {[*next(iter(given.values())).shape]}"
                    return Verdict(Outcome.WRONG, f"{what}: other tokens than PyTorch's")
    return verdict


def _generates(batch: Batch) -> bool:
    """Whether rows are padded on the left or not at all, as a decoder reads them."""
    mask = batch.get("attention_mask")
    return mask is None or "decoder_input_ids" in batch or bool(mask[:, -1].all())


def _unpadded(batch: Batch) -> bool:
    mask = batch.get("attention_mask")
    return mask is None or bool(mask.all())


def _operators(place: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in place.glob("*.onnx"):
        found.update(node.op_type for graph in ir.load(path).graphs() for node in graph)
    return found


_PLACES = re.compile(r"\s*\(?(/[\w.+-]+){2,}(:\d+)?\)?")
_COLOURS = re.compile(r"\x1b\[\d*m")


def _said(error: Exception) -> str:
    """What an error says first, and because of what, without places on this machine."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    told = lines[:1] + [line for line in lines[1:] if line.startswith("because:")]
    return f"{type(error).__name__}: {_PLACES.sub('', ' '.join(told))[:300]}".removesuffix(": ")
