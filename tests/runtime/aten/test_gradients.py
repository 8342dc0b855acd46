"""Kernels of gradients against the bodies of what they stand for, and in training programs."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from ortrain.autodiff import differentiate
from ortrain.program import Role
from ortrain.runtime.aten import AtenExecutor
from ortrain.testing import Variant, check_gradients, variants
from tests.cases import ALL, FAMILIES
from tests.programs import program, run

EXECUTOR = AtenExecutor()
CASES = {case.id: case for case in ALL}
# PyTorch has none of the statistics' gradients.
COMPOSITES = [case for case in FAMILIES["gradients"] if case.note != "of-statistics"]
# What a kernel takes in float32 where the rest is of 16 bits.
WIDE = ("mean", "inverse", "inverse_std", "logsumexp")


def forms():
    for case in COMPOSITES:
        for dims in dict.fromkeys(form.dims for form in variants(case)):
            yield pytest.param(case, dims, id=f"{case.id}-{dims}")


def results_of(case, dtype, dims="static", single=()):
    """What the kernel makes, by output, and what the body makes of the same numbers."""
    exact, wide = case.build(np.dtype(np.float64), 21, dims)
    case = replace(case, single=single)
    subject, feeds = case.build(np.dtype(dtype), 21, dims)
    lowered = EXECUTOR.lower(subject)
    assert case.operator in lowered.operators(), "no kernel took it"
    compiled = EXECUTOR.compile(lowered)
    names = [v.name for v in subject.graph.outputs]
    made = compiled.run([feeds[name] for name in compiled.input_names])
    return dict(zip(names, made, strict=True)), run(exact, wide)


@pytest.mark.parametrize(("case", "dims"), list(forms()))
def test_a_kernel_computes_what_the_body_does(case, dims):
    made, wanted = results_of(case, np.float64, dims)
    for name in made:
        np.testing.assert_allclose(made[name], wanted[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("case", COMPOSITES, ids=lambda case: case.id)
def test_a_kernel_takes_numbers_of_16_bits(case, dtype):
    made, wanted = results_of(case, dtype, single=WIDE)
    for name in made:
        assert made[name].dtype == dtype
        error = np.abs(made[name].astype(np.float64) - wanted[name]).max(initial=0)
        assert error <= 0.03 * np.abs(wanted[name]).max(initial=0)


def strided(array):
    """A tensor of the same numbers, whose first axis is the innermost in memory."""
    tensor = torch.from_numpy(array)
    if tensor.dim() < 2:
        return tensor
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("case", COMPOSITES, ids=lambda case: case.id)
def test_a_kernel_takes_tensors_as_they_lie(case):
    subject, feeds = case.build(np.dtype(np.float64), 21)
    compiled = EXECUTOR.compile(EXECUTOR.lower(subject))
    tensors = [strided(feeds[name]) for name in compiled.input_names]
    made = compiled.run_values(tensors)
    wanted = run(subject, feeds)
    for value, tensor in zip(subject.graph.outputs, made, strict=True):
        np.testing.assert_allclose(tensor.numpy(), wanted[value.name], rtol=1e-9, atol=1e-9)


# -- whole programs ------------------------------------------------------------------------------


def rows():
    for case in ALL:
        if not case.runtime:
            all_forms = variants(case)
            for form in dict.fromkeys((all_forms[0], all_forms[-1])):
                yield pytest.param(case, form, id=f"{case.id}-{form}")


@pytest.mark.parametrize(("case", "variant"), list(rows()))
def test_every_case_agrees_with_the_reference(case, variant):
    check_gradients(case, only=[variant], executor=EXECUTOR)


LOSSES = [
    case for case in FAMILIES["loss"] if case.operator == "ortrain::CrossEntropy"
]  # whose forms are more than those of its gradient


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_gradient_of_a_loss_takes_numbers_of_16_bits(case, dtype):
    """In one program with its forward: log-probabilities are not any numbers."""
    found = {}
    for each in (dtype, np.float64):
        subject, feeds = case.build(np.dtype(each), 21)
        keep = EXECUTOR.keeps if each is dtype else None
        training = differentiate(subject, ["logits"], keep=keep)
        (seed,) = training.inputs(Role.OUTPUT_GRADIENT)
        feeds[seed.name] = np.full(seed.shape.numpy(), 0.5, each)
        if each is np.float64:
            found[each] = run(training, feeds)["logits.gradient"]
            continue
        compiled = EXECUTOR.compile(EXECUTOR.lower(training))
        assert "_log_softmax_backward_data" in compiled.source
        made = compiled.run([feeds[name] for name in compiled.input_names])
        found[each] = made[compiled.output_names.index("logits.gradient")]
    error = np.abs(found[dtype].astype(np.float64) - found[np.float64]).max()
    assert error <= 0.03 * np.abs(found[np.float64]).max()


def test_only_what_is_asked_for_is_made():
    def body(op, x, w):
        return op.Conv(x, w)

    shapes = {"x": ("batch", 3, 5, 5), "w": (4, 3, 3, 3)}
    for wrt, mask in (("x", "[True, False, False]"), ("w", "[False, True, False]")):
        training = differentiate(program(body, shapes), [wrt], keep=EXECUTOR.keeps)
        source = EXECUTOR.compile(EXECUTOR.lower(training)).source
        assert f"{mask})" in source


@pytest.mark.parametrize(("dtype", "kept"), [(np.float32, True), (ml_dtypes.bfloat16, False)])
def test_attention_of_16_bits_keeps_its_weights_on_the_cpu(dtype, kept):
    def body(op, q, k, v):
        return op.node("Attention", (q, k, v), domain="ortrain", scale=0.5)

    subject = program(body, dict.fromkeys("qkv", (2, 2, 3, 8)), dtype=dtype)
    training = differentiate(subject, ["q"], keep=EXECUTOR.keeps)
    assert ("ortrain::FlashAttention" in training.operators()) is kept


def test_a_layer_norm_whose_scale_is_broadcast_is_spelled_out():
    case = CASES["LayerNormalization-scalar-scale"]
    check_gradients(case, only=[Variant(21, "static")], executor=EXECUTOR)
    subject, feeds = case.build(np.dtype(np.float32), 21)
    training = differentiate(subject, [*feeds], keep=EXECUTOR.keeps)
    assert "ortrain::LayerNormalizationGradient" not in training.operators()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wide", [("scale", "mean", "var"), ("mean", "var"), ()])
def test_frozen_statistics_far_from_zero_are_not_rounded(dtype, wide):
    """Against the same numbers in float64, as they are after they were rounded to the dtype."""
    rng = np.random.default_rng(0)
    sizes, names = (8, 4, 5, 5), ("dy", "x", "scale", "mean", "var")
    feeds = {
        "dy": rng.standard_normal(sizes), "x": rng.standard_normal(sizes) * 0.5 + 5,
        "scale": rng.standard_normal(4), "mean": rng.standard_normal(4) * 0.2 + 5,
        "var": rng.random(4) * 0.3 + 0.1,
    }  # fmt: skip
    dtypes = {name: np.float32 if name in wide else dtype for name in names}
    feeds = {name: feeds[name].astype(dtypes[name]) for name in names}

    def body(op, **given):
        return dict(
            zip(
                ("d_x", "d_scale", "d_bias"),
                op.node(
                    "BatchNormalizationGradient", tuple(given.values()), domain="ortrain",
                    outputs=3, needs=[1, 1, 1, 0, 0],
                ),
                strict=True,
            )
        )  # fmt: skip

    shapes = {name: array.shape for name, array in feeds.items()}
    subject = program(body, shapes, dtypes=dtypes)
    lowered = EXECUTOR.lower(subject)
    assert lowered.operators().get("ortrain::BatchNormalizationGradient"), "no kernel took it"
    made = EXECUTOR.compile(lowered).run([feeds[name] for name in names])
    wanted = run(
        program(body, shapes, dtype=np.float64), {n: v.astype(float) for n, v in feeds.items()}
    )
    step = 2.0 ** (-8 if dtype is ml_dtypes.bfloat16 else -11)  # of one rounding
    for result, (name, true) in zip(made, wanted.items(), strict=True):
        error = np.abs(result.astype(np.float64) - true).max() / np.abs(true).max()
        assert error <= 1.01 * step, name
