"""What becomes of a row: its samples in eager PyTorch and as a graph, compared."""

from __future__ import annotations

import contextlib
import operator
import re
import unittest.mock
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ortrain import Options, ORTModule
from ortrain.capture.onnx.registry import Registry
from ortrain.config import Engine
from ortrain.frontend.graph import EMPTY
from tests.sweep.agreement import Step, difference, in_another_precision, step
from tests.sweep.rows import SAMPLES, UNINITIALISED, Row, Sample

# Each is swept by itself; the first is what a sweep takes that names none.
ENGINES: tuple[Engine, ...] = ("onnxruntime", "aten")


class Outcome(StrEnum):
    """What becomes of a row or a sample; of a row's samples the first in this order counts."""

    WRONG = "wrong"
    RAISES = "raises"
    OWN_ERROR = "own error"
    EAGER = "eager"
    GRAPH = "graph"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Verdict:
    """What became of a row or a sample.

    Attributes:
        outcome: in a word.
        reason: why it is not a graph, in one line without paths.
        graphs: how many samples ran as a graph.
        samples: how many could be compared.
        upstream: operators in its graphs that PyTorch's exporter translates.
    """

    outcome: Outcome
    reason: str = ""
    graphs: int = 0
    samples: int = 0
    upstream: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Verdict:
        """The verdict that was written as JSON."""
        outcome, upstream = Outcome(fields["outcome"]), tuple(fields["upstream"])
        return cls(**{**fields, "outcome": outcome, "upstream": upstream})


def forced(engine: Engine) -> Options:
    """The graph wherever there is one, and eager where there is none.

    The certificate would put eager in the place of a wrong graph: the sweep is to find it.
    """
    return Options(engine=engine, fallback="torch", certificate="off")


def of_row(
    row: Row,
    most: int = SAMPLES,
    dtype: torch.dtype | None = None,
    engine: Engine = ENGINES[0],
) -> Verdict:
    """Runs the samples of a row, as many as asked for, on an engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = list(row.samples(most, dtype))
        except Exception as error:
            return Verdict(Outcome.NOT_COMPARABLE, f"no samples: {_in_short(error)}")
        if row.name in UNINITIALISED:
            return Verdict(Outcome.NOT_COMPARABLE, "uninitialised memory")
        found = [of_sample(sample, engine) for sample in samples]
    if not found:
        return Verdict(Outcome.NOT_COMPARABLE, "no samples")
    order = list(Outcome)
    worst = min(found, key=lambda verdict: order.index(verdict.outcome))
    compared = [v for v in found if v.outcome is not Outcome.NOT_COMPARABLE]
    graphs = sum(v.outcome is Outcome.GRAPH for v in found)
    upstream = sorted({target for v in found for target in v.upstream})
    return Verdict(worst.outcome, worst.reason, graphs, len(compared), tuple(upstream))


def of_sample(sample: Sample, engine: Engine) -> Verdict:
    """Runs one sample in PyTorch and as a graph on an engine."""
    try:
        eager = step(sample.module(), sample.args, sample.kwargs)
    except Exception as error:
        return Verdict(Outcome.NOT_COMPARABLE, f"eager raises {_in_short(error)}")
    if not eager.tensors:
        return Verdict(Outcome.NOT_COMPARABLE, "no tensor among the outputs")
    other = _step_in_another_precision(sample)
    model = ORTModule(sample.module(), options=forced(engine))
    try:
        with _translated_upstream() as upstream:
            ours = step(model, sample.args, sample.kwargs)
    except Exception as error:
        return Verdict(Outcome.RAISES, _in_short(error))
    wrong = difference(ours, eager, other)
    report = model.report
    if wrong:
        reason = f"{report.mode}: {wrong}"
        return Verdict(Outcome.WRONG, reason, upstream=tuple(sorted(upstream)))
    is_graph = report.mode == "graph"
    if is_graph and not eager.drew and (other_size := _grown(sample)):
        wrong = _wrong_at(other_size, model)
        if wrong:
            return Verdict(Outcome.WRONG, wrong, upstream=tuple(sorted(upstream)))
    if "an error of ortrain's own" in report.reason:
        return Verdict(Outcome.OWN_ERROR, in_one_line(report.reason))
    if eager.drew:
        return Verdict(Outcome.NOT_COMPARABLE, f"random; as a graph: {is_graph}")
    if is_graph:
        return Verdict(Outcome.GRAPH, upstream=tuple(sorted(upstream)))
    if EMPTY.what in report.reason:  # which says nothing about the operator
        return Verdict(Outcome.NOT_COMPARABLE, "an empty tensor, which runs in PyTorch")
    return Verdict(Outcome.EAGER, in_one_line(report.reason))


def _grown(sample: Sample) -> Sample | None:
    """The sample with one more of what its first tensor has along its first axis."""
    leaves = pytree.tree_leaves((sample.args, sample.kwargs))
    tensors = [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    if not tensors or not tensors[0].ndim or len(tensors[0]) < 2:
        return None
    size = len(tensors[0])

    def grown(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or not tensor.ndim or len(tensor) != size:
            return tensor
        again = torch.cat([tensor.detach(), tensor.detach()[:1]])
        return again.requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, grown, (sample.args, sample.kwargs))
    return Sample(sample.module, args, kwargs)


def _wrong_at(sample: Sample, model: ORTModule) -> str:
    """What a module that was captured at another size makes otherwise than PyTorch."""
    try:
        eager = step(sample.module(), sample.args, sample.kwargs)
    except Exception:
        return ""  # at this size it is no sample
    try:
        model.zero_grad()
        model.load_state_dict(sample.module().state_dict())
        ours = step(model, sample.args, sample.kwargs)
    except Exception as error:
        return f"at another size: {_in_short(error)}"
    wrong = difference(ours, eager, _step_in_another_precision(sample))
    return f"at another size, {model.report.mode}: {wrong}" if wrong else ""


def _step_in_another_precision(sample: Sample) -> Step | None:
    """Of eager; None where it does not run so."""
    module = sample.module()
    held = [*module.parameters(), *pytree.tree_leaves((sample.args, sample.kwargs))]
    dtypes = {t.dtype for t in held if isinstance(t, torch.Tensor)}
    dtype = next((d for d in dtypes if d.is_floating_point or d.is_complex), torch.float32)
    try:
        args, kwargs = in_another_precision((sample.args, sample.kwargs), dtype)
        return step(in_another_precision(module, dtype), args, kwargs)
    except Exception:
        return None


@contextlib.contextmanager
def _translated_upstream() -> Iterator[set[str]]:
    """Of the graphs captured inside, the operators that PyTorch's exporter translates."""
    found: set[str] = set()
    translate = Registry.translate

    def noting(self: Registry, exported: ExportedProgram) -> Any:
        calls = {n.target for n in exported.graph.nodes if n.op == "call_function"}
        theirs = {t for t in calls - {operator.getitem} if not self.ours.is_registered(t)}
        found.update(str(target) for target in theirs)
        return translate(self, exported)

    with unittest.mock.patch.object(Registry, "translate", noting):
        yield found


def _in_short(error: BaseException) -> str:
    return in_one_line(f"{type(error).__name__}: {error}")


_PLACE = re.compile(r"^\s*where:.*$", re.MULTILINE)
_HELP = re.compile(r"^\s*help:.*$", re.MULTILINE)
_PATH = re.compile(r"(/[\w.\-]+)+/")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def in_one_line(text: Any, limit: int = 240) -> str:
    """A message without places, paths and addresses, which differ between two runs."""
    text = _HELP.sub("", _PLACE.sub("", str(text)))
    text = _ADDRESS.sub("0x…", _PATH.sub("", text))
    text = re.sub(r"\s*\n\s*because:\s*", ": ", text)
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
