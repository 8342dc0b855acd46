"""Operators of a file, counted: what an optimization has changed."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import onnx_ir as ir

from ortrain.deploy.model_folder import load_model

# Operators that do the work of several.
FUSED = frozenset(
    {
        "Attention",
        "BiasAdd",
        "BiasGelu",
        "BiasSoftmax",
        "BiasSplitGelu",
        "DecoderMaskedMultiHeadAttention",
        "EmbedLayerNormalization",
        "FastGelu",
        "FusedConv",
        "FusedGemm",
        "FusedMatMul",
        "Gelu",
        "GemmFastGelu",
        "GroupNorm",
        "GroupQueryAttention",
        "LayerNormalization",
        "MultiHeadAttention",
        "NhwcConv",
        "PackedAttention",
        "PackedMultiHeadAttention",
        "QuickGelu",
        "RMSNormalization",
        "RotaryEmbedding",
        "SimplifiedLayerNormalization",
        "SkipGroupNorm",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }
)


def operators_of(model: ir.Model) -> Counter[str]:
    """How many nodes of each operator a model has, in its sub-graphs and functions too."""
    nodes = [*model.graph.all_nodes()]
    for function in model.functions.values():
        nodes += function.all_nodes()
    return Counter(node.op_type for node in nodes)


def operators_in(path: str | os.PathLike[str]) -> Counter[str]:
    """The same of a file.

    Raises:
        InputError: it is no ONNX model, or damaged.
    """
    return operators_of(load_model(Path(path)))


def fused(counts: Counter[str]) -> dict[str, int]:
    """Those that do the work of several."""
    return {name: counts[name] for name in sorted(counts) if name in FUSED}
