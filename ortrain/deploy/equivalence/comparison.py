"""``compare``: two models on one golden set."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ortrain.deploy.equivalence.budgets import Budgets
from ortrain.deploy.equivalence.golden_set import GoldenSet
from ortrain.deploy.equivalence.report import EquivalenceReport


def compare(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
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
        InputError: the models cannot be compared on these examples.
        ExecutionError: onnxruntime cannot run one of them.
    """
    raise NotImplementedError
