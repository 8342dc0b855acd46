"""``HalfPrecisionConfig``: floating point of 16 bits, for storage alone or for computing too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.half import to_half
from ortrain.deploy.quantization import constants, graph_nodes, preparation
from ortrain.errors import InputError, listing
from ortrain.kinds import NONE, expect, expect_flag, expect_names

_KINDS = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: (2 - 2.0**-7) * 2.0**127}
# Weights of fewer elements stay as they are: constants of formulas, of which files have no size.
_SMALL = 64


@dataclass
class HalfPrecisionConfig:
    """How a model gets floating point of 16 bits.

    Attributes:
        dtype: ``"float16"`` or ``"bfloat16"``.
        compute: whether products are computed in it too. Else weights are stored in it and are
            float32 again when onnxruntime has loaded the file: half the size on any processor, and
            no further error. Processors have few kernels of 16 bits; GPUs have them.
        keep_io_types: whether inputs and outputs stay float32, where it is computed in.
        nodes_to_exclude: names of nodes that stay as they are.
        operators_to_exclude: operators that stay as they are, where it is computed in.
    """

    dtype: str = "float16"
    compute: bool = False
    keep_io_types: bool = True
    nodes_to_exclude: list[str] = field(default_factory=list)
    operators_to_exclude: list[str] = field(default_factory=list)

    is_static = False

    def __post_init__(self) -> None:
        aliases = {"fp16": "float16", "bf16": "bfloat16", "half": "float16"}
        expect("dtype", self.dtype, str, "'float16' or 'bfloat16'")
        self.dtype = aliases.get(self.dtype, self.dtype)
        if self.dtype not in _KINDS:
            raise ValueError(f"dtype={self.dtype!r}: expected 'float16' or 'bfloat16'")
        expect_flag("compute", self.compute)
        expect_flag("keep_io_types", self.keep_io_types)
        if self.compute and self.dtype == "bfloat16":
            raise ValueError(
                "compute=True with dtype='bfloat16': onnxruntime has too few kernels of it; store "
                "weights in bfloat16 (compute=False), or compute in float16"
            )
        for name in ("nodes_to_exclude", "operators_to_exclude"):
            expect_names(name, getattr(self, name), NONE)
            setattr(self, name, list(getattr(self, name) or ()))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HalfPrecisionConfig:
        """The configuration of a mapping; keys that are not of it are left out."""
        expect("values", values, Mapping, "a mapping")
        names = cls.__dataclass_fields__
        return cls(**{name: value for name, value in values.items() if name in names})

    def __str__(self) -> str:
        return f"{self.dtype}, {'computed in' if self.compute else 'of weights'}"


def halved(model: ir.Model, config: HalfPrecisionConfig, file: str) -> ir.Model:
    """The model in floating point of 16 bits.

    Args:
        model: is changed.
        config: how.
        file: its name, for errors.

    Raises:
        InputError: a weight does not fit into float16, or there is none to convert.
        ValueError: a node that is named is not there.
    """
    preparation.prepare(model, gemm=False, wanted=lambda node: False)
    graph_nodes.expect_known(model, config.nodes_to_exclude, "nodes_to_exclude")
    _expect_in_range(model, config, file)
    return _computed(model, config) if config.compute else _stored(model, config, file)


def _stored(model: ir.Model, config: HalfPrecisionConfig, file: str) -> ir.Model:
    """Each weight → a weight of 16 bits and a Cast, which onnxruntime computes once."""
    kind, excluded = _KINDS[config.dtype], set(config.nodes_to_exclude)
    casts = []
    for name, value in list(model.graph.initializers.items()):
        tensor = constants.constant(value)
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size < _SMALL:
            continue
        uses = [use for use in value.uses() if use.node.name not in excluded]
        if not uses or value.is_graph_output():
            continue
        if config.dtype == "float16" and _beyond(tensor):
            continue  # a mask, to whose numbers scores are added: in float16 they would count
        narrow = constants.initializer(model, f"{name}_{config.dtype}", _narrow(tensor, kind))
        cast = ir.node("Cast", [narrow], {"to": ir.DataType.FLOAT}, name=f"{name}_widened")
        wide = cast.outputs[0]
        wide.name, wide.type, wide.shape = f"{name}_wide", value.type, value.shape
        for use in uses:
            use.node.replace_input_with(use.idx, wide)
        casts.append(cast)
    if not casts:
        raise InputError(
            f"{file} has no float32 weight to convert",
            help="give a model in float32, and exclude fewer nodes",
        )
    first = next(iter(model.graph))
    model.graph.insert_before(first, casts)
    preparation.remove_unused(model)
    return model


def _computed(model: ir.Model, config: HalfPrecisionConfig) -> ir.Model:
    names, operators = set(config.nodes_to_exclude), set(config.operators_to_exclude)
    preparation.infer(model)
    to_half(
        model,
        infer=False,
        keep_io_types=config.keep_io_types,
        stays=lambda node: node.name in names or node.op_type in operators,
    )
    return model


def _beyond(tensor: ir.TensorProtocol) -> bool:
    """Whether a weight has finite numbers that float16 has not."""
    array = tensor.numpy()
    sizes = np.abs(array)
    return bool((np.isfinite(array) & (sizes > _LARGEST[ir.DataType.FLOAT16])).any())


def _narrow(tensor: ir.TensorProtocol, kind: ir.DataType) -> np.ndarray:
    array = tensor.numpy()
    # The lowest number of float32, which masks have, is beyond bfloat16; with minus infinity in its
    # place, a row that is masked as a whole would be NaN.
    largest = _LARGEST[kind]
    clipped = np.clip(array, -largest, largest)
    return np.where(np.isfinite(array), clipped, array).astype(kind.numpy())


def _expect_in_range(model: ir.Model, config: HalfPrecisionConfig, file: str) -> None:
    if config.dtype != "float16":
        return
    top = _LARGEST[ir.DataType.FLOAT16]
    excluded = set(config.nodes_to_exclude)
    large = []
    for name, value in model.graph.initializers.items():
        tensor = constants.constant(value)
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size < _SMALL:
            continue
        sizes = np.abs(tensor.numpy())
        # The lowest number of float32 masks what it is added to; that of float16 does that too.
        highest = float(np.max(sizes, initial=0.0, where=sizes < 1e30))
        if highest > top and any(use.node.name not in excluded for use in value.uses()):
            large.append(f"{name} ({highest:.3g})")
    if large:
        raise InputError(
            f"{file} has weights beyond the range of float16",
            because=f"{listing(large)}; the largest number of float16 is {top:g}",
            help="choose dtype='bfloat16', or exclude the nodes that read them",
        )
