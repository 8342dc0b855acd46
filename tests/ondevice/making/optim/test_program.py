"""The optimizer model's form: inputs, outputs, roles, states, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from ortrain.errors import OrtrainWarning
from ortrain.graph.aliasing import check_aliases
from ortrain.ondevice.making.optim.blocks import LARGE, ROW, state_shape
from ortrain.ondevice.optim import SGD, Adam, AdamW, Group, Lion, optimizer_program, states
from ortrain.program import Phase, Role, phase_of, role_of, target_of
from tests.ondevice.making.optim.stepping import SHAPES, listed, session

OPTIMIZERS = [AdamW(max_norm=1.0), Adam(weight_decay=0.1), SGD(), SGD(momentum=0.9), Lion()]


def test_inputs_and_outputs_are_those_of_the_contract_in_its_order() -> None:
    program = optimizer_program(AdamW(max_norm=1.0), listed({"a": (2, 3), "b.c": ()}))
    kept = ["a.exp_avg", "a.exp_avg_sq", "b.c.exp_avg", "b.c.exp_avg_sq"]
    assert [v.name for v in program.inputs()] == [
        *("learning_rate", "step", "a", "b.c", "a_grad", "b.c_grad"),
        *kept,
    ]
    assert [v.name for v in program.outputs()] == [
        *("a.updated", "b.c.updated"),
        *(f"{name}.updated" for name in kept),
        *("step.updated", "grad_norm"),
    ]
    assert program.aliases == {f"{name}.updated": name for name in ["a", "b.c", *kept]}
    gradient = program.input("b.c_grad")
    assert (role_of(gradient), target_of(gradient)) == (Role.GRADIENT, "b.c")
    assert {phase_of(node) for node in program.graph} == {Phase.UPDATE}


def test_there_is_no_norm_where_nothing_is_clipped() -> None:
    program = optimizer_program(AdamW(), listed({"a": (2, 3)}))
    assert "grad_norm" not in [v.name for v in program.outputs()]


def test_states_have_a_name_a_parameter_and_a_kind() -> None:
    (state,) = states(SGD(momentum=0.9), listed({"a": (2, 3)}))
    assert (state.name, state.parameter, state.kind) == (
        "a.momentum_buffer",
        "a",
        "momentum_buffer",
    )
    assert (state.dtype, state.shape) == (ir.DataType.FLOAT, (2, 3))
    assert states(SGD(), listed({"a": (2, 3)})) == []


@pytest.mark.parametrize("shape", [(30522, 384), (50257, 768), (4096, 4096), (LARGE + 1,)])
def test_states_of_a_large_parameter_lie_in_rows_of_its_elements(shape: tuple[int, ...]) -> None:
    rows, row = state_shape(shape)
    assert rows * row == math.prod(shape)
    assert row <= ROW


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1536, 384), (1048583,)])
def test_states_of_others_have_the_parameters_shape(shape: tuple[int, ...]) -> None:
    assert state_shape(shape) == shape


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_models_are_valid_standard_onnx_without_float64(optimizer) -> None:
    program = optimizer_program(optimizer, listed(SHAPES))
    model = ir.to_proto(program.model)
    onnx.checker.check_model(model, full_check=True)
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 18)}
    values = [v for node in program.graph.all_nodes() for v in node.outputs]
    dtypes = {v.dtype for v in (*values, *program.graph.initializers.values())}
    assert dtypes <= {ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_stay_safe_in_place_after_the_optimizations_of_onnxruntime(
    optimizer, tmp_path: Path
) -> None:
    program = optimizer_program(optimizer, listed(SHAPES))
    path = tmp_path / "optimized.onnx"
    session(program, optimized=str(path))
    check_aliases(ir.from_proto(onnx.load(path)).graph, program.aliases)


def test_small_parameters_share_their_nodes() -> None:
    few = optimizer_program(AdamW(), listed({f"p{i}": (384,) for i in range(2)}))
    many = optimizer_program(AdamW(), listed({f"p{i}": (384,) for i in range(50)}))
    assert len(few.graph) == len(many.graph)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(betas=(1.0, 0.9)), r"betas\[0\] must be at least 0 and below 1, and is 1.0"),
        (lambda: Lion(betas=(0.9, -0.1)), r"betas\[1\] .* -0.1"),
        (lambda: Adam(eps=-1.0), "eps .* -1.0"),
        (lambda: AdamW(weight_decay=float("nan")), "weight_decay .* nan"),
        (lambda: SGD(momentum=-0.5), "momentum .* -0.5"),
        (lambda: SGD(nesterov=True), "nesterov .* momentum=0.0"),
        (lambda: SGD(nesterov=True, momentum=0.9, dampening=0.1), "dampening=0.1"),
        (lambda: AdamW(max_norm=0.0), "max_norm .* 0.0"),
        (lambda: Group(lr_scale=-1.0), "lr_scale .* -1.0"),
        (lambda: Group(weight_decay=-1.0), "weight_decay .* -1.0"),
    ],
)
def test_a_bad_hyperparameter_is_named_with_its_value(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_group_that_is_a_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"groups\['\*.bias'\] must be a Group, and is 0.0"):
        AdamW(groups={"*.bias": 0.0})  # type: ignore[dict-item]


def test_a_pattern_that_fits_no_parameter_is_warned_of() -> None:
    optimizer = AdamW(groups={"*.bais": Group(weight_decay=0.0)})
    with pytest.warns(OrtrainWarning, match=r"'\*.bais'.*AdamW.groups.*'a.bias'"):
        optimizer_program(optimizer, listed({"a.bias": (3,)}))


def test_other_dtypes_repeated_names_and_no_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="'a' is float16"):
        optimizer_program(AdamW(), [("a", ir.DataType.FLOAT16, (2,))])
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        optimizer_program(AdamW(), listed({"a": (2,)}) * 2)
    with pytest.raises(ValueError, match="no parameter"):
        optimizer_program(AdamW(), [])
