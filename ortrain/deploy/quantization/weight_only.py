"""``WeightOnlyConfig``: weights in blocks of four or eight bits, products in floating point."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.deploy.quantization import constants, fused, graph_nodes, preparation, tied, widening
from ortrain.errors import InputError, OrtrainWarning, listing
from ortrain.kinds import NONE, expect, expect_flag, expect_names, expect_whole

OPERATORS = ("MatMul", "Gather")
_BLOCKS = (16, 32, 64, 128, 256)


@dataclass
class WeightOnlyConfig:
    """How weights are stored in few bits; activations stay floating point.

    Products become ``MatMulNBits`` and embeddings ``GatherBlockQuantized``, both of onnxruntime.

    Attributes:
        bits: 4 or 8.
        block_size: numbers that share a scale: 16, 32, 64, 128 or 256.
        symmetric: whether zero is in the middle of each block's range; else a block has its own.
        accuracy_level: in what products are computed: 1 float32, 2 float16, 3 bfloat16, 4 integers
            of eight bits, to which activations are rounded; None leaves it to onnxruntime, which
            takes float32. On one core of an AMD Zen 5, MiniLM on 32 words took 2.2 times as long as
            in float32 with eight bits and None, and 0.6 times with 4, with the same predictions.
        nodes_to_quantize: names of nodes; empty for all.
        nodes_to_exclude: names of nodes that stay as they are.
        operators_to_quantize: of ``MatMul`` and ``Gather``.
    """

    bits: int = 4
    block_size: int = 32
    symmetric: bool = False
    accuracy_level: int | None = 4
    nodes_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    operators_to_quantize: list[str] = field(default_factory=lambda: list(OPERATORS))

    is_static = False

    def __post_init__(self) -> None:
        for name, known in (("bits", (4, 8)), ("block_size", _BLOCKS)):
            value = getattr(self, name)
            expect_whole(name, value)
            if value not in known:
                raise ValueError(f"{name}={value}: expected {' or '.join(map(str, known))}")
        expect_flag("symmetric", self.symmetric)
        expect_whole("accuracy_level", self.accuracy_level, NONE)
        if self.accuracy_level not in (None, 0, 1, 2, 3, 4):
            raise ValueError(f"accuracy_level={self.accuracy_level}: expected 0 to 4, or None")
        for name in ("nodes_to_quantize", "nodes_to_exclude", "operators_to_quantize"):
            expect_names(name, getattr(self, name), NONE)
            setattr(self, name, list(getattr(self, name) or ()))
        self.operators_to_quantize = self.operators_to_quantize or list(OPERATORS)
        if other := set(self.operators_to_quantize) - {*OPERATORS, "Gemm"}:
            raise ValueError(
                f"operators_to_quantize has {listing(sorted(other))}: expected of MatMul and Gather"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WeightOnlyConfig:
        """The configuration of a mapping; keys that are not of it are left out."""
        expect("values", values, Mapping, "a mapping")
        names = cls.__dataclass_fields__
        return cls(**{name: value for name, value in values.items() if name in names})

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"weights in {self.bits} bits, {kind}, blocks of {self.block_size}"


def in_blocks(model: ir.Model, config: WeightOnlyConfig, file: str) -> ir.Model:
    """The model with its weights in few bits.

    Args:
        model: is changed.
        config: which weights, and how.
        file: its name, for errors.

    Raises:
        InputError: it is quantized already, or no weight of it would be.
        ValueError: a node that is named is not there.
    """
    graph_nodes.expect_float(model, file)
    preparation.prepare(model, gemm=False, wanted=lambda node: False)
    for argument in ("nodes_to_quantize", "nodes_to_exclude"):
        graph_nodes.expect_known(model, getattr(config, argument), argument)
    chosen, excluded = set(config.nodes_to_quantize), set(config.nodes_to_exclude)
    operators = set(config.operators_to_quantize)
    if operators & {"MatMul", "Gemm"}:
        operators |= {"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "Attention"}

    def wanted(node: ir.Node) -> bool:
        if node.op_type not in operators or node.name in excluded:
            return False
        return not chosen or node.name in chosen

    constants.fold(model, wanted)
    widening.widen(model, wanted, frozenset({ir.DataType.FLOAT16}))
    fused.take_apart(model, wanted, dynamic=False)
    preparation.prepare(model, gemm=True, wanted=wanted)
    writer = _Blocks(model, config, tied.tables(model, wanted))
    count, left = 0, list[str]()
    for node in list(graph_nodes.nodes(model)):
        if not wanted(node):
            continue
        done = writer.table(node) if node.op_type == "Gather" else writer.product(node)
        count += done
        if not done and constants.weight(node) is not None:
            left.append(node.name or "")
    if not count:
        raise InputError(
            f"nothing of {file} would be quantized",
            because="all products with a constant matrix and all embeddings are excluded, or there "
            "are none",
            help="name other nodes, or leave the lists out",
        )
    if left:
        warnings.warn(
            f"{file}: {len(left)} nodes were to be quantized and stay as they were: "
            f"{listing(left, 3)}; only matrices are kept in blocks",
            OrtrainWarning,
            stacklevel=2,
        )
    model.opset_imports.setdefault(graph_nodes.MICROSOFT, 1)
    preparation.remove_unused(model)
    return model


class _Blocks:
    """Puts quantized nodes in the place of others; a weight of several readers is made once."""

    def __init__(
        self, model: ir.Model, config: WeightOnlyConfig, shared: Mapping[str, str]
    ) -> None:
        self._model, self._config, self._shared = model, config, shared
        # The kernel is onnxruntime's; of its rewriting, nodes that share a weight give it twice.
        self._kernel = _kernel(config)
        self._made: dict[tuple[str, str], list[ir.Value]] = {}
        self._flat: dict[str, ir.Value] = {}

    def product(self, node: ir.Node) -> bool:
        """``MatMul`` with a constant matrix → ``MatMulNBits``."""
        tensor = constants.weight(node)
        if tensor is None or len(tensor.shape) != 2 or not graph_nodes.standard(node, "MatMul"):
            return False
        if not tensor.size:
            return False
        if tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            return False
        value = node.inputs[1]
        assert value is not None
        rows, columns = tensor.numpy().shape
        attributes: dict[str, Any] = {
            "K": rows,
            "N": columns,
            "bits": self._config.bits,
            "block_size": self._config.block_size,
        }
        if self._config.accuracy_level:
            attributes["accuracy_level"] = self._config.accuracy_level
        made = ir.node(
            "MatMulNBits",
            [node.inputs[0], *self._packed(value, transposed=True)],
            attributes,
            domain=graph_nodes.MICROSOFT,
            name=node.name,
        )
        graph_nodes.put(node, [made])
        return True

    def table(self, node: ir.Node) -> bool:
        """``Gather`` of rows of a constant table → ``GatherBlockQuantized``."""
        value = node.inputs[0]
        tensor = constants.constant(value)
        if value is None or tensor is None or len(tensor.shape) != 2 or not tensor.size:
            return False
        if tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            return False
        if graph_nodes.attribute(node, "axis", 0) != 0 or not graph_nodes.standard(node, "Gather"):
            return False
        columns = tensor.numpy().shape[1]
        if columns % self._config.block_size:  # the last block would be padded, and given out too
            return False
        packed, *more = self._rows(node, value)
        made = ir.node(
            "GatherBlockQuantized",
            [packed, node.inputs[1], *more],
            {
                "bits": self._config.bits,
                "block_size": self._config.block_size,
                "gather_axis": 0,
                "quantize_axis": 1,
            },
            domain=graph_nodes.MICROSOFT,
            name=node.name,
        )
        graph_nodes.put(node, [made])
        return True

    def _rows(self, node: ir.Node, value: ir.Value) -> list[ir.Value]:
        """The same for rows: of a table that is the output layer too, those of the product."""
        weight = self._shared.get(node.name or "")
        if weight is None:
            return self._packed(value, transposed=False)
        packed, *more = self._packed(self._model.graph.initializers[weight], transposed=True)
        if weight not in self._flat:  # [rows, blocks, bytes] → [rows, bytes]
            shape = constants.initializer(self._model, "rows_of_bytes", np.array([0, -1]))
            flat = ir.node("Reshape", [packed, shape], name=f"{weight}_by_rows")
            self._model.graph.insert_before(next(iter(self._model.graph)), flat)
            self._flat[weight] = flat.outputs[0]
            flat.outputs[0].name = f"{weight}_rows"
        return [self._flat[weight], *more]

    def _packed(self, value: ir.Value, *, transposed: bool) -> list[ir.Value]:
        """Bits, scales and, unless it is symmetric, zeros of a weight as initializers."""
        assert value.name is not None
        key = value.name, "product" if transposed else "table"
        if key not in self._made:
            tensor = value.const_value
            assert tensor is not None
            array = tensor.numpy() if transposed else tensor.numpy().T
            packed, scales, zeros = self._kernel.qbits_block_quant(np.ascontiguousarray(array))
            if not transposed:  # [rows, blocks, bytes] → [rows, bytes]
                packed = packed.reshape(len(packed), -1)
            parts = {f"_Q{self._config.bits}": packed, "_scales": scales}
            if not self._config.symmetric:
                parts["_zero_points"] = zeros
            end = "" if transposed else "_table"
            self._made[key] = [
                constants.initializer(self._model, f"{value.name}{end}{suffix}", part)
                for suffix, part in parts.items()
            ]
        return self._made[key]


def _kernel(config: WeightOnlyConfig) -> Any:
    """What packs a matrix, of onnxruntime; importing it makes every library log to stderr."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            DefaultWeightOnlyQuantizer,
        )
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
    return DefaultWeightOnlyQuantizer(
        DefaultWeightOnlyQuantConfig(
            block_size=config.block_size, is_symmetric=config.symmetric, bits=config.bits
        )
    )
