"""Graphs as no exporter of ours writes them: drawn, valid, and hostile to whoever rewrites them.

Each is a row of blocks on values ``[batch, length, 16]`` (linear maps, norms, GELUs, attention,
branches, loops, calls of functions) in one of many spellings, some of them damaged: a value in the
middle is an output or is read twice, weights are shared or may be fed, types are of 16 or 64 bits,
names are missing, odd or there twice, shapes in the file are out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH, HEADS = 16, 4
OPSETS = (11, 12, 13, 14, 16, 17, 18, 20, 21)
# Names of axes; the empty one is none at all.
NAMES = [
    ("batch", "seq"), ("batch_size", "sequence length"), ("b", "2*b"), ("", ""), ("N", ""),
    ("unk__0", "unk__1"), ("ortrain: #1", "ortrain: 4*batch"), ("größe", "0"), ("same", "same"),
]  # fmt: skip
_TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16,
          np.float64: TensorProto.DOUBLE}  # fmt: skip


@dataclass
class Foreign:
    """A drawn graph.

    Attributes:
        model: with its weights inside.
        feeds: what to run it on.
        dtype: of its numbers.
        told: what was drawn, for whoever reads a failure.
    """

    model: onnx.ModelProto
    feeds: list[dict[str, np.ndarray]]
    dtype: Any
    told: list[str]

    def save(self, folder: Path, *, external: bool) -> Path:
        """Writes it, with its weights beside it where that is asked for."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "model.onnx"
        onnx.save(
            self.model, path, save_as_external_data=external, location="model.weights",
            size_threshold=0,
        )  # fmt: skip
        return path


@dataclass
class _Scope:
    """Nodes and weights of one graph."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.opset = int(self.pick(OPSETS))
        self.dtype = self.pick([np.float32] * 6 + [np.float16, np.float64])
        self.scope = _Scope()
        self.main = self.scope
        self.count = self.weights = 0
        self.told: list[str] = [f"opset {self.opset}", np.dtype(self.dtype).name]
        self.functions: list[onnx.FunctionProto] = []
        self.seen: list[str] = []  # values of the main graph that may be outputs
        self.masks: dict[str, None] = {}  # names of inputs beside x
        self.named = self.draw() < 0.5
        # Bodies of other branches may use the same names; some exporters number them anew.
        self.restarts = self.draw() < 0.5

    # -- chances ---------------------------------------------------------------------------------

    def draw(self) -> float:
        return float(self.random.random())

    def pick(self, among: Sequence[Any]) -> Any:
        return among[int(self.random.integers(len(among)))]

    def fresh(self, base: str = "v") -> str:
        self.count += 1
        return f"{base}{self.count}"

    # -- nodes -----------------------------------------------------------------------------------

    def node(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **given: Any) -> Any:
        names = [self.fresh() for _ in range(outputs)]
        name = self.pick(["", f"{op}_{self.count}"]) if self.named else ""
        self.scope.nodes.append(
            helper.make_node(op, list(inputs), names, name=name, domain=domain, **given)
        )
        return names[0] if outputs == 1 else names

    def weight(self, *shape: int, scale: float = 0.5, array: np.ndarray | None = None) -> str:
        """A weight of this graph or, in a body, one outside."""
        scope = self.main if self.draw() < 0.5 else self.scope
        numbers = self.random.standard_normal(shape) * scale if array is None else array
        self.weights += 1
        name = f"w{self.weights}"
        scope.weights[name] = np.asarray(numbers, self.dtype if array is None else None)
        return name

    def number(self, value: float) -> str:
        """A constant of one element, in a form that an exporter may choose."""
        form = self.pick(["initializer", "node", "vector", "three axes"])
        array = np.asarray(value, self.dtype)
        if form == "node":
            return self.node("Constant", value=numpy_helper.from_array(array))
        shape = {"initializer": (), "vector": (1,), "three axes": (1, 1, 1)}[form]
        return self.weight(array=array.reshape(shape))

    def whole(self, *values: int) -> str:
        array = np.asarray(values, np.int64)
        if self.draw() < 0.5:
            return self.node("Constant", value=numpy_helper.from_array(array))
        return self.weight(array=array)

    def single(self, value: int) -> str:
        array = np.asarray(value, np.int64)
        return self.node("Constant", value=numpy_helper.from_array(array))

    # -- forms that depend on the opset ----------------------------------------------------------

    def unsqueeze(self, x: str, axis: int) -> str:
        if self.opset < 13:
            return self.node("Unsqueeze", x, axes=[axis])
        return self.node("Unsqueeze", x, self.whole(axis))

    def mean(self, x: str, axis: int = -1, keep: int = 1) -> str:
        if self.opset < 18:
            return self.node("ReduceMean", x, axes=[axis], keepdims=keep)
        return self.node("ReduceMean", x, self.whole(axis), keepdims=keep)

    def size(self, x: str, axis: int) -> str:
        """One size of a value, [1], as it is computed at run time."""
        if self.opset >= 15 and self.draw() < 0.3:
            return self.node("Shape", x, start=axis, end=axis + 1)
        shape = self.node("Shape", x)
        if self.draw() < 0.5:
            return self.unsqueeze(self.node("Gather", shape, self.single(axis)), 0)
        if self.draw() < 0.5:
            return self.node("Gather", shape, self.whole(axis))
        return self.node("Slice", shape, self.whole(axis), self.whole(axis + 1), self.whole(0))

    # -- blocks: [batch, length, 16] → the same --------------------------------------------------

    def linear(self, x: str, weight: str | None = None) -> str:
        product = self.node("MatMul", x, weight or self.weight(WIDTH, WIDTH, scale=0.3))
        if self.draw() < 0.3:
            return product
        bias = self.weight(WIDTH) if self.draw() < 0.8 else self.weight(1, 1, WIDTH)
        return self.node("Add", *self.shuffled(product, bias))

    def shuffled(self, *names: str) -> list[str]:
        return [names[i] for i in self.random.permutation(len(names))]

    def gelu(self, x: str) -> str:
        form = self.pick(["erf", "tanh", "sigmoid", "half a curve"])
        half = self.number(0.5)
        if form == "sigmoid":
            inner = x if self.draw() < 0.5 else self.node("Mul", x, self.number(1.702))
            return self.node("Mul", *self.shuffled(x, self.node("Sigmoid", inner)))
        if form == "tanh":
            cube = self.node("Pow", x, self.number(3.0))
            inner = self.node("Add", x, self.node("Mul", cube, self.number(0.044715)))
            curve = self.node("Tanh", self.node("Mul", inner, self.number(np.sqrt(2 / np.pi))))
        elif form == "erf":
            curve = self.node("Erf", self.node("Div", x, self.number(np.sqrt(2.0))))
        else:
            curve = self.node("Erf", self.node("Mul", x, self.number(0.7)))
        one = self.node("Add", *self.shuffled(curve, self.number(1.0)))
        self.seen.append(one) if self.scope is self.main else None
        if self.draw() < 0.5:
            return self.node("Mul", self.node("Mul", x, one), half)
        return self.node("Mul", *self.shuffled(one, self.node("Mul", x, half)))

    def norm(self, x: str) -> str:
        scale, offset = self.weight(WIDTH), self.weight(WIDTH)
        if self.opset >= 17 and self.draw() < 0.3:
            return self.node("LayerNormalization", x, scale, offset, axis=-1, epsilon=1e-3)
        axis = self.pick([-1, -1, -1, 1])
        rms = self.draw() < 0.3
        centred = x if rms else self.node("Sub", x, self.mean(x, axis))
        square = (
            self.node("Mul", centred, centred)
            if self.draw() < 0.5
            else self.node("Pow", centred, self.number(2.0))
        )
        variance = self.node("Add", self.mean(square, axis), self.number(1e-2))
        root = self.node("Sqrt", variance)
        if self.draw() < 0.7:
            normal = self.node("Div", centred, root)
        else:
            normal = self.node("Mul", centred, self.node("Reciprocal", root))
        if self.scope is self.main:
            self.seen += [normal, root]
        scaled = self.node("Mul", *self.shuffled(normal, scale))
        return scaled if rms else self.node("Add", *self.shuffled(scaled, offset))

    def split(self, x: str, *, heads: int = HEADS, merged: bool = False) -> str:
        """[batch, heads, length, size], or [batch * heads, length, size]."""
        form = self.pick(["zeros", "sizes", "hole", "numbers of the last"])
        size = WIDTH // heads
        if form == "zeros":
            target = self.whole(0, 0, heads, size)
        elif form == "hole":
            target = self.whole(0, -1, heads, size)
        elif form == "sizes":
            parts = [self.size(x, 0), self.size(x, 1), self.whole(heads), self.whole(size)]
            target = self.node("Concat", *parts, axis=0)
        else:
            parts = [self.size(x, 0), self.size(x, 1), self.whole(-1), self.whole(size)]
            target = self.node("Concat", *parts, axis=0)
        apart = self.node("Transpose", self.node("Reshape", x, target), perm=[0, 2, 1, 3])
        if not merged:
            return apart
        rows = self.node("Mul", self.size(x, 0), self.whole(heads))
        target = self.node("Concat", rows, self.whole(-1), self.whole(size), axis=0)
        return self.node("Reshape", apart, target)

    def attention(self, x: str) -> str:
        other = x
        shared = self.weight(WIDTH, WIDTH, scale=0.3) if self.draw() < 0.2 else None
        folded = self.draw() < 0.2
        q, k, v = (
            self.split(self.linear(part, shared), merged=folded) for part in (x, other, other)
        )
        swap = [0, 2, 1] if folded else [0, 1, 3, 2]
        factor = self.number(0.5)
        if self.draw() < 0.3:
            q = self.node("Mul", q, factor)
            scores = self.node("MatMul", q, self.node("Transpose", k, perm=swap))
        else:
            scores = self.node("MatMul", q, self.node("Transpose", k, perm=swap))
            scores = self.node(self.pick(["Mul", "Div"]), scores, factor)
        apart = folded and self.draw() < 0.7
        if folded and self.draw() < 0.5:
            scores = self.node("Add", scores, self.alibi(x))
        if apart:
            parts = [self.size(x, 0), self.whole(HEADS), self.size(x, 1), self.whole(-1)]
            scores = self.node("Reshape", scores, self.node("Concat", *parts, axis=0))
        if not folded or apart:
            scores = self.masked(scores, x)
        axis = -1 if self.draw() < 0.9 else (3 if not folded or apart else 2)
        weights = self.node("Softmax", scores, axis=axis)
        if self.scope is self.main:
            self.seen += [weights, scores, k]
        if self.draw() < 0.1:
            weights = self.node("Mul", weights, self.number(0.5))
        if self.draw() < 0.2:
            weights = self.node("Identity", weights)
        if apart:
            rows = self.node("Mul", self.size(x, 0), self.whole(HEADS))
            target = self.node("Concat", rows, self.size(x, 1), self.whole(-1), axis=0)
            weights = self.node("Reshape", weights, target)
        context = self.node("MatMul", weights, v)
        if folded:
            parts = [self.size(x, 0), self.whole(HEADS), self.size(x, 1), self.whole(-1)]
            context = self.node("Reshape", context, self.node("Concat", *parts, axis=0))
        joined = self.node("Transpose", context, perm=[0, 2, 1, 3])
        if self.draw() < 0.5:
            target = self.whole(0, 0, WIDTH)
        else:
            target = self.node("Concat", self.size(x, 0), self.size(x, 1), self.whole(-1), axis=0)
        return self.linear(self.node("Reshape", joined, target))

    def alibi(self, x: str) -> str:
        """[batch * heads, 1, length] of a slope of each head."""
        slopes = self.weight(HEADS, 1)
        ones = self.node("ReduceMax", self.node("Abs", x), axes=[2], keepdims=0) if (
            self.opset < 18
        ) else self.node("ReduceMax", self.node("Abs", x), self.whole(2), keepdims=0)  # fmt: skip
        each = self.node("Mul", self.unsqueeze(ones, 1), slopes)  # [batch, heads, length]
        rows = self.node("Mul", self.size(x, 0), self.whole(HEADS))
        return self.node(
            "Reshape", each, self.node("Concat", rows, self.whole(1), self.whole(-1), axis=0)
        )

    def masked(self, scores: str, x: str) -> str:
        form = self.pick(["none", "added", "added", "all", "chosen", "chosen lightly", "two"])
        self.told.append(f"mask {form}")
        if form == "none":
            return scores
        if form in ("added", "two"):
            scores = self.node("Add", *self.shuffled(scores, self.input("mask")))
        if form in ("all", "two"):
            scores = self.node("Add", *self.shuffled(scores, self.input("bias")))
        if form.startswith("chosen"):
            low = {np.float16: -6e4, np.float32: -3e38, np.float64: -1e300}[self.dtype]
            fill = self.number(low if form == "chosen" else -9.0)
            scores = self.node("Where", self.input("seen"), scores, fill)
        return scores

    def input(self, name: str) -> str:
        """``mask`` [batch, 1, 1, length], ``bias`` [1, 4, length, length], ``seen`` of truths."""
        self.masks[name] = None
        return name

    def branch(self, x: str) -> str:
        count = self.count
        graphs = []
        for each in ("then", "else"):
            if self.restarts:
                self.count = count
            outer, self.scope = self.scope, _Scope()
            result = self.pick([self.gelu, self.norm, self.linear, self.attention])(x)
            value = helper.make_tensor_value_info(result, _TYPES[self.dtype], None)
            body = helper.make_graph(
                self.scope.nodes, each, [], [value], self.tensors(self.scope.weights)
            )
            graphs.append(body)
            self.scope = outer
        self.count += 1000  # what follows has names of its own
        condition = self.input("condition")
        return self.node("If", condition, then_branch=graphs[0], else_branch=graphs[1])

    def loop(self, x: str) -> str:
        outer, self.scope = self.scope, _Scope()
        step, going, carried = self.fresh("step"), self.fresh("going"), self.fresh("carried")
        shown = self.node("Identity", going)
        result = self.pick([self.gelu, self.norm, self.linear])(carried)
        kind = _TYPES[self.dtype]
        body = helper.make_graph(
            self.scope.nodes,
            "body",
            [
                helper.make_tensor_value_info(step, TensorProto.INT64, []),
                helper.make_tensor_value_info(going, TensorProto.BOOL, []),
                helper.make_tensor_value_info(carried, kind, None),
            ],
            [
                helper.make_tensor_value_info(shown, TensorProto.BOOL, []),
                helper.make_tensor_value_info(result, kind, None),
            ],
            self.tensors(self.scope.weights),
        )
        self.scope = outer
        times = self.single(2)
        on = self.node("Constant", value=numpy_helper.from_array(np.asarray(True)))
        return self.node("Loop", times, on, x, body=body)

    def call(self, x: str) -> str:
        """A function of the model's own."""
        if not self.functions:
            nodes = [
                helper.make_node("Sigmoid", ["a"], ["s"]),
                helper.make_node("Mul", ["a", "s"], ["b"]),
            ]
            imports = [helper.make_opsetid("", self.opset)]
            self.functions = [helper.make_function("own", "curve", ["a"], ["b"], nodes, imports)]
        return self.node("curve", x, domain="own")

    def noise(self, x: str) -> str:
        form = self.pick(
            ["identity", "dropout", "transposes", "cast", "reshapes", "slice", "expand"]
        )
        if form == "identity":
            return self.node("Identity", x)
        if form == "dropout":
            return self.node("Dropout", x)
        if form == "cast":
            return self.node("Cast", x, to=_TYPES[self.dtype])
        if form == "transposes":
            perm = self.pick([[0, 2, 1], [1, 0, 2], [2, 1, 0]])
            return self.node("Transpose", self.node("Transpose", x, perm=perm), perm=perm)
        if form == "slice":
            end = self.pick([self.whole(2**63 - 1), self.size(x, 1)])
            return self.node("Slice", x, self.whole(0), end, self.whole(1))
        if form == "expand":
            return self.node("Expand", x, self.node("Shape", x))
        flat = self.node("Reshape", x, self.whole(-1, WIDTH))
        parts = [self.size(x, 0), self.pick([self.size(x, 1), self.whole(-1)]), self.whole(WIDTH)]
        return self.node("Reshape", flat, self.node("Concat", *parts, axis=0))

    def residual(self, x: str) -> str:
        return self.node("Add", *self.shuffled(x, self.pick([self.linear, self.gelu])(x)))

    def last(self, x: str) -> str:
        """One token of each row."""
        return self.node("Gather", x, self.single(0), axis=1)

    def tensors(self, weights: dict[str, np.ndarray]) -> list[onnx.TensorProto]:
        return [numpy_helper.from_array(array, name) for name, array in weights.items()]


def drawn(seed: int) -> Foreign:
    """The graph of a number."""
    self = _Drawing(seed)
    blocks: list[Callable[[str], str]] = [
        self.linear, self.gelu, self.norm, self.attention, self.attention, self.noise,
        self.residual, self.branch, self.loop,
    ]  # fmt: skip
    if self.opset >= 13 and self.draw() < 0.3:
        blocks.append(self.call)
    names = self.pick(NAMES)
    x, whole = "x", list[str]()
    for _ in range(int(self.random.integers(2, 6))):
        block = self.pick(blocks)
        self.told.append(block.__name__)
        if self.draw() < 0.15:
            self.seen.append(x)
        x = block(x)
        self.seen.append(x)
        whole.append(x)
    final = self.last(x) if self.draw() < 0.3 else x
    # What is an output, some of it in the middle of a pattern; of the inputs none.
    count = self.pick([0, 0, 1, 2])
    middle = [v for v in self.shuffled(*self.seen)[:count] if v not in ("x", final)]
    kind = _TYPES[self.dtype]
    shape = [name or None for name in names]
    inputs = [helper.make_tensor_value_info("x", kind, [*shape, WIDTH])]
    b, n = shape
    shapes = {
        "mask": (kind, [b, 1, 1, n]), "bias": (kind, [1, HEADS, n, n]),
        "seen": (TensorProto.BOOL, [b, 1, n, n]), "condition": (TensorProto.BOOL, []),
    }  # fmt: skip
    inputs += [helper.make_tensor_value_info(name, *shapes[name]) for name in self.masks]
    shown = dict.fromkeys([final, *middle])
    # Of the sizes of outputs, a file may say nothing, or what is not so.
    ranks = self.draw() < 0.3
    said = [1, 3, WIDTH] if self.draw() < 0.3 else ["a", "seq", "c"]
    outputs = [
        helper.make_tensor_value_info(name, kind, said if ranks and name in whole else None)
        for name in shown
    ]
    bodies = {"branch", "loop"} & set(self.told)
    # Before IR 4, a weight is an input too, which those of a body cannot be.
    weights, ir_version = self.main.weights, self.pick([7, 8, 9, 10] if bodies else [3, 7, 8, 10])
    if self.functions:
        ir_version = max(ir_version, 8)
    if self.opset >= 19:
        ir_version = max(ir_version, 9)
    fed = ir_version < 4 or self.draw() < 0.1
    if fed:
        for name, array in weights.items():
            inputs.append(
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
                )
            )
    graph = helper.make_graph(self.scope.nodes, "g", inputs, outputs, self.tensors(weights))
    if self.draw() < 0.2:
        # As in a file whose inputs were made open by hand: what it says of the others is old.
        graph.value_info.extend(
            helper.make_tensor_value_info(value, kind, [1, 3, WIDTH]) for value in whole
        )
        self.told.append("old sizes")
    imports = [helper.make_opsetid("", self.opset)]
    if self.functions:
        imports.append(helper.make_opsetid("own", 1))
    model = helper.make_model(graph, opset_imports=imports, functions=self.functions)
    model.ir_version = ir_version
    self.told.append(f"IR {ir_version}, axes {names}, outputs {[o.name for o in outputs]}")
    feeds = [_feeds(self, seed, *sizes) for sizes in ((2, 5), (1, 3), (3, 1))]
    if names == ("same", "same"):
        feeds = [_feeds(self, seed, size, size) for size in (3, 1)]
    if names == ("b", "2*b"):
        feeds = [_feeds(self, seed, size, 2 * size) for size in (2, 3)]
    if fed and ir_version >= 4:  # before, onnxruntime takes them for constants
        floats = [n for n, a in weights.items() if a.dtype == self.dtype and a.size > 1]
        if floats:  # another number for one of them
            name = self.pick(floats)
            other = self.random.standard_normal(weights[name].shape).astype(self.dtype)
            feeds.append({**feeds[0], name: other})
    return Foreign(model, feeds, self.dtype, self.told)


def _feeds(self: _Drawing, seed: int, batch: int, length: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([seed, batch, length])
    found = {"x": random.standard_normal((batch, length, WIDTH)).astype(self.dtype)}
    for name in self.masks:
        if name == "mask":
            low = {np.float16: -6e4, np.float32: -3e38, np.float64: -1e300}[self.dtype]
            added = np.where(random.random((batch, 1, 1, length)) < 0.3, low, 0.0)
            found[name] = added.astype(self.dtype)
        elif name == "bias":
            found[name] = random.standard_normal((1, HEADS, length, length)).astype(self.dtype)
        elif name == "seen":
            found[name] = random.random((batch, 1, length, length)) < 0.7
        else:
            found[name] = np.asarray(batch != 1)
    return found
