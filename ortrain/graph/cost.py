"""How much arithmetic a graph does, roughly: what decides whether threads pay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from ortrain.graph import shapes

Symbols = tuple[str, ...]


class Multiplications:
    """Multiplications of all matrix products and convolutions, plus one for every other element.

    A polynomial in the symbolic dimensions: a decoder has another length at each token, and need
    not walk its graph again for it.

    Args:
        graph: or some of its nodes; composites count as one.
    """

    def __init__(self, graph: Iterable[ir.Node]) -> None:
        self._terms: Counter[Symbols] = Counter()
        for node in graph:
            for value in node.outputs:
                count, symbols = _product((*factors(node, value), *(shapes.dims(value) or ())))
                self._terms[symbols] += count

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """Their number.

        Args:
            sizes: value of each symbolic dimension; unknown dimensions count as 1.
        """
        return sum(
            count * math.prod(sizes.get(symbol, 1) for symbol in symbols)
            for symbols, count in self._terms.items()
        )


def factors(node: ir.Node, output: ir.Value) -> tuple[shapes.Dim, ...]:
    """What an element of an output of the node costs."""
    if node.op_type == "LinearCrossEntropy":
        x, weight = (shapes.dims(value) for value in node.inputs[:2])
        place = node.outputs.index(output)
        if x and weight:
            return ((*x, weight[0]), (weight[0],), (x[0],), (x[0],))[place]
    if node.op_type in ("MatMul", "Gemm", "FusedMatMul"):
        left = shapes.dims(node.inputs[0])
        flipped = node.attributes.get("transA")
        if left:
            return (left[-2 if flipped and flipped.as_int() else -1],)
    if node.op_type in ("Conv", "ConvTranspose"):
        return (shapes.dims(node.inputs[1]) or ())[1:]
    if node.op_type in ("LSTM", "GRU", "RNN"):
        w, r = (shapes.dims(value) for value in node.inputs[1:3])
        if w and r and all(isinstance(dim, int) for dim in (*w, *r)):
            return (w[1] * (w[2] + r[2]) // r[2],)  # type: ignore[operator]
    if node.op_type == "Attention":
        keys = shapes.dims(node.inputs[1])
        if keys and len(keys) > 1:
            return (2, keys[-2])
    return ()


def _product(dims: tuple[shapes.Dim, ...]) -> tuple[int, Symbols]:
    count = math.prod(dim for dim in dims if isinstance(dim, int))
    # Of axes that a reshape has merged: "s0*s1".
    parts = [part for dim in dims if isinstance(dim, str) for part in dim.split("*")]
    count *= math.prod(int(part) for part in parts if part.isdigit())
    return count, tuple(sorted(part for part in parts if not part.isdigit()))
