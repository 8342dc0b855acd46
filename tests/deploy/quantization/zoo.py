"""Graphs of foreign files, one peculiarity each, that quantizers have to bear.

Each is ONNX text with weights by name and batches of several sizes. What a file has in the large
(families of transformers, exporters, opsets) is in ``test_families.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

Arrays = dict[str, np.ndarray]
WIDTH = 32
SIZES = ((2, 5), (1, 1), (3, 8))


@dataclass
class Graph:
    """One graph.

    Attributes:
        text: nodes of its body, as ``onnx.parser`` reads them.
        inputs: name → type, as ``float[b,n,32]``.
        outputs: the same.
        weights: name → array.
        fed: names of weights that are inputs as well.
        opset: of ONNX's operators.
        feeds: batches; by default of ``x`` ``[b, n, 32]``.
        before: functions of the model's own, as text.
        ir_version: of the format.
        nothing: kinds of quantization by which nothing in it can be quantized.
    """

    text: str
    inputs: dict[str, str] = field(default_factory=lambda: {"x": f"float[b,n,{WIDTH}]"})
    outputs: dict[str, str] = field(default_factory=lambda: {"y": "float"})
    weights: Arrays = field(default_factory=dict)
    fed: tuple[str, ...] = ()
    opset: int = 21
    feeds: list[Arrays] | None = None
    before: str = ""
    ir_version: int = 10
    nothing: tuple[str, ...] = ()

    def batches(self) -> list[Arrays]:
        """What it is run on."""
        if self.feeds is not None:
            return self.feeds
        return [{"x": drawn(b, n, WIDTH, seed=b)} for b, n in SIZES]

    def model(self) -> onnx.ModelProto:
        """The model, with its weights inside."""
        listed = [", ".join(f"{kind} {name}" for name, kind in part.items())
                  for part in (self.inputs, self.outputs)]  # fmt: skip
        imports = f'"" : {self.opset}, "com.microsoft" : 1' + (', "own" : 1' * bool(self.before))
        text = f"<ir_version: {self.ir_version}, opset_import: [{imports}]>\n"
        text += f"graph ({listed[0]}) => ({listed[1]}) {{\n{self.text}\n}}\n{self.before}"
        model = parser.parse_model(text)
        for name, array in self.weights.items():
            model.graph.initializer.append(numpy_helper.from_array(array, name))
            if name in self.fed:
                kind = helper.np_dtype_to_tensor_dtype(array.dtype)
                model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
        return _renamed(model)

    def save(self, folder: Path, *, external: bool = False) -> Path:
        """Writes it, with its weights beside it where that is asked for."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "model.onnx"
        onnx.save(self.model(), path, save_as_external_data=external, location="model.weights",
                  size_threshold=256)  # fmt: skip
        return path


def _renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """With points, slashes and colons in the places of words: the parser does not read them."""
    text = model.SerializeToString()
    for word, mark in (("POINT", "....."), ("SLASH", "/////"), ("COLON", ":::::")):
        text = text.replace(word.encode(), mark.encode())  # of the same length
    return onnx.load_from_string(text)


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    numbers = np.random.default_rng([seed, *shape]).standard_normal(shape) * scale
    return numbers.astype(np.float32)


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers by which values keep their size; each column has a size of its own."""
    numbers = drawn(*shape, seed=seed) / np.sqrt(shape[0] if len(shape) < 3 else WIDTH)
    columns = np.exp(drawn(shape[-1], seed=seed + 1) / 2)
    return np.asarray(numbers * columns, np.float32)


def whole(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


GRAPHS: dict[str, Callable[[], Graph]] = {}


def graph(function: Callable[[], Graph]) -> Callable[[], Graph]:
    GRAPHS[function.__name__.replace("_", " ")] = function
    return function


def _two(seed: int = 0) -> Arrays:
    return {"w": weight(WIDTH, WIDTH, seed=seed), "v": weight(WIDTH, 8, seed=seed + 7)}


# -- products --------------------------------------------------------------------------------------


@graph
def products() -> Graph:
    return Graph("h = MatMul(x, w)\n r = Relu(h)\n y = MatMul(r, v)", weights=_two())


@graph
def gemm_of_all_attributes() -> Graph:
    return Graph(
        """f = Reshape(x, flat)
        a = Gemm<transB=1, alpha=0.5, beta=2.0>(f, w, c)
        t = Transpose(a)
        e = Gemm<transA=1>(t, v)
        y = Gemm<transB=1, beta=0.5>(e, u, one)""",
        weights={"w": weight(WIDTH, WIDTH).T.copy(), "v": weight(WIDTH, 24, seed=2),
                 "u": weight(24, 8, seed=3).T.copy(), "c": drawn(WIDTH), "flat": whole(-1, WIDTH),
                 "one": np.float32([0.25])},
    )  # fmt: skip


@graph
def gemm_whose_bias_is_a_number_or_a_column() -> Graph:
    return Graph(
        """f = Reshape(x, flat)
        a = Gemm(f, w, number)
        b = Gemm(a, v, row)
        y = Gemm(b, u, column)""",
        feeds=[{"x": drawn(1, 4, WIDTH, seed=s)} for s in range(2)],
        weights={"w": weight(WIDTH, WIDTH), "v": weight(WIDTH, 24, seed=2),
                 "u": weight(24, 8, seed=3), "number": np.float32(0.5), "flat": whole(-1, WIDTH),
                 "row": drawn(1, 24), "column": drawn(4, 1)},
    )  # fmt: skip


@graph
def gemm_whose_bias_is_computed() -> Graph:
    return Graph(
        """f = Reshape(x, flat)
        c = ReduceMean<keepdims=1>(f, zero)
        y = Gemm<alpha=2.0>(f, w, c)""",
        weights={"w": weight(WIDTH, WIDTH), "flat": whole(-1, WIDTH), "zero": whole(0)},
    )


@graph
def a_vector_as_weight() -> Graph:
    return Graph("h = MatMul(x, w)\n y = MatMul(h, v)",
                 weights={"w": weight(WIDTH, WIDTH), "v": drawn(WIDTH)})  # fmt: skip


@graph
def a_weight_on_the_left() -> Graph:
    return Graph("t = Transpose<perm=[0,2,1]>(x)\n h = MatMul(w, t)\n y = MatMul(v, h)",
                 weights={"w": weight(WIDTH, WIDTH), "v": weight(WIDTH, 8).T.copy()})  # fmt: skip


@graph
def a_weight_for_each_row() -> Graph:
    return Graph(
        "h = Unsqueeze(x, one)\n p = MatMul(h, w)\n q = MatMul(p, v)\n y = ReduceSum(q, one)",
        weights={"w": weight(3, WIDTH, WIDTH), "v": weight(1, 3, WIDTH, 8), "one": whole(1)},
    )


@graph
def a_vector_as_input() -> Graph:
    return Graph("h = MatMul(x, w)\n r = Relu(h)\n y = MatMul(r, v)", weights=_two(),
                 inputs={"x": f"float[{WIDTH}]"},
                 feeds=[{"x": drawn(WIDTH, seed=s)} for s in range(3)])  # fmt: skip


@graph
def odd_sizes() -> Graph:
    return Graph("h = MatMul(x, w)\n r = Relu(h)\n y = MatMul(r, v)",
                 weights={"w": weight(WIDTH, 33), "v": weight(33, 1, seed=4)})  # fmt: skip


@graph
def products_of_activations() -> Graph:
    return Graph(
        """q = MatMul(x, w)
        t = Transpose<perm=[0,2,1]>(q)
        s = MatMul(x, t)
        p = Softmax<axis=-1>(s)
        y = MatMul(p, x)""",
        weights={"w": weight(WIDTH, WIDTH)},
    )


@graph
def a_masked_softmax() -> Graph:
    batches = []
    for (b, n), low in zip(SIZES, (-np.inf, np.finfo(np.float32).min, -1e9), strict=True):
        mask = np.where(np.arange(n) < max(1, n - 2), 0.0, low)
        mask = np.broadcast_to(mask, (b, 1, n)).astype(np.float32)
        batches.append({"x": drawn(b, n, WIDTH), "mask": mask})
    return Graph(
        """q = MatMul(x, w)
        t = Transpose<perm=[0,2,1]>(q)
        s = MatMul(x, t)
        m = Add(s, mask)
        p = Softmax<axis=-1>(m)
        y = MatMul(p, x)""",
        inputs={"x": f"float[b,n,{WIDTH}]", "mask": "float[b,1,n]"},
        weights={"w": weight(WIDTH, WIDTH)}, feeds=batches,
    )  # fmt: skip


@graph
def a_constant_mask_of_the_lowest_number() -> Graph:
    """Of positions, as GPT-2 has it: more numbers than a formula has."""
    low = float(np.finfo(np.float32).min)
    mask = np.where(np.tri(16, dtype=bool), 0.0, low).astype(np.float32)
    mask[3] = low  # a row that is masked as a whole
    return Graph(
        """q = MatMul(x, w)
        t = Transpose<perm=[0,2,1]>(q)
        s = MatMul(x, t)
        size = Shape<start=1, end=2>(x)
        a = Slice(mask, zero, size, zero)
        b = Slice(a, zero, size, one)
        m = Add(s, b)
        p = Softmax<axis=-1>(m)
        y = MatMul(p, x)""",
        weights={"w": weight(WIDTH, WIDTH) / 4, "mask": mask, "zero": whole(0), "one": whole(1)},
    )  # fmt: skip


@graph
def an_einsum() -> Graph:
    return Graph('h = Einsum<equation="bij,jk->bik">(x, w)\n y = MatMul(h, v)', weights=_two())


@graph
def a_fused_product() -> Graph:
    return Graph(
        """h = com.microsoft.FusedMatMul<alpha=0.5, transB=1>(x, w)
        f = Reshape(h, flat)
        y = com.microsoft.FusedGemm<transB=1, alpha=2.0, activation="Relu">(f, v, c)""",
        weights={"w": weight(WIDTH, WIDTH).T.copy(), "v": weight(WIDTH, 8).T.copy(),
                 "c": drawn(8), "flat": whole(-1, WIDTH)},
    )  # fmt: skip


# -- weights that several read, or that others may see ---------------------------------------------


@graph
def a_weight_in_several_places() -> Graph:
    return Graph(
        """h = MatMul(x, w)
        f = Reshape(h, flat)
        g = Gemm<transB=1>(f, w)
        t = Transpose(w)
        k = MatMul(g, t)
        l = MatMul(w, w)
        m = MatMul(k, l)
        n = Add(m, row)
        top = ReduceMax<keepdims=0>(w)
        y = Mul(n, top)""",
        weights={"w": weight(WIDTH, WIDTH), "flat": whole(-1, WIDTH), "row": drawn(WIDTH)},
    )  # fmt: skip


@graph
def a_table_that_is_the_output_layer() -> Graph:
    ids = [{"ids": np.random.default_rng(b).integers(0, 50, (b, n))} for b, n in SIZES]
    return Graph(
        """e = Gather(table, ids)
        h = MatMul(e, w)
        t = Transpose<perm=[1,0]>(table)
        y = MatMul(h, t)""",
        inputs={"ids": "int64[b,n]"}, feeds=ids,
        weights={"table": weight(50, WIDTH), "w": weight(WIDTH, WIDTH)},
    )  # fmt: skip


@graph
def a_table_that_a_gemm_reads() -> Graph:
    ids = [{"ids": np.random.default_rng(b).integers(0, 50, (b, n))} for b, n in SIZES]
    return Graph(
        """e = Gather(table, ids)
        h = MatMul(e, w)
        f = Reshape(h, flat)
        y = Gemm<transB=1, alpha=0.125>(f, table, bias)""",
        inputs={"ids": "int64[b,n]"}, feeds=ids,
        weights={"table": weight(50, WIDTH), "w": weight(WIDTH, WIDTH), "bias": drawn(50),
                 "flat": whole(-1, WIDTH)},
    )  # fmt: skip


@graph
def a_weight_that_is_an_output() -> Graph:
    return Graph(
        "h = MatMul(x, w)\n y = MatMul(h, v)",
        outputs={"y": "float", "w": f"float[{WIDTH},{WIDTH}]"},
        weights=_two(),
    )


@graph
def a_weight_that_may_be_fed() -> Graph:
    return Graph("h = MatMul(x, w)\n y = MatMul(h, v)", weights=_two(), fed=("w",))


@graph
def all_weights_may_be_fed() -> Graph:
    return Graph("h = MatMul(x, w)\n y = MatMul(h, v)", weights=_two(), fed=("w", "v"),
                 nothing=("dynamic", "weights"))  # fmt: skip


@graph
def weights_of_the_oldest_format() -> Graph:
    return Graph("h = MatMul(x, w)\n y = MatMul(h, v)", weights=_two(), fed=("w", "v"),
                 ir_version=3, opset=13)  # fmt: skip


@graph
def an_input_that_is_an_output() -> Graph:
    return Graph("h = MatMul(x, w)\n y = MatMul(h, v)\n z = Identity(x)",
                 outputs={"y": "float", "h": "float", "z": "float"}, weights=_two())  # fmt: skip


@graph
def names_that_quantizers_make() -> Graph:
    """Each name that a quantizer makes of ``w`` and ``h`` is there already, as another thing."""
    ends = ("_quantized", "_scale", "_zero_point", "_Q4", "_Q8", "_scales", "_zero_points",
            "_float16", "_bfloat16", "_wide", "_widened", "_folded", "_for_t1.0", "_for_n0.5",
            "_table_Q4", "_table_scales", "_by_rows", "_columns", "_times_2.0", ".half", ".float",
            "_DequantizeLinear_Output", "_QuantizeLinear_Output", "_of_MatMul_1")  # fmt: skip
    ids = [{"ids": np.random.default_rng(b).integers(0, WIDTH, (b, n))} for b, n in SIZES]
    lines, last = ["q = Gather(w, ids)", "h = MatMul(q, w)"], "h"
    weights: Arrays = {"w": weight(WIDTH, WIDTH), "last_axis": weight(WIDTH, WIDTH, seed=9),
                       "rows_of_bytes": weight(WIDTH, WIDTH, seed=8)}  # fmt: skip
    for index, end in enumerate(ends):
        name = f"w{end.replace('.', 'POINT')}"
        weights[name] = weight(WIDTH, WIDTH, seed=index + 10)
        lines.append(f"step{index} = MatMul({last}, {name})")
        last = f"step{index}"
    lines += [f"r = MatMul({last}, last_axis)", "s = MatMul(r, rows_of_bytes)", "t = Transpose(w)"]
    lines += ["f = Reshape(s, flat)", "u = Gemm<transB=1>(f, w)", "y = MatMul(u, t)"]
    return Graph("\n".join(lines), inputs={"ids": "int64[b,n]"}, feeds=ids,
                 weights={**weights, "flat": whole(-1, WIDTH)})  # fmt: skip


@graph
def names_of_activations_that_quantizers_make() -> Graph:
    return Graph(
        """x_quantized = MatMul(x, w)
        x_scale = Add(x_quantized, x)
        x_zero_point = MatMul(x_scale, v)
        x_DequantizeLinear_Output = Relu(x_zero_point)
        x_QuantizeLinear_Output = MatMul(x_DequantizeLinear_Output, w)
        y_output_quantized = MatMul(x_QuantizeLinear_Output, v)
        y_quantized = MatMul(x, y_matrix)
        a = Add(y_output_quantized, y_quantized)
        b = MatMul(x, v)
        y = Add(a, b)""",
        weights={"w": weight(WIDTH, WIDTH), "v": weight(WIDTH, WIDTH, seed=3),
                 "y_matrix": weight(WIDTH, WIDTH, seed=5)},
    )  # fmt: skip


@graph
def names_with_marks() -> Graph:
    return Graph(
        """hSLASHaCOLON = MatMul(x, SLASHwCOLON0)
        hPOINTPOINT = Relu(hSLASHaCOLON)
        y = MatMul(hPOINTPOINT, POINTv)""",
        weights={"SLASHwCOLON0": weight(WIDTH, WIDTH), "POINTv": weight(WIDTH, 8)},
    )


# -- other operators with weights ------------------------------------------------------------------


@graph
def tables_of_many_kinds() -> Graph:
    ids = [
        {"ids": np.random.default_rng(b).integers(-20, 20, (b, n)), "one": np.asarray(b - 2)}
        for b, n in SIZES
    ]
    return Graph(
        """a = Gather(table, ids)
        b = Gather<axis=1>(across, ids)
        t = Transpose<perm=[1,2,0]>(b)
        c = Gather(table, one)
        d = Gather(numbers, ids)
        e = Unsqueeze(d, last)
        f = Gather(cube, one)
        g = MatMul(a, f)
        h = Gather(odd, ids)
        i = MatMul(h, w)
        j = Sum(g, t, c, e)
        y = Add(j, i)""",
        inputs={"ids": "int64[b,n]", "one": "int64"}, feeds=ids,
        weights={"table": weight(20, WIDTH), "across": drawn(WIDTH, 20), "numbers": drawn(20),
                 "cube": weight(4, WIDTH, WIDTH), "odd": weight(20, 33), "last": whole(-1),
                 "w": weight(33, WIDTH, seed=5)},
    )  # fmt: skip


@graph
def a_table_of_whole_numbers() -> Graph:
    ids = [{"ids": np.random.default_rng(b).integers(0, 20, (b, n))} for b, n in SIZES]
    return Graph(
        "i = Gather(rows, ids)\n e = Gather(table, i)\n y = MatMul(e, w)",
        inputs={"ids": "int64[b,n]"}, feeds=ids,
        weights={"rows": np.arange(20)[::-1].copy(), "table": weight(20, WIDTH),
                 "w": weight(WIDTH, 8)},
    )  # fmt: skip


def _pictures(channels: int = 3, size: int = 9) -> list[Arrays]:
    return [{"x": drawn(b, channels, size, size, seed=b)} for b in (2, 1, 3)]


def _kernels(*shape: int, seed: int = 0) -> np.ndarray:
    fan = np.prod(shape[1:])
    rows = np.exp(drawn(shape[0], seed=seed + 1) / 2).reshape(-1, *[1] * (len(shape) - 1))
    return np.asarray(drawn(*shape, seed=seed) / np.sqrt(fan) * rows, np.float32)


@graph
def convolutions() -> Graph:
    return Graph(
        """a = Conv<pads=[1,1,1,1]>(x, w, c)
        r = Relu(a)
        b = Conv<group=8, pads=[0,1,2,1], dilations=[1,2]>(r, depth)
        d = Conv<group=2, strides=[2,2], auto_pad="SAME_UPPER">(b, grouped, c)
        e = Clip(d, zero, six)
        g = GlobalAveragePool(e)
        f = Flatten(g)
        y = Gemm<transB=1>(f, v)""",
        inputs={"x": "float[b,3,9,9]"}, feeds=_pictures(),
        weights={"w": _kernels(8, 3, 3, 3), "c": drawn(8), "depth": _kernels(8, 1, 3, 3),
                 "grouped": _kernels(8, 4, 3, 3), "v": weight(8, 5).T.copy(),
                 "zero": np.float32(0), "six": np.float32(6)},
    )  # fmt: skip


@graph
def convolutions_of_one_and_three_axes() -> Graph:
    return Graph(
        """t = Transpose<perm=[0,2,1]>(x)
        a = Conv<pads=[1,1]>(t, w, c)
        u = Unsqueeze(a, axes)
        y = Conv<pads=[1,0,0,1,0,0]>(u, v)""",
        weights={"w": _kernels(16, WIDTH, 3), "c": drawn(16), "v": _kernels(4, 16, 3, 1, 1),
                 "axes": whole(3, 4)},
    )  # fmt: skip


@graph
def transposed_convolutions() -> Graph:
    return Graph(
        """a = ConvTranspose<strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, w, c)
        r = LeakyRelu(a)
        b = ConvTranspose<group=2>(r, v)
        y = Conv(b, u)""",
        inputs={"x": "float[b,3,9,9]"}, feeds=_pictures(),
        weights={"w": _kernels(3, 8, 3, 3), "c": drawn(8), "v": _kernels(8, 3, 2, 2),
                 "u": _kernels(4, 6, 1, 1)},
    )  # fmt: skip


@graph
def a_convolution_whose_kernel_is_computed() -> Graph:
    return Graph(
        """k = ReduceMean<keepdims=1>(x, zero)
        m = Conv(x, w)
        n = Conv<pads=[4,4,4,4]>(x, k)
        y = Concat<axis=1>(m, n)""",
        inputs={"x": "float[b,3,9,9]"}, feeds=_pictures(), outputs={"m": "float", "n": "float"},
        weights={"w": _kernels(4, 3, 1, 1), "zero": whole(0)},
    )  # fmt: skip


@graph
def norms_and_pools_of_pictures() -> Graph:
    return Graph(
        """a = Conv<pads=[1,1,1,1]>(x, w)
        n = BatchNormalization(a, s, c, mean, var)
        r = Relu(n)
        p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
        q = AveragePool<kernel_shape=[2,2], pads=[1,1,0,0], count_include_pad=0>(p)
        i = InstanceNormalization(q, s, c)
        z = Resize<mode="linear">(i, , scales)
        o = Pad<mode="reflect">(z, pads)
        l = Pad(o, pads, minus)
        e = Sigmoid(l)
        y = Conv(e, v)""",
        inputs={"x": "float[b,3,9,9]"}, feeds=_pictures(),
        weights={"w": _kernels(8, 3, 3, 3), "s": np.abs(drawn(8)) + 0.5, "c": drawn(8, seed=2),
                 "mean": drawn(8, seed=3), "var": np.abs(drawn(8, seed=4)) + 0.5,
                 "scales": np.float32([1, 1, 2, 2]), "pads": whole(0, 0, 1, 1, 0, 0, 1, 1),
                 "minus": np.float32(-2), "v": _kernels(4, 8, 3, 3)},
    )  # fmt: skip


@graph
def moves_of_values_and_whole_numbers() -> Graph:
    return Graph(
        """size = Shape(x)
        first = Slice(size, zero, one)
        twice = Concat<axis=0>(first, flat)
        h = MatMul(x, w)
        a, b = Split<axis=2, num_outputs=2>(h)
        c = Concat<axis=2>(b, a)
        d = Unsqueeze(c, one)
        e = Squeeze(d, one)
        t = Transpose<perm=[1,0,2]>(e)
        u = Transpose<perm=[1,0,2]>(t)
        f = Reshape(u, twice)
        top, where = TopK<axis=1>(f, three)
        best = ArgMax<axis=1, keepdims=1>(f)
        g = Clip(f, low, high)
        big = Greater(g, nil)
        i = Where(big, g, nil)
        j = Softmax<axis=1>(i)
        k = Mul(j, i)
        l = Reshape(k, back)
        m = Slice(l, zero, three, last)
        y = MatMul(m, v)""",
        outputs={"y": "float", "where": "int64", "best": "int64"},
        feeds=[{"x": drawn(b, n, WIDTH, seed=b)} for b, n in ((2, 4), (1, 2), (3, 6))],
        weights={"w": weight(WIDTH, WIDTH), "zero": whole(0), "one": whole(1), "flat": whole(-1),
                 "three": whole(3), "low": np.float32(-3), "high": np.float32(3),
                 "nil": np.float32(0), "back": whole(-1, 2, WIDTH), "last": whole(2),
                 "v": weight(3, 8)},
    )  # fmt: skip


@graph
def quantized_values_that_a_body_and_a_choice_read() -> Graph:
    batches = [{"x": drawn(b, n, WIDTH), "on": np.asarray(b == 2)} for b, n in SIZES]
    return Graph(
        """h = MatMul(x, w)
        g = Mul(h, h)
        positive = Greater(x, nil)
        i = Where(positive, g, nil)
        j = If(on) <
          then_branch = one () => (float[b,n,32] a) { a = Sin(h) },
          else_branch = two () => (float[b,n,32] c) { c = Cos(i) }
        >
        k = Add(i, j)
        y = MatMul(k, v)""",
        inputs={"x": f"float[b,n,{WIDTH}]", "on": "bool"}, feeds=batches,
        weights={**_two(), "nil": np.float32(0)},
    )  # fmt: skip


@graph
def recurrent_layers() -> Graph:
    return Graph(
        """s = Transpose<perm=[1,0,2]>(x)
        a, ah, ac = LSTM<hidden_size=16, direction="bidirectional">(s, w, r, c)
        m = Transpose<perm=[0,2,1,3]>(a)
        f = Reshape(m, joined)
        b, bh = GRU<hidden_size=16>(f, gw, gr)
        u = Squeeze(b, one)
        y = MatMul(u, v)""",
        weights={"w": _kernels(2, 64, WIDTH), "r": _kernels(2, 64, 16), "c": drawn(2, 128) / 4,
                 "gw": _kernels(1, 48, WIDTH), "gr": _kernels(1, 48, 16),
                 "joined": whole(0, 0, 32), "one": whole(1), "v": weight(16, 5)},
    )  # fmt: skip


@graph
def an_lstm_with_all_of_its_inputs() -> Graph:
    batches = [
        {"x": drawn(b, n, WIDTH), "lengths": np.asarray([n, 1, 3][:b], np.int32).clip(1, n)}
        for b, n in SIZES
    ]
    return Graph(
        """s = Transpose<perm=[1,0,2]>(x)
        first = ReduceMean<keepdims=1>(s, axes)
        cut = Slice(first, zero, sixteen, two)
        rows = Shape<start=0, end=1>(x)
        target = Concat<axis=0>(one, rows, sixteen)
        h = Expand(cut, target)
        a, ah, ac = LSTM<hidden_size=16, clip=3.0>(s, w, r, c, lengths, h, h, p)
        u = Squeeze(a, one)
        y = MatMul(u, v)""",
        inputs={"x": f"float[b,n,{WIDTH}]", "lengths": "int32[b]"},
        outputs={"y": "float", "ac": "float"}, feeds=batches,
        weights={"w": _kernels(1, 64, WIDTH), "r": _kernels(1, 64, 16), "c": drawn(1, 128) / 4,
                 "p": drawn(1, 48) / 4, "zero": whole(0), "sixteen": whole(16), "two": whole(2),
                 "one": whole(1), "axes": whole(0, 1), "v": weight(16, 5)},
    )  # fmt: skip


@graph
def attention_of_the_standard() -> Graph:
    return Graph(
        """q = MatMul(x, w)
        a = Attention<q_num_heads=4, kv_num_heads=4>(q, x, x)
        y = MatMul(a, v)""",
        weights=_two(), opset=23, ir_version=11,
    )  # fmt: skip


@graph
def attention_of_onnxruntime() -> Graph:
    masks = [np.arange(n)[None] < np.asarray([n, 1, 4])[:b, None] for b, n in SIZES]
    batches = [
        {"x": drawn(b, n, WIDTH), "mask": mask.astype(np.int32)}
        for (b, n), mask in zip(SIZES, masks, strict=True)
    ]
    return Graph(
        """a = com.microsoft.Attention<num_heads=4>(x, w, c, mask)
        b = com.microsoft.Attention<num_heads=4, scale=0.1, unidirectional=1>(a, w, c)
        y = MatMul(b, v)""",
        inputs={"x": f"float[b,n,{WIDTH}]", "mask": "int32[b,n]"}, feeds=batches,
        weights={"w": weight(WIDTH, 96), "c": drawn(96) / 4, "v": weight(WIDTH, 8)},
    )  # fmt: skip


# -- bodies and functions --------------------------------------------------------------------------


@graph
def branches() -> Graph:
    batches = [{"x": drawn(b, n, WIDTH), "on": np.asarray(b == 2)} for b, n in SIZES]
    return Graph(
        """h = MatMul(x, w)
        y = If(on) <
          then_branch = one () => (float then_y) {
            u = Constant<value = float[2] {0.5, 0.25}>()
            p = MatMul(h, w)
            q = MatMul(p, v)
            then_y = Identity(q)
          },
          else_branch = two () => (float else_y) {
            p = Relu(h)
            else_y = MatMul(p, v)
          }
        >""",
        inputs={"x": f"float[b,n,{WIDTH}]", "on": "bool"}, feeds=batches, weights=_two(),
        nothing=("static",),
    )  # fmt: skip


@graph
def a_loop() -> Graph:
    return Graph(
        """times = Constant<value = int64 {2}>()
        on = Constant<value = bool {1}>()
        h = Loop(times, on, x) <
          body = one (int64 step, bool going, float[b,n,32] state) => (bool stays, float next) {
            p = MatMul(state, w)
            next = Tanh(p)
            stays = Identity(going)
          }
        >
        y = MatMul(h, v)""",
        weights=_two(), nothing=("static",),
    )  # fmt: skip


@graph
def a_scan() -> Graph:
    return Graph(
        """s = Transpose<perm=[1,0,2]>(x)
        z = ReduceMean<keepdims=0>(s, zero)
        last, all = Scan<num_scan_inputs=1,
          body = one (float[b,32] state, float[b,32] each) => (float[b,32] next, float[b,8] shown) {
            p = MatMul(state, w)
            q = Add(p, each)
            next = Tanh(q)
            shown = MatMul(next, v)
          }
        >(z, s)
        y = Transpose<perm=[1,0,2]>(all)""",
        weights={**_two(), "zero": whole(0)}, nothing=("static",),
    )  # fmt: skip


@graph
def functions_of_the_model() -> Graph:
    return Graph(
        """h = own.layer<alpha=0.5>(x, w)
        y = own.layer<alpha=2.0>(h, v)""",
        before="""<domain: "own", opset_import: ["" : 21]>
        layer <alpha>(a, m) => (b) {
            p = MatMul(a, m)
            b = Elu<alpha: float = @alpha>(p)
        }""",
        weights=_two(),
    )


# -- types and values ------------------------------------------------------------------------------


@graph
def constants_in_the_place_of_weights() -> Graph:
    made = Graph("h = MatMul(x, w)\n r = Relu(h)\n y = MatMul(r, v)", weights=_two())

    class Lifted(Graph):
        def model(self) -> onnx.ModelProto:
            model = super().model()
            nodes = [
                helper.make_node("Constant", [], [tensor.name], value=tensor)
                for tensor in model.graph.initializer
            ]
            nodes += list(model.graph.node)
            del model.graph.initializer[:], model.graph.node[:]
            model.graph.node.extend(nodes)
            return model

    return Lifted(made.text, weights=made.weights)


@graph
def numbers_of_16_bits() -> Graph:
    return Graph(
        "h = MatMul(x, w)\n r = Relu(h)\n y = MatMul(r, v)",
        inputs={"x": f"float16[b,n,{WIDTH}]"}, outputs={"y": "float16"},
        weights={name: array.astype(np.float16) for name, array in _two().items()},
        feeds=[{"x": drawn(b, n, WIDTH).astype(np.float16)} for b, n in SIZES],
        nothing=("half",),
    )  # fmt: skip


@graph
def weights_of_16_bits_that_are_widened() -> Graph:
    return Graph(
        "c = Cast<to=1>(w)\n h = MatMul(x, c)\n r = Relu(h)\n y = MatMul(r, v)",
        weights={"w": weight(WIDTH, WIDTH).astype(np.float16), "v": weight(WIDTH, 8)},
    )


@graph
def parts_of_16_and_64_bits() -> Graph:
    return Graph(
        """h = MatMul(x, w)
        d = Cast<to=11>(h)
        e = MatMul(d, wide)
        f = Cast<to=10>(e)
        g = MatMul(f, narrow)
        i = Cast<to=1>(g)
        y = MatMul(i, v)""",
        weights={**_two(), "wide": weight(WIDTH, WIDTH).astype(np.float64),
                 "narrow": weight(WIDTH, WIDTH).astype(np.float16)},
    )  # fmt: skip


@graph
def nothing_but_64_bits() -> Graph:
    return Graph(
        "h = MatMul(x, w)\n y = MatMul(h, v)",
        inputs={"x": f"double[b,n,{WIDTH}]"}, outputs={"y": "double"},
        weights={name: array.astype(np.float64) for name, array in _two().items()},
        feeds=[{"x": drawn(b, n, WIDTH).astype(np.float64)} for b, n in SIZES],
        nothing=("dynamic", "static", "weights", "half"),
    )  # fmt: skip


@graph
def sizes_of_zero() -> Graph:
    return Graph(
        """a = MatMul(x, none)
        b = MatMul(a, nothing)
        h = MatMul(x, w)
        s = Add(h, b)
        c = Concat<axis=2>(s, a)
        y = MatMul(c, v)""",
        weights={**_two(), "none": np.zeros((WIDTH, 0), np.float32),
                 "nothing": np.zeros((0, WIDTH), np.float32)},
        feeds=[{"x": drawn(2, 5, WIDTH)}, {"x": drawn(0, 5, WIDTH)}, {"x": drawn(2, 0, WIDTH)}],
    )  # fmt: skip


@graph
def weights_of_odd_numbers() -> Graph:
    """Columns of zeros, of one number, of tiny and of large ones, with one far from all others."""
    odd = weight(WIDTH, WIDTH)
    odd[:, 0], odd[:, 1], odd[:, 2], odd[:, 3] = 0, 0.5, -0.25, odd[:, 3] * np.float32(1e-30)
    odd[:, 4] = np.abs(odd[:, 4]) + 1
    odd[:, 5] = -np.abs(odd[:, 5]) - 1
    odd[7, 6] = 20
    return Graph(
        "h = MatMul(x, w)\n z = MatMul(h, zeros)\n s = Add(h, z)\n r = MatMul(s, ones)\n"
        "y = MatMul(s, v)",
        outputs={"y": "float", "h": "float", "r": "float"},
        weights={"w": odd, "v": weight(WIDTH, 8), "zeros": np.zeros((WIDTH, WIDTH), np.float32),
                 "ones": np.full((WIDTH, 3), 0.1, np.float32)},
    )  # fmt: skip


@graph
def tiny_and_large_values() -> Graph:
    return Graph(
        """a = Mul(x, tiny)
        h = MatMul(a, w)
        b = Mul(h, large)
        r = MatMul(b, w)
        c = Mul(r, tiny)
        y = MatMul(c, v)""",
        weights={**_two(), "tiny": np.float32(1e-6), "large": np.float32(1e9)}, nothing=("half",),
    )  # fmt: skip


@graph
def words_and_sequences() -> Graph:
    batches = [{"x": drawn(b, n, WIDTH), "words": np.asarray(["a", "b"], object)} for b, n in SIZES]
    return Graph(
        """h = MatMul(x, w)
        parts = SplitToSequence<axis=2, keepdims=1>(h, half)
        zero = Constant<value = int64 {0}>()
        first = SequenceAt(parts, zero)
        joined = ConcatFromSequence<axis=2>(parts)
        y = MatMul(joined, v)
        same = Identity(words)""",
        inputs={"x": f"float[b,n,{WIDTH}]", "words": "string[k]"},
        outputs={"y": "float", "same": "string", "first": "float"}, feeds=batches,
        weights={**_two(), "half": np.asarray(WIDTH // 2, np.int64)},
    )  # fmt: skip
