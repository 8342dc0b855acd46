"""Normalizations."""

from __future__ import annotations

from torch.nn import functional as F  # noqa: N812

from ortrain.testing import OpCase, normal, positive


def layer_norm(x, scale, bias=None, axis=-1, epsilon=1e-5):
    width = x.shape[axis % x.ndim :]
    y = F.layer_norm(x, width, eps=epsilon) * scale
    return y if bias is None else y + bias


def layer(note, shape, scale, bias=None, **attributes):
    inputs = {"x": normal(*shape), "scale": normal(*scale)}
    if bias is not None:
        inputs["bias"] = normal(*bias)
    return OpCase(
        "LayerNormalization", inputs, attributes, torch=layer_norm, tolerance="sums", note=note
    )


def rms_norm(x, scale, axis=-1, epsilon=1e-5):
    return F.rms_norm(x, x.shape[axis % x.ndim :], eps=epsilon) * scale


def group_norm(x, scale, bias, num_groups, epsilon=1e-5):
    repeats = x.shape[1] // len(scale)
    return F.group_norm(
        x, num_groups, scale.repeat_interleave(repeats), bias.repeat_interleave(repeats), epsilon
    )


def batch_norm(x, scale, bias, mean, var, epsilon, training_mode=0):
    return F.batch_norm(
        x, mean.detach().clone() if training_mode else mean,
        var.detach().clone() if training_mode else var,
        scale, bias, bool(training_mode), 0.1, epsilon,
    )  # fmt: skip


def frozen_batch_norm(x, scale, bias, mean, var, epsilon):
    def column(v):
        return v.reshape(-1, *[1] * (x.ndim - 2))

    return column(scale) * (x - column(mean)) / (column(var) + epsilon).sqrt() + column(bias)


def batch(note, wrt, outputs=1, seeds=None, runtime="", **attributes):
    return OpCase(
        "BatchNormalization",
        {"x": normal(3, 2, 2, 2), "scale": normal(2), "bias": normal(2), "mean": normal(2),
         "var": positive(2)},
        {"epsilon": 1e-3, **attributes},
        wrt=wrt, torch=batch_norm if attributes else frozen_batch_norm, outputs=outputs,
        seeds=seeds, tolerance="sums", note=note, runtime=runtime,
    )  # fmt: skip


CASES = [
    layer("last", (2, 3, 4), (4,), (4,)),
    layer("no-bias", (2, 3, 4), (4,)),
    layer("axis1", (2, 3, 4), (3, 4), (3, 4), axis=1),
    layer("axis-2", (2, 3, 4), (3, 4), (4,), axis=-2),
    layer("epsilon", (3, 4), (4,), (4,), epsilon=0.1),
    layer("scalar-scale", (3, 4), (1,), (4,)),
    OpCase("LayerNormalization", {"x": normal(3, 4), "scale": positive(4), "bias": normal(4)},
           wrt=("scale", "bias"), torch=layer_norm, tolerance="sums", note="only-affine"),
    OpCase("LayerNormalization", {"x": normal(3, 4), "scale": positive(4), "bias": normal(4)},
           wrt=("x",), constants=("scale", "bias"), torch=layer_norm, tolerance="sums",
           note="frozen-affine"),
    *(
        OpCase("RMSNormalization", {"x": normal(*shape), "scale": normal(*scale)}, attributes,
               torch=rms_norm, tolerance="sums", note=note)
        for note, shape, scale, attributes in (
            ("last", (2, 3, 4), (4,), {}),
            ("axis1", (2, 3, 4), (3, 4), {"axis": 1, "epsilon": 0.01}),
        )
    ),
    *(
        OpCase("InstanceNormalization",
               {"x": normal(*shape), "scale": normal(3), "bias": normal(3)}, {"epsilon": 1e-3},
               torch=lambda x, scale, bias, epsilon: F.instance_norm(
                   x, None, None, scale, bias, eps=epsilon),
               tolerance="sums", note=f"{len(shape) - 2}d")
        for shape in ((2, 3, 4), (2, 3, 2, 3))
    ),
    OpCase("GroupNormalization", {"x": normal(2, 4, 3), "scale": normal(2), "bias": normal(2)},
           {"num_groups": 2}, torch=group_norm, tolerance="sums", note="scale-of-group",
           opsets=(18,), runtime="its function body fails to load at opset 18"),
    *(
        OpCase("GroupNormalization", {"x": normal(*shape), "scale": normal(4), "bias": normal(4)},
               {"num_groups": 2, "epsilon": 1e-3}, torch=group_norm, tolerance="sums",
               note=f"{len(shape) - 2}d", opsets=(21,))
        for shape in ((2, 4, 3), (2, 4, 2, 3))
    ),
    batch("inference", wrt=None),
    batch("only-affine", wrt=("scale", "bias")),
    batch("frozen-statistics", wrt=("x", "scale", "bias")),
    batch("training", wrt=("x", "scale", "bias"), outputs=3, seeds=(0,), training_mode=1,
          runtime="its float32 statistics follow another convention"),
    *(
        OpCase("LpNormalization", {"x": normal(2, 3, 4, avoid=(0,))}, {"axis": axis, "p": p},
               torch=lambda x, axis, p: F.normalize(x, p, axis), tolerance="sums",
               note=f"axis{axis}-p{p}")
        for axis, p in ((-1, 2), (1, 1))
    ),
]  # fmt: skip
