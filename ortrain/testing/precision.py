"""How close two results must be, by what is computed; and programs in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortrain.errors import ParityError
from ortrain.program import Program


@dataclass(frozen=True)
class Tolerance:
    """Largest difference of two tensors, relative to the largest magnitude in the expected one.

    Attributes:
        numeric: float64 gradient against finite differences.
        oracle: float64 against float64 of another implementation.
        single: float32 against float64.
    """

    numeric: float
    oracle: float
    single: float


# Finite differences of fourth order with a step of 1e-3 leave about 1e-11 for smooth functions, so
# that 1e-7 has room for sharp ones and none for a wrong factor. float32 carries 6e-8: a handful of
# roundings for "smooth", many or amplified ones for "sums".
TOLERANCES = {
    "exact": Tolerance(numeric=1e-9, oracle=0.0, single=0.0),
    "smooth": Tolerance(numeric=1e-7, oracle=1e-9, single=3e-6),
    "sums": Tolerance(numeric=1e-6, oracle=1e-7, single=3e-5),
}


def assert_close(
    actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str, where: str
) -> None:
    """Raises where two tensors differ in shape, or in value by more than the tolerance.

    Args:
        actual: the result in question.
        expected: what it should be.
        tolerance: relative to the largest magnitude in ``expected``.
        what: the two results, for the message.
        where: the case and its variant, for the message.

    Raises:
        ParityError: they differ.
    """
    if actual.shape != expected.shape:
        raise ParityError(f"{what}: shape {actual.shape} instead of {expected.shape}", where=where)
    if not actual.size:
        return
    wide = np.float64 if actual.dtype.kind == "f" else actual.dtype
    got, want = actual.astype(wide), expected.astype(wide)
    if wide is not np.float64:
        agree = bool((got == want).all())
        error, scale = float(not agree), 1.0
    else:
        scale = float(np.abs(want).max())
        error = float(np.abs(got - want).max())
        # Not `error > bound`: a NaN must fail too.
        agree = error <= tolerance * scale
    if not agree:
        place = tuple(int(i) for i in np.unravel_index(np.argmax(got != want), got.shape))
        if wide is np.float64:
            place = tuple(int(i) for i in np.unravel_index(np.argmax(abs(got - want)), got.shape))
        raise ParityError(
            f"{what}: differ by {error:.3g} where the largest value is {scale:.3g} "
            f"(allowed: {tolerance:.1g} of it)",
            where=where,
            because=f"at {place}: {got[place]!r} instead of {want[place]!r}",
        )


def in_float64(program: Program) -> Program:
    """A copy of a float32 program that computes in float64: inputs, constants, casts.

    Attributes of type float stay what they are: ONNX stores them as float32.
    """
    result = program.clone()
    graph = result.graph
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
            value.const_value = ir.tensor(tensor.numpy().astype(np.float64), name=value.name)
            value.type = ir.TensorType(ir.DataType.DOUBLE)
    for value in [*graph.inputs, *(v for n in graph.all_nodes() for v in n.outputs)]:
        if value.dtype == ir.DataType.FLOAT:
            # A type of its own: a copy of a program shares the types of the original's values.
            value.type = ir.TensorType(ir.DataType.DOUBLE)
    for node in graph.all_nodes():
        if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1)))
        for name, attribute in list(node.attributes.items()):
            if attribute.type is ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                if tensor.dtype == ir.DataType.FLOAT:
                    wide = ir.tensor(tensor.numpy().astype(np.float64))
                    node.attributes[name] = ir.AttrTensor(name, wide)
            elif name in ("to", "dtype") and attribute.type is ir.AttributeType.INT:
                if attribute.as_int() == ir.DataType.FLOAT:
                    node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.DOUBLE))
            elif node.op_type == "Constant" and name in ("value_float", "value_floats"):
                number = np.asarray(attribute.value, np.float64)
                del node.attributes[name]
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(number))
    return result
