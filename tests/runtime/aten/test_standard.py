"""The cases that ONNX itself has of each operator: refused, perhaps, but nowhere wrong."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortrain.program import Program
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten.refusals import missing

# The reference has the same numbers, and fewer of them than `output_shape` asks for.
KNOWN = {"test_convtranspose_output_shape"}
# Of the 1884 cases of onnx 1.23; the others are of text, sequences, numbers of 8 bits or fewer,
# and operators of which nothing is trained.
SERVED = 1480
# Of the dtype's own rounding, where a case does not allow as much.
ROUNDING = {"float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.slow
@pytest.mark.breadth
def test_the_standards_own_cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are made on the spot, from functions of numpy
        from onnx.backend.test.case.node import collect_testcases

        cases = [case for case in collect_testcases(None) if _is_standard(case)]
    served, wrong = 0, {}
    for case in cases:
        for inputs, outputs in case.data_sets:
            results = _computed(case.model, inputs)
            if results is None:
                continue
            served += 1
            for result, output in zip(results, outputs, strict=True):
                if reason := _differs(result, _array(output), case.rtol, case.atol):
                    wrong[case.name] = reason
    assert wrong.keys() == KNOWN, wrong
    assert served >= SERVED


def _is_standard(case):
    return case.model is not None and all(o.domain == "" for o in case.model.opset_import)


def _computed(model, inputs):
    executor = AtenExecutor()
    try:
        lowered = executor.lower(Program(ir.from_proto(model)))
        if missing(lowered):
            return None
        return executor.compile(lowered).run([_array(value) for value in inputs])
    except Exception:
        return None  # what is refused is not wrong


def _array(value):
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _differs(result, wanted, rtol, atol):
    wanted = np.asarray(wanted)
    if (result.dtype, result.shape) != (wanted.dtype, wanted.shape):
        return f"{result.dtype} {result.shape}, not {wanted.dtype} {wanted.shape}"
    if wanted.dtype.kind not in "fV":
        return "" if (result == wanted).all() else f"{result}, not {wanted}"
    rounding = ROUNDING.get(wanted.dtype.name, 0.0)
    found, true = result.astype(np.float64), wanted.astype(np.float64)
    near = np.allclose(found, true, max(rtol, rounding), max(atol, rounding), equal_nan=True)
    return "" if near else f"{found}, not {true}"
