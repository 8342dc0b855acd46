"""Families of models, as exporters write them, in each kind of quantization, at several lengths."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    HalfPrecisionConfig,
    ORTQuantizer,
    WeightOnlyConfig,
)
from ortrain.errors import InputError, OrtrainWarning
from tests.breadth import crossed
from tests.deploy.optimization import exports
from tests.deploy.quantization.families import OTHERS, exported
from tests.deploy.quantization.models import checksums
from tests.deploy.quantization.test_zoo import error, outputs

FAMILIES = [*OTHERS, *exports.TEXT, *exports.PAIRS, *exports.VISION]
# Exporter, opset; dynamo takes ten times as long as torchscript.
EXPORTERS = [("torchscript", 14), ("torchscript", 17), ("dynamo", 18), ("dynamo", 20)]
# What PyTorch's exporters cannot write.
NOT_WRITTEN = {
    ("convnext", "torchscript"), ("convnext", "dynamo"), ("t5", "dynamo"), ("swin", "dynamo"),
}  # fmt: skip
METHODS = {
    "minmax": AutoCalibrationConfig.minmax,
    "percentiles": AutoCalibrationConfig.percentiles,
    "entropy": AutoCalibrationConfig.entropy,
}
CONFIGS = {
    "dynamic": (lambda: AutoQuantizationConfig.avx512_vnni(False), 0.12),
    "dynamic avx2": (lambda: AutoQuantizationConfig.avx2(False, per_channel=False), 0.12),
    "minmax": (lambda: AutoQuantizationConfig.avx512_vnni(True), 0.3),
    "percentiles": (AutoQuantizationConfig.tensorrt, 0.3),
    # It cuts by intent: attention of few words at 0.6. With zeros counted, errors were 0.7 to 0.95.
    "entropy": (lambda: AutoQuantizationConfig.avx2(True), 0.6),
    "4 bits": (lambda: WeightOnlyConfig(4, 16), 0.4),
    "8 bits": (lambda: WeightOnlyConfig(8, 32), 0.05),
    "half": (HalfPrecisionConfig, 5e-3),
}


@pytest.mark.parametrize(
    ("family", "exporter"),
    crossed(FAMILIES, EXPORTERS[:1], sample=["cnn", "mlp", "lstm", "gru"])
    + [
        pytest.param(family, exporter, marks=pytest.mark.breadth)
        for family in FAMILIES
        for exporter in EXPORTERS[1:]
    ],
)
def test_a_family_answers_nearly_as_before(
    tmp_path: Path, family: str, exporter: tuple[str, int]
) -> None:
    if (family, exporter[0]) in NOT_WRITTEN:
        pytest.skip("PyTorch's exporter does not write it")
    source = tmp_path / "source"
    source.mkdir()
    _, path, batches = exported(
        family, source / "model.onnx", exporter=exporter[0], opset=exporter[1]
    )
    feeds = [exports.arrays(batch) for batch in batches]
    before, sums = outputs(path, feeds), checksums(source)
    quantizer = ORTQuantizer.from_pretrained(source)
    for name, (config, limit) in CONFIGS.items():
        method, ranges = METHODS.get(name), None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OrtrainWarning)  # of what stays
            if method is not None:
                ranges = quantizer.fit(feeds, method())
            try:
                quantizer.quantize(config(), tmp_path / name, calibration_tensors_range=ranges)
            except InputError:
                assert name in ("4 bits", "8 bits")  # convolutions are not kept in blocks
                assert family in ("cnn", "resnet", "mobilenet")
                continue
        found = error(before, outputs(tmp_path / name / "model_quantized.onnx", feeds))
        assert found < limit, name
    assert checksums(source) == sums
