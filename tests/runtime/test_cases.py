"""Every executor runs every case, and agrees with the reference."""

from __future__ import annotations

import pytest

from ortrain.runtime.onnxruntime.executor import OnnxRuntimeExecutor
from ortrain.testing import check_gradients, variants
from tests.autodiff.test_rules import KNOWN
from tests.cases import ALL


def rows():
    for case in ALL:
        if case.runtime or case.id in KNOWN:
            continue
        forms = variants(case)
        for form in dict.fromkeys((forms[0], forms[-1])):
            yield pytest.param(case, form, id=f"{case.id}-{form}")


@pytest.fixture(scope="module")
def executor():
    return OnnxRuntimeExecutor(threads=1)


@pytest.mark.parametrize(("case", "variant"), list(rows()))
def test_an_executor_agrees_with_the_reference(case, variant, executor):
    check_gradients(case, only=[variant], executor=executor)
