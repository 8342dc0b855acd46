"""Branches and loops: functions inside the function, and what they read around them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from ortrain.errors import ExecutionError
from ortrain.graph.scan import scan
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.programs import program

FLOAT, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


def compiled(subject):
    executor = AtenExecutor()
    return executor.compile(executor.lower(subject))


def agrees(subject, feeds):
    """Runs a program as onnxruntime does, and returns its source.

    The reference makes no step of a loop without a condition, and knows no axes of a scan.
    """
    stock, runs = OnnxRuntimeExecutor(threads=1), compiled(subject)
    session = stock.compile(stock.lower(subject))
    found = session.run([feeds[name] for name in session.input_names])
    expected = dict(zip(session.output_names, found, strict=True))
    given = [torch.from_numpy(np.array(feeds[v.name])) for v in subject.graph.inputs]
    results = runs.run_values(list(given))
    for value, result in zip(subject.graph.outputs, results, strict=True):
        if not result.numel():  # onnxruntime says nothing about the other axes of no rows
            assert not expected[value.name].size
            continue
        assert result.shape == expected[value.name].shape
        np.testing.assert_allclose(result.numpy(), expected[value.name], rtol=1e-5, atol=1e-6)
    for value, tensor in zip(subject.graph.inputs, given, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), feeds[value.name])
    memory = [t.untyped_storage().data_ptr() for t in (*results, *given) if t.numel()]
    assert len(set(memory)) == len(memory)
    return runs.source


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def entry(name, dtype=FLOAT, shape=None):
    return ir.Value(
        name=name, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape)
    )


def branches(op, condition, then, otherwise, dtype=FLOAT):
    """An If of two functions of a builder."""
    graphs = []
    for name, body in (("then", then), ("otherwise", otherwise)):
        with op.subgraph(f"{name}_{len(op.nodes)}") as inner:
            graphs.append(inner.returning(body(inner)))
    result = op.If(condition, then_branch=graphs[0], else_branch=graphs[1])
    result.type = ir.TensorType(dtype)
    return result


def loop(op, trips, condition, states, body, outputs):
    """A Loop: ``body(op, step, condition, *states)`` gives a condition, states and rows."""
    entries = [entry("step", INT64, ()), entry("goes_on", BOOL, ())]
    entries += [entry(f"state_{i}", s.dtype) for i, s in enumerate(states)]
    with op.subgraph(f"loop_{len(op.nodes)}", entries) as inner:
        results = [inner.Identity(value) for value in body(inner, *entries)]
        graph = inner.returning(*results)
    made = op.node("Loop", [trips, condition, *states], outputs=outputs, body=graph)
    made = made if isinstance(made, tuple) else (made,)
    for value, result in zip(made, results[1:], strict=True):
        value.type = ir.TensorType(result.dtype)
    return made


@pytest.mark.parametrize("chosen", [True, False])
def test_a_branch_reads_what_is_around_it(chosen):
    def body(op, a, flag):
        scaled = op.Mul(a, 2.0)
        result = branches(
            op, flag, lambda inner: inner.Add(scaled, a), lambda inner: inner.Exp(scaled)
        )
        return op.Add(result, scaled)

    subject = program(body, {"a": ("n",), "flag": ()}, dtypes={"flag": np.bool_})
    source = agrees(subject, {"a": normal(3), "flag": np.array(chosen)})
    assert "control.choose" in source


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("returned", ["an input", "a constant", "a value around it", "a view"])
def test_what_a_branch_returns_of_others_is_not_written_into(returned, chosen):
    def body(op, a, flag):
        scaled = op.Mul(a, 2.0)
        other = {
            "an input": lambda inner: inner.Identity(a),
            "a constant": lambda inner: inner.Identity(inner.constant(normal(3, 1, seed=2))),
            "a value around it": lambda inner: inner.Identity(scaled),
            "a view": lambda inner: inner.Squeeze(inner.Unsqueeze(scaled, [0]), [0]),
        }[returned]
        result = branches(op, flag, other, lambda inner: inner.Exp(scaled))
        result.shape = ir.Shape([3, 1])
        return {"y": op.Tanh(op.Neg(result)), "z": op.Tanh(op.Add(scaled, a)), "w": result}

    subject = program(body, {"a": (3, 1), "flag": ()}, dtypes={"flag": np.bool_})
    feeds = {"a": normal(3, 1), "flag": np.array(chosen)}
    agrees(subject, feeds)
    runs = compiled(subject)
    first, second = (runs.run([feeds[v.name] for v in subject.graph.inputs]) for _ in range(2))
    np.testing.assert_array_equal(first, second, err_msg="a constant was written into")


def test_a_branch_on_a_constant_is_no_branch():
    def body(op, a):
        return branches(op, op.constant(np.array(True)), lambda i: i.Neg(a), lambda i: i.Exp(a))

    source = agrees(program(body, {"a": ("n",)}), {"a": normal(3)})
    assert "control" not in source
    assert "exp" not in source


def test_a_branch_on_sizes_waits_for_no_tensor():
    def body(op, a):
        rows = op.Squeeze(op.Shape(a, end=1), [0])
        return branches(op, op.Greater(rows, 2), lambda i: i.Neg(a), lambda i: i.Exp(a))

    for rows in (2, 3):
        source = agrees(program(body, {"a": ("n",)}), {"a": normal(rows)})
        assert "control.choose((n > 2), " in source


def test_a_loop_on_sizes_waits_for_no_tensor():
    def body(op, a):
        rows = op.Squeeze(op.Shape(a, end=1), [0])

        def step(inner, number, goes_on, x):
            return inner.Less(inner.Mul(number, 2), rows), inner.Tanh(x)

        return loop(op, None, op.Greater(rows, 1), [a], step, 1)[0]

    for rows in (1, 2, 7):
        source = agrees(program(body, {"a": ("n",)}), {"a": normal(rows)})
        assert "torch.tensor" not in source


@pytest.mark.parametrize("chosen", [True, False])
def test_sizes_that_a_branch_asks_for_are_not_those_of_the_other(chosen):
    """Each function asks anew what only the one beside it has asked for."""

    def body(op, a, rows, flag):
        wide = op.Reshape(a, rows)  # of unknown sizes
        wide.shape = ir.Shape([None, None])

        def flat(inner):
            return inner.Reshape(wide, inner.Concat(inner.Shape(wide, end=1), [-1], axis=0))

        result = branches(
            op, flag, lambda inner: inner.Neg(flat(inner)), lambda inner: inner.Exp(flat(inner))
        )
        return op.Reshape(result, op.Concat(op.Shape(wide, end=1), [-1], axis=0))

    shapes = {"a": ("n",), "rows": (2,), "flag": ()}
    subject = program(body, shapes, dtypes={"flag": np.bool_, "rows": np.int64})
    agrees(subject, {"a": normal(6), "rows": np.array([2, 3]), "flag": np.array(chosen)})


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_a_loop_of_so_many_steps(trips):
    def body(op, a, b):
        def step(inner, number, goes_on, x):
            new = inner.Add(x, inner.Mul(b, inner.Cast(number, to=FLOAT)))
            return goes_on, new, inner.MatMul(new, b)

        x, rows = loop(op, np.int64(trips), None, [a], step, 2)
        return {"x": x, "rows": rows}

    source = agrees(
        program(body, {"a": (3, 3), "b": (3, 3)}), {"a": normal(3, 3), "b": normal(3, 3, seed=1)}
    )
    assert "asks=False" in source, "a condition that holds for ever is not asked for"


@pytest.mark.parametrize(("trips", "limit"), [(None, 20.0), (2, 20.0), (9, 20.0), (9, -1.0)])
def test_a_loop_as_long_as_a_condition_holds(trips, limit):
    def body(op, a):
        def holds(inner, x):
            return inner.Less(inner.ReduceSum(inner.Mul(x, x), keepdims=0), limit)

        def step(inner, number, goes_on, x):
            new = inner.Mul(x, 1.5)
            return holds(inner, new), new, inner.Neg(x)

        x, rows = loop(op, trips if trips is None else np.int64(trips), holds(op, a), [a], step, 2)
        return {"x": x, "rows": rows}

    agrees(program(body, {"a": (3,)}), {"a": normal(3)})


def test_what_no_step_collects_has_the_shape_that_one_would_have_given_it():
    def body(op, a):
        return loop(op, np.int64(0), None, [a], lambda i, n, c, x: (c, x, i.MatMul(x, x)), 2)[1]

    (rows,) = compiled(program(body, {"a": (3, 3)})).run([normal(3, 3)])
    assert rows.shape == (0, 3, 3)


def test_the_number_of_steps_may_be_computed():
    def body(op, a, count):
        def step(inner, number, goes_on, x):
            return goes_on, inner.Tanh(x)

        return loop(op, op.Add(count, 1), None, [a], step, 1)[0]

    subject = program(body, {"a": (3,), "count": ()}, dtypes={"count": np.int64})
    for count in (-1, 0, 4):
        agrees(subject, {"a": normal(3), "count": np.array(count)})


def test_the_number_of_a_step_is_a_size_inside():
    def body(op, a):
        def step(inner, number, goes_on, x):
            row = inner.Gather(a, number, axis=0)
            return goes_on, inner.Add(x, row), inner.Mul(row, 2.0)

        start = op.ReduceSum(a, [0], keepdims=0)
        x, rows = loop(op, op.Squeeze(op.Shape(a, end=1), [0]), None, [start], step, 2)
        return {"x": x, "rows": rows}

    agrees(program(body, {"a": ("n", 3)}), {"a": normal(4, 3)})


def test_a_state_of_a_loop_may_grow():
    def body(op, a):
        def step(inner, number, goes_on, x):
            return goes_on, inner.Concat(x, a, axis=0)

        return loop(op, np.int64(3), None, [a], step, 1)[0]

    agrees(program(body, {"a": ("n", 2)}), {"a": normal(2, 2)})


def test_a_loop_whose_states_change_places():
    def body(op, a, b):
        x, y = loop(op, np.int64(3), None, [a, b], lambda i, n, c, x, y: (c, y, x), 2)
        return {"x": op.Neg(x), "y": y}

    agrees(program(body, {"a": (2,), "b": (2,)}), {"a": normal(2), "b": normal(2, seed=1)})


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_scan_in_either_direction(steps, backwards):
    def body(op, x, start, w):
        def step(inner, states, slices):
            h, total = states
            new = inner.Tanh(inner.Add(inner.MatMul(h, w), slices[0]))
            return (new, inner.Add(total, new)), (new, inner.Neg(total))

        (h, total), (ys, zs) = scan(op, step, [start, start], [x], backwards=backwards)
        return {"h": h, "total": total, "ys": ys, "zs": zs}

    subject = program(body, {"x": ("t", 2, 3), "start": (2, 3), "w": (3, 3)})
    feeds = {"x": normal(steps, 2, 3), "start": normal(2, 3, seed=1), "w": normal(3, 3, seed=2)}
    if steps:
        agrees(subject, feeds)
    else:  # onnxruntime stacks nothing
        h, total, ys, zs = compiled(subject).run([feeds[v.name] for v in subject.graph.inputs])
        np.testing.assert_array_equal(h, feeds["start"])
        np.testing.assert_array_equal(total, feeds["start"])
        assert ys.shape == zs.shape == (0, 2, 3)


def test_a_scan_along_other_axes():
    def body(op, x, z, start):
        entries = [entry("h", shape=(2,)), entry("a", shape=(2,)), entry("b", shape=(2,))]
        with op.subgraph("step", entries) as inner:
            h, a, b = entries
            new = inner.Add(inner.Mul(h, 0.5), inner.Mul(a, b))
            outputs = (new, inner.Neg(new), inner.Unsqueeze(inner.Exp(new), [0]))
            graph = inner.returning(*outputs)
        results = op.node(
            "Scan", [start, x, z], outputs=3, body=graph, num_scan_inputs=2,
            scan_input_axes=[1, -1], scan_input_directions=[0, 1],
            scan_output_axes=[1, -1], scan_output_directions=[1, 0],
        )  # fmt: skip
        for value in results:
            value.type = ir.TensorType(FLOAT)
        return dict(zip("huv", results, strict=True))

    subject = program(body, {"x": (2, "t"), "z": (2, "t"), "start": (2,)})
    agrees(subject, {"x": normal(2, 5), "z": normal(2, 5, seed=1), "start": normal(2, seed=2)})


def test_functions_inside_functions_read_all_that_is_around_them():
    def body(op, x, start, w, flag):
        outer = op.Exp(w)

        def step(inner, states, slices):
            around = inner.Mul(slices[0], 2.0)

            def refine(deep, number, goes_on, h):
                moved = branches(
                    deep, flag,
                    lambda i: i.Add(i.MatMul(h, outer), around),
                    lambda i: i.Sub(i.MatMul(h, w), slices[0]),
                )  # fmt: skip
                return goes_on, deep.Tanh(moved)

            (h,) = loop(inner, np.int64(2), None, [states[0]], refine, 1)
            h.shape = ir.Shape([2, 3])
            return (h,), (inner.Add(h, around),)

        (h,), (ys,) = scan(op, step, [start], [x])
        return {"h": h, "ys": ys}

    shapes = {"x": ("t", 2, 3), "start": (2, 3), "w": (3, 3), "flag": ()}
    subject = program(body, shapes, dtypes={"flag": np.bool_})
    for flag in (True, False):
        feeds = {
            "x": normal(4, 2, 3),
            "start": normal(2, 3),
            "w": normal(3, 3),
            "flag": np.array(flag),
        }
        agrees(subject, feeds)


def test_what_a_function_reads_is_freed_after_its_last_call_and_not_before():
    def body(op, x, start, w):
        weight, factor = op.Exp(w), op.Tanh(w)

        def step(inner, states, slices):
            return (inner.MatMul(inner.Add(states[0], slices[0]), weight),), ()

        for _ in range(2):
            (start,), _ = scan(op, step, [start], [x])
        return op.MatMul(start, factor)

    subject = program(body, {"x": ("t", 2, 3), "start": (2, 3), "w": (3, 3)})
    source = agrees(subject, {"x": normal(4, 2, 3), "start": normal(2, 3), "w": normal(3, 3) * 0.1})
    lines = [line.strip() for line in source.splitlines()]
    weight = next(line.split(" = ")[0] for line in lines if "torch.exp(" in line)
    calls = [i for i, line in enumerate(lines) if "control.scan" in line]
    (freed,) = [i for i, line in enumerate(lines) if line.startswith("del") and weight in line]
    assert freed == calls[1] + 1


def test_a_loop_writes_into_nothing_around_it_and_not_into_its_slices():
    """Views of what is outside, of states and of slices, in calls that could write over them."""

    def body(op, x, start, w):
        scaled = op.Mul(w, 0.5)

        def step(inner, states, slices):
            turned = inner.Transpose(scaled, perm=[1, 0])
            seen = inner.Tanh(inner.Mul(turned, 0.5))
            row = inner.Reshape(slices[0], [3, 1])
            state = inner.Transpose(states[0], perm=[1, 0])
            new = inner.Add(inner.Tanh(inner.Transpose(scaled, perm=[1, 0])), inner.Neg(row))
            return (inner.Add(inner.Neg(state), inner.Mul(new, seen)),), (inner.Exp(row),)

        (h,), (ys,) = scan(op, step, [start], [x])
        return {"h": h, "ys": ys, "scaled": scaled}

    subject = program(body, {"x": ("t", 3), "start": (3, 3), "w": (3, 3)})
    agrees(subject, {"x": normal(4, 3), "start": normal(3, 3, seed=1), "w": normal(3, 3, seed=2)})


@pytest.mark.parametrize("name", ["t1", "t2", "max", "control", "host", "run", "values", "del"])
def test_any_name_will_do(name):
    def body(op, **inputs):
        (a,) = inputs.values()
        return op.Add(op.Mul(op.Exp(a), op.Neg(a)), op.Gemm(a, a, alpha=0.5))

    agrees(program(body, {name: (3, 3)}), {name: normal(3, 3)})


def test_a_loop_refuses_a_state_whose_rank_changes():
    def body(op, a):
        return loop(op, np.int64(2), None, [a], lambda i, n, c, x: (c, i.Unsqueeze(x, [0])), 1)[0]

    runs = compiled(program(body, {"a": (3,)}))
    with pytest.raises(ExecutionError, match="changes the rank of a state"):
        runs.run([normal(3)])
