"""``Calibration``: what data have shown of the activations of a folder's files, shard by shard."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np

from ortrain.deploy.model_folder import ModelFolder
from ortrain.deploy.progress import tracked
from ortrain.deploy.quantization.calibration_config import CalibrationConfig
from ortrain.deploy.quantization.calibration_data import ORTCalibrationDataReader
from ortrain.deploy.quantization.calibrator import Calibrator
from ortrain.deploy.quantization.chain import Chain
from ortrain.errors import StateError
from ortrain.kinds import expect


class Calibration:
    """Collects the ranges of activations of all files; what is added in many calls adds up.

    Args:
        source: the folder, which is read only.
    """

    def __init__(self, source: ModelFolder) -> None:
        self._source = source
        self._calibrators: dict[str, Calibrator] = {}
        self._calibrated_by: tuple[Any, ...] | None = None

    def add(
        self,
        dataset: Any,
        config: CalibrationConfig,
        operators: Sequence[str] | None,
        batch_size: int,
        *,
        use_gpu: bool,
        symmetric: bool,
    ) -> None:
        """Runs the files on some data.

        Args:
            dataset: what ``ORTCalibrationDataReader`` takes.
            config: the method.
            operators: whose inputs and outputs have ranges; all of them by default.
            batch_size: how many rows are looked at together.
            use_gpu: whether the model runs on CUDA.
            symmetric: whether ranges are symmetric around zero.

        Raises:
            StateError: an earlier call had another method or other operators.
            InputError: the data does not fit the model.
            ExecutionError: onnxruntime cannot run the model on it.
        """
        self._calibrate_by(config, operators, use_gpu, symmetric)
        chain = Chain({file: each.inputs for file, each in self._calibrators.items()})
        reader = ORTCalibrationDataReader(
            dataset, batch_size, names=chain.columns(), ranks=chain.ranks()
        )
        runs = {file: calibrator.run for file, calibrator in self._calibrators.items()}
        try:
            total = -(-len(dataset) // batch_size) if isinstance(dataset, Sized) else None
            for batch in tracked(reader, "calibrating", "batch", total):
                chain.run(batch, runs)
        except BaseException:
            for calibrator in self._calibrators.values():
                calibrator.close()
            raise

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Activation → its lowest and its highest value; with several files ``file/activation``.

        Raises:
            ValueError: nothing has been collected.
        """
        if not any(calibrator.batches for calibrator in self._calibrators.values()):
            raise ValueError(
                "nothing has been collected: call fit or partial_fit first, with data that is not "
                "empty"
            )
        found: dict[str, tuple[float, float]] = {}
        several = len(self._calibrators) > 1
        for file, calibrator in self._calibrators.items():
            ranges = calibrator.ranges()
            found.update({f"{file}/{n}" if several else n: r for n, r in ranges.items()})
            calibrator.close()
        return found

    def forget(self) -> None:
        """Begins anew."""
        for calibrator in self._calibrators.values():
            calibrator.close()
        self._calibrators, self._calibrated_by = {}, None

    def _calibrate_by(
        self,
        config: CalibrationConfig,
        operators: Sequence[str] | None,
        use_gpu: bool,
        symmetric: bool,
    ) -> None:
        described_by = (
            dataclasses.astuple(config)[4:],  # what it says of the data may differ by shard
            tuple(operators or ()),
            use_gpu,
            symmetric,
        )
        if self._calibrated_by is None:
            provider = "CUDAExecutionProvider" if use_gpu else "CPUExecutionProvider"
            self._calibrators = {
                file: Calibrator(
                    self._source.path / file,
                    copy.deepcopy(config),
                    operators,
                    symmetric=symmetric,
                    provider=provider,
                )
                for file in self._source.files
            }
            self._calibrated_by = described_by
        elif self._calibrated_by != described_by:
            raise StateError(
                "partial_fit with another method, other operators or another device than before",
                because="shards add up to one set of ranges",
                help="give the same arguments, or begin anew with fit",
            )


def as_pairs(given: Any) -> dict[str, tuple[float, float]] | None:
    """Ranges as pairs, also of onnxruntime's own ``TensorsData``."""
    if given is None:
        return None
    items = given.items() if hasattr(given, "items") else None
    if items is None:
        expect("calibration_tensors_range", given, Mapping, "activation → (lowest, highest)")
    found: dict[str, tuple[float, float]] = {}
    for name, value in items or ():
        low, high = getattr(value, "range_value", value)
        found[name] = float(np.asarray(low).reshape(())), float(np.asarray(high).reshape(()))
    return found
