"""Sums, means, norms and extrema over axes, and softmax."""

from __future__ import annotations

import numpy as np
import torch

from ortrain.testing import OpCase, distinct, normal, positive


def axes(*values):
    return np.array(values, np.int64)


def over(function, extremum=False):
    """The PyTorch function with ONNX's way to say which axes."""

    def apply(x, axes=None, keepdims=1, noop_with_empty_axes=0):
        if axes is None or not len(axes):
            if noop_with_empty_axes:
                return function(x.unsqueeze(0), (0,), False)
            axes = range(x.ndim)
        return function(x, tuple(int(a) for a in axes), bool(keepdims))

    return apply


def smallest(x, dims, keep):
    return x.amin(dims, keep)


def largest(x, dims, keep):
    return x.amax(dims, keep)


def product(x, dims, keep):
    for dim in sorted((d % x.ndim for d in dims), reverse=True):
        x = x.prod(dim, keepdim=keep)
    return x


FUNCTIONS = {
    "ReduceSum": lambda x, d, k: x.sum(d, k),
    "ReduceMean": lambda x, d, k: x.mean(d, k),
    "ReduceL1": lambda x, d, k: x.abs().sum(d, k),
    "ReduceL2": lambda x, d, k: x.square().sum(d, k).sqrt(),
    "ReduceSumSquare": lambda x, d, k: x.square().sum(d, k),
    "ReduceLogSum": lambda x, d, k: x.sum(d, k).log(),
    "ReduceLogSumExp": lambda x, d, k: x.logsumexp(d, k),
    "ReduceMax": largest,
    "ReduceMin": smallest,
    "ReduceProd": product,
}


def cumulative(x, axis, exclusive=0, reverse=0):
    axis = int(axis)
    x = x.flip(axis) if reverse else x
    total = x.cumsum(axis) - (x if exclusive else 0)
    return total.flip(axis) if reverse else total


def draw(operator, *shape):
    if operator in ("ReduceLogSum", "ReduceProd"):
        return positive(*shape)
    return distinct(*shape)


def reduction(operator, note, shape, given=None, constant=True, **attributes):
    return OpCase(
        operator,
        {"x": draw(operator, *shape), "axes": given},
        attributes,
        constants=("axes",) if constant and given is not None else (),
        torch=over(FUNCTIONS[operator]),
        tolerance="sums",
        note=note,
    )


CASES = [
    *(
        case
        for operator in FUNCTIONS
        for case in (
            reduction(operator, "last", (2, 3), axes(-1)),
            reduction(operator, "first-dropped", (2, 3), axes(0), keepdims=0),
            reduction(operator, "two-dropped", (2, 3, 4), axes(2, 0), keepdims=0),
            reduction(operator, "all", (2, 3)),
            reduction(operator, "all-dropped", (2, 3), keepdims=0),
            reduction(operator, "fed-axes", (2, 3), axes(1), constant=False, keepdims=0),
            reduction(operator, "empty-axes", (2, 3), axes()),
            reduction(operator, "size-one", (2, 1, 3), axes(1)),
        )
    ),
    *(
        reduction(operator, "noop", (2, 3), axes(), noop_with_empty_axes=1)
        for operator in FUNCTIONS
    ),
    OpCase("ReduceProd", {"x": np.array([[2, 0, 3], [0, 0, 4], [5, 6, 7]], np.float32),
                          "axes": axes(1)},
           constants=("axes",), torch=over(product), note="zeros", tolerance="sums"),
    *(
        OpCase(operator, {"x": normal(2, 3, 4)}, {"axis": axis}, torch=function,
               tolerance="sums", note=f"axis{axis}")
        for operator, function in {
            "Softmax": lambda x, axis: torch.softmax(x, axis),
            "LogSoftmax": lambda x, axis: torch.log_softmax(x, axis),
        }.items()
        for axis in (-1, 0, 1)
    ),
    *(
        OpCase("CumSum", {"x": normal(2, 3), "axis": np.array(axis, np.int64)},
               {"exclusive": exclusive, "reverse": reverse}, constants=("axis",),
               note=f"axis{axis}-exclusive{exclusive}-reverse{reverse}",
               torch=cumulative, tolerance="sums")
        for axis, exclusive, reverse in ((0, 0, 0), (1, 1, 0), (-1, 0, 1), (1, 1, 1))
    ),
]  # fmt: skip
