"""Artifacts of a small classifier, made by hand as docs/ondevice-contract.md says.

``relu(x @ fc1 - mean) * scale * (1 + seed / 100) @ fc2 + bias`` and cross-entropy: ``scale`` is
frozen; ``mean`` is that of the batch in training, which moves the buffer ``norm.mean``, and this in
evaluation; the seed plays the part of dropout.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
from safetensors.numpy import save_file

from ortrain.graph.build import Builder
from ortrain.ondevice import contract
from tests.files import sealing

SHAPES = {"fc1.weight": (4, 8), "scale": (8,), "fc2.weight": (8, 3), "fc2.bias": (3,)}
TRAINED = ("fc1.weight", "fc2.weight", "fc2.bias")
BUFFERS = {"norm.mean": (8,)}
STATES = tuple(contract.state(p, k) for p in TRAINED for k in ("exp_avg", "exp_avg_sq"))
BETAS, EPS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.99), 1e-8, 0.01, 0.5
MOMENTUM = 0.1


def write(folder: Path, optimizer: str = "adamw") -> Path:
    """Writes all artifacts into a folder.

    Args:
        folder: is made.
        optimizer: ``adamw``, which clips, or ``sgd``, which does neither that nor have states.
    """
    folder.mkdir()
    for name, model in (
        (contract.TRAINING_MODEL, _training()),
        (contract.EVAL_MODEL, _evaluation()),
        (contract.OPTIMIZER_MODEL, _optimizer(optimizer)),
        (contract.TRAIN_STEP_MODEL, _train_step(optimizer)),
    ):
        model.metadata_props["ortrain.checksum"] = sealing.UNSEALED
        ir.save(model, folder / name)
        sealing.seal(folder / name)
    metadata = description(STATES if optimizer == "adamw" else ())
    save_file(initial(), folder / contract.CHECKPOINT, metadata)
    save_file({}, folder / contract.NOMINAL_CHECKPOINT, metadata | {"nominal": "true"})
    sealing.seal(folder / contract.CHECKPOINT)
    sealing.seal(folder / contract.NOMINAL_CHECKPOINT)
    return folder


def initial() -> dict[str, np.ndarray]:
    """Parameters and buffers before training."""
    generator = np.random.default_rng(1)
    values = {n: generator.standard_normal(s, np.float32) for n, s in SHAPES.items()}
    return values | {name: np.zeros(shape, np.float32) for name, shape in BUFFERS.items()}


def batch(size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels."""
    generator = np.random.default_rng(100 + seed)
    return generator.standard_normal((size, 4), np.float32), generator.integers(0, 3, size)


def description(states: tuple[str, ...] = STATES) -> dict[str, str]:
    """The metadata of the checkpoint."""

    def rows(shapes: dict[str, tuple[int, ...]], **more: dict[str, object]) -> str:
        return json.dumps(
            [
                {"name": n, "dtype": "F32", "shape": list(s)} | {k: v[n] for k, v in more.items()}
                for n, s in shapes.items()
            ]
        )

    parameters = rows(SHAPES, requires_grad={name: name in TRAINED for name in SHAPES})
    buffers = rows(BUFFERS)
    of = {name: name.rpartition(".")[::2] for name in states}
    shapes = {name: SHAPES[of[name][0]] for name in states}
    parts = [{name: of[name][i] for name in states} for i in (0, 1)]
    return {
        "format": "ortrain.checkpoint",
        "version": "2",
        "checksum": sealing.UNSEALED,
        "parameters": parameters,
        "buffers": buffers,
        "states": rows(shapes, parameter=parts[0], kind=parts[1]),
        "model": hashlib.sha256(f"{parameters}\n{buffers}".encode()).hexdigest(),
        "properties": "{}",
    }


# -- graphs --------------------------------------------------------------------------------------


class Graph:
    """A graph under construction: inputs by name, and a builder."""

    def __init__(self) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="graph")
        self.op = Builder(self.graph, opset=18, prefix="n")

    def input(self, name: str, shape: tuple[object, ...], dtype: ir.DataType) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def floats(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, ir.Value]:
        return {name: self.input(name, s, ir.DataType.FLOAT) for name, s in shapes.items()}

    def output(self, name: str, value: ir.Value, shape: tuple[object, ...] | None = None) -> None:
        value.name = name
        if shape is not None:
            value.shape = ir.Shape(shape)
        self.graph.outputs.append(value)

    def model(self) -> ir.Model:
        return ir.Model(self.graph, ir_version=10)


def _user(graph: Graph) -> tuple[ir.Value, ir.Value]:
    x = graph.input("x", ("batch", 4), ir.DataType.FLOAT)
    return x, graph.input("labels", ("batch",), ir.DataType.INT64)


def _training_part(graph: Graph) -> dict[str, ir.Value]:
    """Inputs up to the seed, outputs up to the buffers; the gradients."""
    op = graph.op
    x, labels = _user(graph)
    v = graph.floats(SHAPES) | graph.floats(BUFFERS)
    seed = graph.input(contract.SEED, (1,), ir.DataType.INT64)
    with op:
        z = op.MatMul(x, v["fc1.weight"])
        mean = op.ReduceMean(z, [0], keepdims=0)
        centred = z - mean
        factor = v["scale"] * (op.Cast(seed, to=1) * 0.01 + 1.0)
        active = op.Relu(centred) * factor
        logits = op.MatMul(active, v["fc2.weight"]) + v["fc2.bias"]
        loss, log_probabilities = op.node("SoftmaxCrossEntropyLoss", [logits, labels], outputs=2)
        rows = op.Cast(op.Shape(x, start=0, end=1), to=1)
        classes = op.OneHot(labels, op.constant([3]), op.constant(np.float32([0, 1])))
        dlogits = (op.Exp(log_probabilities) - classes) / rows
        dcentred = op.MatMul(dlogits, op.Transpose(v["fc2.weight"], perm=[1, 0])) * factor
        dcentred = op.Where(op.Greater(centred, op.constant(np.float32(0))), dcentred, 0.0)
        dz = dcentred - op.ReduceMean(dcentred, [0], keepdims=1)
        gradients = {
            "fc1.weight": op.MatMul(op.Transpose(x, perm=[1, 0]), dz),
            "fc2.weight": op.MatMul(op.Transpose(active, perm=[1, 0]), dlogits),
            "fc2.bias": op.ReduceSum(dlogits, [0], keepdims=0),
        }
        moved = v["norm.mean"] * (1 - MOMENTUM) + mean * MOMENTUM
    graph.output("loss", loss, ())
    graph.output("logits", logits, ("batch", 3))
    graph.output("norm.mean.updated", moved, (8,))
    return gradients


def _training() -> ir.Model:
    graph = Graph()
    gradients = _training_part(graph)
    trained = {p: SHAPES[p] for p in TRAINED}
    buffers = graph.floats({contract.accumulation_buffer(p): s for p, s in trained.items()})
    reset = graph.input(contract.LAZY_RESET_GRAD, (1,), ir.DataType.BOOL)
    branches = []
    for branch in ("then", "else"):
        op = Builder(prefix=branch, opset=18)
        for gradient, buffer in zip(gradients.values(), buffers.values(), strict=True):
            op.Identity(gradient) if branch == "then" else op.Add(gradient, buffer)
        outputs = [node.outputs[0] for node in op.nodes]
        branches.append(ir.Graph([], outputs, nodes=op.nodes, name=branch))
    sums = graph.op.node(
        "If", [reset], outputs=len(trained), then_branch=branches[0], else_branch=branches[1]
    )
    for (name, shape), value in zip(trained.items(), sums, strict=True):
        value.dtype = ir.DataType.FLOAT
        graph.output(contract.accumulation_out(name), value, shape)
    return graph.model()


def _evaluation() -> ir.Model:
    graph = Graph()
    op = graph.op
    x, labels = _user(graph)
    v = graph.floats(SHAPES) | graph.floats(BUFFERS)
    with op:
        centred = op.MatMul(x, v["fc1.weight"]) - v["norm.mean"]
        active = op.Relu(centred) * v["scale"]
        active.name = "active"
        logits = op.MatMul(active, v["fc2.weight"]) + v["fc2.bias"]
        loss = op.SoftmaxCrossEntropyLoss(logits, labels)
    graph.output("loss", loss, ())
    graph.output("logits", logits, ("batch", 3))
    return graph.model()


def _optimizer(kind: str) -> ir.Model:
    graph = Graph()
    rate = graph.input(contract.LEARNING_RATE, (1,), ir.DataType.FLOAT)
    step = graph.input(contract.STEP, (1,), ir.DataType.INT64)
    parameters = graph.floats({p: SHAPES[p] for p in TRAINED})
    gradients = graph.floats({contract.gradient(p): SHAPES[p] for p in TRAINED})
    states = graph.floats({s: SHAPES[s.rpartition(".")[0]] for s in STATES if kind == "adamw"})
    _update(
        graph,
        kind,
        parameters,
        dict(zip(TRAINED, gradients.values(), strict=True)),
        states,
        rate,
        step,
    )
    return graph.model()


def _train_step(kind: str) -> ir.Model:
    graph = Graph()
    gradients = _training_part(graph)
    parameters = {value.name: value for value in graph.graph.inputs if value.name in TRAINED}
    states = graph.floats({s: SHAPES[s.rpartition(".")[0]] for s in STATES if kind == "adamw"})
    rate = graph.input(contract.LEARNING_RATE, (1,), ir.DataType.FLOAT)
    step = graph.input(contract.STEP, (1,), ir.DataType.INT64)
    if kind == "sgd":  # no parameter is written before all gradients are there; clipping sees to it
        with graph.op as op:
            sums = [op.ReduceSum(g, op.constant([0]), keepdims=0) for g in gradients.values()]
            rest = op.Concat(*(op.Reshape(s, [-1]) for s in sums), axis=0)
            rate = op.Where(op.IsNaN(op.ReduceMax(rest, keepdims=1)), 0.0, rate)
    _update(graph, kind, parameters, gradients, states, rate, step)
    return graph.model()


def _update(graph, kind, parameters, gradients, states, rate, step):  # type: ignore[no-untyped-def]
    updated = {}
    with graph.op as op:
        following = step + 1
        if kind == "sgd":
            for name, p in parameters.items():
                updated[name] = p - gradients[name] * rate
        else:
            squares = [op.ReduceSumSquare(g, keepdims=0) for g in gradients.values()]
            norm = op.Reshape(op.Sqrt(op.Sum(*squares)), [1])
            scale = op.Min(
                op.constant(np.float32([MAX_NORM])) / (norm + 1e-6), op.constant(np.float32([1]))
            )
            t = op.Cast(following, to=1)
            corrections = [1.0 - op.Pow(op.constant(np.float32([b])), t) for b in BETAS]
            for name, p in parameters.items():
                g = gradients[name] * scale
                m, v = (states[contract.state(name, k)] for k in ("exp_avg", "exp_avg_sq"))
                m = m * BETAS[0] + g * (1 - BETAS[0])
                v = v * BETAS[1] + g * g * (1 - BETAS[1])
                direction = m / corrections[0] / (op.Sqrt(v / corrections[1]) + EPS)
                updated[name] = p * (1.0 - rate * WEIGHT_DECAY) - direction * rate
                updated[contract.state(name, "exp_avg")] = m
                updated[contract.state(name, "exp_avg_sq")] = v
        shapes = SHAPES | {s: SHAPES[s.rpartition(".")[0]] for s in STATES}
        for name in (*parameters, *states):
            graph.output(contract.updated(name), updated[name], shapes[name])
        graph.output(contract.updated(contract.STEP), following, (1,))
        if kind == "adamw":
            graph.output(contract.GRAD_NORM, norm, (1,))
