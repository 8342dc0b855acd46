"""Gradients of normalizations in 16 bits: of tensors as they lie, and of mixed dtypes."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import pytest
import torch

from ortrain.graph import shapes
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten.dtypes import DTYPES
from tests.programs import program, run
from tests.runtime.layouts import LAYOUTS, repeated

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FORMS = {**LAYOUTS, "repeated": repeated(0), "plain": torch.Tensor.clone}
SIZES = (16, 3, 5, 7)


def of_batch(op, dy, x, weight, mean, inverse):
    return op.node("BatchNormGradient", (dy, x, weight, mean, inverse), domain="ortrain")


def of_frozen_batch(op, dy, x, weight, mean, inverse):
    form = {"domain": "ortrain", "outputs": 5, "needs": [1, 1, 1, 0, 0]}
    return op.node("BatchNormalizationGradient", (dy, x, weight, mean, inverse), **form)[0]


def of_rows(op, dy, x, weight, mean, inverse):
    """RMSNormalization along the last axis."""
    scale = op.Expand(op.ReduceMean(weight, [0], keepdims=0), [SIZES[-1]])
    found = op.node("RMSNormalizationGradient", (dy, x, scale), domain="ortrain", outputs=2)
    return found[0]


def subject(body, dtype):
    """The program of a gradient, its statistics in float32 or as wide as the rest."""
    narrow = ir.DataType.from_numpy(np.dtype(dtype))
    single = np.float64 if narrow is ir.DataType.DOUBLE else np.float32
    sizes = {"dy": SIZES, "x": SIZES, "weight": SIZES[1:2], "mean": SIZES[1:2]}
    dtypes = dict.fromkeys(sizes, dtype) | {"mean": single, "inverse": single}
    return program(body, {**sizes, "inverse": SIZES[1:2]}, opset=23, dtypes=dtypes)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("body", [of_batch, of_frozen_batch, of_rows])
def test_dx_is_rounded_about_once_however_tensors_lie(body, dtype):
    """Sums of numbers that all are positive: what is rounded of them is large beside dx."""
    generator = torch.Generator().manual_seed(0)
    wide = {
        "x": torch.randn(SIZES, generator=generator),
        "dy": torch.rand(SIZES, generator=generator),
        "weight": torch.rand(SIZES[1], generator=generator) + 0.5,
        "mean": torch.zeros(SIZES[1]),
        "inverse": torch.ones(SIZES[1]),
    }
    narrow = {n: t.to(dtype) if n in ("x", "dy", "weight") else t for n, t in wide.items()}
    executor = AtenExecutor()
    held = subject(body, ir.DataType.BFLOAT16.numpy() if dtype is torch.bfloat16 else np.float16)
    exact = subject(body, np.dtype(np.float64))
    compiled = executor.compile(executor.lower(held))
    pairs = [*itertools.product(FORMS, repeat=2)]
    for of_x, of_dy in pairs[:: 4 if body is of_rows else 1]:
        given = {**narrow, "x": FORMS[of_x](narrow["x"]), "dy": FORMS[of_dy](narrow["dy"])}
        wanted = run(exact, {n: t.double().numpy() for n, t in given.items()})["y"]
        (found,) = compiled.run_values([given[name] for name in compiled.input_names])
        error = np.abs(found.double().numpy() - wanted).max()
        assert error <= 1.2 * ROUNDING[dtype] * np.abs(wanted).max(), (of_x, of_dy)


# -- dtypes that PyTorch has no kernel for ---------------------------------------------------------


class _OfAGpu:
    """Stands for PyTorch's operators there: of layers and groups they take one dtype alone."""

    def native_layer_norm_backward(self, dy, x, sizes, mean, inverse, weight, bias, mask):
        return self._gradients(dy, x, mean, inverse, weight)

    def native_group_norm_backward(self, dy, x, mean, inverse, weight, *rest):
        return self._gradients(dy, x, mean, inverse, weight, of_statistics=x.dtype)

    def _fused_rms_norm_backward(self, dy, x, sizes, inverse, weight, mask):
        return self._gradients(dy, x, inverse, inverse, weight)[:2]

    def _gradients(self, dy, x, mean, inverse, weight, of_statistics=torch.float32):
        assert dy.dtype == x.dtype == weight.dtype
        assert mean.dtype == inverse.dtype == of_statistics
        return torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(weight)


GRADIENTS = {
    "LayerNormalizationGradient": ((2, 4, 6), (6,), (2, 4, 1), {"axis": -1}),
    "GroupNormGradient": ((2, 4, 6), (4,), (2, 2), {"num_groups": 2}),
    "RMSNormalizationGradient": ((2, 4, 6), (6,), None, {"axis": -1}),
}


@pytest.mark.parametrize("of_scale", [np.float16, np.float32])
@pytest.mark.parametrize("of_x", [np.float16, np.float32])
@pytest.mark.parametrize("operator", GRADIENTS)
def test_a_gpu_is_given_tensors_and_weights_of_one_dtype(operator, of_x, of_scale):
    whole, of_weights, of_rows, attributes = GRADIENTS[operator]
    sizes = {"dy": whole, "x": whole, "scale": of_weights}
    if operator == "LayerNormalizationGradient":
        sizes["bias"] = of_weights
    if of_rows:
        sizes |= {"mean": of_rows, "inverse": of_rows}
    dtypes = {n: of_x if n in ("dy", "x") else of_scale for n in sizes}
    dtypes |= {n: np.float32 for n in ("mean", "inverse") if n in sizes}

    def body(op, **values):
        outputs = 2 if operator.startswith("RMS") else 3
        form = {"domain": "ortrain", "outputs": outputs, **attributes}
        made = op.node(operator, tuple(values.values()), **form)
        for value, like in zip(made, (values["x"], values["scale"], values["scale"]), strict=False):
            shapes.assign(value, like.dtype, like.shape)
        return {f"d{i}": value for i, value in enumerate(made)}

    held = program(body, sizes, opset=23, dtypes=dtypes)
    executor = AtenExecutor("cuda")
    compiled = executor.compile(executor.lower(held))
    compiled.function.__globals__["aten"] = _OfAGpu()
    given = [torch.ones(sizes[n], dtype=DTYPES[v]) for n, v in zip(
        compiled.input_names, compiled.input_dtypes, strict=True)]  # fmt: skip
    found = compiled.function(given)
    assert [t.dtype for t in found] == [DTYPES[v] for v in compiled.output_dtypes]
