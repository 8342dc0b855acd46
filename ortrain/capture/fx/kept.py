"""Operators that stay PyTorch's: those without a translation, or whose ONNX has no gradient."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture.fx.splice import from_same_place, substitute
from ortrain.capture.origin import operator_name, origin
from ortrain.capture.trace.aside import aside
from ortrain.capture.trace.found import Found, find
from ortrain.capture.trace.keeping import Keeper
from ortrain.errors import OrtrainError
from ortrain.kept.arguments import Arguments, Result
from ortrain.kept.call import Kept, Site


def keep_operators(
    module: fx.GraphModule, nodes: Iterable[fx.Node], keeper: Keeper, because: str
) -> list[fx.Node]:
    """Puts a kept call in the place of each operator that can be one.

    Args:
        module: whose graph is changed in place.
        nodes: of the graph.
        keeper: notes the calls.
        because: why they stay.

    Returns:
        The nodes that cannot be one.
    """
    left = [node for node in nodes if not _is_keepable(node)]
    for node in nodes:
        if node not in left:
            keep_call(module.graph, node, keeper, because)
    return left


def _is_keepable(node: fx.Node) -> bool:
    """Whether an operator makes tensors of tensors and of nothing else, and draws nothing."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    made = pytree.tree_leaves(node.meta.get("val"))
    values = [each.meta.get("val") for each in node.all_input_nodes]
    return (
        torch.Tag.nondeterministic_seeded not in target.tags
        and any(isinstance(value, torch.Tensor) for value in values)
        and not any(isinstance(value, torch.SymFloat | torch.SymBool) for value in values)
        and bool(made)
        and all(isinstance(value, torch.Tensor) and _is_plain(value) for value in (*made, *values)
                if not isinstance(value, torch.SymInt | int))
    )  # fmt: skip


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that a graph has, of sizes that its inputs decide about."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_complex()
        and not tensor.is_quantized
        and not any(
            isinstance(size, torch.SymInt)
            and any(str(symbol).startswith("u") for symbol in size.node.expr.free_symbols)
            for size in tensor.shape
        )
    )


def _taken_for_granted(known: Any, given: list[torch.Tensor]) -> Found:
    """What an operator gives that has a gradient for each tensor of floating-point numbers."""
    reached = [value.is_floating_point() for value in given]
    result = Result(known)
    differentiable = [any(reached) and t.is_floating_point() for t in result.tensors]
    shapes = [tuple(value.shape) for value in given]
    return Found(result, result.tensors, differentiable, reached, True, shapes)


def keep_call(
    graph: fx.Graph,
    node: fx.Node,
    keeper: Keeper,
    because: str,
    name: str = "",
    known: Any = None,
) -> list[fx.Node]:
    """Puts a kept call in the place of one that makes tensors of tensors.

    Args:
        graph: of the call.
        node: whose target is called, and whose ``val`` tells whether it returns one tensor.
        keeper: notes the call.
        because: why it stays.
        name: of what is called; its operator's by default.
        known: what it returns as the trace has it, where it may not run without contents.

    Returns:
        The nodes of the tensors that it gives.
    """
    target: Any = node.target
    args: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
    given = [
        leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)
    ]
    tensors = [n for n in given if isinstance(n.meta["val"], torch.Tensor)]
    sizes = [n for n in given if isinstance(n.meta["val"], torch.SymInt)]
    arguments = Arguments(tuple(args), dict(kwargs))
    site = Site(f"the operator {name or operator_name(target)}", origin(node), because)
    call = Kept(target, arguments, site, grad=torch.is_grad_enabled())
    values = [n.meta["val"] for n in tensors]
    mode: Any = torch._guards.detect_fake_mode(values)
    with aside(), mode:
        try:
            found = find(call, values, [n.meta["val"] for n in sizes])
        except OrtrainError:
            raise
        except Exception:  # it looks at values beside those that it returns, as istft does
            if known is None:
                raise
            found = _taken_for_granted(known, values)
    call.result, call.connected, call.ways = found.result, found.connected, found.ways
    number = keeper.called(call, found.tensors)
    with graph.inserting_before(node):
        whole = graph.call_function(torch.ops.ortrain.kept.default, (tensors, sizes, number))
        whole.meta["val"] = found.tensors
        from_same_place(whole, node)
        parts = []
        for i, (tensor, reached) in enumerate(
            zip(found.tensors, found.differentiable, strict=True)
        ):
            part = graph.call_function(operator.getitem, (whole, i))
            part.meta["val"] = tensor
            from_same_place(part, node)
            if tensor.is_floating_point() and not reached:
                part = graph.call_function(torch.ops.aten.detach.default, (part,))
                part.meta["val"] = tensor
                from_same_place(part, node)
            parts.append(part)
    is_one = isinstance(node.meta["val"], torch.Tensor)
    names: dict[Any, str] = {user.args[1]: user.name for user in node.users if not is_one}
    if is_one:
        names[0] = node.name
    substitute(node, parts[0] if is_one else parts)
    for i, own in names.items():  # by which it may be an output of the graph
        parts[i].name = own
    return parts
