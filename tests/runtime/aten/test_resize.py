"""Images of other sizes: PyTorch's kernels where they mean the same, and plain arithmetic."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from ortrain import Options, ORTModule
from ortrain.errors import ExecutionError
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from ortrain.runtime.reference import ReferenceExecutor
from tests.programs import program
from tests.runtime.agreement import agree

COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel",
               "half_pixel_symmetric")  # fmt: skip
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def ints(*values):
    return np.array(values, np.int64)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("seed", range(80))
def test_any_form_of_resize(seed):
    draw = random.Random(seed)
    rank = draw.randint(1, 4)
    sizes = [draw.randint(1, 5) for _ in range(rank)]
    axes = draw.sample(range(rank), draw.randint(1, min(rank, 3)))
    form = {
        "mode": draw.choice(["nearest", "linear", "cubic"]),
        "coordinate_transformation_mode": draw.choice(COORDINATES),
        "nearest_mode": draw.choice(ROUNDINGS),
    }
    if form["mode"] == "cubic":
        form["cubic_coeff_a"] = draw.choice([-0.75, -0.5])
        form["exclude_outside"] = draw.randint(0, 1)
    if form["mode"] != "nearest" and draw.random() < 0.3:
        form["antialias"] = 1
    scales = np.array([draw.choice([0.5, 0.6, 1.0, 1.5, 2.0, 3.0]) for _ in axes], np.float32)
    # A single element is at 0 by the standard, and elsewhere by onnx.reference.
    least = 2 if form["coordinate_transformation_mode"] == "pytorch_half_pixel" else 1
    scales = np.maximum(scales, [least / sizes[axis] for axis in axes]).astype(np.float32)
    wanted = ints(*(draw.randint(least, 8) for _ in axes))
    x = floats(*sizes)

    def stretched(op, x):
        return op.Resize(x, None, scales, None, axes=axes, **form)

    def sized(op, x):
        return op.Resize(x, None, None, wanted, axes=axes, **form)

    def given(op, x, sizes):
        return op.Resize(x, None, None, sizes, axes=axes, **form)

    agree(stretched, {"x": x}, tolerance=1e-5)
    if form["coordinate_transformation_mode"] == "half_pixel_symmetric":
        return  # its scale is what the sizes give, to rounding
    agree(sized, {"x": x}, tolerance=1e-5)
    agree(given, {"x": x, "sizes": wanted}, tolerance=1e-5)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("seed", range(12))
def test_corners_are_aligned_by_the_size_that_there_is_then(mode, seed):
    """By a fraction of it, which scales may give, neither PyTorch nor onnxruntime goes."""
    draw = random.Random(seed)
    x = floats(1, 2, draw.randint(3, 8), draw.randint(3, 8), seed=seed)
    scales = np.array(
        [1, 1, *(draw.choice([0.61, 0.73, 0.87, 1.31, 2.63]) for _ in "hw")], np.float32
    )
    form = {"coordinate_transformation_mode": "align_corners", "mode": mode}
    subject = program(lambda op, x: op.Resize(x, None, scales, None, **form), {"x": x.shape})
    sizes = [int(n * scale) for n, scale in zip(x.shape[2:], scales[2:], strict=True)]
    kind = {"linear": "bilinear", "cubic": "bicubic"}[mode]
    wanted = F.interpolate(torch.from_numpy(x), sizes, mode=kind, align_corners=True).numpy()
    for executor in (AtenExecutor(), OnnxRuntimeExecutor(), ReferenceExecutor()):
        (found,) = executor.compile(executor.lower(subject)).run([x])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_an_aspect_ratio_is_kept(policy):
    agree(
        lambda op, x: op.Resize(
            x, None, None, ints(7, 5), axes=[1, 2], keep_aspect_ratio_policy=policy, mode="linear"
        ),
        {"x": floats(2, 3, 4)}, tolerance=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_a_part_of_an_image(mode):
    form = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": mode, "axes": [1, 2],
            "extrapolation_value": 9.0}  # fmt: skip
    x, roi = floats(2, 4, 5), np.array([0.2, -0.1, 0.7, 1.2], np.float32)
    agree(lambda op, x: op.Resize(x, roi, None, ints(3, 6), **form), {"x": x}, tolerance=1e-5)
    agree(lambda op, x, roi: op.Resize(x, roi, None, ints(3, 1), **form),
          {"x": x, "roi": roi}, tolerance=1e-5)  # fmt: skip


def test_scales_may_come_with_the_call():
    agree(lambda op, x, scales: op.Resize(x, None, scales, None, mode="linear"),
          {"x": floats(1, 2, 4, 4), "scales": np.array([1, 1, 1.5, 2], np.float32)},
          tolerance=1e-5)  # fmt: skip


def test_whole_numbers_are_picked_and_not_mixed():
    x = np.arange(12).reshape(3, 4)
    agree(lambda op, x: op.Resize(x, None, None, ints(5, 7)), {"x": x})
    subject = program(lambda op, x: op.Resize(x, None, None, ints(5, 7), mode="linear"),
                      {"x": (3, 4)}, dtype=np.int64)  # fmt: skip
    with pytest.raises(ExecutionError, match="not of int64"):
        AtenExecutor().compile(AtenExecutor().lower(subject))


@pytest.mark.parametrize(
    ("form", "kernel"),
    [
        ({"mode": "linear"}, "upsample_bilinear2d"),
        ({"mode": "cubic"}, "upsample_bicubic2d"),
        ({"mode": "nearest", "coordinate_transformation_mode": "asymmetric",
          "nearest_mode": "floor"}, "upsample_nearest2d"),
        ({"mode": "nearest", "nearest_mode": "round_prefer_ceil"}, "_upsample_nearest_exact2d"),
        ({"mode": "nearest"}, "upsample_nearest2d"),  # at these sizes it picks the same places
        ({"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, "resampling.resize"),
    ],
)  # fmt: skip
def test_what_pytorch_has_a_kernel_for_it_computes(form, kernel):
    scales = np.array([1, 1, 1.5, 1.5], np.float32)
    sources = agree(lambda op, x: op.Resize(x, None, scales, None, **form),
                    {"x": floats(1, 2, 3, 4)}, tolerance=1e-5)  # fmt: skip
    assert kernel in sources[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_numbers_of_any_width(dtype, mode):
    """The same bits as PyTorch's own function."""
    kind = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}[mode]
    asymmetric = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    form = asymmetric if mode == "nearest" else {}
    import ml_dtypes

    own = {torch.float16: np.float16, torch.float64: np.float64, torch.bfloat16: ml_dtypes.bfloat16}
    subject = program(
        lambda op, x: op.Resize(x, None, None, ints(1, 2, 5, 7), mode=kind, **form),
        {"x": (1, 2, 3, 4)}, dtype=own[dtype],
    )  # fmt: skip
    x = torch.from_numpy(floats(1, 2, 3, 4)).to(dtype)
    (result,) = AtenExecutor().compile(AtenExecutor().lower(subject)).run_values([x.clone()])
    assert torch.equal(result, F.interpolate(x, (5, 7), mode=mode))


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("corners", [0, 1])
def test_images_at_other_places(mode, padding, corners):
    if (mode, padding) == ("cubic", "border"):
        return  # refused
    form = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    grid = np.random.default_rng(0).uniform(-1.5, 1.5, (2, 5, 6, 2)).astype(np.float32)
    agree(lambda op, x, grid: op.GridSample(x, grid, **form),
          {"x": floats(2, 3, 4, 5), "grid": grid}, tolerance=1e-4)  # fmt: skip


@pytest.mark.parametrize("corners", [0, 1])
def test_grids_of_affine_maps(corners):
    agree(lambda op, theta: op.AffineGrid(theta, ints(2, 3, 4, 5), align_corners=corners),
          {"theta": floats(2, 2, 3)}, tolerance=1e-5)  # fmt: skip
    agree(lambda op, theta, size: op.AffineGrid(theta, size, align_corners=corners),
          {"theta": floats(1, 3, 4), "size": ints(1, 2, 3, 4, 5)}, tolerance=1e-5,
          symbolic=False)  # fmt: skip


def test_the_matrix_of_a_gradient_is_a_constant(monkeypatch):
    monkeypatch.setattr("ortrain.runtime.aten.kernels.create.MOST_ENTRIES", 9)
    subject = program(
        lambda op, x: op.Resize(op.EyeLike(x), None, np.array([2, 1], np.float32), mode="linear"),
        {"x": (3, 3)},
    )
    source = AtenExecutor().compile(AtenExecutor().lower(subject)).source
    assert "upsample" not in source
    agree(lambda op, x: op.Resize(op.EyeLike(x), None, np.array([2, 1], np.float32), mode="linear"),
          {"x": floats(3, 3)}, tolerance=1e-6)  # fmt: skip


# --- in a module whose forward has no operator of ours, and whose backward has ------------------

FIRST = {
    "convolution": lambda: torch.nn.Conv2d(3, 4, 3, padding=1),
    "transposed convolution": lambda: torch.nn.ConvTranspose2d(3, 4, 2, 2),
    "group norm": lambda: torch.nn.GroupNorm(1, 3),
    "maximum": lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.MaxPool2d(2)),
}
SECOND = {
    "bilinear": {"size": (9, 7), "mode": "bilinear"},
    "bicubic": {"scale_factor": 2, "mode": "bicubic"},
    "nearest": {"scale_factor": 2, "mode": "nearest"},
    "area": {"size": (3, 3), "mode": "area"},
}


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", FIRST)
def test_behind_a_layer_whose_gradient_alone_is_an_operator_of_ours(first, second, capfd):
    class Resized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = FIRST[first]()

        def forward(self, x):
            return F.interpolate(self.first(x), **SECOND[second]).square().mean()

    options = Options(engine="aten", fallback="raise")  # an error where the numbers are others
    model = ORTModule(Resized(), options=options)
    model(torch.randn(2, 3, 6, 6, requires_grad=True)).backward()
    assert model.report.mode == "graph"
    assert capfd.readouterr().err == ""
