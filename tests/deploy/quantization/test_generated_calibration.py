"""Ranges of graphs drawn at random, against formulas over all of their activations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.shape_inference
import onnxruntime
import pytest
from onnx import TensorProto, helper

from ortrain.deploy.quantization import AutoCalibrationConfig, CalibrationConfig, ORTQuantizer
from tests.breadth import sampled
from tests.deploy.quantization.models import Arrays, saved

WIDTH = 6
# Operators of one operand, and what they make of numbers: one-sided, spread, few, tiny, large.
STEPS = ("Relu", "Softmax", "Tanh", "Neg", "Sigmoid", "small", "large", "shift", "product")


def drawn(folder: Path, seed: int) -> list[str]:
    """A chain of operators, each result of which a product reads; the names of all activations."""
    noise = np.random.default_rng(seed)
    nodes, weights, names, value = [], {}, ["x"], "x"
    for place, step in enumerate(noise.choice(STEPS, 5)):
        made = f"v{place}"
        if step in ("small", "large", "shift", "product"):
            kind = {"shift": "Add", "product": "MatMul"}.get(str(step), "Mul")
            by = {"small": 1e-3, "large": 1e3, "shift": 5.0}.get(str(step))
            shape = (WIDTH, WIDTH) if by is None else ()
            array = noise.standard_normal(shape) if by is None else np.asarray(by)
            weights[f"c{place}"] = array.astype(np.float32)
            nodes.append(helper.make_node(kind, [value, f"c{place}"], [made], name=f"n{place}"))
        else:
            nodes.append(helper.make_node(str(step), [value], [made], name=f"n{place}"))
        weights[f"w{place}"] = noise.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        product = helper.make_node("MatMul", [made, f"w{place}"], [f"p{place}"], name=f"m{place}")
        nodes.append(product)
        names += [made, f"p{place}"]
        value = made
    outputs = dict.fromkeys((f"p{i}" for i in range(5)), TensorProto.FLOAT)
    saved(folder, nodes, {"x": (TensorProto.FLOAT, ["batch", "n", WIDTH])}, outputs, weights)
    return names


def activations(folder: Path, data: list[Arrays], names: list[str]) -> dict[str, list[np.ndarray]]:
    """All values of each activation, row by row of the data, by a session that gives them all."""
    model = onnx.load(folder / "model.onnx")
    shown = {output.name for output in model.graph.output} | {"x"}
    model.graph.output.extend(
        helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names if n not in shown
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    wanted = [name for name in names if name != "x"]
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for row in data:
        batch = {"x": row["x"][None]}
        found["x"].append(row["x"].ravel())
        for name, array in zip(wanted, session.run(wanted, batch), strict=True):
            found[name].append(array.ravel())
    return found


def sharded(folder: Path, data: list[Arrays], config: CalibrationConfig) -> dict[str, np.ndarray]:
    quantizer = ORTQuantizer.from_pretrained(folder)
    for start in (0, 7, 9):
        end = {0: 7, 7: 9}.get(start)
        quantizer.partial_fit(data[start:end], config, batch_size=start % 3 + 1)
    return {name: np.asarray(pair) for name, pair in quantizer.compute_ranges().items()}


@pytest.mark.parametrize("seed", sampled(range(40), range(6)))
def test_ranges_are_those_of_the_formulas(tmp_path: Path, seed: int) -> None:
    names = drawn(tmp_path / "a", seed)
    noise = np.random.default_rng(seed + 1000)
    data = [
        {"x": (noise.standard_normal((noise.integers(1, 30), WIDTH)) * s).astype(np.float32)}
        for s in noise.choice([0.1, 1.0, 10.0], 20)
    ]
    values = {n: np.concatenate(v) for n, v in activations(tmp_path / "a", data, names).items()}
    found = sharded(tmp_path / "a", data, AutoCalibrationConfig.minmax())
    assert found.keys() >= {*names} - {"x"}  # which a Neg or a Tanh may read, and nothing else
    values = {name: all_of for name, all_of in values.items() if name in found}
    for name, all_of in values.items():
        expected = [all_of.min(), all_of.max()]
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-7)
    for percentile in (90.0, 99.0, 99.99):
        config = AutoCalibrationConfig.percentiles(percentile=percentile)
        found = sharded(tmp_path / "a", data, config)
        tail = (100 - percentile) / 2
        for name, all_of in values.items():
            # Between the values on both sides of the place, to a bin: a 2048th of the largest.
            bin_of = np.abs(all_of).max() / 2048 * 1.01
            for place, share in zip(found[name], (tail, 100 - tail), strict=True):
                low, high = (np.percentile(all_of, share, method=m) for m in ("lower", "higher"))
                around = np.searchsorted(np.sort(all_of), [low, high])
                ordered = np.sort(all_of)
                below = ordered[max(around[0] - 1, 0)]
                above = ordered[min(around[1] + 1, len(ordered) - 1)]
                assert below - bin_of <= place <= above + bin_of, (name, percentile)
    found = sharded(tmp_path / "a", data, AutoCalibrationConfig.entropy())
    for name, all_of in values.items():
        low, high = found[name]
        assert all_of.min() - 1e-6 <= low <= high <= all_of.max() + 1e-6 * abs(all_of.max())
        # What is cut is rare, to the bin that a border lies in; zeros are in any range.
        width = 2 * np.abs(all_of).max() / 128
        inside = ((all_of >= low - width) & (all_of <= high + width)).mean()
        assert inside >= 0.99, (name, inside)


@pytest.mark.parametrize("constant", [0.5, 0.01])
def test_a_moving_average_is_that_of_the_formula(tmp_path: Path, constant: float) -> None:
    names = drawn(tmp_path / "a", 3)
    noise = np.random.default_rng(5)
    data = [{"x": (noise.standard_normal((7, WIDTH)) * s).astype(np.float32)} for s in range(1, 9)]
    config = AutoCalibrationConfig.minmax(moving_average=True, averaging_constant=constant)
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    for start in (0, 3, 4):
        quantizer.partial_fit(data[start : {0: 3, 3: 4}.get(start)], config)
    found = quantizer.compute_ranges()
    for name, rows in activations(tmp_path / "a", data, names).items():
        low, high = rows[0].min(), rows[0].max()
        for row in rows[1:]:
            low, high = low + constant * (row.min() - low), high + constant * (row.max() - high)
        np.testing.assert_allclose(found[name], [low, high], rtol=1e-4, atol=1e-6)
