"""What the tables have not: slices of every kind, empty results, sizes that are computed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.runtime.agreement import agree

FAR = 2**62


def ints(*values):
    return np.array(values, np.int64)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bounds(draw, size):
    return draw.choice([*range(-size - 2, size + 3), FAR, -FAR])


@pytest.mark.parametrize("seed", range(60))
def test_a_slice_takes_what_it_takes_in_onnx(seed):
    """Any bounds and steps, known while the function is written and given with the call."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
    axes = draw.sample(range(len(sizes)), draw.randint(1, len(sizes)))
    steps = [draw.choice([1, 1, 2, 3, -1, -1, -2, -3]) for _ in axes]
    rows = []
    for axis, step in zip(axes, steps, strict=True):
        start = bounds(draw, sizes[axis])
        # numpy takes nothing from before the start of a step backwards, where ONNX begins at 0.
        rows.append((max(start, -sizes[axis]) if step < 0 else start, bounds(draw, sizes[axis])))
    starts, ends = (ints(*column) for column in zip(*rows, strict=True))
    named = ints(*(a - len(sizes) * draw.randint(0, 1) for a in axes))

    def known(op, x):
        return op.Slice(x, starts, ends, named, ints(*steps))

    def given(op, x, starts, ends, axes, steps):
        return op.Slice(x, starts, ends, axes, steps)

    x = floats(*sizes)
    agree(known, {"x": x})
    agree(given, {"x": x, "starts": starts, "ends": ends, "axes": named, "steps": ints(*steps)})
    agree(
        lambda op, x, starts, ends: op.Slice(x, starts, ends, named, ints(*steps)),
        {"x": x, "starts": starts, "ends": ends},
    )


@pytest.mark.parametrize("seed", range(40))
def test_pads_of_every_kind(seed):
    """Around any axes, negative ones, and ones that go round more than once."""
    draw = random.Random(seed)
    rank = draw.randint(1, 5)
    mode = draw.choice(["constant", "reflect", "edge", "wrap"])
    sizes = [draw.randint(2, 4) for _ in range(rank)]
    axes = sorted(draw.sample(range(rank), draw.randint(1, rank)))
    low, high = ([draw.randint(-1, 3) for _ in axes] for _ in range(2))
    for i, axis in enumerate(axes):
        if sizes[axis] + min(low[i], 0) + min(high[i], 0) < 1:
            high[i] = 0
    pads, named = ints(*low, *high), ints(*axes)
    dtype = draw.choice([np.float32, np.float16, np.int64, np.float64])
    x = np.arange(1, np.prod(sizes) + 1).reshape(sizes).astype(dtype)
    fill = np.array(7, dtype) if mode == "constant" else None

    def known(op, x):
        return op.Pad(x, pads, fill, named, mode=mode)

    def given(op, x, pads):
        return op.Pad(x, pads, None, named, mode=mode)

    def all_given(op, x, pads, axes):
        return op.Pad(x, pads, None, axes, mode=mode)

    agree(known, {"x": x})
    agree(given, {"x": x, "pads": pads})
    agree(all_given, {"x": x, "pads": pads, "axes": named})


def test_a_fill_value_may_be_computed():
    agree(
        lambda op, x, fill: op.Pad(x, [1, 0, 0, 2], op.Neg(fill)),
        {"x": floats(2, 3), "fill": floats()},
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_shape_that_is_computed_broadcasts(seed):
    """To sizes of another tensor, of which some are 1 and some are those that there were."""
    draw = random.Random(seed)
    wide = [draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
    own = [draw.choice([1, n]) for n in wide][draw.randint(0, len(wide)) :]
    other = [draw.choice([1, n]) if i >= len(wide) - len(own) and own[i - len(wide)] != 1 else n
             for i, n in enumerate(wide)]  # fmt: skip
    sources = agree(
        lambda op, x, like: op.Expand(x, op.Shape(like)),
        {"x": floats(*own), "like": floats(*other, seed=1)},
    )
    assert all("torch.tensor" not in source for source in sources)
    agree(lambda op, x, shape: op.Expand(x, shape), {"x": floats(*own), "shape": ints(*other)})


def test_an_empty_tensor_broadcasts():
    agree(lambda op, x, like: op.Expand(x, op.Shape(like)),
          {"x": floats(1, 3), "like": floats(0, 1)})  # fmt: skip
    agree(lambda op, x, like: op.Expand(x, op.Shape(like)),
          {"x": floats(0, 3), "like": floats(1, 1)})  # fmt: skip


def test_a_zero_that_is_computed_keeps_the_size():
    def body(op, x, like):
        nothing = op.Sub(op.Shape(like, end=1), op.Shape(like, start=1))
        return op.Reshape(x, op.Concat(nothing, [-1], axis=0))

    agree(body, {"x": floats(2, 3, 4), "like": floats(5, 5)})


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3), (4,), (1, 1, 1)])
def test_tiles_flat_axes_and_triangles(shape):
    repeats = ints(*range(2, 2 + len(shape)))
    agree(lambda op, x: op.Tile(x, repeats), {"x": floats(*shape)})
    agree(lambda op, x, n: op.Tile(x, n), {"x": floats(*shape), "n": repeats})
    for axis in range(-len(shape), len(shape) + 1):
        agree(lambda op, x, axis=axis: op.Flatten(x, axis=axis), {"x": floats(*shape)})
    if len(shape) > 1:
        for k in (-2, 0, 1, 5):
            agree(lambda op, x, k: op.Trilu(x, k, upper=0), {"x": floats(*shape), "k": np.int64(k)})
            agree(lambda op, x, k=k: op.Trilu(x, np.int64(k)), {"x": floats(*shape) > 0})


def test_axes_may_come_with_the_call():
    x = floats(2, 1, 3)
    agree(lambda op, x, axes: op.Squeeze(x, axes), {"x": x, "axes": ints(-2)})
    agree(lambda op, x, axes: op.Unsqueeze(x, axes), {"x": x, "axes": ints(-1, 0)})
    agree(lambda op, x: op.Unsqueeze(x, [0, 2, 4, -1]), {"x": x})
    agree(lambda op, x: op.Squeeze(x), {"x": x}, symbolic=False)


@pytest.mark.parametrize("seed", range(30))
def test_parts_put_together_are_the_whole(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(3)]
    axis = draw.randint(-3, 2)
    parts = draw.randint(1, 3)
    lengths = [draw.randint(0, 3) for _ in range(parts)]
    sizes[axis] = sum(lengths)
    x, given = floats(*sizes), ints(*lengths)

    def known(op, x):
        cut = op.node("Split", (x, given), outputs=parts, axis=axis)
        cut = (cut,) if parts == 1 else cut
        return {"whole": op.Concat(*cut, axis=axis),
                **{f"part{i}": op.Identity(part) for i, part in enumerate(cut)}}  # fmt: skip

    def stated(op, x, lengths):
        cut = op.node("Split", (x, lengths), outputs=parts, axis=axis)
        return {f"part{i}": part for i, part in enumerate((cut,) if parts == 1 else cut)}

    agree(known, {"x": x})
    agree(stated, {"x": x, "lengths": given})


@pytest.mark.parametrize(("size", "parts"), [(7, 3), (6, 3), (5, 1), (4, 3), (9, 4)])
def test_equal_parts(size, parts):
    def body(op, x):
        cut = op.node("Split", (x,), outputs=parts, axis=1, num_outputs=parts)
        return {f"part{i}": part for i, part in enumerate((cut,) if parts == 1 else cut)}

    agree(body, {"x": floats(2, size)})


def test_ranges_of_any_direction():
    def body(op, a, b, c):
        return op.Range(a, b, c)

    for numbers in [(0, 5, 2), (5, 0, -2), (0, -3, 1), (3, 3, 1), (2, 7, -1)]:
        agree(body, dict(zip("abc", map(np.int64, numbers), strict=True)))
        agree(lambda op, n=numbers: op.Range(*map(np.int64, n)), {})
        agree(body, dict(zip("abc", map(np.float32, numbers), strict=True)))
    agree(lambda op, x: op.Range(np.int64(-1), op.Neg(op.Size(x)), np.int64(-1)), {"x": floats(4)})
    agree(lambda op, x: op.Range(op.Size(x), np.int64(2), np.int64(1)), {"x": floats(4)})


def test_new_tensors():
    import onnx_ir as ir

    for value in (np.float32(0), np.float32(-0.0), np.int64(3), np.uint16(65535), np.array(True)):
        filled = ir.tensor(np.asarray(value).reshape(1))
        agree(lambda op, x, v=filled: op.ConstantOfShape(op.Shape(x), value=v), {"x": floats(2, 3)})
        agree(lambda op, shape, v=filled: op.ConstantOfShape(shape, value=v), {"shape": ints(2, 3)})
    for k in (-2, 0, 1):
        agree(lambda op, x, k=k: op.EyeLike(x, k=k), {"x": floats(3, 5)})
        agree(lambda op, x, k=k: op.EyeLike(x, k=k, dtype=7), {"x": floats(5, 3)})


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("values", [(0.0, 1.0), (2.0, -3.0)])
def test_one_hot_counts_negative_indices_from_the_end(axis, values):
    values, indices = np.array(values, np.float32), ints(0, -1, 3, 2, -4, 1).reshape(2, 3)
    agree(lambda op, i: op.OneHot(i, np.int64(4), values, axis=axis), {"i": indices})
    agree(lambda op, i, d, v: op.OneHot(i, d, v, axis=axis),
          {"i": indices, "d": np.int64(4), "v": values})  # fmt: skip


def test_one_hot_of_an_index_out_of_range_is_cold():
    """As the standard says; onnx.reference takes it modulo the depth."""
    from ortrain.runtime.aten import AtenExecutor
    from tests.programs import program

    subject = program(
        lambda op, i: op.OneHot(i, np.int64(3), np.array([0, 1], np.float32)),
        {"i": (2,)}, dtypes={"i": np.int64},
    )  # fmt: skip
    executor = AtenExecutor()
    (result,) = executor.compile(executor.lower(subject)).run([ints(3, -4)])
    assert not result.any()


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_and_space(mode):
    agree(lambda op, x: op.DepthToSpace(x, blocksize=2, mode=mode), {"x": floats(2, 12, 3, 1)})
    agree(lambda op, x: op.DepthToSpace(x, blocksize=1, mode=mode), {"x": floats(2, 12, 3, 1)})
    agree(lambda op, x: op.SpaceToDepth(x, blocksize=3), {"x": floats(1, 2, 6, 3)})


@pytest.mark.parametrize("wanted", [(5, 2), (2, 7), (3, 4), (6, 1)])
def test_a_centre_is_cropped_and_padded(wanted):
    agree(lambda op, x, s: op.CenterCropPad(x, s), {"x": floats(3, 4), "s": ints(*wanted)})
    agree(lambda op, x: op.CenterCropPad(x, ints(*wanted), axes=[-1, 0]), {"x": floats(3, 4)})


def test_sequences_are_reversed_as_far_as_they_go():
    lengths = ints(3, 1, 0)
    agree(lambda op, x, n: op.ReverseSequence(x, n), {"x": floats(4, 3, 2), "n": lengths})
    agree(lambda op, x, n: op.ReverseSequence(x, n, batch_axis=0, time_axis=1),
          {"x": floats(3, 4, 2), "n": lengths})  # fmt: skip
