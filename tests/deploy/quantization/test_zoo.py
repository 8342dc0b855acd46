"""Whatever a file is peculiar in: what is written of it loads, and answers nearly as before."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    HalfPrecisionConfig,
    ORTQuantizer,
    QuantFormat,
    QuantizationConfig,
    WeightOnlyConfig,
)
from ortrain.errors import InputError, OrtrainWarning
from tests.breadth import crossed
from tests.deploy.quantization.models import OVERFLOWS, Arrays, checksums, exact, session
from tests.deploy.quantization.zoo import GRAPHS, SIZES, Graph, drawn, weight, whole

_PRESETS = ("arm64", "avx2", "avx512", "avx512_vnni", "ppc64le")
CONFIGS: dict[str, Any] = {
    **{f"dynamic {n}": (lambda n=n: getattr(AutoQuantizationConfig, n)(False)) for n in _PRESETS},
    **{f"static {n}": (lambda n=n: getattr(AutoQuantizationConfig, n)(True)) for n in _PRESETS},
    "dynamic with one scale": lambda: AutoQuantizationConfig.avx512_vnni(False, per_channel=False),
    "dynamic with zeros": lambda: AutoQuantizationConfig.avx512_vnni(
        False, use_symmetric_weights=False
    ),
    "static with one scale": lambda: AutoQuantizationConfig.avx2(True, per_channel=False),
    "static tensorrt": AutoQuantizationConfig.tensorrt,
    "static operators": lambda: QuantizationConfig(True, QuantFormat.QOperator, per_channel=True),
    "weights in 4 bits": lambda: WeightOnlyConfig(bits=4, block_size=16, accuracy_level=1),
    "weights in 4 bits, symmetric": lambda: WeightOnlyConfig(4, 16, symmetric=True),
    "weights in 8 bits": lambda: WeightOnlyConfig(bits=8, accuracy_level=1),
    "weights in 8 bits, symmetric": lambda: WeightOnlyConfig(8, 16, symmetric=True),
    "half": HalfPrecisionConfig,
    "half bfloat16": lambda: HalfPrecisionConfig("bfloat16"),
    "half computed": lambda: HalfPrecisionConfig(compute=True),
}
# The largest error of a batch, in parts of the answers' size.
LIMITS = {
    "dynamic": 0.06, "static": 0.12, "weights in 8": 0.03, "weights in 4": 0.3,
    "half bfloat16": 1e-2, "half": 4e-3,
}  # fmt: skip
# Of graphs that make more of the same error, by how much.
FACTORS = {
    "names that quantizers make": 4.0,  # more than twenty products in a row
    "moves of values and whole numbers": 4.0,  # and which is third of the largest
    "weights of odd numbers": 2.0,  # with a number far from all others
}
# Scores count beside a mask in float16, and are told to in docs/fusions.md.
LEFT_OUT = {("a constant mask of the lowest number", "half computed")}
if OVERFLOWS:  # also in products of two activations, which have no seven bits; it is for devices
    LEFT_OUT |= {(name, "static tensorrt") for name in (
        "products of activations", "a constant mask of the lowest number",
    )}  # fmt: skip


def limit_of(kind: str) -> float:
    limit = next(limit for begin, limit in LIMITS.items() if kind.startswith(begin))
    config = CONFIGS[kind]()
    return limit * (1 if exact(config) == config else 2)  # as wide as a step of seven bits


def outputs(path: Path, batches: list[Arrays]) -> list[list[np.ndarray]]:
    run = session(path)
    names = {value.name for value in run.get_inputs()}
    return [run.run(None, {n: a for n, a in b.items() if n in names}) for b in batches]


def error(before: list[list[np.ndarray]], after: list[list[np.ndarray]]) -> float:
    """The largest error of a batch in an output: root mean squares, by that of all batches."""
    found = [0.0]
    for old, new in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True):
        assert [(a.shape, a.dtype) for a in old] == [(a.shape, a.dtype) for a in new]
        if old[0].dtype.kind != "f":
            found += [float(np.mean(a != b)) for a, b in zip(old, new, strict=True) if a.size]
            continue
        size = _size(np.concatenate([array.reshape(-1) for array in old]))
        assert all(np.isfinite(array).all() for array in new)
        errors = [_size(a - b) for a, b in zip(old, new, strict=True) if a.size]
        found += [each / max(size, 1e-30) for each in errors]
    return max(found)


def _size(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array.astype(np.float64)))))


def quantized(graph: Graph, folder: Path, kind: str, *, external: bool = False) -> Path | None:
    """The file that is quantized; None where nothing in it can be."""
    batches = graph.batches()
    source = graph.save(folder / "source", external=external).parent
    before = checksums(source)
    quantizer, ranges = ORTQuantizer.from_pretrained(source), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrtrainWarning)  # of what stays
        try:
            if kind.startswith("static"):
                ranges = quantizer.fit(batches, AutoCalibrationConfig.minmax())
            config = exact(CONFIGS[kind]())
            quantizer.quantize(config, folder / "target", calibration_tensors_range=ranges)
        except InputError as refusal:
            told = ["nothing of", "no float32 weight"]
            told += ["inside If, Loop or Scan"] if kind.startswith("static") else []
            if not any(each in str(refusal) for each in told):
                raise
            return None
    assert checksums(source) == before
    return next((folder / "target").glob("*.onnx"))


@pytest.mark.parametrize(("kind", "name"), crossed(CONFIGS, GRAPHS, one_in=7))
def test_a_graph_with_one_peculiarity_answers_nearly_as_before(
    tmp_path: Path, kind: str, name: str
) -> None:
    if (name, kind) in LEFT_OUT:
        return
    graph = GRAPHS[name]()
    path = quantized(graph, tmp_path, kind, external=len(name) % 2 == 0)
    if path is None:
        return
    limit = limit_of(kind)
    before = outputs(tmp_path / "source" / "model.onnx", graph.batches())
    assert error(before, outputs(path, graph.batches())) < limit * FACTORS.get(name, 1.0)


@pytest.mark.parametrize("opset", [11, pytest.param(12, marks=pytest.mark.breadth)])
@pytest.mark.parametrize(
    "kind", ["dynamic avx2", "dynamic avx512_vnni", "static avx2", "static operators",
             "weights in 8 bits", "half"],
)  # fmt: skip
def test_files_of_old_opsets_are_quantized(tmp_path: Path, kind: str, opset: int) -> None:
    limit = limit_of(kind)
    for name in (
        "products", "gemm of all attributes", "products of activations", "odd sizes",
        "a table that is the output layer", "convolutions", "attention of onnxruntime",
    ):  # fmt: skip
        graph = dataclasses.replace(GRAPHS[name](), opset=opset)
        path = quantized(graph, tmp_path / name, kind)
        if path is None:
            assert name == "convolutions" or kind == "half"
            continue
        before = outputs(tmp_path / name / "source" / "model.onnx", graph.batches())
        assert error(before, outputs(path, graph.batches())) < limit


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        # A refusal is a finding, too: these are all that may be.
        *((name, ("weights",)) for name in (
            "a weight on the left", "a weight for each row", "convolutions of one and three axes",
            "transposed convolutions", "a convolution whose kernel is computed",
            "norms and pools of pictures",
        )),
        *((name, ("static",)) for name in ("branches", "a loop", "a scan")),
    ],
)  # fmt: skip
def test_nothing_else_is_refused(tmp_path: Path, name: str, kinds: tuple[str, ...]) -> None:
    for kind in ("dynamic avx2", "static avx2", "weights in 4 bits"):
        path = quantized(GRAPHS[name](), tmp_path / kind, kind)
        assert (path is None) == kind.startswith(kinds)


@pytest.mark.parametrize(
    "kind", ["dynamic avx2", "static avx2", "static operators", "weights in 4 bits", "half",
             "half bfloat16", "half computed"],
)  # fmt: skip
def test_names_do_not_matter(tmp_path: Path, kind: str) -> None:
    """Also those that a quantizer makes: it took what was there under such a name for its own."""
    graph = GRAPHS["names that quantizers make"]()
    path = quantized(graph, tmp_path, kind)
    model = onnx.load(tmp_path / "source" / "model.onnx")
    short = {w.name: f"m{i}" for i, w in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = short[tensor.name]
    for node in model.graph.node:
        node.input[:] = [short.get(name, name) for name in node.input]
    other = Renamed(graph.text, graph.inputs, graph.outputs, feeds=graph.feeds)
    other.made = model
    plain = quantized(other, tmp_path / "plain", kind)
    assert path is not None
    assert plain is not None
    for old, new in zip(
        outputs(plain, graph.batches()), outputs(path, graph.batches()), strict=True
    ):
        np.testing.assert_allclose(new[0], old[0], rtol=1e-5, atol=1e-5)


class Renamed(Graph):
    made: onnx.ModelProto

    def model(self) -> onnx.ModelProto:
        return self.made


@pytest.mark.parametrize("shown", ["x_quantized", "x_scale", "h_zero_point", "x.own"])
@pytest.mark.parametrize("kind", ["dynamic avx2", "static avx2", "static operators"])
def test_an_output_may_have_a_name_that_a_quantizer_makes(
    tmp_path: Path, kind: str, shown: str
) -> None:
    graph = Graph(
        f"h = MatMul(x, w)\n {shown.replace('.', 'POINT')} = MatMul(h, v)",
        outputs={shown.replace(".", "POINT"): "float"},
        weights={"w": weight(32, 32), "v": weight(32, 32, seed=3)},
    )
    path = quantized(graph, tmp_path, kind)
    assert path is not None
    assert onnx.load(path).graph.output[0].name.replace(".....", ".") == shown
    before = outputs(tmp_path / "source" / "model.onnx", graph.batches())
    assert error(before, outputs(path, graph.batches())) < 0.1


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32])
def test_weights_in_blocks_are_within_half_a_step_and_multiply_as_such(
    tmp_path: Path, bits: int, block: int, symmetric: bool
) -> None:
    graph = GRAPHS["gemm of all attributes"]()
    graph.save(tmp_path / "a")
    config = WeightOnlyConfig(bits, block, symmetric, accuracy_level=1)
    ORTQuantizer.from_pretrained(tmp_path / "a").quantize(config, tmp_path / "b")
    model = onnx.load(tmp_path / "b" / "model_quantized.onnx")
    held = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
    found = [unpacked(n, held) for n in model.graph.node if n.op_type == "MatMulNBits"]
    assert len(found) == 3
    w, v, u = graph.weights["w"].T * np.float32(0.5), graph.weights["v"], graph.weights["u"].T
    for (matrix, steps), true in zip(found, (w, v, u), strict=True):
        # Of a symmetric block, the largest number is a whole step beyond the last level.
        bound = steps * (1.01 if symmetric else 0.51)
        assert (np.abs(matrix - true) <= bound).all()
    for feeds in graph.batches():
        flat = feeds["x"].reshape(-1, 32).astype(np.float64)
        a = flat @ found[0][0] + 2.0 * graph.weights["c"]
        answer = a @ found[1][0] @ found[2][0] + 0.5 * graph.weights["one"]
        got = outputs(tmp_path / "b" / "model_quantized.onnx", [feeds])[0][0]
        np.testing.assert_allclose(got, answer, rtol=1e-4, atol=1e-4 * np.abs(answer).max())


def unpacked(node: onnx.NodeProto, held: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The matrix [K, N] of a ``MatMulNBits``, as its documentation defines it, and its steps."""
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    bits, block, columns = given["bits"], given["block_size"], given["N"]
    blocks = -(-given["K"] // block)

    def numbers(packed: np.ndarray) -> np.ndarray:
        if bits == 8:
            return packed
        return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)

    whole_numbers = numbers(held[node.input[1]]).reshape(columns, blocks, block).astype(np.float64)
    # Those of a symmetric block have the sign of its largest number.
    scales = held[node.input[2]].reshape(columns, blocks, 1).astype(np.float64)
    zeros: Any = 2 ** (bits - 1)
    if len(node.input) > 3 and node.input[3]:
        zeros = numbers(held[node.input[3]].reshape(columns, -1))[:, :blocks, None].astype(float)
    matrix = ((whole_numbers - zeros) * scales).reshape(columns, -1)[:, : given["K"]]
    steps = np.repeat(np.abs(scales), block, 2).reshape(columns, -1)[:, : given["K"]]
    return matrix.T, steps.T


def test_a_softmax_over_one_element_is_one_in_static_quantization(tmp_path: Path) -> None:
    """A session joined it with the pairs around it, and that kernel gives 0 there."""
    graph = Graph(
        "q = MatMul(x, w)\n t = Transpose<perm=[0,2,1]>(x)\n s = MatMul(q, t)\n"
        "p = Softmax(s)\n y = MatMul(p, x)",
        weights={"w": weight(32, 32)},
    )
    for kind in ("static arm64", "static operators"):
        path = quantized(graph, tmp_path / kind, kind)
        assert path is not None
        alone = {"x": drawn(2, 1, 32)}
        assert error([[alone["x"]]], outputs(path, [alone])) < 0.05


def test_products_of_16_bits_become_whole_numbers(tmp_path: Path) -> None:
    for kind in ("dynamic avx2", "static avx2"):
        path = quantized(GRAPHS["numbers of 16 bits"](), tmp_path / kind, kind)
        assert path is not None
        model = onnx.load(path)
        assert [value.type.tensor_type.elem_type for value in model.graph.input] == [10]
        weights = [w for w in model.graph.initializer if len(w.dims) == 2]
        assert {w.data_type for w in weights} <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
        assert len(weights) == 2


def test_texts_may_calibrate(tmp_path: Path) -> None:
    graph = GRAPHS["words and sequences"]()
    graph.save(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    rows = [{"x": b["x"], "words": list(b["words"])} for b in graph.batches()]
    assert quantizer.fit(rows, AutoCalibrationConfig.minmax()).keys() >= {"x", "h", "y"}


def test_scalars_are_fed_as_scalars(tmp_path: Path) -> None:
    graph = Graph(
        "h = MatMul(x, w)\n y = Mul(h, by)",
        inputs={"x": "float[b,n,32]", "by": "float"}, weights={"w": weight(32, 32)},
        feeds=[{"x": drawn(b, n, 32), "by": np.asarray(np.float32(b))} for b, n in SIZES],
    )  # fmt: skip
    assert quantized(graph, tmp_path, "static avx2") is not None


def test_what_is_no_matrix_is_told_to_stay_in_floating_point(tmp_path: Path) -> None:
    GRAPHS["a vector as weight"]().save(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    with pytest.warns(OrtrainWarning, match=r"1 nodes were to be quantized and stay.*MatMul_1"):
        quantizer.quantize(WeightOnlyConfig(block_size=16), tmp_path / "b")


def test_factors_are_in_a_bias_that_several_products_share(tmp_path: Path) -> None:
    """With the scale of another product it was another bias."""
    graph = Graph(
        """f = Reshape(x, flat)
        a = Gemm(f, w, c)
        b = Gemm<transB=1, beta=4.0>(a, v, c)
        y = Gemm<alpha=0.01>(b, w, c)""",
        weights={"w": weight(32, 32), "v": weight(32, 32, seed=3) * 9, "c": drawn(32),
                 "flat": whole(-1, 32)},
    )  # fmt: skip
    for kind in ("dynamic avx2", "static avx2", "static with one scale", "static operators"):
        path = quantized(graph, tmp_path / kind, kind)
        assert path is not None
        before = outputs(tmp_path / kind / "source" / "model.onnx", graph.batches())
        assert error(before, outputs(path, graph.batches())) < 0.06


@pytest.mark.parametrize("beside", [False, True])
def test_a_weight_beside_the_file_may_stay_in_two_forms(tmp_path: Path, beside: bool) -> None:
    """One was a view of the other, whose file was closed: nothing was written."""
    graph = Graph(
        "t = Transpose(w)\n u = MatMul(w, t)\n h = MatMul(x, v)\n y = MatMul(h, u)",
        weights={"w": weight(32, 32), "v": weight(32, 32, seed=3)},
    )
    before = graph.save(tmp_path / "a", external=True)
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    config = WeightOnlyConfig(8, 16, nodes_to_quantize=["MatMul_2"])
    quantizer.quantize(config, tmp_path / "b", use_external_data_format=beside)
    after = tmp_path / "b" / "model_quantized.onnx"
    assert error(outputs(before, graph.batches()), outputs(after, graph.batches())) < 0.03
