"""The checker is checked: what it must reject."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference.shape_annotation_checker import ShapeAnnotationError

from ortrain.autodiff import registry
from ortrain.errors import ParityError
from ortrain.runtime.reference import ReferenceExecutor
from ortrain.testing import OpCase, check_gradients, normal, variants
from ortrain.testing.precision import TOLERANCES


@pytest.fixture
def rule(monkeypatch):
    """Puts a rule of the test's in the place of an operator's own."""

    def put(name, function, broadcast=False):
        entry = registry.Entry(function, broadcast)
        monkeypatch.setitem(registry._ENTRIES, registry._key(name), entry)

    return put


TANH = OpCase("Tanh", {"x": normal(3, 4)})
SOFTMAX = OpCase("Softmax", {"x": normal(4, 4)}, {"axis": 0})


def test_right_rules_pass():
    check_gradients(TANH)
    check_gradients(SOFTMAX)


@pytest.mark.parametrize("factor", [1.001, 0.999, -1.0, 2.0])
def test_a_rule_that_is_wrong_by_a_tenth_of_a_percent_fails(rule, factor):
    rule("Tanh", lambda g, x: (g.dy - g.dy * g.y * g.y) * factor)
    with pytest.raises(ParityError, match="finite differences"):
        check_gradients(TANH)


@pytest.mark.parametrize("kind", sorted(TOLERANCES))
def test_no_class_of_tolerance_lets_a_tenth_of_a_percent_pass(rule, kind):
    rule("Tanh", lambda g, x: (g.dy - g.dy * g.y * g.y) * 1.001)
    with pytest.raises(ParityError):
        check_gradients(replace(TANH, tolerance=kind))


def test_a_rule_that_is_wrong_in_one_element_fails(rule):
    def off(g, x):
        slip = np.zeros((3, 4))
        slip[1, 2] = 0.01
        return g.dy - g.dy * g.y * g.y + g.op.constant(slip, x.dtype)

    rule("Tanh", off)
    with pytest.raises(ParityError, match="finite differences"):
        check_gradients(TANH, only=[variants(TANH)[0]])


def test_a_rule_with_a_swapped_axis_fails(rule):
    def swapped(g, x, *, axis=-1):
        weighted = g.dy * g.y
        return weighted - g.y * g.op.ReduceSum(weighted, [1], keepdims=1)

    rule("Softmax", swapped)
    with pytest.raises(ParityError, match="finite differences"):
        check_gradients(SOFTMAX)


def test_a_transposed_gradient_of_a_square_matrix_fails(rule):
    rule("Transpose", lambda g, x, *, perm=None: g.dy)
    with pytest.raises(ParityError, match="finite differences"):
        check_gradients(OpCase("Transpose", {"x": normal(3, 3)}))


def test_a_rule_that_forgets_to_sum_a_broadcast_axis_fails(rule):
    rule("Add", lambda g, a, b: (g.dy, g.dy))
    with pytest.raises((ParityError, AssertionError)):
        check_gradients(OpCase("Add", {"a": normal(2, 3), "b": normal(3)}))


def test_a_rule_that_returns_no_gradient_fails(rule):
    rule("Tanh", lambda g, x: None)
    with pytest.raises(ParityError, match="no gradient flows to 'x'"):
        check_gradients(TANH)


def test_a_nan_fails(rule):
    rule("Tanh", lambda g, x: g.dy * g.op.Log(g.op.Neg(x * x)))
    with pytest.raises(ParityError, match="finite differences"):
        check_gradients(TANH)


def test_a_gradient_that_is_zero_everywhere_tests_nothing_and_fails(rule):
    case = OpCase("Relu", {"x": np.full((2, 3), -1.0, np.float32)})
    with pytest.raises(ParityError, match="zero everywhere"):
        check_gradients(case)
    check_gradients(replace(case, flat=("x",)))


def test_a_different_function_of_pytorch_fails():
    with pytest.raises(ParityError, match="output 'y' against torch"):
        check_gradients(replace(TANH, torch=lambda x: x.sin()))


def test_the_same_function_with_another_gradient_in_pytorch_fails():
    with pytest.raises(ParityError, match="gradient of 'x' against torch"):
        check_gradients(replace(TANH, torch=lambda x: x.detach().tanh() + 0 * x))
    check_gradients(replace(TANH, torch=lambda x: torch.tanh(x)))


def test_an_executor_that_computes_something_else_fails():
    class Wrong:
        name = "wrong"

        def lower(self, program):
            return ReferenceExecutor().lower(program)

        def compile(self, program):
            compiled = ReferenceExecutor().compile(program)

            class Off:
                def run(self, inputs):
                    return [v * np.float32(1.001) for v in compiled.run(inputs)]

            return Off()

    with pytest.raises(ParityError, match="in float32 on wrong"):
        check_gradients(TANH, executor=Wrong())


def test_a_rule_that_changes_the_forward_fails(rule):
    def meddling(g, x, *, alpha):
        g.node.attributes["alpha"] = ir.AttrFloat32("alpha", 0.5)
        return g.op.Where(g.op.Greater(x, 0), g.dy, g.dy * alpha)

    rule("LeakyRelu", meddling)
    case = OpCase("LeakyRelu", {"x": normal(3, 4, avoid=(0,))}, {"alpha": 0.25})
    with pytest.raises(ParityError, match="output 'y' after autodiff"):
        check_gradients(case, only=[variants(case)[0]])


def test_a_dtype_that_a_rule_states_wrongly_fails(rule):
    def liar(g, x):
        dx = g.dy * 1
        lie = dx - dx * g.y * g.y
        dx.shape = ir.Shape([7, 7])
        return lie

    rule("Tanh", liar)
    with pytest.raises(ShapeAnnotationError):
        check_gradients(TANH, only=[variants(TANH)[0]])
