"""Stands in for what generate_artifacts does not make yet: optimizer, train step, checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01
KINDS = ("exp_avg", "exp_avg_sq")
SPELLED = {"float32": "F32", "int64": "I64"}


def add_optimizer(folder: Path, tensors: dict[str, np.ndarray], trained: list[str]) -> None:
    """Writes optimizer_model.onnx, train_step_model.onnx and checkpoint beside the others."""
    training = onnx.load(folder / "training_model.onnx")
    inputs = {i.name: i for i in training.graph.input}
    nodes, constants = _adamw(trained)
    floats = TensorProto.FLOAT
    rate = helper.make_tensor_value_info("learning_rate", floats, [1])
    step = helper.make_tensor_value_info("step", TensorProto.INT64, [1])

    def infos(names: list[str]) -> list[onnx.ValueInfoProto]:
        shapes = {name: list(tensors[name].shape) for name in trained}
        return [
            helper.make_tensor_value_info(
                n, floats, next(s for p, s in shapes.items() if _of(n, p))
            )
            for n in names
        ]

    states = [f"{p}.{kind}" for p in trained for kind in KINDS]
    results = infos([f"{n}.updated" for n in (*trained, *states)])
    results.append(helper.make_tensor_value_info("step.updated", TensorProto.INT64, [1]))
    results.append(helper.make_tensor_value_info("grad_norm", floats, [1]))
    grads = infos([f"{p}_grad" for p in trained])
    graph = helper.make_graph(
        nodes,
        "optimizer",
        [rate, step, *infos(trained), *grads, *infos(states)],
        results,
        constants,
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(model, folder / "optimizer_model.onnx")

    # The same after the training model, whose accumulation always starts anew.
    fused = onnx.ModelProto()
    fused.CopyFrom(training)
    graph = fused.graph
    reset = numpy_helper.from_array(np.array([True]), "lazy_reset_grad")
    zeros = [
        numpy_helper.from_array(np.zeros_like(tensors[p]), f"{p}_grad.accumulation.buffer")
        for p in trained
    ]
    graph.initializer.extend([reset, *zeros, *constants])
    kept = [i for n, i in inputs.items() if n not in {x.name for x in (reset, *zeros)}]
    del graph.input[:]
    graph.input.extend([*kept, *infos(states), rate, step])
    for node in nodes:
        for place, name in enumerate(node.input):
            if name.endswith("_grad"):
                node.input[place] = f"{name}.accumulation.out"
    graph.node.extend(nodes)
    outputs = [o for o in graph.output if not o.name.endswith("_grad.accumulation.out")]
    del graph.output[:]
    graph.output.extend([*outputs, *results])
    onnx.save(fused, folder / "train_step_model.onnx")

    _checkpoint(folder, tensors, trained, list(inputs))


def _of(name: str, parameter: str) -> bool:
    return name in {parameter, f"{parameter}_grad"} or name.startswith(f"{parameter}.")


def _adamw(trained: list[str]) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(value: float, dtype: type = np.float32) -> str:
        name = f"adamw/{len(constants)}"
        constants.append(numpy_helper.from_array(np.array([value], dtype), name))
        return name

    def op(kind: str, *inputs: str, out: str = "", **attributes: int) -> str:
        name = out or f"adamw/{kind}/{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    now = op("Add", "step", constant(1, np.int64), out="step.updated")
    t = op("Cast", now, to=TensorProto.FLOAT)

    def correction(beta: float) -> str:
        th = op("Tanh", op("Mul", t, constant(math.log(beta) / 2)))
        return op("Div", op("Mul", th, constant(-2)), op("Sub", constant(1), th))

    squares = [op("ReduceSumSquare", f"{p}_grad", keepdims=0) for p in trained]
    op("Reshape", op("Sqrt", op("Sum", *squares)), constant(1, np.int64), out="grad_norm")
    c1, c2 = (correction(beta) for beta in BETAS)
    pace = op("Div", "learning_rate", c1)
    shrink = op("Sub", constant(1), op("Mul", "learning_rate", constant(DECAY)))
    root = op("Sqrt", c2)
    for p in trained:
        g, states = f"{p}_grad", [f"{p}.{kind}" for kind in KINDS]
        moments = [
            op(
                "Add",
                op("Mul", old, constant(b)),
                op("Mul", new, constant(1 - b)),
                out=f"{old}.updated",
            )
            for old, new, b in zip(states, (g, op("Mul", g, g)), BETAS, strict=True)
        ]
        below = op("Add", op("Div", op("Sqrt", moments[1]), root), constant(EPS))
        change = op("Mul", pace, op("Div", moments[0], below))
        op("Sub", op("Mul", p, shrink), change, out=f"{p}.updated")
    return nodes, constants


def _checkpoint(
    folder: Path, tensors: dict[str, np.ndarray], trained: list[str], inputs: list[str]
) -> None:
    def spec(name: str, **more: object) -> dict[str, object]:
        array = tensors[name]
        return {"name": name, "dtype": SPELLED[str(array.dtype)], "shape": array.shape, **more}

    buffers = [n for n in tensors if n.split(".")[-1].startswith(("running", "num_batches"))]
    rest = sorted((n for n in tensors if n not in buffers), key=lambda n: n not in trained)
    states = [
        {**spec(p), "name": f"{p}.{kind}", "parameter": p, "kind": kind}
        for p in trained
        for kind in KINDS
    ]
    texts = {
        "parameters": json.dumps([spec(n, requires_grad=n in trained) for n in rest]),
        "buffers": json.dumps([spec(n) for n in buffers]),
        "states": json.dumps(states),
    }
    both = f"{texts['parameters']}\n{texts['buffers']}"
    zeros = {str(s["name"]): np.zeros(s["shape"], np.float32) for s in states}
    metadata = {
        "format": "ortrain.checkpoint",
        "version": "1",
        **texts,
        "model": hashlib.sha256(both.encode()).hexdigest(),
        "properties": json.dumps({"epoch": 2, "loss": 2.0, "name": 'the "first"', "big": 2**60}),
        "step": "0",
        "seed": "0",
        "learning_rate": "0.002",
    }
    save_file({**tensors, **zeros}, folder / "checkpoint", metadata)
