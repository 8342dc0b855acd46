"""A file says what the operators in it mean: the plain onnxruntime runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ortrain.graph import shapes
from ortrain.graph.local_functions import SPELLINGS, with_functions
from ortrain.ops import DOMAIN
from ortrain.program import Program, Role
from ortrain.runtime.onnxruntime.lowering import make_standard
from tests.autodiff.test_composites import KEPT, every, training
from tests.breadth import sampled
from tests.cases import ALL
from tests.programs import program

CASES = {case.id: case for case in ALL}
OURS = {*KEPT, *(case.id for case in ALL if case.domain == DOMAIN)}
# Further forms of operators whose gradient may be one of ours.
MORE = [name for name in CASES if CASES[name].op_type in {CASES[each].op_type for each in OURS}]


def run(model: str | bytes, feeds: dict[str, np.ndarray]) -> list[Any]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def with_gradients(case: Any) -> tuple[Program, dict[str, np.ndarray]]:
    """A case and its gradients, as one operator each where there is one, and what it is fed.

    Where the sizes of what the gradients come from are not known, it is the case alone.
    """
    found, feeds = training(case, every)
    rng = np.random.default_rng(3)
    outputs = {f"{value.name}.gradient": value for value in found.graph.outputs}
    for seed in found.inputs(Role.OUTPUT_GRADIENT):
        size = shapes.static(outputs[seed.name])
        if size is None:
            return case.build(np.dtype(np.float32), case.tried_opsets()[-1])
        feeds[seed.name] = rng.standard_normal(size).astype(seed.dtype.numpy())
    return found, feeds


@pytest.mark.parametrize("name", sampled(MORE, OURS))
def test_a_file_runs_as_the_program_of_standard_operators(name: str, tmp_path: Path) -> None:
    subject, feeds = with_gradients(CASES[name])
    path, text = tmp_path / "model.onnx", subject.text()
    subject.save(path)
    assert subject.text() == Program.load(path).text() == text
    standard = subject.clone()
    make_standard(standard)
    for found, wanted in zip(run(str(path), feeds), run(standard.serialize(), feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def silus(op: Any, x: ir.Value, z: ir.Value) -> ir.Value:
    """Three, of which two have the same shape."""
    first = op.node("Silu", [op.node("Silu", [x], domain=DOMAIN)], domain=DOMAIN)
    return op.Add(op.ReduceSum(first), op.ReduceSum(op.node("Silu", [z], domain=DOMAIN)))


def test_nodes_with_the_same_body_share_it() -> None:
    subject = program(silus, {"x": ("rows", 4), "z": (7,)})
    model = with_functions(subject.model)
    assert [n.overload for n in model.graph if n.domain] == ["1", "1", "2"]
    assert sorted(model.functions) == [(DOMAIN, "Silu", "1"), (DOMAIN, "Silu", "2")]
    onnx.checker.check_model(ir.to_proto(model))
    assert not subject.model.functions  # it was a copy
    assert not any(n.overload for n in subject.graph)


def test_what_standard_operators_say_is_not_copied() -> None:
    subject = program(lambda op, x: op.Relu(x), {"x": (3,)})
    assert with_functions(subject.model) is subject.model


def test_where_only_pytorch_knows_what_a_call_does_it_is_left_as_it_is(tmp_path: Path) -> None:
    def body(op: Any, x: ir.Value) -> ir.Value:
        (kept, _) = op.node("Kept", [x], domain=DOMAIN, outputs=2, key="call")
        shapes.assign(kept, x.dtype, x.shape)
        result: ir.Value = op.node("Silu", [kept], domain=DOMAIN)
        return result

    subject = program(body, {"x": (3,)})
    subject.save(tmp_path / "model.onnx")
    written = onnx.load(tmp_path / "model.onnx")
    assert [f.name for f in written.functions] == ["Silu"]
    assert [n.overload for n in written.graph.node] == ["", "1"]
    assert Program.load(tmp_path / "model.onnx").text() == subject.text()


def test_an_operator_that_is_not_known_is_left_as_it_is(tmp_path: Path) -> None:
    def body(op: Any, x: ir.Value) -> ir.Value:
        result: ir.Value = op.node("OfALaterVersion", [x], domain=DOMAIN)
        shapes.assign(result, x.dtype, x.shape)
        return result

    subject = program(body, {"x": (3,)})
    subject.save(tmp_path / "model.onnx")
    assert Program.load(tmp_path / "model.onnx").text() == subject.text()


def test_functions_of_others_stay(tmp_path: Path) -> None:
    subject = program(lambda op, x: op.node("Theirs", [x], domain="theirs"), {"x": (3,)})
    shapes.assign(subject.graph.outputs[0], ir.DataType.FLOAT, ir.Shape([3]))
    x = ir.Value(name="x")
    relu = ir.Node("", "Relu", [x])
    graph = ir.Graph([x], relu.outputs, nodes=[relu], opset_imports={"": 21})
    theirs = ir.Function("theirs", "Theirs", graph=graph, attributes=[])
    subject.model.functions[theirs.identifier()] = theirs
    subject.import_domains()
    subject.save(tmp_path / "model.onnx")
    assert list(Program.load(tmp_path / "model.onnx").model.functions) == [theirs.identifier()]
    (found,) = run(str(tmp_path / "model.onnx"), {"x": np.array([-1, 0, 1], np.float32)})
    assert found.tolist() == [0, 0, 1]


def test_without_the_operators_at_hand_a_file_keeps_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(silus, {"x": ("rows", 4), "z": (7,)}).save(tmp_path / "one.onnx")
    with monkeypatch.context() as patched:  # as in a process that has imported Program alone
        patched.delitem(SPELLINGS, DOMAIN)
        Program.load(tmp_path / "one.onnx").save(tmp_path / "two.onnx")
    feeds = {"x": np.ones([2, 4], np.float32), "z": np.ones(7, np.float32)}
    assert run(str(tmp_path / "two.onnx"), feeds) == run(str(tmp_path / "one.onnx"), feeds)
    whole = Program.load(tmp_path / "two.onnx")
    assert not whole.model.functions
    assert not any(n.overload for n in whole.graph)
