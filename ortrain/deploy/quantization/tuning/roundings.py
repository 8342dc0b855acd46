"""Where a quantized model rounds, and how: read off from what the quantizer makes of a model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxruntime.quantization.quant_utils import get_qmin_qmax_for_qType

from ortrain.deploy.quantization import constants, graph_nodes
from ortrain.deploy.quantization.configuration import QuantFormat, QuantizationConfig
from ortrain.deploy.quantization.rewriting import Ranges, quantized
from ortrain.errors import OrtrainWarning

_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8)
_PAIR = ("QuantizeLinear", "DequantizeLinear")
_WEIGHTED = {
    "BatchNormalization",
    "Conv",
    "ConvTranspose",
    "Gemm",
    "InstanceNormalization",
    "LayerNormalization",
}
_QUANTIZES = ("DynamicQuantizeLinear", "QuantizeLinear")


@dataclass(frozen=True)
class Rounding:
    """How numbers become integers.

    Attributes:
        low: the lowest integer that a range goes to.
        high: the highest.
        cut: the lowest and the highest that there may be: those of the dtype, also where a range
            goes to fewer, so that what is rounded beyond it stays.
        weight: whether it is a weight's, which is trained; else an activation's.
        symmetric: whether the range of what is rounded is made symmetric around zero.
        axis: of a weight's channels, each with a range of its own; None for one range.
        fixed: scale and zero that are known beforehand; None where they follow from the smallest
            and the largest number of what is rounded, in every run.
        learnt: the range that is trained, by the name of an activation or of an initializer.
    """

    low: int
    high: int
    cut: tuple[int, int]
    weight: bool = False
    symmetric: bool = False
    axis: int | None = None
    fixed: tuple[float, float] | None = None
    learnt: str | None = None


@dataclass
class Roundings:
    """The places of a model at which numbers are rounded.

    Attributes:
        inputs: node and position of its input → how.
        rows: Gather that reads rows of a rounded table → how; the range is the whole table's.
        outputs: output of the model → how.
    """

    inputs: dict[tuple[str, int], Rounding] = field(default_factory=dict)
    rows: dict[str, Rounding] = field(default_factory=dict)
    outputs: dict[str, Rounding] = field(default_factory=dict)

    def places(self) -> Iterator[tuple[tuple[str, int], Rounding]]:
        """All of them; a table of rows as an input of its Gather, outputs at position -1."""
        yield from self.inputs.items()
        yield from (((name, 0), how) for name, how in self.rows.items())
        yield from (((name, -1), how) for name, how in self.outputs.items())

    def replaced(self, others: Mapping[tuple[str, int], Rounding]) -> Roundings:
        """The same places, some with other roundings; by the names of :meth:`places`."""
        return Roundings(
            {place: others.get(place, how) for place, how in self.inputs.items()},
            {name: others.get((name, 0), how) for name, how in self.rows.items()},
            {name: others.get((name, -1), how) for name, how in self.outputs.items()},
        )


def roundings(
    model: ir.Model, config: QuantizationConfig, ranges: Ranges | None, file: str
) -> Roundings:
    """What quantization by a configuration rounds.

    Args:
        model: floating point, with names on all of its nodes; is changed.
        config: of the quantization; of static ones that write quantized operators, the roundings
            are those of pairs of QuantizeLinear and DequantizeLinear.
        ranges: of activations, for static quantization.
        file: its name, for errors.

    Raises:
        InputError: it cannot be quantized so.
    """
    graph = model.graph
    before = {node.name or "": node for node in graph}
    transposed = {name for name, node in before.items() if graph_nodes.attribute(node, "transB", 0)}
    if config.is_static:
        config = dataclasses.replace(config, format=QuantFormat.QDQ)
    with warnings.catch_warnings():
        # Of nodes that stay as they are; it was told when the model was quantized.
        warnings.simplefilter("ignore", OrtrainWarning)
        made, _ = quantized(model, config, ranges, file)
    found = Roundings()
    for node in made.graph:
        name = node.name or ""
        if config.is_static:
            for index, value in enumerate(node.inputs):
                own = node.op_type == "MatMul" or (node.op_type in _WEIGHTED and index == 1)
                how = None if node.op_type in _PAIR else _of_pair(value, config, own)
                if how is None or name not in before:
                    continue
                if how.weight and node.op_type == "Gather" and how.axis is None:
                    found.rows[name] = how
                else:
                    found.inputs[name, index] = how
        elif node.op_type in ("MatMulInteger", "ConvInteger"):
            name = name.removesuffix("_quant")
            _of_product(name, node, config, name in transposed, found)
        elif node.op_type == "Gather":
            _of_rows(node, config, found)
    if config.is_static:
        for value in made.graph.outputs:
            how = _of_pair(value, config, False)
            if how is not None and not how.weight:
                found.outputs[value.name or ""] = how
    return found


def followed(
    model: ir.Model, config: QuantizationConfig, ranges: Ranges | None, file: str
) -> dict[tuple[str, int], str]:
    """Which calibrated value's range decides at each place, found by other ranges of all of them.

    Some decide at several places, as behind a Transpose; at some none does: behind a Softmax.

    Args:
        model: as of :func:`roundings`; is changed.
        config: the same.
        ranges: of activations, for static quantization.
        file: its name, for errors.

    Returns:
        Place, as :meth:`Roundings.places` names it → name of the value.
    """
    if ranges is None or not config.is_static:
        return {}
    names = [*ranges]
    # Each value has a width of its own, which its scale tells.
    known = {name: (-float(index + 1), float(index + 1)) for index, name in enumerate(names)}
    found = {}
    for place, how in roundings(model, config, known, file).places():
        if how.fixed is None:
            continue
        for levels in (how.high - how.low, how.high - how.low - 1):
            width = how.fixed[0] * levels / 2
            index = round(width) - 1
            if abs(width - round(width)) < 1e-6 * width and 0 <= index < len(names):
                found[place] = names[index]
                break
    return found


def layout(value: ir.Value | None) -> tuple[ir.Value, tuple[int, ...] | None] | None:
    """The float32 initializer that a value is another layout of, and the order of its axes there.

    None in place of the order where axes are not only moved, and None where there is none.
    """
    root, order = _root(value), None
    if root is None or root.shape is None:
        return None
    node = None if value is None else value.producer()
    rank = len(root.shape)
    if node is None:
        order = tuple(range(rank))
    elif node.op_type == "Transpose" and node.inputs[0] is root:
        default = tuple(reversed(range(rank)))
        order = tuple(graph_nodes.attribute(node, "perm", default))
    return root, order


def _of_pair(value: ir.Value | None, config: QuantizationConfig, own: bool) -> Rounding | None:
    """What a pair of QuantizeLinear and DequantizeLinear does; None where there is none.

    Args:
        value: behind the pair.
        config: of the quantization.
        own: whether a constant here is a weight to onnxruntime; it takes others for activations.
    """
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    source, scale, zero = (*node.inputs, None)[:3]
    assert source is not None
    kind = _kind(zero if zero is not None else source)
    if kind is None:  # of a bias in 32 bits, whose steps are too small to learn from
        return None
    first = source.producer()
    if source.const_value is not None or (
        first is not None and constants.constant(first.inputs[0]) is not None
    ):
        axis = graph_nodes.attribute(node, "axis", 1) if np.ndim(_array(scale)) else None
        # With a scale for each channel onnxruntime takes no other zero than the middle.
        symmetric = config.weights_symmetric if own else config.activations_symmetric
        return _of_weight(kind, symmetric or axis is not None, axis, reduced=config.reduce_range)
    if first is None or first.op_type != "QuantizeLinear":
        return None
    low, high = get_qmin_qmax_for_qType(int(kind))
    steps = _array(scale), np.asarray(0) if zero is None else _array(zero)
    fixed = float(steps[0]), float(steps[1])
    return Rounding(low=int(low), high=int(high), cut=(int(low), int(high)), fixed=fixed)


def _of_product(
    name: str, node: ir.Node, config: QuantizationConfig, transposed: bool, found: Roundings
) -> None:
    """The roundings of a product in integers, whose input is rounded in each run."""
    read, _, _, zero = (*node.inputs, None, None)[:4]
    source = None if read is None else read.producer()
    if source is not None and source.op_type in _QUANTIZES:  # else it is in integers already
        found.inputs[name, 0] = Rounding(low=0, high=255, cut=(0, 255))
    kind = None if zero is None else _kind(zero)
    if zero is None or kind is None:
        return
    axis = None
    if np.ndim(_array(zero)):
        convolves = node.op_type == "ConvInteger"
        axis = 0 if convolves or transposed else -1
    symmetric = _symmetric(kind, config)
    found.inputs[name, 1] = _of_weight(kind, symmetric, axis, reduced=config.reduce_range)


def _of_rows(node: ir.Node, config: QuantizationConfig, found: Roundings) -> None:
    """The rounding of a table of which rows are read."""
    table = node.inputs[0]
    if table is None or table.const_value is None or (kind := _kind(table)) is None:
        return
    name = node.name or ""
    scale = next((use.node for use in node.outputs[0].uses()), None)
    symmetric = _symmetric(kind, config)
    if scale is not None and scale.op_type == "Cast":
        # Integers that the output layer reads too: each row has the scale of its column there.
        axis = 0 if config.per_channel else None
        found.inputs[name, 0] = _of_weight(kind, symmetric, axis, reduced=config.reduce_range)
        return
    found.rows[name] = _of_weight(kind, symmetric, None, reduced=False)


def _symmetric(kind: ir.DataType, config: QuantizationConfig) -> bool:
    """Whether integers are symmetric in dynamic quantization, where their type alone decides."""
    own = int(kind) == config.weights_dtype.tensor_type
    return config.weights_symmetric if own else config.activations_symmetric


def _of_weight(kind: ir.DataType, symmetric: bool, axis: int | None, *, reduced: bool) -> Rounding:
    low, high = get_qmin_qmax_for_qType(int(kind), reduced, symmetric)
    least, most = get_qmin_qmax_for_qType(int(kind))
    cut = int(least), int(most)
    return Rounding(
        low=int(low), high=int(high), cut=cut, weight=True, symmetric=symmetric, axis=axis
    )


def _kind(value: ir.Value) -> ir.DataType | None:
    kind = value.dtype if value.const_value is None else value.const_value.dtype
    return kind if kind in _INTEGERS else None


def _array(value: Any) -> np.ndarray:
    assert value is not None
    assert value.const_value is not None
    array: np.ndarray = value.const_value.numpy()
    return array


def trained(model: ir.Model, found: Roundings) -> list[str]:
    """The initializers that a model is trained in: rounded weights, biases and scales of norms.

    Args:
        model: floating point, with names on all of its nodes, and what :func:`roundings` was given.
        found: where it rounds.

    Returns:
        Their names, in the order of the file; float32 alone.
    """
    chosen: set[str] = set()
    for node in model.graph:
        name = node.name or ""
        places = {0} if name in found.rows else set()
        places |= {
            index for index in range(len(node.inputs)) if _is_weight(found.inputs, name, index)
        }
        places |= _BESIDE.get(node.op_type, set()) if node.domain in graph_nodes.STANDARD else set()
        for index in places:
            value = node.inputs[index] if index < len(node.inputs) else None
            beside = not (name in found.rows or _is_weight(found.inputs, name, index))
            if (root := _root(value)) is not None and not (beside and len(root.shape or ()) != 1):
                chosen.add(root.name or "")
    return [name for name in model.graph.initializers if name in chosen]


# Where operators read biases, and the scales of normalizations: vectors, other than tables.
_BESIDE = {
    "Add": {0, 1},
    "BatchNormalization": {1, 2},
    "Conv": {2},
    "ConvTranspose": {2},
    "Gemm": {2},
    "GroupNormalization": {1, 2},
    "InstanceNormalization": {1, 2},
    "LayerNormalization": {1, 2},
    "Mul": {0, 1},
    "RMSNormalization": {1},
    "Sub": {1},
}


def _is_weight(places: dict[tuple[str, int], Rounding], name: str, index: int) -> bool:
    how = places.get((name, index))
    return how is not None and how.weight


def _root(value: ir.Value | None) -> ir.Value | None:
    """The float32 initializer that a value is, or is another layout of; None where there is none.

    A number alone is no weight: it scales, or divides by a norm's epsilon.
    """
    while value is not None and value.producer() is not None:
        node = value.producer()
        assert node is not None
        moved = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
        if not graph_nodes.standard(node, *moved):
            return None
        value = node.inputs[0]
    tensor = constants.constant(value)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size < 2:
        return None
    return value
