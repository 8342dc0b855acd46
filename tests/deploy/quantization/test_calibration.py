"""Ranges: of all data whatever its shards, sizes and form are, with nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    CalibrationConfig,
    ORTCalibrationDataReader,
    ORTQuantizer,
)
from ortrain.errors import ExecutionError, InputError, OrtrainWarning, StateError
from tests.deploy.quantization.models import (
    WIDTH,
    WORDS,
    Arrays,
    answers,
    checksums,
    classifier,
    exact,
    generator,
    ids,
    operators,
    relative,
    saved,
)

METHODS = {
    "minmax": AutoCalibrationConfig.minmax(),
    "entropy": AutoCalibrationConfig.entropy(),
    "percentiles": AutoCalibrationConfig.percentiles(percentile=99.9),
}


def product(folder: Path) -> Path:
    """A product and a sum of rows of any length."""
    rng = generator()
    weights = {
        "w": rng.standard_normal((8, 8), dtype=np.float32),
        "b": rng.standard_normal(8, dtype=np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Add", ["m", "b"], ["y"], name="bias"),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["batch", "length", 8])}
    return saved(folder, nodes, inputs, {"y": TensorProto.FLOAT}, weights)


def rows(scales: list[float], seed: int = 0, lengths: tuple[int, ...] = (3, 5, 2)) -> list[Arrays]:
    rng = generator(seed)
    return [
        {"x": rng.standard_normal((lengths[i % len(lengths)], 8), dtype=np.float32) * np.float32(s)}
        for i, s in enumerate(scales)
    ]


def quantizer(tmp_path: Path) -> ORTQuantizer:
    if not (tmp_path / "a").exists():
        product(tmp_path / "a")
    return ORTQuantizer.from_pretrained(tmp_path / "a")


@pytest.mark.parametrize("method", METHODS)
def test_ranges_of_shards_are_those_of_all_data(tmp_path: Path, method: str) -> None:
    data = rows([1, 1, 100, 1, 0.01, 0.01])
    whole = quantizer(tmp_path).fit(data, METHODS[method])
    sharded = quantizer(tmp_path)
    for start in range(0, 6, 2):
        sharded.partial_fit(data[start : start + 2], METHODS[method])
    assert sharded.compute_ranges() == whole
    reverse = quantizer(tmp_path)
    for each in reversed(data):
        reverse.partial_fit([each], METHODS[method])
    assert reverse.compute_ranges() == whole


def test_minmax_is_the_smallest_and_the_largest_value(tmp_path: Path) -> None:
    data = rows([1, 50, 2])
    found = quantizer(tmp_path).fit(data, METHODS["minmax"])
    values = np.concatenate([each["x"].ravel() for each in data])
    assert found["x"] == (float(values.min()), float(values.max()))
    path = tmp_path / "a" / "model.onnx"
    outputs = [answers(path, {"x": each["x"][None]})[0].ravel() for each in data]
    expected = np.concatenate(outputs)
    assert found["y"] == pytest.approx((expected.min(), expected.max()), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_any_length_with_any_batch_size_give_the_same_ranges(
    tmp_path: Path, method: str, batch_size: int
) -> None:
    data = rows([1, 2, 3, 4, 5, 6, 7])
    one = quantizer(tmp_path).fit(data, METHODS[method])
    found = quantizer(tmp_path).fit(data, METHODS[method], batch_size=batch_size)
    assert found.keys() == one.keys()
    for name, (low, high) in found.items():
        # A product of more rows sums in another order.
        assert (low, high) == pytest.approx(one[name], rel=1e-3)


def test_a_moving_average_goes_on_over_shards(tmp_path: Path) -> None:
    data = rows([1, 2, 3, 4])
    config = AutoCalibrationConfig.minmax(moving_average=True, averaging_constant=0.5)
    found = quantizer(tmp_path)
    found.partial_fit(data[:2], config)
    found.partial_fit(data[2:], config)
    high = float(data[0]["x"].max())
    for each in data[1:]:
        high += 0.5 * (float(each["x"].max()) - high)
    assert found.compute_ranges()["x"][1] == pytest.approx(high, rel=1e-6)


def test_a_percentile_is_that_of_all_values(tmp_path: Path) -> None:
    data = rows([1] * 60, lengths=(40,))
    config = AutoCalibrationConfig.percentiles(percentile=90.0)
    low, high = quantizer(tmp_path).fit(data, config)["x"]
    values = np.concatenate([each["x"].ravel() for each in data])
    assert low == pytest.approx(np.percentile(values, 5), abs=0.01)
    assert high == pytest.approx(np.percentile(values, 95), abs=0.01)


def test_symmetric_ranges_are_symmetric(tmp_path: Path) -> None:
    for config in METHODS.values():
        found = quantizer(tmp_path).fit(rows([1, 2]), config, force_symmetric_range=True)
        assert all(low == -high for low, high in found.values())


def test_fit_begins_anew(tmp_path: Path) -> None:
    one = quantizer(tmp_path)
    one.fit(rows([100]), METHODS["minmax"])
    assert one.fit(rows([1]), METHODS["minmax"]) == quantizer(tmp_path).fit(
        rows([1]), METHODS["minmax"]
    )


def test_shards_of_two_methods_are_an_error(tmp_path: Path) -> None:
    one = quantizer(tmp_path)
    one.partial_fit(rows([1]), METHODS["minmax"])
    with pytest.raises(StateError, match="another method"):
        one.partial_fit(rows([1]), METHODS["entropy"])


def test_nothing_collected_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing has been collected"):
        quantizer(tmp_path).compute_ranges()
    with pytest.raises(ValueError, match="nothing has been collected"):
        quantizer(tmp_path).fit([], METHODS["minmax"])


def test_no_file_is_left_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    product(tmp_path / "a")
    before = checksums(tmp_path / "a")
    for config in METHODS.values():
        quantizer(tmp_path).fit(rows([1, 2]), config)
    assert checksums(tmp_path / "a") == before
    assert not list((tmp_path / "here").iterdir())
    assert not list((tmp_path / "temporary").iterdir())


def test_activations_are_held_in_groups_of_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows([1, 2, 3, 4])
    config = METHODS["percentiles"]
    whole = quantizer(tmp_path).fit(data, config)
    from ortrain.deploy.quantization import calibrator

    groups: list[list[str]] = []
    grouped = calibrator._grouped

    def watched(*given: Any) -> list[list[str]]:
        groups[:] = grouped(*given)
        return groups

    monkeypatch.setattr(calibrator, "_grouped", watched)
    monkeypatch.setattr(
        calibrator.Calibrator.__init__,
        "__kwdefaults__",
        {
            **(calibrator.Calibrator.__init__.__kwdefaults__ or {}),
            "held": 4,
        },
    )
    assert quantizer(tmp_path).fit(data, config) == whole
    assert len(groups) == 3
    assert all(len(group) == 1 for group in groups)


def test_masks_of_infinities_have_no_range_and_their_nodes_stay(tmp_path: Path) -> None:
    rng = generator()
    weights = {
        "w": rng.standard_normal((8, 8), dtype=np.float32),
        "lowest": np.float32(-np.inf).reshape(()),
        "zero": np.float32(0).reshape(()),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Where", ["keep", "zero", "lowest"], ["mask"], name="mask"),
        helper.make_node("Add", ["m", "mask"], ["scores"], name="add"),
        helper.make_node("Softmax", ["scores"], ["y"], name="softmax"),
    ]
    inputs = {
        "x": (TensorProto.FLOAT, ["n", 8]),
        "keep": (TensorProto.BOOL, ["n", 8]),
    }
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    keep = np.ones((3, 8), bool)
    keep[:, 5:] = False
    data = [{"x": rng.standard_normal((3, 8), dtype=np.float32), "keep": keep}]
    one = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = one.fit(data, METHODS["minmax"])
    assert {"mask", "scores"}.isdisjoint(found)
    config = exact(AutoQuantizationConfig.avx512_vnni(is_static=True))
    one.quantize(config, tmp_path / "b", calibration_tensors_range=found)
    after = tmp_path / "b" / "model_quantized.onnx"
    old, new = answers(before, data[0])[0], answers(after, data[0])[0]
    assert (new[:, 5:] == 0).all()
    assert relative(old, new) < 0.05
    config.nodes_to_quantize = ["product", "mask"]
    with pytest.warns(OrtrainWarning, match="mask .calibration has no range of mask"):
        one.quantize(config, tmp_path / "c", calibration_tensors_range=found)


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A map-style data set that never raises an IndexError."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        values = generator(index % 6).integers(0, WORDS, 5)
        return {"input_ids": torch.as_tensor(values), "labels": torch.tensor(index % 4)}


def test_every_kind_of_data_gives_the_same_ranges(tmp_path: Path) -> None:
    import datasets

    classifier(tmp_path / "a")
    lists = [
        {"input_ids": each["input_ids"].tolist()} for each in map(Data().__getitem__, range(6))
    ]

    def stream() -> Iterator[dict[str, list[int]]]:
        yield from lists

    table = datasets.Dataset.from_list([{**each, "text": "words"} for each in lists])
    kinds: dict[str, Any] = {
        "list": lists,
        "iterator": stream(),
        "dataset": table,
        "torch columns": table.with_format("torch", columns=["input_ids"]),
        "loader": torch.utils.data.DataLoader(Data(), batch_size=1),
        "torch dataset": Data(),
        "pairs": [(each, 1) for each in lists],
        "batches": [{"input_ids": np.asarray([each["input_ids"]])} for each in lists],
    }
    found = {
        kind: ORTQuantizer.from_pretrained(tmp_path / "a").fit(data, METHODS["minmax"])
        for kind, data in kinds.items()
    }
    for kind, ranges in found.items():
        assert ranges == found["list"], kind


def test_a_column_that_is_missing_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing that a model takes"):
        quantizer(tmp_path).fit([{"text": "words"}], METHODS["minmax"])


def test_data_of_another_rank_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has shapes"):
        quantizer(tmp_path).fit([{"x": np.zeros(8, np.float32)}], METHODS["minmax"])


def test_data_that_the_model_cannot_run_on_is_an_error_with_its_shapes(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match=r"'x': \(1, 3, 7\)"):
        quantizer(tmp_path).fit([{"x": np.zeros((1, 3, 7), np.float32)}], METHODS["minmax"])


def test_a_text_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="dataset='sst2'"):
        quantizer(tmp_path).fit("sst2", METHODS["minmax"])


def test_a_reader_gives_batches_of_rows_of_one_size_and_begins_again() -> None:
    data = rows([1, 2, 3, 4], lengths=(3, 5))
    reader = ORTCalibrationDataReader(data, batch_size=4, names=["x"], ranks={"x": 3})
    shapes = []
    while (batch := reader.get_next()) is not None:
        shapes.append(batch["x"].shape)
    assert shapes == [(2, 3, 8), (2, 5, 8)]
    first = reader.get_next()
    assert first is not None
    assert first["x"].shape == (2, 3, 8)


def test_a_device_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CUDAExecutionProvider"):
        quantizer(tmp_path).fit(rows([1]), METHODS["minmax"], use_gpu=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"percentile": 101}, "percentile=101"),
        ({"num_bins": 1}, "num_bins=1"),
        ({"method": "median"}, "method='median'"),
        ({"method": "Distribution"}, "Distribution"),
        ({"averaging_constant": 2}, "averaging_constant=2"),
    ],
)
def test_a_wrong_configuration_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CalibrationConfig(**given)


PRESETS = ("arm64", "avx2", "avx512", "avx512_vnni", "ppc64le", "tensorrt")


@pytest.mark.parametrize(
    ("preset", "method"),
    [*((preset, "minmax") for preset in PRESETS), ("avx2", "entropy"), ("tensorrt", "percentiles")],
)
def test_static_quantization_answers_nearly_the_same(
    tmp_path: Path, preset: str, method: str
) -> None:
    before = classifier(tmp_path / "a")
    static = {} if preset == "tensorrt" else {"is_static": True}
    config = exact(getattr(AutoQuantizationConfig, preset)(**static))
    one = ORTQuantizer.from_pretrained(tmp_path / "a")
    data = [ids(8, 6, seed) for seed in range(4)]
    found = one.fit(data, METHODS[method], force_symmetric_range=config.use_symmetric_calibration)
    one.quantize(config, tmp_path / "b", calibration_tensors_range=found)
    after = tmp_path / "b" / "model_quantized.onnx"
    counts = operators(after)
    assert counts["QuantizeLinear"] > 4
    error = relative(answers(before, ids(8, 6, 9))[0], answers(after, ids(8, 6, 9))[0])
    assert 0 < error < 0.12


def test_static_quantization_stores_weights_as_integers(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    one = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = one.fit([ids()], METHODS["minmax"])
    config = exact(AutoQuantizationConfig.avx512_vnni(is_static=True))
    one.quantize(config, tmp_path / "b", calibration_tensors_range=found)
    model = onnx.load(tmp_path / "b" / "model_quantized.onnx")
    large = {i.name: i.data_type for i in model.graph.initializer if np.prod(i.dims) >= 4 * WIDTH}
    assert len(large) == 4
    assert set(large.values()) <= {TensorProto.INT8, TensorProto.UINT8}


def test_static_quantization_in_quantized_operators_runs_too(tmp_path: Path) -> None:
    before = classifier(tmp_path / "a")
    config = AutoQuantizationConfig.avx2(is_static=True, per_channel=False)
    config.format = type(config.format).QOperator
    config.operators_to_quantize = ["MatMul", "Gemm"]
    one = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = one.fit([ids(16, 6)], METHODS["minmax"])
    one.quantize(config, tmp_path / "b", calibration_tensors_range=found)
    after = tmp_path / "b" / "model_quantized.onnx"
    assert operators(after)["QLinearMatMul"] == 2
    assert operators(after)["QGemm"] == 1
    assert relative(answers(before, ids(16, 6))[0], answers(after, ids(16, 6))[0]) < 0.1


def test_ranges_of_onnxruntimes_own_calibration_are_taken_as_well(tmp_path: Path) -> None:
    from ortrain.deploy.quantization.rewriting import tensors_data

    classifier(tmp_path / "a")
    one = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = one.fit([ids()], METHODS["minmax"])
    config = exact(AutoQuantizationConfig.avx512_vnni(is_static=True))
    one.quantize(config, tmp_path / "b", calibration_tensors_range=found)
    one.quantize(config, tmp_path / "c", calibration_tensors_range=tensors_data(found))
    assert checksums(tmp_path / "b") == checksums(tmp_path / "c")


def test_static_quantization_without_ranges_is_an_error(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    config = exact(AutoQuantizationConfig.avx512_vnni(is_static=True))
    with pytest.raises(ValueError, match="needs the ranges of activations"):
        ORTQuantizer.from_pretrained(tmp_path / "a").quantize(config, tmp_path / "b")


def test_products_in_sub_graphs_are_one_clear_error_where_it_is_static(tmp_path: Path) -> None:
    from tests.deploy.quantization.test_dynamic import branches

    branches(tmp_path / "a", outside=True)
    one = ORTQuantizer.from_pretrained(tmp_path / "a")
    data = [{"x": np.ones((2, WIDTH), np.float32), "switch": np.array(True)}]
    with pytest.raises(InputError, match="products inside If, Loop or Scan"):
        one.fit(data, METHODS["minmax"])


def test_ranges_of_two_processes_can_be_merged(tmp_path: Path) -> None:
    path = product(tmp_path / "a")
    data = rows([1, 5, 2, 9])
    batches = [{"x": each["x"][None]} for each in data]
    for config in METHODS.values():
        whole, one, two = (config.create_calibrator(path) for _ in range(3))
        whole.collect(batches)
        one.collect(batches[:1])
        two.collect(batches[1:])
        one.merge(two)
        assert one.ranges() == whole.ranges()
        for each in (whole, one, two):
            each.close()


def test_a_transposed_weight_that_stays_is_neither_quantized_nor_complained_of(
    tmp_path: Path,
) -> None:
    before = classifier(tmp_path / "a")
    one = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = one.fit([ids()], METHODS["minmax"])
    config = exact(
        AutoQuantizationConfig.avx512_vnni(is_static=True, nodes_to_exclude=["product_0"])
    )
    one.quantize(config, tmp_path / "b", calibration_tensors_range=found)
    after = tmp_path / "b" / "model_quantized.onnx"
    kinds = {i.name: i.data_type for i in onnx.load(after).graph.initializer}
    assert kinds["w0"] == TensorProto.FLOAT
    assert relative(answers(before, ids())[0], answers(after, ids())[0]) < 0.1


def test_ranges_are_those_of_onnxruntimes_calibration_where_that_is_right(tmp_path: Path) -> None:
    """One shard of one length: what the library's own calibrators are right on."""
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    path = product(tmp_path / "a")
    data = rows([1, 3, 2, 5], lengths=(40,))
    (tmp_path / "work").mkdir()
    for method, given, close in (
        (CalibrationMethod.MinMax, METHODS["minmax"], 1e-6),
        (CalibrationMethod.Percentile, AutoCalibrationConfig.percentiles(percentile=99.0), 0.01),
    ):
        other = create_calibrator(
            path,
            ["MatMul", "Add"],
            augmented_model_path=str(tmp_path / "work" / "augmented.onnx"),
            calibrate_method=method,
            extra_options={"num_bins": 2048, "percentile": 99.0, "symmetric": False},
        )
        other.collect_data(iter_reader([{"x": each["x"][None]} for each in data]))
        theirs = {
            name: [float(np.asarray(value).item()) for value in each.range_value]
            for name, each in other.compute_data().data.items()
        }
        ours = quantizer(tmp_path).fit(data, given, operators_to_quantize=["MatMul", "Add"])
        assert ours.keys() == theirs.keys()
        for name, (low, high) in ours.items():
            size = max(map(abs, theirs[name]))
            assert low == pytest.approx(theirs[name][0], abs=close * size)
            assert high == pytest.approx(theirs[name][1], abs=close * size)


def iter_reader(batches: list[Arrays]) -> Any:
    """Batches as onnxruntime's calibrators read them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(batches)

        def get_next(self) -> Arrays | None:
            return next(self._left, None)

    return Reader()
