"""The rewriting of a graph to integers of eight bits, by onnxruntime's quantizers."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import add_infer_metadata, find_by_name

from ortrain.deploy.quantization import (
    constants,
    fused,
    graph_nodes,
    names,
    preparation,
    tied,
    widening,
)
from ortrain.deploy.quantization.configuration import (
    QuantFormat,
    QuantizationConfig,
    QuantizationMode,
)
from ortrain.errors import InputError, OrtrainWarning, listing

Ranges = Mapping[str, tuple[float, float]]

# The oldest opset with quantized operators, and the oldest that has pairs with scales by channel.
OLDEST, BY_CHANNEL = 11, 13
# Weights of other nodes above this many bytes do not enter the quantizer at all.
_LEFT_OUT = 1 << 20


def quantized(
    model: ir.Model, config: QuantizationConfig, ranges: Ranges | None, file: str
) -> tuple[ir.Model, dict[str, str]]:
    """A quantized model.

    Args:
        model: is changed; the caller loads it anew for what else it wants.
        config: which nodes, and how; stays as it is.
        ranges: of activations, by the names of values as :func:`ready` makes them; None for dynamic
            quantization.
        file: its name, for errors.

    Returns:
        The model, and why nodes stay as they were that were to be quantized: name → reason.

    Raises:
        InputError: the model is quantized already, nothing in it can be, or its sub-graphs cannot.
        ValueError: a node that is named is not there.
    """
    graph_nodes.expect_float(model, file)
    config = _of_opset(config, graph_nodes.opset(model), file)
    excluded = ready(model, config, file)
    preparation.infer(model)
    # What follows from constants alone is no activation: a weight that stays, transposed, stays.
    apart = {*config.nodes_to_exclude, *constants.constants(model)}
    wanted = _wanted(config, apart | set(excluded))
    may_share = not config.is_static and graph_nodes.opset(model) >= BY_CHANNEL
    shared = tied.tables(model, wanted) if may_share else {}
    apart |= shared.keys()
    alone: dict[str, str] = {}
    if config.is_static:
        alone = _of_one_number(model)
        excluded |= _of_other_types(model) | alone
    wanted = _wanted(config, apart | set(excluded))
    if ranges is not None:
        excluded |= _without_range(model, ranges, wanted)
        wanted = _wanted(config, apart | set(excluded))
    if not any(wanted(node) for node in graph_nodes.nodes(model)):
        raise InputError(
            f"nothing of {file} would be quantized",
            because=f"of operators {listing(config.operators_to_quantize)} it has no node that is "
            "not excluded",
            help="name other operators or nodes, or leave these lists out",
        )
    if config.is_static and config.format == QuantFormat.QOperator:
        _step_between(model)
    left_out: dict[str, ir.TensorProtocol] = {}
    proto = _proto(model, wanted, left_out)
    chosen = [node.name or "" for node in graph_nodes.nodes(model) if wanted(node)]
    excluded_names = sorted({*apart, *excluded})
    with _quiet():
        result = _rewrite(proto, config, ranges, chosen, excluded_names, _by_tensor(model))
    made = ir.from_proto(result)
    for name, tensor in left_out.items():
        if name in made.graph.initializers:
            made.graph.initializers[name].const_value = tensor
    tied.share(made, shared)
    _keep_apart(made, alone)
    made.producer_name, made.producer_version = "ortrain", None
    _report_left(made, config, excluded, file)
    return made, excluded


def _of_opset(config: QuantizationConfig, opset: int, file: str) -> QuantizationConfig:
    """The configuration as an opset has it: before 13, pairs have one scale for a weight."""
    if not config.is_static or not config.per_channel or opset >= BY_CHANNEL:
        return config
    warnings.warn(
        f"{file} is of opset {opset}: each weight gets one scale, as scales by channel need opset "
        f"{BY_CHANNEL}",
        OrtrainWarning,
        stacklevel=2,
    )
    return dataclasses.replace(config, per_channel=False)


def ready(model: ir.Model, config: QuantizationConfig, file: str) -> dict[str, str]:
    """Prepares a model for a configuration, in place; values that are calibrated keep their names.

    Returns:
        Nodes that cannot be quantized: name → reason.

    Raises:
        InputError: its opset is too old, or its sub-graphs cannot be quantized.
        ValueError: a node that is named is not there.
    """
    opset = graph_nodes.opset(model)
    if opset < OLDEST:
        raise InputError(
            f"{file} is of opset {opset}",
            because=f"quantized operators need opset {OLDEST}",
            help="export the model with a newer opset, or convert it with onnx.version_converter",
        )
    # Names of nodes that have none are given first, so that a configuration may have them.
    preparation.prepare(model, gemm=False, wanted=lambda node: False)
    for argument in ("nodes_to_quantize", "nodes_to_exclude"):
        graph_nodes.expect_known(model, getattr(config, argument), argument)
    wanted = _wanted(config, set(config.nodes_to_exclude), gemm=True)
    constants.fold(model, wanted)  # casts of weights, too
    widening.widen(model, wanted, frozenset())
    fused.take_apart(model, wanted, dynamic=not config.is_static)
    excluded = _unquantizable(model, config)
    preparation.prepare(
        model,
        gemm=not config.is_static,
        wanted=_wanted(config, set(config.nodes_to_exclude) | set(excluded), gemm=True),
        plain=config.is_static,
    )
    if config.is_static:
        _expect_flat(model, config, file)
    return excluded


def _wanted(config: QuantizationConfig, excluded: set[str], gemm: bool = False) -> constants.Wanted:
    operators, chosen = set(config.operators_to_quantize), set(config.nodes_to_quantize)
    if "MatMul" in operators:
        operators |= {"FusedMatMul", "Attention"}
        if gemm and not config.is_static:
            operators |= {"Gemm", "FusedGemm"}
    if "Gemm" in operators:
        operators |= {"FusedGemm"} if config.is_static else {"FusedGemm", "MatMul"}

    def wanted(node: ir.Node) -> bool:
        if node.op_type not in operators or node.name in excluded:
            return False
        return not chosen or node.name in chosen

    return wanted


def _unquantizable(model: ir.Model, config: QuantizationConfig) -> dict[str, str]:
    """Nodes on which onnxruntime's quantizer would fail or go wrong."""
    found = dict.fromkeys(
        graph_nodes.misnamed(model, config.operators_to_quantize),
        "an operator of another domain has the same name",
    )
    for node in graph_nodes.nodes(model):
        name = node.name or ""
        if node.op_type == "Attention" and node.domain == graph_nodes.MICROSOFT:
            if not fused.has_quantized_form(node):
                found[name] = "QAttention has not all of its attributes and inputs"
            elif config.is_static:
                found[name] = "it has a cache, and only its dynamic form is quantized then"
        elif (
            node.op_type in ("Conv", "ConvTranspose", "LSTM")
            and not config.is_static
            and constants.weight(node) is None
        ):
            found[name] = "its weight is no constant"
        elif node.op_type == "LSTM" and not config.weights_symmetric:
            found[name] = "its quantized form has symmetric weights alone"
        elif (tensor := constants.weight(node)) is not None and not tensor.size:
            found[name] = "its weight has no numbers"
    return found


def _of_other_types(model: ir.Model) -> dict[str, str]:
    """Nodes at numbers of 16 or 64 bits, whose scales are of float32."""
    others = constants.FLOATS - {ir.DataType.FLOAT}
    return {
        node.name or "": f"its numbers are {kinds.pop().name}"
        for node in model.graph
        if (kinds := {v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype})
        and (kinds := kinds & others)
    }


def _of_one_number(model: ir.Model) -> dict[str, str]:
    """Each ``Softmax`` over an axis that may have one element.

    Its quantized kernel gives 0 there where it should give 1 (onnxruntime 1.31.1): a decoder's
    first token then attended to nothing.
    """
    found = {}
    for node in graph_nodes.nodes(model):
        if not graph_nodes.standard(node, "Softmax"):
            continue
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        axis = graph_nodes.attribute(node, "axis", -1 if graph_nodes.opset(model) >= 13 else 1)
        size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
        if not isinstance(size, int) or size < 2:
            found[node.name or ""] = "its axis may have one element"
    return found


def _keep_apart(model: ir.Model, names: Collection[str]) -> None:
    """Keeps each ``Softmax`` from being joined with the pairs around it when a session loads it.

    What it gives is at most 1; a session removes an ``Identity``, and no ``Min``.
    """
    for node in list(graph_nodes.nodes(model)):
        if node.name not in names or node.graph is None:
            continue
        value = node.outputs[0]
        readers = [use for use in value.uses() if use.node.op_type == "QuantizeLinear"]
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        if not readers or before is None or before.op_type != "DequantizeLinear":
            continue
        one = constants.initializer(model, "one", np.asarray(1, np.float32))
        same = ir.node("Min", [value, one], name=f"{node.name}_apart")
        same.outputs[0].type, same.outputs[0].shape = value.type, value.shape
        node.graph.insert_after(node, same)
        for use in readers:
            use.node.replace_input_with(use.idx, same.outputs[0])


def _step_between(model: ir.Model) -> None:
    """Puts an ``Identity`` before readers for which onnxruntime's quantizer leaves nothing to read.

    Where values are quantized operators' results, it writes no floating point for bodies that
    reach out for it, nor for a ``Where``. A session removes the ``Identity``.
    """
    inner = {id(node) for node in graph_nodes.nodes(model) if node.graph is not model.graph}
    for node in list(model.graph):
        for value in node.outputs:
            apart = [
                use
                for use in value.uses()
                if id(use.node) in inner or graph_nodes.standard(use.node, "Where")
            ]
            if not apart or (value.type is not None and value.dtype not in constants.FLOATS):
                continue
            same = ir.node("Identity", [value], name=f"{value.name}_apart")
            made = same.outputs[0]
            made.name = names.unused(model, f"{value.name}_apart")
            made.type, made.shape = value.type, value.shape
            model.graph.insert_after(node, same)
            for use in apart:
                use.node.replace_input_with(use.idx, made)


def _by_tensor(model: ir.Model) -> frozenset[str]:
    """Weights that have one scale: those of a MatMul that are no matrices, or its first factor.

    Kernels have a scale for each column of a matrix that is multiplied with, and nothing else.
    """
    found = set()
    for name, value in model.graph.initializers.items():
        for use in value.uses():
            if not graph_nodes.standard(use.node, "MatMul"):
                continue
            if use.idx == 0 or value.shape is None or len(value.shape) != 2:
                found.add(name)
    return frozenset(found)


def _expect_flat(model: ir.Model, config: QuantizationConfig, file: str) -> None:
    wanted = _wanted(config, set(config.nodes_to_exclude))
    inside = [
        node.name or ""
        for node in constants.products(model)
        if node.graph is not model.graph and wanted(node)
    ]
    if inside:
        raise InputError(
            f"{file} has products inside If, Loop or Scan, which static quantization cannot reach",
            because=f"these nodes are in sub-graphs: {listing(inside, 3)}",
            help="quantize dynamically, export decoders with and without cache as two files "
            "instead of a merged one, or exclude these nodes",
        )


def _without_range(model: ir.Model, ranges: Ranges, wanted: constants.Wanted) -> dict[str, str]:
    """Nodes of which an activation has no range, as masks of infinities have none."""
    found = {}
    for node in model.graph:
        if not wanted(node):
            continue
        for value in (*node.inputs, *node.outputs):
            if value is None or not value.name or value.is_initializer():
                continue
            if value.type is not None and value.type.dtype not in constants.FLOATS:
                continue
            if value.name not in ranges:
                found[node.name or ""] = f"calibration has no range of {value.name}"
    return found


def _proto(
    model: ir.Model, wanted: constants.Wanted, left_out: dict[str, ir.TensorProtocol]
) -> onnx.ModelProto:
    """The model for the quantizer; large weights of other nodes are named in it, not contained."""
    kept: dict[str, ir.TensorProtocol] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        kept[name] = tensor
        if tensor.nbytes > _LEFT_OUT and not any(wanted(use.node) for use in value.uses()):
            left_out[name] = tensor
            value.const_value = ir.ExternalTensor(
                "left_out",
                0,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.numpy().shape),
                name=name,
            )
        elif isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(tensor.numpy(), tensor.dtype, name=name)
    proto = ir.to_proto(model)
    for name, tensor in kept.items():
        model.graph.initializers[name].const_value = tensor
    add_infer_metadata(proto)
    return proto


def _rewrite(
    proto: onnx.ModelProto,
    config: QuantizationConfig,
    ranges: Ranges | None,
    chosen: list[str],
    excluded: list[str],
    by_tensor: frozenset[str],
) -> onnx.ModelProto:
    operators = list(config.operators_to_quantize)
    if "Gemm" in operators and not config.is_static:
        operators.append("MatMul")
    options: dict[str, Any] = {
        "ActivationSymmetric": config.activations_symmetric,
        "AddQDQPairToWeight": config.qdq_add_pair_to_weight,
        "DedicatedQDQPair": config.qdq_dedicated_pair,
        "DefaultTensorType": onnx.TensorProto.FLOAT,
        "EnableSubgraph": not config.is_static,
        "MatMulConstBOnly": not config.is_static,
        "QDQOpTypePerChannelSupportToAxis": dict(config.qdq_op_type_per_channel_support_to_axis),
        "WeightSymmetric": config.weights_symmetric,
    }
    given = tensors_data(ranges) if ranges is not None else None
    if config.is_static and config.format == QuantFormat.QDQ:
        quantizer = _Pairs(
            proto,
            config.per_channel,
            config.reduce_range,
            config.weights_dtype,
            config.activations_dtype,
            given,
            chosen,
            excluded,
            operators,
            options,
        )
    else:
        # Made as a static one, or it writes the whole model to a temporary folder and copies it
        # twice, which models of more than 2 GiB do not survive.
        quantizer = _Operators(
            proto,
            config.per_channel,
            config.reduce_range,
            QuantizationMode[config.mode.name],
            True,
            config.weights_dtype,
            config.activations_dtype,
            given,
            chosen,
            excluded,
            operators,
            options,
        )
        quantizer.static = config.is_static
    quantizer.by_tensor = by_tensor
    quantizer.quantize_model()
    return quantizer.model.model


class _Pairs(QDQQuantizer):  # type: ignore[misc]
    """Writes pairs, some weights with one scale."""

    by_tensor: frozenset[str] = frozenset()

    def is_tensor_per_channel(
        self, tensor_name: str, default_axis: int, op_type: str | None = None
    ) -> tuple[bool, int | None]:
        if tensor_name in self.by_tensor:
            return False, None
        found: tuple[bool, int | None] = super().is_tensor_per_channel(
            tensor_name, default_axis, op_type
        )
        return found


class _Operators(ONNXQuantizer):  # type: ignore[misc]
    """Writes quantized operators, some weights with one scale."""

    by_tensor: frozenset[str] = frozenset()

    def quantize_weight_per_channel(
        self,
        weight_name: str,
        weight_qType: Any,  # noqa: N803
        channel_axis: int,
        reduce_range: bool = True,
        keep_float_weight: bool = False,
    ) -> Any:
        if weight_name in self.by_tensor:
            held = find_by_name(weight_name, self.model.initializer())
            return self.quantize_initializer(held, weight_qType, reduce_range, keep_float_weight)
        return super().quantize_weight_per_channel(
            weight_name, weight_qType, channel_axis, reduce_range, keep_float_weight
        )


def tensors_data(ranges: Ranges) -> TensorsData:
    """Ranges in the form of onnxruntime's quantizers."""
    return TensorsData(
        CalibrationMethod.MinMax,
        {
            name: TensorData(lowest=np.float32(low), highest=np.float32(high))
            for name, (low, high) in ranges.items()
        },
    )


def _report_left(
    model: ir.Model, config: QuantizationConfig, excluded: Mapping[str, str], file: str
) -> None:
    """Warns of products that are floating point still, and that nobody asked to stay so.

    Other nodes that have no range carry masks, and must stay; they are told where they were named.
    """
    named = set(config.nodes_to_quantize)
    wanted = _wanted(config, set(config.nodes_to_exclude) | set(excluded))
    left = []
    if not config.is_static:
        left = [node.name or "" for node in constants.products(model) if wanted(node)]
    kinds = {node.name or "": node.op_type for node in graph_nodes.nodes(model)}
    told = [
        f"{name} ({reason})"
        for name, reason in sorted(excluded.items())
        if name in named or kinds.get(name) in constants.WEIGHTED
    ]
    if left or told:
        warnings.warn(
            f"{file}: {len(left) + len(told)} nodes were to be quantized and stay as they were: "
            f"{listing([*left, *told], 3)}",
            OrtrainWarning,
            stacklevel=2,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that onnxruntime logs for each node, on the root logger."""
    logger = logging.getLogger()

    def drop(record: logging.LogRecord) -> bool:
        return "quantization" not in record.pathname or record.levelno >= logging.ERROR

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
