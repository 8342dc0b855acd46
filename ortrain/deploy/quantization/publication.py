"""``Publication``: a folder's files, quantized, compared, recovered, and described beside them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortrain.deploy.model_folder import ModelFolder, save_model
from ortrain.deploy.ort_config import ORTConfig
from ortrain.deploy.progress import tracked
from ortrain.deploy.quantization.recovery import Recovery
from ortrain.deploy.quantization.rewrites import Config, Rewrites
from ortrain.deploy.quantization.sensitivity import evenly
from ortrain.deploy.quantization.tuning.tuner import Tune

if TYPE_CHECKING:
    from ortrain.deploy.equivalence import Budgets, GoldenSet
    from ortrain.deploy.quantization.tuning.run import FineTuned

SENSITIVITY = "sensitivity.json"
FINE_TUNING = "fine_tuning.json"


class Publication:
    """Writes what a quantization makes of a folder into another one.

    Args:
        source: the folder.
        rewrites: that make the models.
        folder: to write to.
        suffix: of the files' names; None for none.
        beside: whether weights lie beside the files in any case.
    """

    def __init__(
        self,
        source: ModelFolder,
        rewrites: Rewrites,
        folder: Path,
        suffix: str | None,
        *,
        beside: bool,
    ) -> None:
        self._source, self._rewrites = source, rewrites
        self._folder, self._suffix, self._beside = folder, suffix, beside

    def write(self, configs: Mapping[str, Config], tuned: FineTuned | None = None) -> None:
        """Writes the models.

        Args:
            configs: file → its configuration.
            tuned: whose weights are quantized instead of the source's, with its ranges.
        """
        weights = None if tuned is None else tuned.weights
        ranges = None if tuned is None else tuned.ranges
        for file, each in tracked(configs.items(), "quantizing", "file"):
            model = self._rewrites.model(file, each, weights, ranges)
            beside = True if self._beside else None
            save_model(model, self._folder / _named(file, self._suffix), external=beside)

    def compare(
        self,
        configs: dict[str, Config],
        golden: GoldenSet,
        budgets: Budgets | None,
        *,
        recover: bool,
        at_most: int | None,
        tune: Tune | str,
    ) -> dict[str, Config]:
        """Holds what has been written to budgets, and writes the report.

        Args:
            configs: that it was written by.
            golden: examples.
            budgets: to keep; None for none.
            recover: whether other ways are tried where it does not keep them.
            at_most: nodes that may be left out; None for all but one.
            tune: trains the weights for some configurations, or why nothing does.

        Returns:
            The configurations of what is written now.

        Raises:
            EquivalenceError: the budgets were not kept.
        """
        recovery = Recovery(
            self._pair(),
            golden,
            budgets,
            self.write,
            lambda: self._rewrites.sensitivities(configs, evenly(golden.batches)),
            at_most,
            tune if isinstance(tune, str) else partial(tune, configs),
        )
        found = recovery.run(configs, recover=recover)
        found.report.save(self._folder)
        if found.sensitive:
            self._json(SENSITIVITY, [each.to_dict() for each in found.sensitive])
        if found.tuned is not None:
            self._json(FINE_TUNING, found.tuned.to_dict())
        return found.configs

    def describe(self, configs: Mapping[str, Config]) -> None:
        """Writes ``ort_config.json``.

        Args:
            configs: of what is written.
        """
        written = copy.deepcopy(next(iter(configs.values())))
        for name in ("nodes_to_quantize", "nodes_to_exclude"):
            if hasattr(written, name):
                union = {n for each in configs.values() for n in getattr(each, name)}
                setattr(written, name, sorted(union))
        external = self._beside or any(p.suffix == ".onnx_data" for p in self._folder.iterdir())
        config = ORTConfig(use_external_data_format=external, quantization=written)
        config.save_pretrained(self._folder)

    def _json(self, name: str, content: Any) -> None:
        text = json.dumps(content, indent=2, allow_nan=False)
        (self._folder / name).write_text(text + "\n", encoding="utf-8")

    def _pair(self) -> tuple[Path, Path]:
        files = self._source.files
        if len(files) == 1:
            return self._source.path / files[0], self._folder / _named(files[0], self._suffix)
        return self._source.path, self._folder


def _named(file: str, suffix: str | None) -> str:
    path = Path(file)
    return f"{path.stem}_{suffix}{path.suffix}" if suffix else file
