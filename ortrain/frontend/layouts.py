"""How results and gradients lie in memory, where nothing else tells.

The order of axes in memory is part of what PyTorch gives: ``view`` may fail without it. A trace
takes that of results from fakes, whose rules are written beside the kernels. On a CPU those of some
kernels are others. (Found by comparing both for some hundred functions in all orders of axes.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx
from torch.nn import functional

from ortrain.capture.onnx.translations.base import symbolic
from ortrain.program import Program
from ortrain.pytorch.conditions import with_sizes


def _row_by_row(_: Tensor) -> torch.memory_format:
    return torch.contiguous_format


def _as_given(given: Tensor) -> torch.memory_format:
    """Channels last where those of what is given are, whole and beyond doubt."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.dim())
    if last is None or given.is_contiguous() or not given.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


_KERNELS: dict[Callable[..., Any], Callable[[Tensor], torch.memory_format]] = {
    functional.batch_norm: _as_given,
    torch.batch_norm: _as_given,
    functional.logsigmoid: _row_by_row,
    functional.rrelu: _row_by_row,
    torch.rrelu: _row_by_row,
    functional.unfold: _row_by_row,
}


def laid_out(target: Any, args: Sequence[Any], result: Any) -> Any:
    """A result of a function as the function's kernel leaves it in memory.

    Args:
        target: the function.
        args: of the call.
        result: what its fake gives.
    """
    given = args[0] if args else None
    if not isinstance(given, Tensor) or given.device.type != "cpu":
        return result
    kernel = _KERNELS.get(target)
    if target is functional.interpolate and given.dim() == 3:
        kernel = _row_by_row
    return result if kernel is None else result.contiguous(memory_format=kernel(given))


# Values of the symbols in sizes. At two some results are views that are copies at other sizes. The
# larger ones are for what convolutions leave nothing of at the others.
_TRIED, _LARGER = (2, 3, 8), (1000, 3001, 8002)
_RESHAPE = torch.ops.aten.reshape.default


def decide_layouts(graph: fx.Graph) -> None:
    """Finds sizes that decide how a reshaped tensor lies in memory.

    ``reshape`` gives a view where it can, whose axes may lie in another order, and else a copy that
    lies row by row. A trace knows one of the two, and takes it for all sizes.

    Raises:
        SymbolicSize: there are such sizes: the graph is traced anew, with numbers for them.
    """
    known: dict[Any, bool] = {}
    for node in graph.find_nodes(op="call_function", target=_RESHAPE):
        given, result = node.args[0].meta["val"], node.meta["val"]
        sizes, strides, shape = [*given.shape], [*given.stride()], [*result.shape]
        if not any(isinstance(size, torch.SymInt) for size in (*sizes, *shape)):
            continue
        key = str((sizes, strides, shape))
        if key not in known:
            known[key] = len(sizes) > 1 and _is_undecided(sizes, strides, shape)
        if known[key]:
            error = symbolic(f"how the result of {node.name} lies in memory")
            error.values = [given]
            raise error


def _is_undecided(sizes: Sequence[Any], strides: Sequence[Any], shape: Sequence[Any]) -> bool:
    """Whether a reshaped tensor's axes lie in their order at some sizes and otherwise at others."""
    first, last = len(sizes), len(sizes) + len(strides)
    every = [*sizes, *strides, *shape]
    found = set()
    for values in [*with_sizes(every, _TRIED)] or with_sizes(every, _LARGER):
        given = torch.empty_strided(values[:first], values[first:last], device="meta")
        try:
            result = given.reshape(values[last:])
        except RuntimeError:  # there is no such shape of so many elements
            continue
        # An axis of one may have any stride.
        steps = [n for n, size in zip(result.stride(), result.shape, strict=True) if size > 1]
        found.add(steps == sorted(steps, reverse=True))
    return len(found) > 1


# What the symbols of sizes stand for: an axis may be of one in the example alone.
_SOME = 1009, 2


def stored(tensor: Tensor) -> tuple[int, ...]:
    """The axes of a tensor of a trace in the order in which they lie in memory, at any sizes.

    An axis of size 1 stays where it is among the others, and those along which all elements are the
    same come first, so that they part no others. The channel of grey images lies last where its
    stride says so: a convolution reads it.
    """
    if tensor.layout is not torch.strided:
        return tuple(range(tensor.ndim))
    numbers = next(with_sizes([*tensor.shape, *tensor.stride()], _SOME))
    sizes, strides = numbers[: tensor.ndim], [*map(float, numbers[tensor.ndim :])]
    grey = len(sizes) in (4, 5) and sizes[1] == strides[1] == 1
    for axis in reversed(range(len(sizes))):
        if sizes[axis] == 1:
            inner = axis + 1
            strides[axis] = sizes[inner] * strides[inner] if inner < len(sizes) else 1
    if grey:
        strides[1] = 0.5
    return tuple(sorted(range(len(sizes)), key=lambda axis: -(strides[axis] or math.inf)))


_PRODUCTS, _CONVOLUTIONS = {"MatMul", "Gemm"}, {"Conv", "ConvTranspose"}


def orders_of(program: Program, weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The order of the axes in memory of gradients that PyTorch lays as their weights.

    Args:
        program: the forward.
        weights: by the names of its inputs.

    Returns:
        By name, from the outermost axis to the innermost; none for weights that lie row by row.
    """
    last = torch.channels_last
    found: dict[str, tuple[int, ...]] = {}
    for name, weight in weights.items():
        if weight.is_contiguous():
            continue
        value = program.input(name)
        if weight.dim() == 2 and weight.t().is_contiguous() and _read_by(value, _PRODUCTS):
            found[name] = (1, 0)
        if weight.is_contiguous(memory_format=last) and _read_by(value, _CONVOLUTIONS):
            found[name] = (0, 2, 3, 1)
    return found


def _read_by(value: ir.Value, kinds: set[str]) -> bool:
    """Whether nothing but such operators read a value, or its transpose."""
    return not value.is_graph_output() and all(
        node.op_type in kinds or (node.op_type == "Transpose" and _read_by(node.outputs[0], kinds))
        for node in value.consumers()
    )
