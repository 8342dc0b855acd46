"""``CalibrationConfig``: what a model is calibrated on, and how ranges follow from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxruntime.quantization.calibrate import CalibrationMethod

from ortrain.kinds import NONE, expect, expect_flag, expect_number, expect_whole

if TYPE_CHECKING:
    from ortrain.deploy.quantization.calibrator import Calibrator

__all__ = ["AutoCalibrationConfig", "CalibrationConfig", "CalibrationMethod"]


@dataclass
class CalibrationConfig:
    """How ranges of activations are found.

    Attributes:
        dataset_name: of the data, for the record.
        dataset_config_name: the same.
        dataset_split: the same.
        dataset_num_samples: how many examples it has.
        method: ``MinMax``, ``Entropy`` or ``Percentile``.
        num_bins: around zero, in which entropy chooses a range. It needs more bins than levels to
            have a choice at all; with no more than that it takes 2048. Percentiles are found in
            bins of at most 1/2048 of the largest value, whatever this is.
        num_quantized_bins: levels that values are rounded to, for entropy.
        percentile: share of a hundred values that the range holds.
        moving_average: whether ranges of batches are averaged instead of joined, for min-max.
        averaging_constant: weight of each new batch in this average.
    """

    dataset_name: str | None = None
    dataset_config_name: str | None = None
    dataset_split: str | None = None
    dataset_num_samples: int | None = None
    method: CalibrationMethod = CalibrationMethod.MinMax
    num_bins: int | None = None
    num_quantized_bins: int | None = None
    percentile: float | None = None
    moving_average: bool | None = None
    averaging_constant: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            names = {each.name.lower(): each for each in CalibrationMethod}
            names["percentiles"] = CalibrationMethod.Percentile
            if self.method.lower() not in names:
                raise ValueError(f"method={self.method!r}: expected MinMax, Entropy or Percentile")
            self.method = names[self.method.lower()]
        expect("method", self.method, CalibrationMethod, "a CalibrationMethod")
        if self.method == CalibrationMethod.Distribution:
            raise ValueError(
                "method=Distribution is for floating point of eight bits; choose MinMax, Entropy "
                "or Percentile"
            )
        for name in ("num_bins", "num_quantized_bins"):
            value = getattr(self, name)
            expect_whole(name, value, NONE)
            if value is not None and value < 2:
                raise ValueError(f"{name}={value}: expected a whole number from 2 up")
        for name, top in (("percentile", 100), ("averaging_constant", 1)):
            value = getattr(self, name)
            expect_number(name, value, NONE)
            if value is not None and not 0 <= value <= top:
                raise ValueError(f"{name}={value}: expected a number from 0 to {top}")
        if self.moving_average is not None:
            expect_flag("moving_average", self.moving_average)

    def create_calibrator(
        self,
        onnx_model_path: str | os.PathLike[str],
        operators_to_quantize: Sequence[str] | None = None,
        use_external_data_format: bool = False,
        force_symmetric_range: bool = False,
        augmented_model_name: str = "augmented_model.onnx",
    ) -> Calibrator:
        """What collects ranges of one ONNX file.

        Args:
            onnx_model_path: of the file.
            operators_to_quantize: those whose inputs and outputs have ranges; by default all.
            use_external_data_format: not needed: large models are known by their size.
            force_symmetric_range: whether ranges are symmetric.
            augmented_model_name: not needed: no file is left.
        """
        from pathlib import Path

        from ortrain.deploy.quantization.calibrator import Calibrator

        del use_external_data_format, augmented_model_name
        path = Path(onnx_model_path)
        return Calibrator(path, self, operators_to_quantize, symmetric=force_symmetric_range)


class AutoCalibrationConfig:
    """Configurations for each method; the data may be a ``datasets.Dataset``, or anything else."""

    @staticmethod
    def minmax(
        dataset: Any = None, moving_average: bool = False, averaging_constant: float = 0.01
    ) -> CalibrationConfig:
        """The smallest and the largest value that was seen."""
        return CalibrationConfig(
            **_described(dataset),
            method=CalibrationMethod.MinMax,
            moving_average=moving_average,
            averaging_constant=averaging_constant,
        )

    @staticmethod
    def entropy(
        dataset: Any = None, num_bins: int = 128, num_quantized_bins: int = 128
    ) -> CalibrationConfig:
        """The range that loses least information."""
        return CalibrationConfig(
            **_described(dataset),
            method=CalibrationMethod.Entropy,
            num_bins=num_bins,
            num_quantized_bins=num_quantized_bins,
        )

    @staticmethod
    def percentiles(
        dataset: Any = None, num_bins: int = 2048, percentile: float = 99.999
    ) -> CalibrationConfig:
        """The range that holds a share of the values."""
        return CalibrationConfig(
            **_described(dataset),
            method=CalibrationMethod.Percentile,
            num_bins=num_bins,
            percentile=percentile,
        )


def _described(dataset: Any) -> dict[str, Any]:
    """What a ``datasets.Dataset`` says of itself; nothing of other data."""
    info = getattr(dataset, "info", None)
    split = getattr(dataset, "split", None)
    return {
        "dataset_name": getattr(info, "builder_name", None),
        "dataset_config_name": getattr(info, "config_name", None),
        "dataset_split": None if split is None else str(split),
        "dataset_num_samples": getattr(dataset, "num_rows", None),
    }
