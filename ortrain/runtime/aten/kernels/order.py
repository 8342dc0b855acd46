"""What runs along one axis: softmax, places of extrema, sorting, sums and products so far."""

from __future__ import annotations

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten.dtypes import UNSIGNED
from ortrain.runtime.aten.kernels.shape import has_some, sized
from ortrain.runtime.aten.kernels.unsigned import ordered
from ortrain.runtime.aten.table import kernel


@kernel("Softmax")
def softmax(t, input, *, axis=-1):
    return t.softmax(input, axis)


@kernel("LogSoftmax")
def log_softmax(t, input, *, axis=-1):
    return t.log_softmax(input, axis)


@kernel("Hardmax")
def hardmax(t, input, *, axis=-1):
    """One at the first largest number, else zero."""
    if not has_some(input):
        return sized(t.call("late.hardmax", input, axis), input.dims)
    return t.scatter(t.zeros_like(input), axis, t.argmax(input, axis, True), 1.0)


def _place(operator, function):
    @kernel(operator)
    def place(t, data, *, axis=0, keepdims=1, select_last_index=0):
        """PyTorch takes the first one of equals, too."""
        x = t.tensor(data)
        if x.dtype in UNSIGNED:
            x = ordered(t, x)
        if not select_last_index:
            return t.call(f"torch.{function}", x, axis, bool(keepdims))
        last = t.call(f"torch.{function}", t.flip(x, [axis]), axis, bool(keepdims))
        return t.rsub(last, t.tensor(data).size(axis) - 1)


_place("ArgMax", "argmax")
_place("ArgMin", "argmin")


@kernel("TopK")
def top_k(t, x, k, *, axis=-1, largest=1, sorted=1, node):
    """Of equals the first one comes first, which PyTorch promises of a stable sort alone."""
    x, (count,) = t.tensor(x), t.ints(k, count=1)
    unsigned, indices, dims = x.dtype in UNSIGNED, node.outputs[1], [*x.dims]
    dims[axis] = count
    compared = ordered(t, x) if unsigned else x
    if not indices.uses() and not indices.is_graph_output():
        values, places = t.topk(compared, count, axis, bool(largest), outputs=2)
    else:
        values, places = t.sort(
            compared, dim=axis, descending=bool(largest), stable=True, outputs=2
        )
        if x.size(axis) != count:
            values, places = values.narrow(axis, 0, count), places.narrow(axis, 0, count)
    if unsigned:
        values.dtype = x.dtype
        values = ordered(t, values)
    return sized(values, dims), sized(places, dims)


def _running(operator, function, neutral):
    @kernel(operator)
    def run(t, x, axis, *, exclusive=0, reverse=0):
        x = t.tensor(x)
        (along,) = t.ints(axis)
        options = {} if x.dtype in FLOATING else {"dtype": x.dtype}
        part = t.flip(x, [along]) if reverse else x
        if exclusive:  # to take each element out again would leave what was rounded off
            part = _shifted(t, part, along, x.rank, neutral)
        result = t.call(f"torch.{function}", part, along, **options)
        return t.flip(result, [along]) if reverse else result


def _shifted(t, x, axis, rank, first):
    """Each element one place further along an axis, which the last one leaves."""
    if not isinstance(axis, int) or not has_some(x):
        return t.call("late.shifted", x, axis, first)
    return t.constant_pad_nd(x, [0, 0] * (rank - 1 - axis % rank) + [1, -1], first)


_running("CumSum", "cumsum", 0)
_running("CumProd", "cumprod", 1)
