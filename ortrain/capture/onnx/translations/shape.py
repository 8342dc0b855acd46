"""Shape: reshape, transpose, expand, join and cut; and what makes new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import (
    INT64_MAX,
    Size,
    Translator,
    aten,
    symbolic,
    translation,
)
from ortrain.graph import shapes


@translation(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def reshape(op: Translator, self: ir.Value, size: Sequence[Size]) -> ir.Value:
    # A static size of 0 is a size, not "as it was".
    return op.Reshape(self, op.sizes(size), allowzero=1)


@translation(aten.flatten.using_ints)
def flatten(op: Translator, self: ir.Value, start_dim: int = 0, end_dim: int = -1) -> ir.Value:
    length = shapes.rank(self)
    assert length is not None
    if length == 0:
        return op.Reshape(self, [1])
    start, end = start_dim % length, end_dim % length
    tail = [op.dim(self, axis) for axis in range(end + 1, length)]
    target = op.constant(np.array([0] * start + [-1], np.int64))
    return op.Reshape(self, op.Concat(target, *tail, axis=0) if tail else target)


@translation(aten.unflatten.int)
def unflatten(op: Translator, self: ir.Value, dim: int, sizes: Sequence[Size]) -> ir.Value:
    length = shapes.rank(self)
    assert length is not None
    dim %= length
    tail = [op.dim(self, axis) for axis in range(dim + 1, length)]
    lead = op.constant(np.array([0] * dim, np.int64))
    return op.Reshape(self, op.Concat(lead, op.sizes(sizes), *tail, axis=0))


@translation(aten.transpose.int)
def transpose(op: Translator, self: ir.Value, dim0: int, dim1: int) -> ir.Value:
    length = shapes.rank(self)
    assert length is not None
    if length == 0:
        return self
    perm = list(range(length))
    perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return op.Transpose(self, perm=perm)


@translation(aten.permute.default)
def permute(op: Translator, self: ir.Value, dims: Sequence[int]) -> ir.Value:
    return op.Transpose(self, perm=[d % len(dims) for d in dims]) if dims else self


@translation(aten.numpy_T.default)
def numpy_t(op: Translator, self: ir.Value) -> ir.Value:
    """``x.T``: all axes from behind."""
    length = shapes.rank(self)
    assert length is not None
    return self if length < 2 else op.Transpose(self, perm=list(reversed(range(length))))


@translation(aten.t.default, aten.mT.default, aten.adjoint.default, aten.mH.default)
def t(op: Translator, self: ir.Value) -> ir.Value:
    """The last two axes change places; of real numbers the conjugate is themselves."""
    length = shapes.rank(self)
    return self if length is None or length < 2 else transpose(op, self, -2, -1)


@translation(aten.unsqueeze.default)
def unsqueeze(op: Translator, self: ir.Value, dim: int) -> ir.Value:
    return op.Unsqueeze(self, [dim])


@translation(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(op: Translator, self: ir.Value, dim: int | Sequence[int] | None = None) -> ir.Value:
    known = shapes.dims(self)
    assert known is not None
    if dim is None:
        wanted = list(range(len(known)))
    else:
        wanted = [dim] if isinstance(dim, int) else list(dim)
    # A symbolic size was not 1 when the trace passed here, and torch then leaves it alone.
    gone = [d for d in wanted if known and known[d] == 1]
    return op.Squeeze(self, gone) if gone else self


@translation(aten.expand.default)
def expand(
    op: Translator, self: ir.Value, size: Sequence[Size], *, implicit: bool = False
) -> ir.Value:
    return op.Expand(self, op.sizes([1 if isinstance(s, int) and s == -1 else s for s in size]))


@translation(aten.expand_as.default)
def expand_as(op: Translator, self: ir.Value, other: ir.Value) -> ir.Value:
    return op.Expand(self, op.shape(other))


@translation(aten.slice.Tensor)
def slice(
    op: Translator,
    self: ir.Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> ir.Value:
    start = 0 if start is None else start
    end = INT64_MAX if end is None else end
    bounds = (start, end, step)
    if all(isinstance(v, int) for v in bounds) and bounds == (0, INT64_MAX, 1):
        return self
    return op.Slice(self, op.index(start), op.index(end), [dim], [step])


@translation(aten.narrow.default)
def narrow(op: Translator, self: ir.Value, dim: int, start: Size, length: Size) -> ir.Value:
    begin, count = op.index(start), op.index(length)
    if isinstance(start, int) and start < 0:  # whose end may be 0, which is the first place
        begin = op.Add(op.dim(self, dim), begin)
    return op.Slice(self, begin, op.Add(begin, count), [dim], [1])


@translation(aten.select.int)
def select(op: Translator, self: ir.Value, dim: int, index: Size) -> ir.Value:
    if isinstance(index, int):
        index = op.constant(np.int64(index))
    return op.Gather(self, index, axis=dim)


@translation(aten.cat.default)
def cat(op: Translator, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    # torch ignores empty vectors among tensors of higher rank.
    kept = [v for v in tensors if shapes.dims(v) != (0,)]
    if not kept:
        return tensors[0]
    return kept[0] if len(kept) == 1 else op.Concat(*kept, axis=dim)


@translation(aten.stack.default)
def stack(op: Translator, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    return op.Concat(*(op.Unsqueeze(v, [dim]) for v in tensors), axis=dim)


@translation(aten.split.Tensor, aten.split.default)
def split(op: Translator, self: ir.Value, split_size: Size, dim: int = 0) -> Any:
    total = _static_dim(self, dim)
    if not isinstance(split_size, int):
        raise symbolic("split")
    sizes = [min(split_size, total - start) for start in range(0, total, split_size)]
    return split_sizes(op, self, sizes, dim)


@translation(aten.split_with_sizes.default, aten.split.sizes)
def split_sizes(op: Translator, self: ir.Value, split_sizes: Sequence[int], dim: int = 0) -> Any:
    if len(split_sizes) == 1:
        return (op.Identity(self),)
    return op.Split(
        self, op.constant(np.array(split_sizes, np.int64)), axis=dim, outputs=len(split_sizes)
    )


@translation(aten.chunk.default)
def chunk(op: Translator, self: ir.Value, chunks: int, dim: int = 0) -> Any:
    return split(op, self, -(-_static_dim(self, dim) // chunks), dim)


@translation(aten.unbind.int)
def unbind(op: Translator, self: ir.Value, dim: int = 0) -> Any:
    count = _static_dim(self, dim)
    return tuple(op.Gather(self, op.constant(np.int64(i)), axis=dim) for i in range(count))


def _static_dim(value: ir.Value, dim: int) -> int:
    known = shapes.dims(value)
    assert known is not None
    size = known[dim]
    if not isinstance(size, int):
        raise symbolic("split")
    return size


@translation(aten.repeat.default)
def repeat(op: Translator, self: ir.Value, repeats: Sequence[Size]) -> ir.Value:
    dims = shapes.dims(self)
    assert dims is not None
    lead = len(repeats) - len(dims)
    if lead:
        self = op.Unsqueeze(self, list(range(lead)))
    wide = (1,) * lead + dims
    times = [1 if isinstance(r, int) and r == 1 else r for r in repeats]
    if all(isinstance(t, int) and t == 1 for t in times):
        return self
    if all(d == 1 or (isinstance(t, int) and t == 1) for d, t in zip(wide, times, strict=True)):
        return op.Expand(self, op.sizes(times))
    return op.Tile(self, op.sizes(times))


@translation(aten.tile.default)
def tile(op: Translator, self: ir.Value, dims: Sequence[Size]) -> ir.Value:
    length = shapes.rank(self)
    assert length is not None
    return repeat(op, self, [1] * (length - len(dims)) + list(dims))


@translation(aten.repeat_interleave.self_int)
def repeat_interleave(
    op: Translator,
    self: ir.Value,
    repeats: Size,
    dim: int | None = None,
    *,
    output_size: Size | None = None,
) -> ir.Value:
    """Each slice ``repeats`` times in a row: along an axis of its own, which then joins ``dim``."""
    if dim is None:
        self, dim = op.Reshape(self, [-1]), 0
    length = shapes.rank(self)
    assert length is not None
    if length == 0:
        self, length = op.Reshape(self, [1]), 1
    dim %= length
    apart = op.Unsqueeze(self, [dim + 1])
    times: list[Size] = [1] * (length + 1)
    times[dim + 1] = repeats
    size = op.Mul(op.dim(self, dim), op.index(repeats))
    sizes = [op.dim(self, axis) if axis != dim else size for axis in range(length)]
    wide = op.Concat(*sizes, axis=0) if length > 1 else size
    return op.Reshape(op.Expand(apart, op.sizes(times)), wide, allowzero=1)


@translation(aten.roll.default)
def roll(
    op: Translator, self: ir.Value, shifts: Size | Sequence[Size], dims: int | Sequence[int] = ()
) -> ir.Value:
    by = [shifts] if isinstance(shifts, int | ir.Value) else list(shifts)
    axes = [dims] if isinstance(dims, int) else list(dims)
    if not axes:  # of the elements in a row
        flat = roll(op, op.Reshape(self, [-1]), by, [0])
        return op.Reshape(flat, op.shape(self))
    for shift, dim in zip(by, axes, strict=True):
        size = op.dim(self, dim)
        cut = op.Mod(op.Sub(size, op.index(shift)), op.Max(size, [1]))
        front = op.Slice(self, cut, [INT64_MAX], [dim], [1])
        self = op.Concat(front, op.Slice(self, [0], cut, [dim], [1]), axis=dim)
    return self


_PADDING = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@translation(aten.pad.default)
def pad(
    op: Translator,
    self: ir.Value,
    pad: Sequence[Size],
    mode: str = "constant",
    value: float | None = None,
) -> ir.Value:
    length = shapes.rank(self)
    assert length is not None
    count = len(pad) // 2  # torch's pairs start at the last axis
    pads = op.sizes([pad[2 * i] for i in range(count)] + [pad[2 * i + 1] for i in range(count)])
    axes = op.constant(np.arange(length - 1, length - 1 - count, -1, dtype=np.int64))
    fill = None if mode != "constant" or not value else op.constant(value, self.dtype)
    return op.Pad(self, pads, fill, axes, mode=_PADDING[mode])


@translation(aten.diff.default)
def diff(
    op: Translator,
    self: ir.Value,
    n: int = 1,
    dim: int = -1,
    prepend: ir.Value | None = None,
    append: ir.Value | None = None,
) -> ir.Value:
    ends = [v for v in (prepend, self, append) if v is not None]
    result = self if len(ends) == 1 else op.Concat(*ends, axis=dim)
    for _ in range(n):
        later = op.Slice(result, [1], [INT64_MAX], [dim], [1])
        earlier = op.Slice(result, [0], [-1], [dim], [1])
        different = "Xor" if result.dtype == ir.DataType.BOOL else "Sub"
        result = op.node(different, (later, earlier))
    return result
