"""A graph of ATen operators as an ONNX model: by our translations, and by torchlib's.

Each node of the graph becomes the ONNX nodes that its translation emits, one after another. Of
torchlib, which PyTorch's exporter has, those translations are used that are known to be right
(:mod:`ortrain.capture.onnx.torchlib`), where there is none of ours.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype
from torch import fx
from torch.export.graph_signature import InputKind

from ortrain.capture.onnx.torchlib import is_verified
from ortrain.capture.traced import Traced
from ortrain.pytorch import torchlib
from ortrain.pytorch.conditions import is_made_of_sizes

Translation = Callable[..., Any]


class NotTranslated(Exception):
    """A translation has failed; its cause says why.

    Attributes:
        node: that it is of.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


@dataclass
class Emitted:
    """What the translations of one graph share.

    Attributes:
        nodes: of the node in translation, so far.
        constants: shared ones by what they are.
        seed: the program's seed input; None where nothing draws.
    """

    nodes: list[ir.Node] = field(default_factory=list)
    constants: dict[Any, ir.Value] = field(default_factory=dict)
    seed: ir.Value | None = None


class Registry:
    """Translations of ATen operators.

    Args:
        opset: of the standard domain.
        translations: ours, called with FX arguments whose nodes are ONNX values.
    """

    def __init__(self, opset: int, translations: dict[Any, Translation]) -> None:
        self.opset, self.translations = opset, translations

    def covers(self, call: fx.Node) -> bool:
        """Whether a call has a translation."""
        if call.target in self.translations:
            return True
        return is_verified(call) and torchlib.function_of(call.target, self.opset) is not None

    def translate(self, traced: Traced, shared: Emitted) -> ir.Model:
        """The ONNX model of a graph all of whose operators are covered.

        Parameters, buffers and constants are its initializers; updated buffers are not among its
        outputs yet. A node's ``meta["node"]`` is the FX node that it comes from.

        Raises:
            NotTranslated: a translation has failed.
        """
        graph = ir.Graph([], [], nodes=[], opset_imports={"": self.opset}, name="main_graph")
        model, values = ir.Model(graph, ir_version=10), dict[fx.Node, Any]()
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                values[node] = _typed(ir.Value(name=node.name), node.meta["val"])
            elif node.op == "output":
                graph.outputs.extend(values[each] for each in node.args[0])
            else:
                try:
                    values[node] = self._translated(node, values, model, shared)
                except Exception as error:
                    raise NotTranslated(node) from error
        _enter(graph, traced, {node.name: value for node, value in values.items()})
        if model.functions:
            _inline(model, self.opset)
        return model

    def _translated(
        self, node: fx.Node, values: dict[fx.Node, Any], model: ir.Model, shared: Emitted
    ) -> Any:
        """What a call gives; its nodes are in the model."""
        if node.target is operator.getitem:
            source, place = node.args
            return values[source][place]  # type: ignore[index]
        args = [_given(each, values) for each in node.args]
        kwargs = {name: _given(each, values) for name, each in node.kwargs.items()}
        if kwargs.get("dtype", -1) is None:
            kwargs["dtype"] = -1
        shared.nodes = []
        if (own := self.translations.get(node.target)) is not None:
            results = own(*args, **kwargs)
        else:
            function = torchlib.function_of(node.target, self.opset)
            assert function is not None, "the operator is covered"
            results, shared.nodes, called = torchlib.emitted(
                function, args, kwargs, self.opset, shared.constants
            )
            model.functions.update({each.identifier(): each for each in called})
        for each in shared.nodes:
            each.meta["node"] = node
        model.graph.extend(shared.nodes)
        if isinstance(results, ir.Value):
            results.name = node.name
            return _typed(results, node.meta["val"])
        for i, (result, known) in enumerate(zip(results, node.meta["val"], strict=False)):
            _typed(result, known).name = f"{node.name}__{i}"
        return results


def _given(argument: Any, values: dict[fx.Node, Any]) -> Any:
    """An argument as translations take it."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, list | tuple):
        return [_given(each, values) for each in argument]
    if isinstance(argument, torch.dtype):
        return from_torch_dtype(argument)
    if isinstance(argument, torch.device | torch.memory_format | torch.layout):
        return str(argument)
    return argument


def _typed(value: ir.Value, known: Any) -> ir.Value:
    """Gives a value the type that the trace knows, where it has none, and its shape."""
    if isinstance(known, torch.Tensor):
        if value.type is None:
            value.dtype = from_torch_dtype(known.dtype)
        sizes: list[Any] = [*known.shape]
        value.shape = ir.Shape([d if isinstance(d, int) else str(d.node) for d in sizes])
        return value
    value.shape = ir.Shape([])
    if is_made_of_sizes(known):
        value.dtype = ir.DataType.DOUBLE  # as Python's are
    elif isinstance(known, bool | torch.SymBool):
        value.dtype = ir.DataType.BOOL
    elif isinstance(known, int | torch.SymInt):
        value.dtype = ir.DataType.INT64
    elif value.type is None or not isinstance(known, torch.SymFloat):
        value.dtype = ir.DataType.FLOAT  # else that of the tensor which has held it
    return value


def _enter(graph: ir.Graph, traced: Traced, values: dict[str, ir.Value]) -> None:
    """Makes inputs of what the caller gives, and initializers of the rest."""
    for spec in traced.inputs:
        value, name = values[spec.arg.name], spec.target or ""
        if spec.kind is InputKind.USER_INPUT:
            graph.inputs.append(value)
            continue
        value.name = name
        if name in traced.constants:
            value.const_value = TorchTensor(traced.constants[name], name=name)
        graph.initializers[name] = value


def _inline(model: ir.Model, opset: int) -> None:
    """Leaves only standard operators and ortrain's: torchlib's functions are inlined.

    They say opset 18 whatever they were asked for, although their bodies were chosen for another.
    """
    for function in model.functions.values():
        function.opset_imports[""] = opset
    known = {v.name: n.meta["node"] for n in model.graph for v in n.outputs if "node" in n.meta}
    InlinePass()(model)
    model.functions.clear()
    for node in reversed(model.graph):
        if "node" in node.meta:
            continue
        # What a function computes on the way is read inside of it alone.
        users = [user for value in node.outputs for user, _ in value.uses()]
        own = next((known[v.name] for v in node.outputs if v.name in known), None)
        found = own or next((u.meta["node"] for u in users if "node" in u.meta), None)
        if found is not None:
            node.meta["node"] = found
