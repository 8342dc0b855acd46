"""Gathering and scattering."""

from __future__ import annotations

import numpy as np
import torch

from ortrain.testing import OpCase, distinct, integers, normal


def ints(*values):
    return np.array(values, np.int64)


def take(data, indices, axis=0):
    picked = data.index_select(axis, indices.reshape(-1) % data.shape[axis])
    axis %= data.ndim
    return picked.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])


def gather(note, shape, indices, constant=False, **attributes):
    return OpCase(
        "Gather", {"data": normal(*shape), "indices": indices}, attributes, torch=take, note=note,
        constants=("indices",) if constant else (), tolerance="sums",
    )  # fmt: skip


CASES = [
    gather("rows", (5, 3), integers(5, 2, 4)),
    gather("rows-1d", (5, 3), integers(5, 4)),
    gather("row", (5, 3), ints(2)[0]),
    gather("repeated", (3, 2), ints(1, 1, 1, 0)),
    gather("negative", (5, 3), ints(-1, -5, 2)),
    gather("vector", (6,), integers(6, 2, 3)),
    gather("axis1", (2, 5, 3), integers(5, 4), axis=1),
    gather("axis1-2d", (2, 5, 3), integers(5, 2, 2), axis=1),
    gather("axis-last", (2, 3, 5), integers(5, 4), axis=-1),
    gather("axis-last-scalar", (2, 3, 5), ints(3)[0], axis=-1),
    gather("constant", (5, 3), ints(0, 2, 2), constant=True),
    gather("constant-first", (2, 5, 3), ints(0)[0], constant=True, axis=1),
    gather("constant-last", (2, 5, 3), ints(-1)[0], constant=True, axis=1),
    gather("constant-one-kept", (2, 5, 3), ints(2), constant=True, axis=1),
    OpCase("Gather", {"data": normal(5, 3), "indices": np.array([1, 4], np.int32)}, torch=take,
           note="int32"),
    OpCase("GatherElements", {"data": normal(3, 4), "indices": integers(3, 2, 4)},
           torch=lambda data, indices: data.gather(0, indices), note="axis0", tolerance="sums"),
    OpCase("GatherElements", {"data": normal(2, 3, 4), "indices": integers(4, 2, 3, 6)},
           {"axis": -1}, torch=lambda data, indices: data.gather(-1, indices), note="axis-last",
           tolerance="sums"),
    OpCase("GatherElements", {"data": normal(3, 4), "indices": ints(-1, -2, 0, 1).reshape(2, 2)},
           {"axis": 1}, torch=lambda data, indices: data[:2].gather(1, indices % 4),
           note="negative", tolerance="sums"),
    OpCase("GatherND", {"data": normal(4, 3), "indices": integers(4, 5, 1)},
           torch=lambda data, indices: data[indices[:, 0]], note="rows", tolerance="sums"),
    OpCase("GatherND", {"data": normal(4, 3), "indices": integers(3, 5, 2)},
           torch=lambda data, indices: data[indices[:, 0], indices[:, 1]], note="elements",
           tolerance="sums"),
    OpCase("GatherND", {"data": normal(2, 4, 3), "indices": integers(4, 2, 5, 1)},
           {"batch_dims": 1}, note="batch1", tolerance="sums",
           torch=lambda data, indices: torch.stack([d[i[:, 0]] for d, i in
                                                    zip(data, indices, strict=True)])),
    OpCase("ScatterND",
           {"data": normal(4, 3), "indices": ints(2, 0).reshape(2, 1), "updates": normal(2, 3)},
           torch=lambda data, indices, updates: data.index_put((indices[:, 0],), updates),
           note="overwrite"),
    OpCase("ScatterND",
           {"data": normal(4, 3), "indices": ints(2, 0, 2).reshape(3, 1), "updates": normal(3, 3)},
           {"reduction": "add"}, note="add",
           torch=lambda data, indices, updates: data.index_put((indices[:, 0],), updates, True)),
    OpCase("ScatterND",
           {"data": normal(4, 3), "indices": ints(2, 0).reshape(2, 1), "updates": normal(2, 3)},
           note="only-updates", wrt=("updates",),
           torch=lambda data, indices, updates: data.index_put((indices[:, 0],), updates)),
    OpCase("ScatterElements",
           {"data": normal(3, 4), "indices": ints(2, 0, 1, 2).reshape(1, 4),
            "updates": normal(1, 4)},
           torch=lambda data, indices, updates: data.scatter(0, indices, updates),
           note="overwrite"),
    OpCase("ScatterElements",
           {"data": normal(3, 4), "indices": integers(4, 3, 2), "updates": normal(3, 2)},
           {"axis": 1, "reduction": "add"}, note="add",
           torch=lambda data, indices, updates: data.scatter_add(1, indices, updates)),
    *(
        OpCase("ScatterElements",
               {"data": distinct(3, 4), "indices": integers(4, 3, 6), "updates": distinct(3, 6)},
               {"axis": 1, "reduction": reduction}, note=reduction, batch=False,
               torch=lambda data, indices, updates, reduction: data.scatter_reduce(
                   1, indices, updates, f"a{reduction}"))
        for reduction in ("max", "min")
    ),
    *(
        OpCase("TopK", {"x": distinct(3, 5), "k": ints(2)},
               {"axis": axis, "largest": largest}, constants=("k",), outputs=2, seeds=(0,),
               torch=lambda x, axis, largest: x.topk(2, axis, bool(largest))[0],
               note=f"axis{axis}-largest{largest}")
        for axis, largest in ((-1, 1), (0, 0))
    ),
    OpCase("Compress", {"x": normal(4, 3), "condition": np.array([True, False, True])},
           {"axis": 0}, torch=lambda x, condition: x[[0, 2]], note="axis0"),
    OpCase("Compress", {"x": normal(2, 3), "condition": np.array([False, True, True, False, True])},
           torch=lambda x, condition: x.reshape(-1)[[1, 2, 4]], note="flat"),
]  # fmt: skip
