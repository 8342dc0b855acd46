"""Normalization that updates running statistics, with the updates as operators of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import Emitter, from_same_place
from ortrain.capture.origin import captured_error

aten = torch.ops.aten

_FUNCTIONAL = aten._native_batch_norm_legit_functional.default


def explicit_statistics(module: fx.GraphModule) -> None:
    """Splits normalization into what it returns, and copies into its running statistics.

    The schemas of ``batch_norm``, ``native_batch_norm`` and ``instance_norm`` hide that they write
    into these, so that no later pass would know.
    """
    for node in list(module.graph.nodes):
        if not may_update_statistics(node):
            continue
        with module.graph.inserting_before(node):
            result = _REWRITES[node.target](Emitter(module.graph, node), *node.args)
        if result is not None:
            node.replace_all_uses_with(result)
            module.graph.erase_node(node)


def may_update_statistics(node: fx.Node) -> bool:
    """Whether a node may write running statistics, and so matters although nothing reads it."""
    is_frozen = node.target is aten.batch_norm.default and not node.args[5]
    return node.target in _REWRITES and not is_frozen


def statistics_of(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a node may write."""
    given = node.args[3:5] if may_update_statistics(node) else ()
    return [each for each in given if isinstance(each, fx.Node)]


def _batch_norm(emit: Emitter, *args: Any) -> fx.Node:
    """The functional form, whose last two results are the new running statistics."""
    input, weight, bias, mean, variance, _, momentum, eps = args[:8]
    if input.meta["val"].ndim < 2:
        raise captured_error(emit.node, "batch_norm of a vector cannot be captured")
    value = input.meta["val"]
    both = emit.graph.call_function(
        _FUNCTIONAL, (input, weight, bias, mean, variance, True, momentum, eps)
    )
    channels = value.new_empty(value.shape[1])  # torch's own meta function needs statistics
    both.meta["val"] = (value, channels, channels, channels, channels)
    from_same_place(both, emit.node)
    output = emit(operator.getitem, both, 0)
    updated = () if _empty(value) else ((mean, 3), (variance, 4))
    for old, index in updated:
        if old is not None:
            statistic = emit(operator.getitem, both, index)
            emit(aten.copy_.default, old, emit(aten.detach.default, statistic))
    return output


def without_needless_barriers(module: fx.GraphModule) -> None:
    """Takes away what stops gradients of new running statistics that nothing else reads."""
    for node in list(module.graph.nodes):
        if node.target is not aten.detach.default or _is_read(node):
            continue
        statistic: Any = node.args[0]
        source = statistic.args[0] if statistic.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.target is _FUNCTIONAL:
            node.replace_all_uses_with(statistic)
            module.graph.erase_node(node)


def _is_read(node: fx.Node) -> bool:
    """Whether something reads a value that gradients flow through.

    A buffer that it is written to is not that.
    """
    written = {aten.clone.default, aten.copy.default}
    return any(
        _is_read(user) if user.target in written else user.op != "output" for user in node.users
    )


def _empty(value: torch.Tensor) -> bool:
    """Whether a batch without rows was traced, which leaves running statistics as they are."""
    return "0" in map(str, value.shape)


def _native_batch_norm(emit: Emitter, *args: Any) -> None:
    raise captured_error(
        emit.node,
        f"{emit.node.target} cannot be captured",
        because="it is the inside of torch.nn.functional.batch_norm, with the statistics that its "
        "backward needs",
        help="call torch.nn.functional.batch_norm",
    )


def _instance_norm(emit: Emitter, *args: Any) -> fx.Node | None:
    """``instance_norm`` takes the mean over the batch of each instance's own statistics."""
    input, weight, bias, mean, variance, own, momentum, eps, *rest = args
    if mean is None or variance is None:
        return None
    if not own:
        return emit(
            aten.batch_norm.default,
            input, weight, bias, mean, variance, False, momentum, eps, *rest,
        )  # fmt: skip
    output = emit(
        aten.instance_norm.default, input, weight, bias, None, None, True, momentum, eps, *rest
    )
    axes = list(range(2, input.meta["val"].ndim))
    detached = emit(aten.detach.default, input)
    for old, statistic in (
        (mean, emit(aten.mean.dim, detached, axes)),
        (variance, emit(aten.var.dim, detached, axes, True)),
    ):
        share = emit(aten.mul.Tensor, emit(aten.mean.dim, statistic, [0]), momentum)
        kept = emit(aten.mul.Tensor, old, 1.0 - momentum)
        emit(aten.copy_.default, old, emit(aten.add.Tensor, kept, share))
    return output


_REWRITES: dict[Any, Callable[..., fx.Node | None]] = {
    aten.batch_norm.default: _batch_norm,
    aten.instance_norm.default: _instance_norm,
    aten.native_batch_norm.default: _native_batch_norm,
    aten._native_batch_norm_legit.default: _native_batch_norm,
    aten._native_batch_norm_legit.no_stats: _native_batch_norm,
    aten._batch_norm_with_update.default: _native_batch_norm,
}
