"""What trains the weights for a quantization, as far as data and configuration allow it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortrain.deploy.model_folder import ModelFolder, save_model
from ortrain.deploy.quantization.configuration import QuantizationConfig
from ortrain.deploy.quantization.rewriting import Ranges
from ortrain.deploy.quantization.tuning.settings import FineTuning
from ortrain.kinds import NONE, expect

if TYPE_CHECKING:
    from ortrain.deploy.equivalence import Budgets, GoldenSet
    from ortrain.deploy.quantization.tuning.rows import Rows
    from ortrain.deploy.quantization.tuning.run import Enough, FineTuned

# Batches of the training data on which it is seen whether they are enough.
_LOOKED_AT = 16
Tune = Callable[[Mapping[str, Any]], "FineTuned"]


def tuner(
    source: ModelFolder,
    config: object,
    ranges: Ranges | None,
    golden: GoldenSet | None,
    data: Any,
    settings: FineTuning | None,
    on_step: Callable[[int, float, int], None] | None = None,
    budgets: Budgets | None = None,
    *,
    recover: bool,
) -> Tune | str:
    """What trains the weights, given the configurations of all files; or why nothing does.

    Args:
        source: the folder.
        config: of the quantization.
        ranges: of activations, for static quantization.
        golden: that the result is judged on.
        data: to train on; None without.
        settings: of the training; None for the defaults.
        on_step: is told of each update.
        budgets: with which training may end early.
        recover: whether a recovery is asked for at all.

    Raises:
        TypeError: an argument is of another type.
        ValueError: training is asked for where there is none.
        InputError: the data are empty, or those of the golden set.
    """
    expect("fine_tuning", settings, (FineTuning, NONE), "a FineTuning")
    served = isinstance(config, QuantizationConfig) and len(source.files) == 1
    if data is None:
        if settings is not None:
            raise ValueError("fine_tuning is of a training: give training_data, or leave it out")
        if served:
            return "there were no training data: with training_data=… the weights are trained"
        return "weights are trained for eight bits alone, in models of one file"
    if golden is None or not recover:
        raise ValueError("training_data are for recovery: give validate=… and on_fail='recover'")
    if not served:
        raise ValueError(
            "training_data: weights are trained for eight bits alone, in models of one file; leave "
            "the data out"
        )
    from ortrain.deploy.equivalence import GoldenSet
    from ortrain.deploy.quantization.tuning.rows import Rows
    from ortrain.deploy.quantization.tuning.run import fine_tune

    expect("validate", golden, GoldenSet, "a GoldenSet")
    chosen = settings or FineTuning()
    rows = Rows.of(data, golden, chosen)

    def tune(configs: Mapping[str, Any]) -> FineTuned:
        (own,) = configs.values()
        enough = None
        if chosen.stop_early and budgets is not None and budgets.given():
            enough = _enough(source, own, ranges, rows, budgets)
        return fine_tune(source, own, ranges, rows, chosen, on_step, enough)

    return tune


def _enough(
    source: ModelFolder,
    config: QuantizationConfig,
    ranges: Ranges | None,
    rows: Rows,
    budgets: Budgets,
) -> Enough:
    """Compares a quantized model with the original on the first batches of the training data."""
    from ortrain.deploy.equivalence import GoldenSet, compare
    from ortrain.deploy.quantization.rewrites import Rewrites

    (file,) = source.files
    labels = None if rows.labels is None else np.concatenate(rows.labels[:_LOOKED_AT])
    part = GoldenSet([*rows.batches[:_LOOKED_AT]], labels=labels, task=rows.task)
    rewrites = Rewrites(source, ranges)

    def enough(
        weights: Mapping[str, np.ndarray], learnt: Mapping[str, tuple[float, float]]
    ) -> bool:
        with tempfile.TemporaryDirectory(prefix="ortrain-fine-tuning-") as folder:
            path = Path(folder, file)
            save_model(rewrites.model(file, config, weights, learnt), path)
            report = compare(source.path / file, path, part, budgets, latency_runs=0, memory=False)
        return report.passed

    return enough
