"""What an exported program is, as parts of a cache key: its graph, constants and signature."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from ortrain.capture.onnx.lift import State
from ortrain.capture.trace.checkpointing import checkpoint_of
from ortrain.capture.traced import Traced
from ortrain.module_state.holder import resolved
from ortrain.pytorch.autocast import Autocast


def parts_of(
    traced: Traced,
    state: State,
    opset: int,
    checked: bool,
    autocast: Autocast = (),
    held: Collection[str] = (),
) -> Iterator[object]:
    """Everything of a graph that its translation depends on.

    Args:
        traced: the ATen graph.
        state: names of the module's parameters and buffers, ties included.
        opset: of the translation.
        checked: whether its checks are looked at.
        autocast: around the call.
        held: names of constants that are inputs, whose contents do not matter.
    """
    yield sorted(held)
    yield opset, checked, torch.is_grad_enabled(), str(autocast)
    yield repr((traced.inputs, traced.outputs))
    yield sorted(state.first.items())
    yield {str(k): str(v) for k, v in traced.ranges.items()}
    for name, child in traced.module.named_modules():
        if not isinstance(child, torch.fx.GraphModule):
            continue
        yield name
        for node in child.graph.nodes:
            # `format_node` leaves out nothing that decides a result; origins go into the nodes.
            yield (
                node.name,
                node.op,
                str(node.target),
                repr(node.args),
                repr(node.kwargs),
                str(node.meta.get("val")),
                str(node.meta.get("nn_module_stack", "")),
                node.meta.get("stack_trace", ""),
                checkpoint_of(node),
            )
    for name, constant in sorted(traced.constants.items()):
        yield name
        if isinstance(constant, torch.Tensor):
            yield (str(constant.dtype), tuple(constant.shape))
            if name in held:
                continue
            lying = resolved(constant.detach().cpu()).contiguous()
            yield lying.view(torch.uint8).numpy().tobytes()
        else:
            yield repr(constant)
    for name, tensor in traced.held.items():
        yield (name, str(tensor.dtype), tuple(tensor.shape))
