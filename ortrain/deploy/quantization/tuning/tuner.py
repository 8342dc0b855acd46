"""What trains the weights for a quantization, as far as data and configuration allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ortrain.deploy.model_folder import ModelFolder
from ortrain.deploy.quantization.configuration import QuantizationConfig
from ortrain.deploy.quantization.rewriting import Ranges
from ortrain.deploy.quantization.tuning.settings import FineTuning
from ortrain.kinds import NONE, expect

if TYPE_CHECKING:
    from ortrain.deploy.equivalence import GoldenSet
    from ortrain.deploy.quantization.tuning.run import FineTuned

Tune = Callable[[Mapping[str, Any]], "FineTuned"]


def tuner(
    source: ModelFolder,
    config: object,
    ranges: Ranges | None,
    golden: GoldenSet | None,
    data: Any,
    settings: FineTuning | None,
    on_step: Callable[[int, float, int], None] | None = None,
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
        return fine_tune(source, own, ranges, rows, chosen, on_step)

    return tune
