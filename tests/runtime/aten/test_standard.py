"""The cases that ONNX itself has of each operator: right, or refused beforehand with a reason."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference.ops import op_resize

from ortrain.program import Program
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten.refusals import refusals
from ortrain.runtime.reference import ReferenceExecutor

# Of the 1884 cases of onnx 1.23; the others are of text, sequences, numbers of 8 bits or fewer,
# operators of which nothing is trained, and sizes that are known too late.
SERVED = 1521
# Of the dtype's own rounding, where a case does not allow as much.
ROUNDING = {"float16": 2e-3, "bfloat16": 1e-2}


# Corners are aligned by the length of the resized tensor, says the operator's text, of which no
# tensor has a fraction, and PyTorch and onnxruntime go by it (tests of resizing compare them). What
# the standard expects of these two comes of 2.4, a length of 4 times a scale of 0.6, instead of 2.
RESIZED = {f"test_resize_downsample_scales_{mode}_align_corners" for mode in ("linear", "cubic")}


def by_its_text(case):
    """The outputs of a case, or for those of `RESIZED` what the operator's text says."""
    if case.name not in RESIZED:
        return case.data_sets
    ((x, scales),) = [[array(value) for value in inputs] for inputs, _ in case.data_sets]
    mode = "cubic" if "cubic" in case.name else "linear"
    sizes = tuple(int(n) for n in x.shape * scales)
    coefficients = {"linear": op_resize._linear_coeffs, "cubic": op_resize._cubic_coeffs}[mode]
    wanted = op_resize._interpolate_nd(
        x, coefficients, output_size=sizes, coordinate_transformation_mode="align_corners"
    )
    return [((x, scales), (wanted.astype(x.dtype),))]


def cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are made on the spot, from functions of numpy
        from onnx.backend.test.case.node import collect_testcases

        return [case for case in collect_testcases(None) if is_standard(case)]


def is_standard(case):
    return case.model is not None and all(o.domain == "" for o in case.model.opset_import)


def is_of_tensors(case):
    """Whether a case has no sequences, no text, and nothing that each draws as it likes."""
    graph = case.model.graph
    text = onnx.TensorProto.STRING
    types = [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
    draws = {"Bernoulli", "RandomUniformLike", "RandomNormalLike"}
    return all(t not in (0, text) for t in types) and not draws & {n.op_type for n in graph.node}


def check(case):
    """Whether PyTorch's executor serves a case: then it compiles and is right."""
    executor = AtenExecutor()
    lowered = executor.lower(Program(ir.from_proto(case.model)))
    reasons = refusals(lowered)
    if reasons:
        assert all(reasons.values())
        return False
    compiled = executor.compile(lowered)
    for inputs, outputs in by_its_text(case):
        results = compiled.run([array(value) for value in inputs])
        for result, output in zip(results, outputs, strict=True):
            assert not (reason := differs(result, array(output), case)), reason
    return True


def test_a_twentieth_of_the_standards_cases_is_right_or_refused():
    served, failed = outcomes(cases()[::20])
    assert not failed
    assert served >= SERVED / 20 - 5


@pytest.mark.slow
@pytest.mark.breadth
def test_the_cases_of_the_standard_are_right_or_refused():
    served, failed = outcomes(cases())
    assert not failed
    assert served >= SERVED


def outcomes(rows):
    """How many are served, and the errors of those that are neither right nor refused."""
    served, failed = 0, {}
    for case in rows:
        try:
            served += check(case)
        except Exception as error:
            failed[case.name] = error
    return served, failed


@pytest.mark.slow
@pytest.mark.breadth
def test_the_reference_is_nowhere_wrong_on_the_cases_of_the_standard():
    """What it does not know it says; numbers that it gives are right."""
    wrong = {}
    for case in filter(is_of_tensors, cases()):
        executor = ReferenceExecutor()
        for inputs, outputs in by_its_text(case):
            try:
                program = executor.lower(Program(ir.from_proto(case.model)))
                results = executor.compile(program).run([array(value) for value in inputs])
            except Exception:
                continue
            for result, output in zip(results, outputs, strict=True):
                if reason := differs(result, array(output), case):
                    wrong[case.name] = reason
    assert not wrong


def array(value):
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def differs(result, wanted, case):
    wanted = np.asarray(wanted)
    if (result.dtype, result.shape) != (wanted.dtype, wanted.shape):
        return f"{result.dtype} {result.shape}, not {wanted.dtype} {wanted.shape}"
    if wanted.dtype.kind not in "fV":
        return "" if (result == wanted).all() else f"{result}, not {wanted}"
    rounding = ROUNDING.get(wanted.dtype.name, 0.0)
    rtol, atol = max(case.rtol, rounding), max(case.atol, rounding)
    found, true = result.astype(np.float64), wanted.astype(np.float64)
    near = np.allclose(found, true, rtol, atol, equal_nan=True)
    return "" if near else f"{found}, not {true}"
