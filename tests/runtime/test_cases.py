"""Every executor runs every case, and agrees with the reference."""

from __future__ import annotations

import pytest

from ortrain.runtime.onnxruntime.executor import OnnxRuntimeExecutor
from ortrain.testing import check_gradients, variants
from tests.autodiff.test_rules import KNOWN
from tests.cases import ALL

# What fails for a reason outside the rules; each entry goes when its reason does.
SCALARS = "OnnxRuntimeExecutor feeds an array without axes as one of shape [1]"
FAILS = {
    "MatMul-vector-vector-opset18-static": SCALARS,
    "Gather-row-opset18-static": SCALARS,
    "Gather-row-opset21-symbolic": SCALARS,
    "Gather-axis-last-scalar-opset18-static": SCALARS,
    "Gather-axis-last-scalar-opset21-symbolic": SCALARS,
}


def rows():
    for case in ALL:
        if case.runtime or case.id in KNOWN:
            continue
        forms = variants(case)
        for form in dict.fromkeys((forms[0], forms[-1])):
            name = f"{case.id}-{form}"
            reason = FAILS.get(name, "")
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            yield pytest.param(case, form, id=name, marks=marks)


@pytest.fixture(scope="module")
def executor():
    return OnnxRuntimeExecutor(threads=1)


@pytest.mark.parametrize(("case", "variant"), list(rows()))
def test_an_executor_agrees_with_the_reference(case, variant, executor):
    check_gradients(case, only=[variant], executor=executor)
