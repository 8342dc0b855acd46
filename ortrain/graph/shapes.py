"""Dtypes and shapes of the values that :class:`~ortrain.graph.build.Builder` emits.

Deliberately small: a dtype for every operator, a shape where it follows at once from the inputs'.
:func:`infer_all` asks onnx's own inference for a whole model. An unknown shape costs a ``Shape``
node at run time; a wrong one costs a wrong gradient, so whatever is in doubt stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

Dim = int | str | None

FLOATING = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
)

# Typing of operators outside the standard domain, entered by whoever defines them.
OPERATORS: dict[tuple[str, str], Callable[[ir.Node], None]] = {}

_BOOL = {
    "And", "Or", "Not", "Xor", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "IsNaN", "IsInf",
}  # fmt: skip
_SEQUENCES = {
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap",
    "SplitToSequence",
}  # fmt: skip
_INT64 = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
ELEMENTWISE = {
    "Add", "Sub", "Mul", "Div", "Pow", "Where", "And", "Or", "Xor", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "BitwiseXor", "BitwiseAnd", "BitwiseOr", "BitShift",
    "Min", "Max", "Sum", "Mean", "Mod", "PRelu",
}  # fmt: skip
SAME_SHAPE = {
    "Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Identity", "Log", "Neg", "Not", "Reciprocal",
    "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sqrt", "Tanh", "Cast", "Softmax", "LogSoftmax",
    "HardSigmoid", "IsNaN", "IsInf", "Gelu", "Clip", "CumSum", "Trilu", "BitwiseNot",
    "ScatterND", "ScatterElements", "LeakyRelu", "Elu", "Selu", "Softplus", "Softsign",
    "HardSwish", "Mish", "LayerNormalization", "RMSNormalization", "GroupNormalization",
    "InstanceNormalization", "Dropout", "Atan", "Asin", "Acos", "Tan", "Sinh", "Cosh",
}  # fmt: skip


# onnx takes any vector for one of sizes, and keeps 330 bytes for each number of it: the labels of
# 16 M rows took 12 s and 5 GB. Longer ones are not shown to it; where there is one far longer,
# which it may find again by itself, it is to follow no sizes at all.
MOST_SIZES, FAR_TOO_LONG = 1 << 12, 1 << 20


def fits_float32(number: float) -> bool:
    """Whether a floating-point attribute of an operator, which is a float32, holds a number."""
    return float(np.float32(number)) == number


def assign(value: ir.Value, dtype: ir.DataType | None, shape: ir.Shape | None = None) -> None:
    """Types a value, with a type object of its own: setting a dtype changes a shared one."""
    value.type = None if dtype is None else ir.TensorType(dtype)
    value.shape = shape


def dims(value: ir.Value | None) -> tuple[Dim, ...] | None:
    """The shape as ints, symbol names and None (unknown); None for an unknown rank."""
    if value is None or value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """The size of a dimension by those of the symbols in it; None where that does not follow.

    Args:
        dim: a size, a symbol, or an expression such as ``s0//2 + 1``.
        sizes: of symbols.
    """
    if dim is None or isinstance(dim, int):
        return dim
    if dim in sizes:
        return sizes[dim]
    try:
        size = ir.SymbolicDim(dim).evaluate(sizes)
    except ValueError:  # a name, of whatever characters
        return None
    return size if isinstance(size, int) else None


def rank(value: ir.Value) -> int | None:
    """The number of axes, None where it is unknown."""
    return None if value.shape is None else len(value.shape)


def static(value: ir.Value) -> list[int] | None:
    """The shape where every dimension is a known number."""
    known = dims(value)
    if known is None or not all(isinstance(d, int) for d in known):
        return None
    return [d for d in known if isinstance(d, int)]


def size(value: ir.Value) -> int | None:
    """The number of elements, where it is known."""
    known = static(value)
    return None if known is None else math.prod(known)


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The value of an initializer or ``Constant`` node; None for anything computed or fed."""
    if value is None:
        return None
    tensor = value.const_value
    if tensor is None:
        producer = value.producer()
        if producer is None or producer.op_type != "Constant":
            return None
        tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or value.is_graph_input():
        return None
    return tensor.numpy()


def same(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are known to be equal."""
    return a is not None and a == b


def broadcast(*known: Sequence[Dim] | None) -> tuple[Dim, ...] | None:
    """The shape of a numpy-style broadcast, unknown dimensions as None."""
    if any(k is None for k in known):
        return None
    present: list[list[Dim]] = [list(k) for k in known if k is not None]
    one: Dim = 1
    length = max(map(len, present))
    result: list[Dim] = []
    for column in zip(*([one] * (length - len(k)) + k for k in present), strict=True):
        wide = [d for d in column if d != 1]
        numbers = [d for d in wide if isinstance(d, int)]
        if not wide:
            result.append(1)
        elif numbers:
            result.append(numbers[0])
        else:
            result.append(wide[0] if all(same(wide[0], d) for d in wide) else None)
    return tuple(result)


def infer(node: ir.Node) -> None:
    """Sets the dtype, and where it is cheap the shape, of a new node's outputs."""
    first = next((v for v in node.inputs if v is not None), None)
    op = node.op_type
    if op in _BOOL:
        dtype: ir.DataType | None = ir.DataType.BOOL
    elif op in _INT64:
        dtype = ir.DataType.INT64
    elif op == "Cast":
        dtype = ir.DataType(node.attributes["to"].as_int())
    elif op == "EyeLike" and "dtype" in node.attributes:
        dtype = ir.DataType(node.attributes["dtype"].as_int())
    elif op == "Where":
        dtype = node.inputs[1].dtype if node.inputs[1] is not None else None
    elif op == "OneHot":
        dtype = node.inputs[2].dtype if node.inputs[2] is not None else None
    elif op == "ConstantOfShape":
        filled = node.attributes.get("value")
        dtype = filled.as_tensor().dtype if filled is not None else ir.DataType.FLOAT
    elif op in ("Range", "CastLike", "EyeLike"):
        pick = node.inputs[1] if op == "CastLike" else first
        dtype = pick.dtype if pick is not None else None
    else:
        dtype = first.dtype if first is not None else None
    for value in node.outputs:
        assign(value, dtype)
    if op in ("Dropout", "MaxPool", "TopK", "Unique"):
        for value in node.outputs[1:]:
            assign(value, ir.DataType.BOOL if op == "Dropout" else ir.DataType.INT64)
    shapes = _OF_ALL_OUTPUTS[op](node) if op in _OF_ALL_OUTPUTS else [_shape(node, op)]
    for value, shape in zip(node.outputs, shapes, strict=False):
        if shape is not None:
            value.shape = ir.Shape(shape)


def _shape(node: ir.Node, op: str) -> tuple[Dim, ...] | None:
    inputs = node.inputs
    if op in SAME_SHAPE:
        return dims(inputs[0])
    if op in ELEMENTWISE:
        return broadcast(*(dims(v) for v in inputs))
    rule = _RULES.get(op)
    return rule(node) if rule else None


def _reduce(node: ir.Node) -> tuple[Dim, ...] | None:
    known = dims(node.inputs[0])
    if known is None:
        return None
    keep = _attribute(node, "keepdims", 1)
    axes_value = node.inputs[1] if len(node.inputs) > 1 else None
    if axes_value is None:
        if _attribute(node, "noop_with_empty_axes", 0):
            return known
        axes = list(range(len(known)))
    else:
        given = constant(axes_value)
        if given is None:
            return None
        if not given.size:  # as if there were none
            if _attribute(node, "noop_with_empty_axes", 0):
                return known
            given = np.arange(len(known))
        axes = [int(a) % len(known) for a in given]
    if keep:
        return tuple(1 if i in axes else d for i, d in enumerate(known))
    return tuple(d for i, d in enumerate(known) if i not in axes)


def _transpose(node: ir.Node) -> tuple[Dim, ...] | None:
    known = dims(node.inputs[0])
    if known is None:
        return None
    perm = node.attributes.get("perm")
    order = perm.as_ints() if perm is not None else range(len(known) - 1, -1, -1)
    return tuple(known[i] for i in order)


def _matmul(node: ir.Node) -> tuple[Dim, ...] | None:
    a, b = dims(node.inputs[0]), dims(node.inputs[1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    if _attribute(node, "transA", 0):
        a = (*a[:-2], a[-1], a[-2])
    if _attribute(node, "transB", 0):
        b = (*b[:-2], b[-1], b[-2])
    batch = broadcast(a[:-2], b[:-2])
    return None if batch is None else (*batch, a[-2], b[-1])


def _reshape(node: ir.Node) -> tuple[Dim, ...] | None:
    target = constant(node.inputs[1])
    if target is None:
        return None
    known = dims(node.inputs[0])
    zero_is_zero = bool(_attribute(node, "allowzero", 0))
    result: list[Dim] = []
    for i, d in enumerate(target.tolist()):
        if d == 0 and not zero_is_zero:
            result.append(known[i] if known is not None and i < len(known) else None)
        elif d == -1:
            result.append(None)
        else:
            result.append(d)
    if known is not None and target.tolist().count(-1) == 1:
        position = target.tolist().index(-1)
        rest = [d for i, d in enumerate(result) if i != position]
        left = list(known)
        for d in rest:
            if d in left and d is not None:
                left.remove(d)
            elif d != 1:
                break
        else:
            left = [d for d in left if d != 1]
            if len(left) <= 1:
                result[position] = left[0] if left else 1
        if result[position] is None and all(isinstance(d, int) for d in (*known, *rest)):
            total = math.prod(d for d in known if isinstance(d, int))
            others = math.prod(d for d in rest if isinstance(d, int))
            result[position] = total // others if others else None
    return tuple(result)


def _expand(node: ir.Node) -> tuple[Dim, ...] | None:
    target = constant(node.inputs[1])
    return None if target is None else broadcast(dims(node.inputs[0]), target.tolist())


def _unsqueeze(node: ir.Node) -> tuple[Dim, ...] | None:
    known, axes = dims(node.inputs[0]), constant(node.inputs[1])
    if known is None or axes is None:
        return None
    length = len(known) + len(axes)
    inserted = {int(a) % length for a in axes}
    rest = iter(known)
    return tuple(1 if i in inserted else next(rest) for i in range(length))


def _squeeze(node: ir.Node) -> tuple[Dim, ...] | None:
    known = dims(node.inputs[0])
    if known is None or len(node.inputs) < 2:
        return None
    axes = constant(node.inputs[1])
    if axes is None:
        return None
    gone = {int(a) % len(known) for a in axes}
    return tuple(d for i, d in enumerate(known) if i not in gone)


def _shape_of(node: ir.Node) -> tuple[Dim, ...] | None:
    known = dims(node.inputs[0])
    if known is None:
        return (None,)
    start = _attribute(node, "start", 0)
    end = _attribute(node, "end", len(known))
    return (len(range(*slice(start, end).indices(len(known)))),)


def _concat(node: ir.Node) -> tuple[Dim, ...] | None:
    known = [dims(value) for value in node.inputs]
    present = [k for k in known if k is not None]
    if len(present) < len(known) or len({len(k) for k in present}) != 1:
        return None
    axis = _attribute(node, "axis", 0) % len(present[0])
    result: list[Dim] = []
    for i, column in enumerate(zip(*present, strict=True)):
        numbers = [d for d in column if isinstance(d, int)]
        if i != axis:
            result.append(numbers[0] if numbers else column[0])
        elif len(column) == 1:
            result.append(column[0])
        else:
            result.append(sum(numbers) if len(numbers) == len(column) else None)
    return tuple(result)


def _slice(node: ir.Node) -> tuple[Dim, ...] | None:
    known = dims(node.inputs[0])
    rest = [constant(value) for value in node.inputs[1:]]
    if known is None:
        return None
    if len(rest) < 3 or rest[2] is None:
        return (None,) * len(known)
    result = list(known)
    for i, axis in enumerate(rest[2].reshape(-1).tolist()):
        size, (start, end) = known[axis], rest[:2]
        step = rest[3].reshape(-1)[i] if len(rest) > 3 and rest[3] is not None else None
        if len(rest) == 3:
            step = 1
        if isinstance(size, int) and start is not None and end is not None and step is not None:
            begin, stop = int(start.reshape(-1)[i]), int(end.reshape(-1)[i])
            if step > 0:
                result[axis] = len(range(size)[begin:stop:step])
                continue
        result[axis] = None
    return tuple(result)


def _gather(node: ir.Node) -> tuple[Dim, ...] | None:
    known, places = dims(node.inputs[0]), dims(node.inputs[1])
    if known is None or places is None:
        return None
    axis = _attribute(node, "axis", 0) % len(known)
    return (*known[:axis], *places, *known[axis + 1 :])


def _split(node: ir.Node) -> list[tuple[Dim, ...] | None]:
    known, count = dims(node.inputs[0]), len(node.outputs)
    if known is None:
        return [None] * count
    axis = _attribute(node, "axis", 0) % len(known)
    given, size = constant(node.inputs[1]) if len(node.inputs) > 1 else None, known[axis]
    sizes: list[Dim] = [None] * count
    if given is not None:
        sizes = given.tolist()
    elif len(node.inputs) == 1 and isinstance(size, int) and size % count == 0:
        sizes = [size // count] * count
    return [(*known[:axis], each, *known[axis + 1 :]) for each in sizes]


def _recurrent(node: ir.Node) -> list[tuple[Dim, ...] | None]:
    """Of LSTM, GRU and RNN: the output of every step, then the last states."""
    x, r = dims(node.inputs[0]), dims(node.inputs[2])
    if x is None or r is None:
        return [None] * len(node.outputs)
    directions, hidden = r[0], r[2]
    if _attribute(node, "layout", 0):
        batch, length = x[:2]
        state: tuple[Dim, ...] = (batch, directions, hidden)
        return [(batch, length, directions, hidden), state, state]
    length, batch = x[:2]
    state = (directions, batch, hidden)
    return [(length, directions, batch, hidden), state, state]


def _attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


_RULES: dict[str, Callable[[ir.Node], tuple[Dim, ...] | None]] = {
    **{
        f"Reduce{kind}": _reduce
        for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
    },
    "Transpose": _transpose,
    "MatMul": _matmul,
    "FusedMatMul": _matmul,
    "Gemm": _matmul,
    "Reshape": _reshape,
    "Expand": _expand,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Shape": _shape_of,
    "Concat": _concat,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": lambda node: dims(node.inputs[1]),
    "Size": lambda node: (),
    "Range": lambda node: (None,),
}

_OF_ALL_OUTPUTS: dict[str, Callable[[ir.Node], list[tuple[Dim, ...] | None]]] = {
    "Split": _split,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}


def infer_all(model: ir.Model) -> None:
    """Runs onnx's shape inference over the whole model; never overwrites what is known better."""
    from onnx_ir.passes.common import NameFixPass

    # It goes by names, which two builders for one node's place have both given.
    NameFixPass()(model)
    # Of a graph with one operator whose domain is not imported, onnx infers nothing at all.
    for domain in sorted({node.domain for node in model.graph.all_nodes()}):
        model.opset_imports.setdefault(domain, 1)
    before, longest = {}, 0
    for value in _values(model.graph):
        if value.shape is not None:
            before[value] = (value.shape.copy(), value.type)
            if len(value.shape) == 1 and isinstance(value.shape[0], int):
                longest = max(longest, value.shape[0])
                if value.shape[0] > MOST_SIZES:
                    value.shape = ir.Shape([None])
    ask_onnx(model, data_prop=longest <= FAR_TOO_LONG)
    for value, (shape, type_) in before.items():
        if value.shape is None or len(value.shape) != len(shape):
            value.shape = shape
        else:
            value.shape = ir.Shape(
                [
                    old if isinstance(old, int) or old.value is not None else new
                    for old, new in zip(shape, value.shape, strict=True)
                ]
            )
        value.type = type_ or value.type


def ask_onnx(model: ir.Model, *, data_prop: bool) -> None:
    """Adds what onnx infers of dtypes and shapes; sequences stay what they are.

    What onnx_ir takes over of its answer is a dtype alone, by which a sequence became a tensor.

    Args:
        model: in which no two values have one name.
        data_prop: whether sizes are followed through what is computed of them.
    """
    from onnx_ir.passes.common import ShapeInferencePass

    others = {
        value: value.type
        for graph in model.graphs()
        for value in _values(graph)
        if value.type is not None and not isinstance(value.type, ir.TensorType)
    }
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=data_prop)(model)
    for value, type_ in others.items():
        value.type = type_
    _note_sequences(model.graph)


def _note_sequences(graph: ir.Graph) -> None:
    """Takes the types of tensors from values that are sequences, in bodies as well."""
    for node in graph:
        bodies = [
            a.as_graph() for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH
        ]
        for body in bodies:
            _note_sequences(body)
        same = node.op_type == "Identity" and is_no_tensor(node.inputs[0])
        if node.op_type in _SEQUENCES or same:
            found = list(node.outputs)
        elif node.op_type in ("If", "Loop") and bodies:
            shown = list(bodies[0].outputs)[node.op_type == "Loop" :]
            found = [v for v, of in zip(node.outputs, shown, strict=False) if is_no_tensor(of)]
        else:
            continue
        for value in found:
            if isinstance(value.type, ir.TensorType):
                value.type, value.shape = ir.SequenceType(value.type), None


def is_no_tensor(value: ir.Value | None) -> bool:
    """Whether a value is known to be a sequence, or an optional one."""
    if value is None or value.type is None:
        return False
    return not isinstance(value.type, ir.TensorType | ir.SparseTensorType)


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [v for node in graph for v in node.outputs] + list(graph.inputs)
