"""Random programs of small whole numbers, which every dtype holds and no order of sums changes.

Each result is brought back to -4 … 4 (0 … 4 of unsigned dtypes), so that engines have to agree in
each bit, in 16 bits and in 8 as well as in 64. Sizes are 0, 1 or a few, known or symbols.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ortrain.graph import shapes
from tests.programs import program

DTYPES = {
    np.dtype(each).name: np.dtype(each)
    for each in (
        np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16,
        np.int8, np.uint8,
    )
}  # fmt: skip
LARGEST = 4
Shape = tuple[int, ...]


class Drawn:
    """A program while it is drawn.

    Attributes:
        op: the builder.
        draw: of all choices.
        dtype: of every tensor in ``pool``.
        pool: tensors with their shapes.
    """

    def __init__(self, op: Any, draw: random.Random, dtype: np.dtype) -> None:
        self.op, self.draw, self.dtype = op, draw, dtype
        self.pool: list[tuple[Any, Shape]] = []

    @property
    def is_unsigned(self) -> bool:
        """Whether no tensor may hold a number below 0."""
        return self.dtype.kind == "u"

    def one(self, of: Callable[[Shape], bool] = lambda shape: True) -> tuple[Any, Shape] | None:
        """A tensor of some shape, those made last more often; None where there is none."""
        found = [each for each in self.pool if of(each[1])]
        if not found:
            return None
        return self.draw.choice(found[-3:] if self.draw.random() < 0.6 else found)

    def number(self, value: float) -> np.ndarray:
        """A constant of the dtype."""
        return np.asarray(value).astype(self.dtype)

    def small(self, value: Any) -> Any:
        """The numbers within the bounds."""
        low = 0 if self.is_unsigned else -LARGEST
        return self.op.Min(self.op.Max(value, self.number(low)), self.number(LARGEST))


def exact_program(name: str, seed: int, length: int = 10) -> tuple[Any, dict[str, np.ndarray]]:
    """A program, and the arrays to feed it.

    Args:
        name: of the dtype, in ``DTYPES``.
        seed: of the choice.
        length: how many operators are drawn.
    """
    dtype, draw, rng = DTYPES[name], random.Random(f"{name} {seed}"), np.random.default_rng(seed)
    size = {axis: draw.choice((0, 1, 1, 2, 3, 3)) for axis in "mnk"}
    axes = [tuple(draw.choice("mnk1") for _ in range(draw.choice((0, 1, 2, 3, 3)))) for _ in "abcd"]
    sizes = {"abcd"[i]: tuple(size.get(axis, 1) for axis in each) for i, each in enumerate(axes)}
    low = 0 if dtype.kind == "u" else -LARGEST
    feeds = {
        each: np.asarray(rng.integers(low, LARGEST + 1, shape)).astype(dtype)
        for each, shape in sizes.items()
    }
    declared: dict[str, tuple[int | str, ...]] = dict(sizes)
    if draw.random() < 0.5:
        declared = {
            "abcd"[i]: tuple(1 if axis == "1" else f"{axis}_size" for axis in each)
            for i, each in enumerate(axes)
        }

    def body(op: Any, **values: Any) -> dict[str, Any]:
        drawn = Drawn(op, draw, dtype)
        drawn.pool = [(values[each], sizes[each]) for each in values]
        while len(drawn.pool) < len(values) + length:
            made = draw.choice(OPERATORS)(drawn)
            if made is not None:
                drawn.pool.append(made)
        chosen = draw.sample(drawn.pool, 4)
        return {f"y{i}": op.Identity(value) for i, (value, _) in enumerate(chosen)}

    subject = program(body, declared, dtype=dtype)
    shapes.infer_all(subject.model)
    return subject, feeds


# -- operators: each takes tensors from the pool, and gives one with its shape --------------------


def _broadcastable(shape: Shape) -> Callable[[Shape], bool]:
    def fits(other: Shape) -> bool:
        pairs = zip(shape[::-1], other[::-1], strict=False)
        return all(m == n or 1 in (m, n) for m, n in pairs)

    return fits


def _has_axis(shape: Shape) -> bool:
    return len(shape) > 0


def _binary(d: Drawn) -> Any:
    x, shape = d.one()
    y, other = d.one(_broadcastable(shape))
    name = d.draw.choice(["Add", "Mul", "Max", "Min", "Sub"])
    if name == "Sub" and d.is_unsigned:
        x, y = d.op.Max(x, y), d.op.Min(x, y)
    return d.small(d.op.node(name, (x, y))), np.broadcast_shapes(shape, other)


def _unary(d: Drawn) -> Any:
    x, shape = d.one()
    name = d.draw.choice(["Neg", "Abs", "Sign", "Identity", "Square"])
    if name == "Square":
        return d.small(d.op.Mul(x, x)), shape
    if name == "Neg" and d.is_unsigned:
        name = "Abs"
    return d.op.node(name, (x,)), shape


def _chosen(d: Drawn) -> Any:
    x, shape = d.one()
    y, other = d.one(_broadcastable(shape))
    name = d.draw.choice(["Greater", "Less", "Equal", "GreaterOrEqual", "LessOrEqual"])
    condition = d.op.node(name, (x, y))
    if d.draw.random() < 0.3:
        condition = d.op.Not(condition)
    if d.draw.random() < 0.3:
        condition = d.op.And(condition, d.op.Equal(y, d.number(1)))
    pair = (x, y) if d.draw.random() < 0.5 else (d.number(2), y)
    return d.op.Where(condition, *pair), np.broadcast_shapes(shape, other)


def _through_another_dtype(d: Drawn) -> Any:
    x, shape = d.one()
    other = d.draw.choice([t for t in DTYPES.values() if d.is_unsigned or t.kind != "u"])
    wide = d.op.cast(x, shapes.ir.DataType.from_numpy(other))
    wide = d.op.Add(wide, np.asarray(1).astype(other))
    return d.small(d.op.cast(wide, shapes.ir.DataType.from_numpy(d.dtype))), shape


def _turned(d: Drawn) -> Any:
    x, shape = d.one(_has_axis) or d.one()
    order = d.draw.sample(range(len(shape)), len(shape))
    return d.op.Transpose(x, perm=order), tuple(shape[i] for i in order)


def _reshaped(d: Drawn) -> Any:
    x, shape = d.one()
    count = int(np.prod(shape))
    if not count:  # a 0 stands for the size that there was
        return None
    wanted: Shape = d.draw.choice([(count,), (1, count), (count, 1), shape[::-1]])
    return d.op.Reshape(x, [*wanted]), wanted


def _with_axis(d: Drawn) -> Any:
    found = d.one(lambda shape: len(shape) < 3)
    if found is None:
        return None
    x, shape = found
    place = d.draw.randint(0, len(shape))
    return d.op.Unsqueeze(x, [place]), (*shape[:place], 1, *shape[place:])


def _without_axis(d: Drawn) -> Any:
    found = d.one(lambda shape: 1 in shape)
    if found is None:
        return None
    x, shape = found
    place = shape.index(1)
    return d.op.Squeeze(x, [place - len(shape)]), (*shape[:place], *shape[place + 1 :])


def _spread(d: Drawn) -> Any:
    x, shape = d.one()
    y, other = d.one(_broadcastable(shape))
    return d.op.Expand(x, d.op.shape(y)), np.broadcast_shapes(shape, other)


def _axis(d: Drawn, of: Callable[[int], bool] = lambda size: True) -> Any:
    """A tensor, its shape, and one of its axes, counted from either end."""
    found = d.one(lambda shape: any(of(size) for size in shape))
    if found is None:
        return None
    x, shape = found
    axis = d.draw.choice([i for i, size in enumerate(shape) if of(size)])
    return x, shape, axis, d.draw.choice([axis, axis - len(shape)])


def _reduced(d: Drawn) -> Any:
    name = d.draw.choice(["ReduceSum", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd"])
    found = _axis(d, lambda size: size > 0 or name == "ReduceSum")
    if found is None:
        return None
    x, shape, axis, given = found
    keep = d.draw.choice([0, 1])
    y = d.op.node(name, (x, [given]), keepdims=keep)
    return d.small(y), (*shape[:axis], *([1] if keep else []), *shape[axis + 1 :])


def _summed_over_all(d: Drawn) -> Any:
    x, shape = d.one()
    return d.small(d.op.ReduceSum(x, keepdims=1)), (1,) * len(shape)


def _run_along(d: Drawn) -> Any:
    found = _axis(d)
    if found is None:
        return None
    x, shape, _, given = found
    form = {"exclusive": d.draw.choice([0, 1]), "reverse": d.draw.choice([0, 1])}
    return d.small(d.op.CumSum(x, np.int64(given), **form)), shape


def _largest(d: Drawn) -> Any:
    found = _axis(d, lambda size: size > 0)
    if found is None:
        return None
    x, shape, axis, given = found
    name = d.draw.choice(["ArgMax", "ArgMin"])
    form = {"keepdims": 1, "select_last_index": d.draw.choice([0, 1])}
    places = d.op.node(name, (x,), axis=given, **form)
    cast = d.op.cast(places, shapes.ir.DataType.from_numpy(d.dtype))
    return d.small(cast), (*shape[:axis], 1, *shape[axis + 1 :])


def _sliced(d: Drawn) -> Any:
    found = _axis(d)
    if found is None:
        return None
    x, shape, axis, given = found
    step = d.draw.choice([1, 1, 2, -1, -2])
    ends = [None, -4, -2, -1, 0, 1, 2, 5]
    if step < 0:  # before the first element numpy and the standard mean other things
        ends = [end for end in ends if end is None or -shape[axis] <= end]
    begin, end = (d.draw.choice(ends) for _ in "be")
    count = len(range(shape[axis])[slice(begin, end, step)])
    far = 1 << 40
    first = (0 if step > 0 else far) if begin is None else begin
    last = (far if step > 0 else -far) if end is None else end
    y = d.op.Slice(x, [first], [last], [given], [step])
    return y, (*shape[:axis], count, *shape[axis + 1 :])


def _joined(d: Drawn) -> Any:
    found = _axis(d)
    if found is None:
        return None
    x, shape, axis, given = found
    rest = (*shape[:axis], *shape[axis + 1 :])
    y, other = d.one(
        lambda s: len(s) == len(shape) and (*s[:axis], *s[axis + 1 :]) == rest and s[axis] < 4
    ) or (x, shape)
    if shape[axis] + other[axis] > 4:
        return None
    joined = d.op.Concat(x, y, axis=given)
    return joined, (*shape[:axis], shape[axis] + other[axis], *shape[axis + 1 :])


def _padded(d: Drawn) -> Any:
    """More, less, or as much as there was, of one axis or of all."""
    found = _axis(d)
    if found is None:
        return None
    x, shape, axis, given = found
    low = d.draw.choice([0, 1, -1])
    high = d.draw.choice([0, 0, 1, -1])
    size = shape[axis] + low + high
    if min(shape[axis], shape[axis] + low, shape[axis] + high, size) < 0 or size > 4:
        return None
    modes = ["constant", *(["edge"] if shape[axis] and min(low, high) >= 0 else [])]
    mode = d.draw.choice(modes)
    fill = d.number(3) if mode == "constant" else None
    if d.draw.random() < 0.5:
        y = d.op.node("Pad", (x, [low, high], fill, [given]), mode=mode)
    else:
        pads = [low if i == axis else 0 for i in range(len(shape))]
        pads += [high if i == axis else 0 for i in range(len(shape))]
        y = d.op.node("Pad", (x, pads, fill), mode=mode)
    return y, (*shape[:axis], size, *shape[axis + 1 :])


def _picked(d: Drawn) -> Any:
    found = _axis(d, lambda size: size > 0)
    if found is None:
        return None
    x, shape, axis, given = found
    count = d.draw.choice([0, 1, 2, 3])
    places = [d.draw.randrange(-shape[axis], shape[axis]) for _ in range(count)]
    y = d.op.Gather(x, np.array(places, np.int64), axis=given)
    return y, (*shape[:axis], count, *shape[axis + 1 :])


def _kept(d: Drawn) -> Any:
    """By a condition that is a constant, which may be shorter than the axis."""
    found = _axis(d)
    if found is None:
        return None
    x, shape, axis, given = found
    flags = [d.draw.random() < 0.5 for _ in range(d.draw.randint(0, shape[axis]))]
    y = d.op.Compress(x, np.array(flags, np.bool_), axis=given)
    return y, (*shape[:axis], sum(flags), *shape[axis + 1 :])


def _written(d: Drawn) -> Any:
    """Elements along an axis written to other places, or added there."""
    found = _axis(d, lambda size: size > 0)
    if found is None:
        return None
    x, shape, axis, given = found
    order = [d.draw.randrange(shape[axis]) for _ in range(shape[axis])]
    reduction = d.draw.choice(["none", "add", "max", "min"])
    if reduction == "none":
        order = d.draw.sample(range(shape[axis]), shape[axis])
    column = [1] * len(shape)
    column[axis] = -1
    places = np.broadcast_to(np.array(order, np.int64).reshape(column), shape).copy()
    data, updates = (x, d.op.Max(x, d.number(1)))
    y = d.op.ScatterElements(data, places, updates, axis=given, reduction=reduction)
    return d.small(y), shape


def _product(d: Drawn) -> Any:
    found = d.one(lambda shape: len(shape) >= 2)
    if found is None:
        return None
    x, shape = found
    turned = d.op.Transpose(x, perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
    return d.small(d.op.MatMul(x, turned)), (*shape[:-1], shape[-2])


def _repeated(d: Drawn) -> Any:
    found = _axis(d, lambda size: size < 3)
    if found is None:
        return None
    x, shape, axis, _ = found
    count = d.draw.choice([0, 1, 2])
    times = [count if i == axis else 1 for i in range(len(shape))]
    return d.op.Tile(x, times), (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])


def _triangle(d: Drawn) -> Any:
    found = d.one(lambda shape: len(shape) >= 2)
    if found is None:
        return None
    x, shape = found
    return d.op.Trilu(x, np.int64(d.draw.choice([-1, 0, 1])), upper=d.draw.choice([0, 1])), shape


def _ordered(d: Drawn) -> Any:
    found = _axis(d, lambda size: size > 0)
    if found is None:
        return None
    x, shape, axis, given = found
    count = d.draw.randint(0, shape[axis])
    form = {"axis": given, "largest": d.draw.choice([0, 1]), "outputs": 2}
    values, _ = d.op.node("TopK", (x, [count]), **form)
    return values, (*shape[:axis], count, *shape[axis + 1 :])


OPERATORS = (
    _binary, _binary, _binary, _unary, _unary, _chosen, _through_another_dtype, _turned, _turned,
    _reshaped, _with_axis, _without_axis, _spread, _reduced, _reduced, _summed_over_all, _run_along,
    _largest, _sliced, _sliced, _joined, _padded, _picked, _kept, _written, _product, _repeated,
    _triangle, _ordered,
)  # fmt: skip
