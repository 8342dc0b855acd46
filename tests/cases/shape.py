"""Operators that move elements without changing them."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from ortrain.testing import OpCase, normal


def ints(*values):
    return np.array(values, np.int64)


def case(operator, note, shape, /, torch=None, constants=None, **others):
    """``others``: arrays are further inputs, everything else an attribute."""
    arrays = {k: v for k, v in others.items() if isinstance(v, np.ndarray) or v is None}
    attributes = {k: v for k, v in others.items() if k not in arrays and k not in OPTIONS}
    options = {k: v for k, v in others.items() if k in OPTIONS}
    return OpCase(
        operator, {"x": normal(*shape), **arrays}, attributes, torch=torch, note=note,
        constants=tuple(k for k, v in arrays.items() if v is not None)
        if constants is None else constants,
        **{"tolerance": "sums", **options},
    )  # fmt: skip


OPTIONS = {"tolerance", "opsets", "unsupported", "symbolic", "runtime"}


def sliced(x, starts, ends, axes=None, steps=None):
    axes = range(len(starts)) if axes is None else [int(a) % x.ndim for a in axes]
    for i, axis in enumerate(axes):
        step = 1 if steps is None else int(steps[i])
        places = range(x.shape[axis])[int(starts[i]) : int(ends[i]) : step]
        if step < 0 and int(ends[i]) < -x.shape[axis]:
            places = range(x.shape[axis])[int(starts[i]) :: step]
        x = x.index_select(axis, torch.tensor(list(places)))
    return x


def resized(note, shape, scales, torch, sizes=None, **attributes):
    given = None if scales is None else np.array([1, 1, *scales], np.float32)
    return OpCase(
        "Resize", {"x": normal(*shape), "roi": None, "scales": given, "sizes": sizes}, attributes,
        constants=[k for k, v in {"scales": given, "sizes": sizes}.items() if v is not None],
        torch=torch, note=note, tolerance="sums", single=("scales",),
    )  # fmt: skip


CASES = [
    case("Reshape", "flat", (2, 3), lambda x: x.reshape(-1), shape=ints(-1)),
    case("Reshape", "zero-copies", (2, 3, 4), lambda x: x.reshape(2, 12), shape=ints(0, -1)),
    case("Reshape", "fed", (2, 3), lambda x: x.reshape(3, 2), shape=ints(3, 2), constants=()),
    case("Reshape", "allowzero", (2, 3), lambda x: x.reshape(3, 2), shape=ints(3, 2), allowzero=1),
    case("Reshape", "scalar", (1, 1), lambda x: x.reshape(()), shape=ints()),
    case("Flatten", "axis1", (2, 3, 4), lambda x: x.reshape(2, 12)),
    case("Flatten", "axis2", (2, 3, 4), lambda x: x.reshape(6, 4), axis=2),
    case("Flatten", "axis0", (2, 3), lambda x: x.reshape(1, 6), axis=0),
    case("Squeeze", "axes", (2, 1, 3, 1), lambda x: x.reshape(2, 3), axes=ints(1, -1)),
    case("Squeeze", "all", (2, 1, 3), lambda x: x.reshape(2, 3)),
    case("Unsqueeze", "two", (2, 3), lambda x: x.reshape(1, 2, 3, 1), axes=ints(0, -1)),
    case("Transpose", "default", (2, 3, 4), lambda x: x.permute(2, 1, 0)),
    case("Transpose", "perm", (2, 3, 4), lambda x: x.permute(1, 2, 0), perm=[1, 2, 0]),
    case("Expand", "scalar", (), lambda x: x.expand(2, 3), shape=ints(2, 3)),
    case("Expand", "row", (1, 3), lambda x: x.expand(2, 3), shape=ints(2, 3)),
    case("Expand", "new-axes", (3, 1), lambda x: x.expand(2, 3, 4), shape=ints(2, 3, 4)),
    case("Expand", "fed", (1, 1, 3), lambda x: x.expand(2, 1, 3), shape=ints(2, 1, 3),
         constants=()),
    case("Expand", "nothing", (2, 3), lambda x: x.expand(2, 3), shape=ints(2, 3)),
    case("Expand", "shorter", (2, 3), lambda x: x.expand(2, 3), shape=ints(3)),
    case("Expand", "repeated-heads", (2, 2, 1, 3), lambda x: x.expand(2, 2, 4, 3),
         shape=ints(2, 2, 4, 3)),
    OpCase("Concat", {"a": normal(2, 3), "b": normal(2, 1), "c": normal(2, 2)}, {"axis": 1},
           torch=lambda a, b, c: torch.cat([a, b, c], 1), note="three"),
    OpCase("Concat", {"a": normal(2, 3), "b": normal(4, 3)}, {"axis": -2},
           torch=lambda a, b: torch.cat([a, b], 0), note="negative-axis"),
    OpCase("Concat", {"a": normal(2, 3), "b": normal(4, 3)}, {"axis": 0},
           torch=lambda a, b: torch.cat([a, b], 0), constants=("a",), note="constant"),
    OpCase("Concat", {"a": normal(2, 3)}, {"axis": 0}, torch=lambda a: a * 1, note="one"),
    OpCase("Split", {"x": normal(2, 5), "split": ints(2, 3)}, {"axis": 1}, outputs=2,
           constants=("split",), torch=lambda x: x.split([2, 3], 1), note="sizes"),
    OpCase("Split", {"x": normal(5, 2)}, {"axis": 0, "num_outputs": 2}, outputs=2,
           torch=lambda x: x.split([3, 2]), note="uneven"),
    OpCase("Split", {"x": normal(2, 6)}, {"axis": -1, "num_outputs": 3}, outputs=3,
           torch=lambda x: x.split(2, 1), note="equal"),
    OpCase("Split", {"x": normal(2, 6)}, {"axis": -1, "num_outputs": 3}, outputs=3, seeds=(1,),
           torch=lambda x: x.split(2, 1)[1], note="one-used"),
    case("Slice", "middle", (5, 3), sliced, starts=ints(1), ends=ints(4)),
    case("Slice", "axes", (4, 5, 3), sliced, starts=ints(1, 0), ends=ints(3, 2), axes=ints(1, -1)),
    case("Slice", "negative-bounds", (5, 3), sliced, starts=ints(-3), ends=ints(-1), axes=ints(0)),
    case("Slice", "beyond-the-end", (5, 3), sliced, starts=ints(2), ends=ints(2**62)),
    case("Slice", "before-the-start", (5, 3), sliced, starts=ints(-9), ends=ints(2)),
    case("Slice", "steps-of-one", (5, 3), sliced, starts=ints(1), ends=ints(4), axes=ints(0),
         steps=ints(1)),
    case("Slice", "step-two", (5, 3), sliced, starts=ints(0), ends=ints(5), axes=ints(0),
         steps=ints(2)),
    case("Slice", "two-steps", (5, 6), sliced, starts=ints(1, 0), ends=ints(5, 6), axes=ints(0, 1),
         steps=ints(2, 3)),
    case("Slice", "backwards", (5, 3), lambda x: x.flip(0), starts=ints(-1), ends=ints(-(2**62)),
         axes=ints(0), steps=ints(-1)),
    case("Slice", "fed", (5, 3), sliced, starts=ints(1), ends=ints(4), axes=ints(0), constants=()),
    case("Tile", "two", (2, 3), lambda x: x.tile(2, 3), repeats=ints(2, 3)),
    case("Tile", "fed", (2, 3), lambda x: x.tile(1, 2), repeats=ints(1, 2), constants=()),
    case("Pad", "both-sides", (2, 3), lambda x: F.pad(x, (1, 2, 0, 1)), pads=ints(0, 1, 1, 2)),
    case("Pad", "value", (2, 3), lambda x: F.pad(x, (1, 2), value=7.0), pads=ints(0, 1, 0, 2),
         value=np.array(7.0, np.float32)),
    case("Pad", "negative", (3, 5), lambda x: F.pad(x, (-1, 2)), pads=ints(0, -1, 0, 2)),
    case("Pad", "nothing", (2, 3), lambda x: x * 1, pads=ints(0, 0, 0, 0)),
    case("Pad", "fed", (2, 3), lambda x: F.pad(x, (1, 2, 0, 1)), pads=ints(0, 1, 1, 2),
         constants=()),
    case("Pad", "axes", (2, 3), lambda x: F.pad(x, (1, 2)), pads=ints(1, 2), value=None,
         axes=ints(-1)),
    case("Pad", "reflect", (2, 4), lambda x: F.pad(x, (2, 1), mode="reflect"),
         pads=ints(0, 2, 0, 1), mode="reflect"),
    case("Pad", "reflect-two-axes", (1, 1, 4, 5), lambda x: F.pad(x, (2, 1, 1, 3), mode="reflect"),
         pads=ints(0, 0, 1, 2, 0, 0, 3, 1), mode="reflect"),
    case("Pad", "edge", (1, 1, 3, 4), lambda x: F.pad(x, (2, 1, 0, 2), mode="replicate"),
         pads=ints(0, 0, 0, 2, 0, 0, 2, 1), mode="edge"),
    case("Pad", "wrap", (1, 1, 3, 4), lambda x: F.pad(x, (2, 1, 0, 2), mode="circular"),
         pads=ints(0, 0, 0, 2, 0, 0, 2, 1), mode="wrap", opsets=(21,)),
    case("Trilu", "upper", (2, 3, 4), lambda x: x.triu(1), k=np.array(1, np.int64)),
    case("Trilu", "lower", (3, 4), lambda x: x.tril(), k=None, upper=0),
    case("DepthToSpace", "dcr", (1, 8, 2, 3), None, blocksize=2),
    case("DepthToSpace", "crd", (1, 8, 2, 3), lambda x: F.pixel_shuffle(x, 2), blocksize=2,
         mode="CRD"),
    case("SpaceToDepth", "", (1, 2, 4, 6), None, blocksize=2),
    case("CenterCropPad", "", (3, 6), None, shape=ints(5, 3)),
    case("CenterCropPad", "axes", (3, 6), None, shape=ints(4), axes=[1]),
    case("ReverseSequence", "", (4, 3, 2), None, sequence_lens=ints(2, 4, 1)),
    case("ReverseSequence", "batch-first", (3, 4), None, sequence_lens=ints(2, 4, 1),
         batch_axis=0, time_axis=1),
    resized("nearest", (1, 2, 3, 4), (2.0, 3.0), lambda x: F.interpolate(x, scale_factor=(2, 3)),
            coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    resized("linear", (1, 2, 3, 4), (2.0, 1.5), lambda x: F.interpolate(
                x, scale_factor=(2, 1.5), mode="bilinear"), mode="linear"),
    resized("linear-down", (1, 1, 6, 5), (0.5, 1.0), lambda x: F.interpolate(
                x, scale_factor=(0.5, 1), mode="bilinear"), mode="linear"),
    resized("align-corners", (1, 2, 3, 4), None, lambda x: F.interpolate(
                x, (5, 7), mode="bilinear", align_corners=True), sizes=ints(1, 2, 5, 7),
            mode="linear", coordinate_transformation_mode="align_corners"),
    resized("cubic", (1, 1, 4, 5), None, lambda x: F.interpolate(x, (7, 8), mode="bicubic"),
            sizes=ints(1, 1, 7, 8), mode="cubic"),
    resized("axes", (1, 1, 4, 5), None, None, sizes=ints(7), axes=[3], mode="linear"),
    resized("1d", (2, 3, 4), None, lambda x: F.interpolate(x, (7,), mode="linear"),
            sizes=ints(2, 3, 7), mode="linear"),
]  # fmt: skip
