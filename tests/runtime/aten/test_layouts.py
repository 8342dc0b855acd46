"""Kernels read tensors as they lie: turned, cut out, repeated, beginning anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ortrain.runtime.aten import AtenExecutor, blas
from ortrain.runtime.aten.executor import constant
from tests.cases import FAMILIES
from tests.runtime.layouts import LAYOUTS, repeated

EXECUTOR = AtenExecutor()
FUSED = ("gradients", "norm", "conv", "pool", "linear", "loss")
CASES = [case for family in FUSED for case in FAMILIES[family] if not case.runtime]
# Of one number along an axis a mean is all there is, and what is left of it is noise.
NOISE = {"BatchNorm-2d-no-affine"}


def rows():
    for case in CASES:
        if case.outputs and "Dropout" not in case.operator:
            yield pytest.param(case, id=case.id)


def agrees(found, wanted, message):
    scale = wanted[np.isfinite(wanted)] if wanted.dtype.kind == "f" else wanted
    largest = np.abs(scale).max(initial=1.0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * largest, err_msg=message)


@pytest.mark.parametrize("case", list(rows()))
def test_a_kernel_takes_tensors_in_any_layout(case):
    opset = case.opsets[-1] if case.opsets else 21
    subject, feeds = case.build(np.dtype(np.float64), opset)
    compiled = EXECUTOR.compile(EXECUTOR.lower(subject))
    held = [constant(np.array(feeds[v.name]), v.dtype) for v in subject.graph.inputs]
    layouts = dict(LAYOUTS)
    if not any(case.id.endswith(name) for name in NOISE):
        layouts |= {f"repeated along {axis}": repeated(axis) for axis in (0, 1, -1)}
    for name, lay in layouts.items():
        is_of_any = name in LAYOUTS  # a row of indices that is repeated is another one
        given = [lay(t) if is_of_any or t.is_floating_point() else t.clone() for t in held]
        plain = [t.clone(memory_format=torch.contiguous_format) for t in given]
        wanted = compiled.run_values(plain)
        for result, expected in zip(compiled.run_values(given), wanted, strict=True):
            agrees(result.numpy(), expected.numpy(), f"{name}\n{compiled.source}")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN")
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_other_librarys_product_takes_tensors_in_any_layout(which, layout, monkeypatch):
    monkeypatch.setattr(blas._CHOICE, "prefers_onednn", lambda *_: True)
    rng = torch.Generator().manual_seed(0)
    operands = [torch.randn(*n, generator=rng) for n in ((5, 7, 130), (140, 130), (140,))]
    wanted = torch.nn.functional.linear(*operands)
    operands[which] = LAYOUTS[layout](operands[which])
    torch.testing.assert_close(blas.linear(*operands), wanted, rtol=1e-5, atol=1e-4)
