"""What a graph has no use for, and what it may not have."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.draws import draws_of
from ortrain.capture.fx.splice import Emitter
from ortrain.capture.fx.statistics import may_update_statistics
from ortrain.capture.onnx.translations import TRANSLATIONS
from ortrain.capture.origin import (
    BESIDE,
    IN_PYTORCH,
    captured_error,
    operator_name,
    origin,
    source_line,
)
from ortrain.capture.traced import Traced
from ortrain.errors import CaptureError, listing
from ortrain.program import Check
from ortrain.pytorch.operators import OpOverload, is_mutable, schema_of

aten = torch.ops.aten

_CHECKS = {
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
}
_VALUES = {aten._assert_async.default, aten._assert_async.msg}
_BITS = 62  # of an int64 of which no sum is negative


def remove_checks(module: fx.GraphModule) -> None:
    """Removes assertions on sizes and dtypes, and what only they needed."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and node.target in _CHECKS:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(_has_effect)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node matters although nothing reads it. A random draw does not."""
    if node.op in ("placeholder", "output"):
        return True
    if node.target in _VALUES or may_update_statistics(node):
        return True
    return isinstance(node.target, OpOverload) and is_mutable(node.target)


def violations(module: fx.GraphModule) -> tuple[fx.Node | None, list[Check]]:
    """Takes assertions on values out of a graph.

    Those of one line, such as that of a layer that is there twelve times, are one check.

    Returns:
        The node of an int64 in which the bit of each check is set that does not hold, None
        without any; and the checks by their bits, the last one for all that there is no bit for.
    """
    graph = module.graph
    found: dict[tuple[str, str], list[fx.Node]] = defaultdict(list)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _VALUES:
            continue
        condition: Any = node.args[0]
        if condition.meta["val"].ndim:
            with graph.inserting_before(node):
                condition = Emitter(graph, condition)(aten.all.default, condition)
        because = node.args[1] if len(node.args) > 1 else "an assertion on values does not hold"
        line = (source_line(condition), str(because))
        found[line if line in found or len(found) < _BITS else [*found][-1]].append(condition)
        graph.erase_node(node)
    output, bits = graph.output_node(), None
    with graph.inserting_before(output):
        for bit, (holds, *others) in enumerate(found.values()):
            emit = Emitter(graph, holds)
            for other in others:
                holds = emit(aten.logical_and.default, holds, other)
            violated = emit(aten.to.dtype, emit(aten.logical_not.default, holds), torch.int64)
            each = emit(aten.mul.Scalar, violated, 2**bit)
            bits = each if bits is None else emit(aten.add.Tensor, bits, each)
    return bits, [Check(origin(nodes[0]), why) for (_, why), nodes in found.items()]


def refuse_second_device(traced: Traced) -> None:
    """Refuses a module that computes on one device and puts results on another.

    A graph runs on one, and the translation of ``tensor.to(device)`` is nothing.
    """
    nodes = traced.graph.nodes
    kinds = {k for n in nodes if n.op == "placeholder" and (k := _device_type(n)) is not None}
    for node in nodes:
        kind = _device_type(node) if node.op == "call_function" else None
        if kind is not None and kinds and kind not in kinds:
            raise captured_error(
                node,
                f"the forward puts a tensor on {kind}, and its inputs are on {listing([*kinds])}",
                because="a graph runs on one device",
                help=f"move tensors between devices outside of the module; or {BESIDE}",
            )


# Their operands have one dtype, or PyTorch raises an error that a trace does not always meet.
_PRODUCTS = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default,
    aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.dot.default,
}  # fmt: skip


def refuse_mixed_products(module: fx.GraphModule) -> None:
    """Refuses products of two dtypes: PyTorch's own error is raised where the call runs there."""
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target not in _PRODUCTS:
            continue
        values = [given.meta.get("val") for given in node.all_input_nodes]
        dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)}
        if len(dtypes) > 1:
            raise captured_error(
                node,
                f"{operator_name(node.target)} of {listing(sorted(map(str, dtypes)))}",
                because="PyTorch multiplies tensors of one dtype",
                help="give it arguments in the dtype of its weights",
            )


# In float64, PyTorch's gradient of these has a factor that float32 has rounded.
_ROUNDED = {aten.hardsigmoid.default, aten.hardsigmoid_.default}


def refuse_rounded_gradients(module: fx.GraphModule) -> None:
    """Refuses operators whose gradient in PyTorch is further off than one of ours would be."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.target in _ROUNDED and value is not None and value.dtype == torch.float64:
            raise captured_error(
                node,
                f"{operator_name(node.target)} of float64",
                because="PyTorch's gradient of it is rounded to float32, and a graph's is not",
                help=IN_PYTORCH,
            )


def _device_type(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, torch.Tensor) else None


def refuse_random(module: fx.GraphModule) -> None:
    """Refuses draws that we do not translate, and those that came with a decomposition."""
    for node in module.graph.nodes:
        if draws_of(node) and not ("stream" in node.kwargs and node.target in TRANSLATIONS):
            raise captured_error(
                node,
                f"{operator_name(node.target)} draws random numbers",
                because="a graph has uniform, normal and exponential numbers, whole ones in a "
                "range, and what follows from these",
                help="draw them outside and pass them in, or leave this to eager",
            )


def refuse_complex(module: fx.GraphModule) -> None:
    """Refuses complex numbers: neither onnxruntime nor a gradient rule knows them."""
    for node in module.graph.nodes:
        if _is_complex(node):
            raise complex_error(node)


def complex_error(node: fx.Node) -> CaptureError:
    """That a graph has no complex numbers such as those of a node."""
    called = node.op == "call_function"
    return captured_error(
        node,
        f"{operator_name(node.target) if called else node.name} is complex",
        because="a graph computes with real numbers",
        help="compute with the real and the imaginary part, or leave this to eager",
    )


def _is_complex(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        name = schema_of(node.target).name.removeprefix("aten::")
        if name.startswith("fft_") and not name.endswith(("shift", "freq")):
            return True  # within, where its result is not
    values = node.meta.get("val")
    return any(
        isinstance(value, torch.Tensor) and value.is_complex()
        for value in (values if isinstance(values, list | tuple) else (values,))
    )
