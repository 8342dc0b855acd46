"""Heads of the query that share keys and values: ``GroupQueryAttention``.

::

    before: key, value [b, g, n, d]                      after
    k = Reshape(Expand(Unsqueeze(key, 2)), [b, h, n, d])  y = GroupQueryAttention<h, g>(q, k, v, …)
    … attention of h heads of query, k and v

The kernel reads each key once for all heads that share it, and nothing is copied. It masks by what
is added to the scores alone: every row is told to be as long as the longest, and ``causal`` is 0.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import Place
from ortrain.deploy.optimization.fusions.heads import Attention, merged
from ortrain.deploy.optimization.fusions.masks import size_of
from ortrain.deploy.optimization.fusions.matching import axes_of, made_by
from ortrain.graph import shapes
from ortrain.graph.build import Builder

# The kernel refuses sizes of heads that are not a multiple of it.
_MULTIPLE = 8


def emit(
    place: Place, op: Builder, found: Attention, bias: ir.Value | None
) -> tuple[str, ir.Value] | None:
    """The operator's name and its result [batch, length, heads * size]; None where it cannot be.

    Args:
        place: of the graph.
        op: where it is made.
        found: the attention.
        bias: [batch or 1, heads or 1, length, keys].
    """
    key, value, times = found.key, found.value, found.times
    if times == 1:
        shared = _shared(key, value)
        if shared is None:
            return None
        key, value, times = shared
    q, k, v = shapes.dims(found.query), shapes.dims(key), shapes.dims(value)
    if q is None or k is None or v is None or not can_be_open():
        return None
    size = q[3]
    if not isinstance(size, int) or size % _MULTIPLE or v[3] != size or k[3] != size:
        return None
    # Without a past there are as many keys as queries, or the kernel refuses the call.
    if not (shapes.same(q[2], k[2]) and shapes.same(q[0], k[0]) and shapes.same(q[0], v[0])):
        return None
    lengths, longest = _lengths(place, op, found.query)
    result: ir.Value = op.node(
        "GroupQueryAttention",
        [
            *(merged(op, part) for part in (found.query, key, value)),
            *(None, None, lengths, longest, None, None, None, bias),
        ],
        domain="com.microsoft",
        num_heads=q[1],
        kv_num_heads=k[1],
        scale=float(found.scale),
        causal=int(found.causal),
    )
    return "GroupQueryAttention", result


def _lengths(place: Place, op: Builder, query: ir.Value) -> tuple[ir.Value, ir.Value]:
    """What the kernel asks for: the keys of each row less 1, and those of the longest."""
    known = shapes.dims(query)
    assert known is not None
    token = (known[0], known[2]) if None not in (known[0], known[2]) else (query,)

    def make() -> tuple[ir.Value, ir.Value]:
        longest = op.Cast(size_of(place, op, query, 2), to=int(ir.DataType.INT32))
        less = op.Sub(longest, op.constant([1], np.dtype(np.int32)))
        rows = op.Expand(less, size_of(place, op, query, 0))
        return rows, op.Squeeze(longest, [0])

    made: tuple[ir.Value, ir.Value] = place.once(("lengths", *token), make)
    return made


def _shared(key: ir.Value, value: ir.Value) -> tuple[ir.Value, ir.Value, int] | None:
    keys, values = repeated(key), repeated(value)
    if keys is None or values is None or keys[1] != values[1] or keys[1] == 1:
        return None
    return keys[0], values[0], keys[1]


def repeated(value: ir.Value) -> tuple[ir.Value, int] | None:
    """What each head of a value is a copy of, and how often each is there in a row.

    ``Reshape(Expand(Unsqueeze(x, 2), [b, g, times, n, d]), [b, g * times, n, d])``
    """
    reshape = made_by(value, "Reshape")
    expand = None if reshape is None else made_by(reshape.inputs[0], "Expand")
    wide = None if expand is None else made_by(expand.inputs[0], "Unsqueeze", "Reshape")
    if reshape is None or expand is None or wide is None:
        return None
    source = wide.inputs[0]
    mine, middle, whole = shapes.dims(source), shapes.dims(expand.outputs[0]), shapes.dims(value)
    thin = shapes.dims(expand.inputs[0])
    if source is None or mine is None or middle is None or whole is None or thin is None:
        return None
    if (len(mine), len(thin), len(middle), len(whole)) != (4, 5, 5, 4):
        return None
    if wide.op_type == "Unsqueeze":
        if axes_of(wide) not in ([2], [-3]):
            return None
    elif thin[2] != 1 or not _same([*thin[:2], *thin[3:]], mine):
        return None
    groups, times = mine[1], middle[2]
    if not isinstance(groups, int) or not isinstance(times, int) or whole[1] != groups * times:
        return None
    if not _same([*middle[:2], *middle[3:]], mine) or not _same([whole[0], *whole[2:]], [
        mine[0], *mine[2:]
    ]):  # fmt: skip
        return None
    return source, times


def _same(a: list[shapes.Dim], b: tuple[shapes.Dim, ...] | list[shapes.Dim]) -> bool:
    return all(shapes.same(x, y) for x, y in zip(a, b, strict=True))


@functools.cache
def can_be_open() -> bool:
    """Whether this onnxruntime's operator can be told not to mask by itself."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return any(
        schema.name == "GroupQueryAttention" and "causal" in schema.attributes
        for schema in state.get_all_operator_schema()
    )
