"""``LoRA``: low-rank adapters beside the products of a model, trained in place of their weights.

    y = x W                    →    y = x W + alpha / rank * (x Aᵀ) Bᵀ

Hu et al., "LoRA: Low-rank adaptation of large language models" (arXiv:2106.09685). Tensors have
PEFT's names and layout: ``<layer>.lora_A.weight`` [rank, in] and ``<layer>.lora_B.weight``
[out, rank]. B begins with zeros, so that training begins with the model as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from ortrain.errors import GraphError, listing
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.kinds import NONE, expect_names, expect_number, expect_whole
from ortrain.ondevice.making.forward import Forward
from ortrain.ondevice.running.adapters import Adapter
from ortrain.program import Program, Role, set_role


@dataclass(frozen=True)
class LoRA:
    """Which weights get adapters, and of what size.

    Args:
        rank: of the adapters.
        targets: patterns, as of ``fnmatch``, of the names of the weights: initializers of an ONNX
            model, parameters of a module. A product with a matrix of such a name gets an adapter.
        alpha: the adapters' output is scaled by ``alpha / rank``; by default by 1.
        seed: of the values that A begins with.

    Raises:
        TypeError: a value of another type.
        ValueError: the rank is below 1, or there is no target.
    """

    rank: int = 8
    targets: Sequence[str] = ("*",)
    alpha: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))
        expect_whole("rank", self.rank)
        expect_names("targets", self.targets)
        expect_number("alpha", self.alpha, NONE, expected="a number or None")
        expect_whole("seed", self.seed)
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: expected 1 or more")
        if not self.targets:
            raise ValueError("targets is empty: name the weights that get adapters")

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def adapt(forward: Forward, lora: LoRA) -> list[Adapter]:
    """Puts adapters into both modes of a model, in place.

    Args:
        forward: whose weights are inputs; the adapters join its tensors and are trained.
        lora: which weights.

    Raises:
        GraphError: no product has a weight of such a name.
    """
    generator = np.random.default_rng(lora.seed)
    found: dict[str, Adapter] = {}
    for program in (forward.training, forward.evaluation):
        for node, weight, transposed in _products(program):
            name = weight.name or ""
            if not any(fnmatchcase(name, pattern) for pattern in lora.targets):
                continue
            if name not in found:
                stem = name.removesuffix(".weight")
                a, b = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
                found[name] = Adapter(name, a, b, lora.scale, transposed)
                outer, inner = forward.tensors[name].shape[:: 1 if transposed else -1]
                bound = 1 / math.sqrt(inner)
                values = generator.uniform(-bound, bound, (lora.rank, inner))
                forward.tensors[a] = values.astype(np.float32)
                forward.tensors[b] = np.zeros((outer, lora.rank), np.float32)
            _insert(program, node, found[name], forward)
    if not found:
        weights = [w.name or "" for _, w, _ in _products(forward.training)]
        raise GraphError(
            f"no weight of a product is named {' or '.join(lora.targets)}",
            because=f"there are {listing(list(dict.fromkeys(weights)))}",
            help="name weights in targets, by patterns such as '*.query.weight'",
        )
    adapters = list(found.values())
    names = [name for each in adapters for name in (each.a, each.b)]
    forward.trainable = (*forward.trainable, *names)
    return adapters


def _products(program: Program) -> list[tuple[ir.Node, ir.Value, bool]]:
    """Products with a matrix of parameters on the right: the node, the parameter, how it lies."""
    parameters, result = set(program.inputs(Role.PARAMETER)), []
    for node in program.graph:
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            continue
        options = {name: attribute.value for name, attribute in node.attributes.items()}
        value, transposed = node.inputs[1], bool(options.get("transB", 0))
        assert value is not None
        if options.get("transA", 0) or options.get("alpha", 1.0) != 1.0:
            continue
        while (producer := value.producer()) is not None and not producer.domain:
            if producer.op_type == "Transpose":
                transposed = not transposed
            elif producer.op_type != "Identity":
                break
            source = producer.inputs[0]
            assert source is not None
            value = source
        if value in parameters and shapes.rank(value) == 2:
            result.append((node, value, transposed))
    return result


def _insert(program: Program, node: ir.Node, adapter: Adapter, forward: Forward) -> None:
    """Adds an adapter's output to a product's."""
    graph, y = program.graph, node.outputs[0]
    (rank, inner), outer = forward.tensors[adapter.a].shape, forward.tensors[adapter.b].shape[0]
    if program is forward.evaluation:
        rank = "rank"  # a model for inference takes adapters of any
    a = _parameter(program, adapter.a, [rank, inner])
    b = _parameter(program, adapter.b, [outer, rank])
    readers = list(y.uses())
    with Builder(opset=program.opset, prefix=f"{adapter.weight}.lora") as op:
        narrow = op.MatMul(node.inputs[0], op.Transpose(a, perm=[1, 0]))
        delta = op.MatMul(narrow, op.Transpose(b, perm=[1, 0]))
        if adapter.scale != 1:
            delta = op.Mul(delta, adapter.scale)
        total = op.Add(y, delta)
    graph.insert_after(node, op.nodes)
    total.shape = y.shape
    for reader, position in readers:
        reader.replace_input_with(position, total)
    if y.is_graph_output():
        outputs = [total if value is y else value for value in graph.outputs]
        total.metadata_props.update(y.metadata_props)
        y.metadata_props.clear()
        name, y.name = y.name, f"{y.name}.base"
        total.name = name
        graph.outputs.clear()
        graph.outputs.extend(outputs)


def _parameter(program: Program, name: str, shape: Sequence[int | str]) -> ir.Value:
    """The program's input of that name, made where there is none."""
    for value in program.graph.inputs:
        if value.name == name:
            return value
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    program.graph.inputs.append(set_role(value, Role.PARAMETER))
    return value
