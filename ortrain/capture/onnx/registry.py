"""PyTorch's ONNX exporter, given our translations.

The one place that speaks to private parts of it (``tests/capture/test_exporter.py`` pins each):

- ``torch.onnx._internal.exporter._registration``: ``ONNXRegistry``, ``OnnxDecompMeta``;
- ``torch.onnx._internal.exporter._core``: ``_exported_program_to_onnx_program``,
  ``_set_shape_type``;
- ``torch.onnx._internal.exporter._building``: ``OpRecorder`` (its ``nodes``, ``constant_farm``).
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import onnxscript.evaluator
import torch
from onnx_ir.passes.common import InlinePass
from torch import fx
from torch.export.graph_signature import ExportGraphSignature
from torch.onnx._internal.exporter import _building, _core, _registration

from ortrain.capture.onnx.torchlib import is_verified
from ortrain.capture.trace.exact_numbers import is_made_of_sizes
from ortrain.capture.trace.exporter import quiet
from ortrain.capture.trace.patched import replaced
from ortrain.capture.traced import Traced

Translation = Callable[..., Any]


class Registry:
    """Translations of ATen operators: ours first, then what is trusted of upstream's torchlib.

    torchlib is loaded when a graph first needs it: filling its registry takes 0.65 s, and graphs
    of the common models get by without.

    Args:
        opset: of the standard domain.
        translations: ours, called with FX arguments whose nodes are ONNX values.
    """

    def __init__(self, opset: int, translations: dict[Any, Translation]) -> None:
        self.opset = opset
        self.translations = translations
        self.ours = _registration.ONNXRegistry()
        self.ours._opset_version = opset
        self._enter(self.ours)

    def _enter(self, registry: _registration.ONNXRegistry) -> None:
        for target, function in self.translations.items():
            entry = _registration.OnnxDecompMeta(
                onnx_function=function,
                fx_target=target,
                signature=None,
                is_custom=True,
                skip_signature_inference=True,
            )
            registry._register(target, entry)

    @functools.cached_property
    def everything(self) -> _registration.ONNXRegistry:
        """Ours and torchlib's."""
        with quiet():
            registry = _registration.ONNXRegistry.from_torchlib(opset_version=self.opset)
        self._enter(registry)
        return registry

    def covers(self, call: fx.Node) -> bool:
        """Whether a call has a translation."""
        target: Any = call.target
        return self.ours.is_registered(target) or (
            is_verified(call) and self.everything.is_registered(target)
        )

    def translate(self, traced: Traced) -> ir.Model:
        """The ONNX model of a graph all of whose operators are covered.

        Parameters, buffers and constants are its initializers; updated buffers are not among its
        outputs yet. A node's ``meta["node"]`` is the FX node that it comes from.
        """
        targets = {n.target for n in traced.graph.nodes if n.op == "call_function"}
        ours = all(self.ours.is_registered(t) for t in targets - {operator.getitem})
        registry = self.ours if ours else self.everything
        own = _core._set_shape_type

        def typed(value: ir.Value, known: Any, *rest: Any, **named: Any) -> None:
            """Floats have the dtype of what holds them; the exporter says float32 of all."""
            dtype = value.dtype
            own(value, known, *rest, **named)
            if is_made_of_sizes(known):
                value.dtype = ir.DataType.DOUBLE  # as Python's are
            elif isinstance(known, torch.SymFloat) and dtype is not None:
                value.dtype = dtype

        with quiet(), replaced(_core, "_set_shape_type", typed):
            made = _core._exported_program_to_onnx_program(_program(traced), registry=registry)
        return made.model


def _program(traced: Traced) -> Any:
    """What the exporter asks of an exported program.

    Values of parameters and buffers it has none: they are inputs in the end.
    """
    return SimpleNamespace(
        graph_module=traced.module,
        graph_signature=ExportGraphSignature(traced.inputs, traced.outputs),
        range_constraints=traced.ranges,
        constants=traced.constants,
        named_parameters=tuple,
        named_buffers=tuple,
    )


def recorder() -> tuple[list[ir.Node], dict[Any, ir.Value]]:
    """The nodes recorded so far for the FX node in translation, and the pool of constants."""
    current = onnxscript.evaluator.default()
    assert isinstance(current, _building.OpRecorder)
    return current.nodes, current.constant_farm


def make_standard(model: ir.Model, opset: int) -> None:
    """Leaves only standard operators and ortrain's: torchlib's functions are inlined.

    The exporter imports opset 18 whatever it was asked for, and its functions say 18 as well,
    although their bodies were chosen for the registry's opset.
    """
    model.opset_imports[""] = opset
    for function in model.functions.values():
        function.opset_imports[""] = opset
    if model.functions:
        known = {v.name: n.meta["node"] for n in model.graph for v in n.outputs if "node" in n.meta}
        InlinePass()(model)
        model.functions.clear()
        _know_their_source(model.graph, known)


def _know_their_source(graph: ir.Graph, sources: dict[str | None, Any]) -> None:
    """Nodes that were inlined come from the FX node whose function they were part of.

    What a function computes on the way is read inside of it alone.
    """
    for node in reversed(graph):
        if "node" in node.meta:
            continue
        users = [user for value in node.outputs for user, _ in value.uses()]
        own = next((sources[v.name] for v in node.outputs if v.name in sources), None)
        found = own or next((u.meta["node"] for u in users if "node" in u.meta), None)
        if found is not None:
            node.meta["node"] = found


_NODE = re.compile(r"Error when translating node %(\S+)")


def failed_node(error: BaseException) -> str:
    """Name of the FX node that an error of :meth:`Registry.translate` is about."""
    current: BaseException | None = error
    while current is not None:
        found = _NODE.search(str(current))
        if found:
            return found[1]
        current = current.__cause__
    return ""
