"""Sums, means, norms and extrema over axes."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten.dtypes import UNSIGNED
from ortrain.runtime.aten.kernels.cast import converted
from ortrain.runtime.aten.kernels.shape import has_some, is_open, sized
from ortrain.runtime.aten.kernels.unsigned import ordered
from ortrain.runtime.aten.lines import Raw
from ortrain.runtime.aten.table import kernel


class _Over:
    """The axes of one reduction, and the calls that reduce over them.

    Attributes:
        axes: their numbers; a tensor where it is not known how many there are.
        is_open: whether that is so.
        is_none: whether nothing is reduced.
        keep: whether they stay, with size 1.
    """

    def __init__(self, t, x, axes, keepdims, noop_with_empty_axes):
        self._t, self._noop, self.keep = t, bool(noop_with_empty_axes), bool(keepdims)
        self.is_open = axes is not None and is_open(axes)
        self.axes = [] if axes is None else axes if self.is_open else t.ints(axes)
        self.is_none = self._noop and not self.is_open and not self.axes
        if not self.is_open and not self.axes and x.dims is not None:
            self.axes = [*range(x.rank)]

    def __call__(self, function, x, *arguments, **options):
        """Writes the call of a function that takes a tensor, axes and whether to keep them."""
        if self.is_none:
            return x
        if not self.is_open:
            result = self._t.call(function, x, *arguments, self.axes, self.keep, **options)
        else:
            result = self._t.call(
                "late.reduce", Raw(function), x, self.axes, self.keep, self._noop, **options
            )
            if self._noop:
                result.roots = x.roots
        return self.noted(result, x)

    def noted(self, result, x):
        """The result, with what is known of its sizes."""
        if x.dims is None or (self.is_open and not self.keep):
            return result
        if self.is_open or not all(isinstance(axis, int) for axis in self.axes):
            return sized(result, [None] * (x.rank if self.keep else x.rank - len(self.axes)))
        over = {axis % x.rank for axis in self.axes}
        if self.keep:
            return sized(result, [1 if i in over else d for i, d in enumerate(x.dims)])
        return sized(result, [d for i, d in enumerate(x.dims) if i not in over])


def _reduction(operator, function, *, floating=False):
    """Registers a kernel.

    Args:
        operator: in ONNX.
        function: ``function(t, x, over)``.
        floating: whether integers are reduced in float64.
    """

    @kernel(operator)
    def reduce(t, data, axes=None, *, keepdims=1, noop_with_empty_axes=0):
        """The axes are an attribute before opset 18."""
        data, dtype = t.tensor(data), data.dtype
        over = _Over(t, data, axes, keepdims, noop_with_empty_axes)
        if not floating or dtype in FLOATING:
            return function(t, data, over)
        result = function(t, converted(t, data, ir.DataType.DOUBLE), over)
        result.dtype = ir.DataType.DOUBLE
        return converted(t, result, dtype)


def _in_dtype(x):
    """PyTorch's sums and products of integers are of int64 where nobody says otherwise."""
    return {} if x.dtype in FLOATING else {"dtype": x.dtype}


def _sum(t, x, over):
    return over("torch.sum", x, **_in_dtype(x))


def _prod(t, x, over):
    """PyTorch has it over one axis."""
    known = not over.is_open and all(isinstance(axis, int) for axis in over.axes)
    if over.is_none or not known:  # which of them is the last is seen at run time
        return over("late.prod", x, **_in_dtype(x))
    result = x
    for axis in sorted((a % x.rank for a in over.axes), reverse=True):
        result = t.prod(result, axis, over.keep, **_in_dtype(x))
    return over.noted(result, x)


def _extreme(function):
    """Of nothing it is the least or the greatest number of the dtype, which PyTorch refuses."""

    def reduce(t, x, over):
        called = f"torch.{function}" if has_some(x) else f"late.{function}"
        if x.dtype not in UNSIGNED:
            return over(called, x)
        result = over(called, ordered(t, x))
        result.dtype = x.dtype
        return ordered(t, result)

    return reduce


def _norm(order):
    def reduce(t, x, over):
        if x.dtype in FLOATING and not over.is_open and not over.is_none:
            return over("torch.linalg.vector_norm", x, order)
        if order == 1 or over.is_none:
            return _sum(t, x if x.dtype in UNSIGNED else t.abs(x), over)
        return t.sqrt(over("torch.sum", t.square(x)))

    return reduce


_reduction("ReduceSum", _sum)
_reduction("ReduceMean", lambda t, x, over: over("torch.mean", x), floating=True)
_reduction("ReduceMax", _extreme("amax"))
_reduction("ReduceMin", _extreme("amin"))
_reduction("ReduceProd", _prod)
_reduction("ReduceL1", _norm(1))
_reduction("ReduceL2", _norm(2), floating=True)
_reduction("ReduceSumSquare", lambda t, x, over: _sum(t, t.mul(x, x), over))
_reduction("ReduceLogSum", lambda t, x, over: t.log(_sum(t, x, over)), floating=True)
_reduction("ReduceLogSumExp", lambda t, x, over: over("torch.logsumexp", x), floating=True)
