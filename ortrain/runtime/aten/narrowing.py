"""Kernels of PyTorch compute in float32 on narrow tensors: casts around them are theirs.

A graph says so in operators, since ONNX's round whatever they give::

    w = Cast<to=FLOAT>(x)        # x is bfloat16
    m = Mul(w, 0.1767)           →    y = Mul(x, 0.1767)
    y = Cast<to=BFLOAT16>(m)

where the number stays the float32 that it is: PyTorch takes it as it is, behind a tensor of any
dtype. A sum of a bfloat16 and a float32 needs no cast either::

    w = Cast<to=FLOAT>(x)
    y = Add(w, z)                →    y = Add(x, z)

Nor does a norm over a batch, whose weights and statistics stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rewire import take_place
from ortrain.graph.rounding import NARROW, WIDE, is_narrow, is_narrowing, is_widening
from ortrain.program import Program

_MIXED = frozenset({"Add", "Sub", "Mul", "Div"})
# Element by element, or along an axis: each takes its operands' dtype and rounds its result once.
_KERNELS = _MIXED | {
    "Pow", "Exp", "Log", "Sqrt", "Reciprocal", "Erf", "Sigmoid", "Tanh", "Sin", "Cos", "Gelu",
    "Softmax", "LogSoftmax", "LeakyRelu", "Elu", "Selu", "Softplus", "HardSwish", "HardSigmoid",
    "Mish", "Silu", "Log1p", "Expm1", "SigmoidGradient", "TanhGradient", "SiluGradient",
    "GeluGradient", "HardSwishGradient", "MishGradient", "SoftplusGradient", "EluGradient",
    "LeakyReluGradient", "SoftmaxGradient", "LogSoftmaxGradient",
}  # fmt: skip
# Of norms over a batch, how many of the first inputs are images.
_BATCH_NORMS = {"BatchNorm": 1, "BatchNormGradient": 2}
# The place where each may have a number.
_NUMBERS = {"Add": (0, 1), "Mul": (0, 1), "Sub": (0, 1), "Div": (1,), "Pow": (1,)}
_COMMUTATIVE = frozenset({"Add", "Mul"})


def leave_casts_to_kernels(program: Program) -> bool:
    """Takes away casts that PyTorch's kernels make themselves; whether there were any."""
    changed = False
    for node in list(program.graph):
        if node.op_type in _KERNELS and len(node.outputs) == 1:
            changed |= _narrow(program, node) or _mix(program, node)
        elif node.op_type in _BATCH_NORMS:
            changed |= _narrow_batch(program, node)
    return changed


def _narrow(program: Program, node: ir.Node) -> bool:
    """A kernel on what is cast to float32, whose result is cast back."""
    result = node.outputs[0]
    readers = [use.node for use in result.uses()]
    dtypes = {reader.outputs[0].dtype for reader in readers}
    if result.is_graph_output() or len(dtypes) != 1 or not all(map(is_narrowing, readers)):
        return False
    (dtype,) = dtypes
    inputs: list[ir.Value | None] = []
    numbers = False
    for place, value in enumerate(node.inputs):
        producer = value.producer() if value is not None else None
        if is_widening(producer) and producer is not None and _dtype(producer) == dtype:
            inputs.append(producer.inputs[0])
        elif _is_number(value) and place in _NUMBERS.get(node.op_type, ()):
            numbers = True
            inputs.append(value)
        else:
            return False
    narrow = [v for v in inputs if v is not None and v.dtype in NARROW]
    if dtype not in NARROW or not narrow:
        return False
    # Beside a number, a tensor without axes would not decide about the dtype of the result.
    if numbers and not any(shapes.rank(v) for v in narrow):
        return False
    # In front of a tensor, and in a difference, PyTorch rounds a number to the tensor's dtype.
    if numbers and node.op_type in _COMMUTATIVE:
        inputs.sort(key=_is_number)
    elif numbers and node.op_type == "Sub" and not _is_exact(inputs, dtype):
        return False
    with Builder.before(node, opset=program.opset) as op:
        made = _again(op, node, inputs)
        shapes.assign(made, dtype, result.shape)
    _stand_for(program, made, readers)
    program.graph.remove(node, safe=True)
    return True


def _narrow_batch(program: Program, node: ir.Node) -> bool:
    """A norm over a batch on what is cast to float32, whose result is cast back or not read."""
    casts = [
        v.producer() if v is not None else None for v in node.inputs[: _BATCH_NORMS[node.op_type]]
    ]
    result = node.outputs[0]
    readers = [use.node for use in result.uses()]
    dtypes = {_dtype(cast) if is_widening(cast) else None for cast in casts}
    dtypes |= {reader.outputs[0].dtype for reader in readers}
    (dtype, *more) = dtypes
    if more or dtype not in NARROW or not all(map(is_narrowing, readers)):
        return False
    if result.is_graph_output():
        return False
    for place, cast in enumerate(casts):
        assert cast is not None  # it widens
        node.replace_input_with(place, cast.inputs[0])
    shapes.assign(result, dtype, result.shape)
    _stand_for(program, result, readers)
    return True


def _stand_for(program: Program, value: ir.Value, casts: Sequence[ir.Node]) -> None:
    """Has a value take the places of some that were cast to what it is."""
    for cast in casts:
        given = cast.outputs[0]
        if given.is_graph_output():
            with Builder.before(cast, opset=program.opset) as op:
                take_place(op.Identity(value), given)
        else:
            ir.convenience.replace_all_uses_with(given, value)
        program.graph.remove(cast, safe=True)


def _mix(program: Program, node: ir.Node) -> bool:
    """A kernel on one tensor that is cast to float32 for it alone, and one that is float32."""
    if node.op_type not in _MIXED or node.domain:
        return False
    for place in (0, 1):
        value, other = node.inputs[place], node.inputs[1 - place]
        cast = value.producer() if value is not None else None
        if cast is None or value is None or other is None or not is_widening(cast):
            continue
        alone = len(value.uses()) == 1 and not value.is_graph_output()
        # A tensor without axes would not decide about the dtype of the result.
        axes = (shapes.rank(value) or 0) and (shapes.rank(other) or 0)
        if alone and axes and other.dtype == WIDE and cast.outputs[0].dtype == WIDE:
            if is_widening(other.producer()):  # of both there is no float32 left
                continue
            node.replace_input_with(place, cast.inputs[0])
            program.graph.remove(cast, safe=True)
            return True
    return False


def _is_number(value: ir.Value | None) -> bool:
    known = shapes.constant(value)
    return known is not None and known.ndim == 0


def _is_exact(values: Sequence[ir.Value | None], dtype: ir.DataType) -> bool:
    """Whether the numbers among some values are such of a narrow dtype."""
    known = [shapes.constant(v) for v in values if _is_number(v)]
    return all(n is not None and bool(n.astype(dtype.numpy()) == n) for n in known)


def _dtype(cast: ir.Node | None) -> ir.DataType | None:
    source = cast.inputs[0] if cast is not None else None
    return None if source is None else source.dtype


def _again(op: Builder, node: ir.Node, inputs: list[ir.Value | None]) -> ir.Value:
    attributes = {a.name: a.value for a in node.attributes.values()}
    made: ir.Value = op.node(node.op_type, inputs, domain=node.domain, **attributes)
    return made


def bodies_in_float32(program: Program, takes_body: Callable[[ir.Node], bool]) -> bool:
    """Has operators on narrow tensors that become several others compute in float32.

    Args:
        program: changed in place.
        takes_body: whether the body of its operator takes a node's place.
    """
    changed = False
    for node in list(program.graph):
        if node.domain or not is_narrow((*node.inputs, *node.outputs)) or not takes_body(node):
            continue
        with Builder.before(node, opset=program.opset) as op:
            for place, value in enumerate(node.inputs):
                if value is not None and value.dtype in NARROW:
                    node.replace_input_with(place, op.cast(value, WIDE))
        for value in node.outputs:
            if value.dtype in NARROW:
                _round(program, node, value)
        changed = True
    return changed


def _round(program: Program, node: ir.Node, value: ir.Value) -> None:
    """Has a node make a value in float32, and a cast behind it what it made before."""
    cast = ir.Node("", "Cast", [], [ir.AttrInt64("to", int(value.dtype or WIDE))], num_outputs=1)
    cast.metadata_props.update(node.metadata_props)
    program.graph.insert_after(node, cast)
    shapes.assign(cast.outputs[0], value.dtype, value.shape)
    take_place(cast.outputs[0], value)
    cast.resize_inputs(1)
    cast.replace_input_with(0, value)
    shapes.assign(value, WIDE, value.shape)
