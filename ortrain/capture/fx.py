"""Clean-up of the exported FX graph, before it is translated.

:func:`clean` leaves a graph without regions, without in-place operators and without mixed dtypes.
Each pass works on the graph in place; a node that it makes carries ``meta`` as an exported one
does: ``val`` (the fake tensor that tells dtype and symbolic shape), the module path and the stack.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from ortrain.capture.origin import captured_error

aten = torch.ops.aten
higher_order = torch.ops.higher_order

_CHECKS = {
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
}


def inline_regions(module: fx.GraphModule) -> None:
    """Puts the bodies of ``no_grad`` and ``autocast`` regions in place of them.

    What a ``no_grad`` region returns is detached: upstream's decomposition forgets the barrier.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is higher_order.wrap_with_set_grad_enabled:
            enabled, body, *args = node.args
            barrier = not enabled
        elif node.target is higher_order.wrap_with_autocast:
            device, dtype, enabled, _, body, *args = node.args
            if enabled:
                raise captured_error(
                    node,
                    f"an autocast region ({device}, {dtype}) cannot be captured",
                    because="the exported graph does not record its casts",
                    help="leave the region out; the precision is chosen for the whole graph",
                )
            barrier = False
        else:
            continue
        _inline(module, node, body, args, barrier)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()


def _inline(
    module: fx.GraphModule, node: fx.Node, body: fx.Node, args: list[Any], barrier: bool
) -> None:
    inner = getattr(module, str(body.target))
    inline_regions(inner)
    graph = module.graph
    mapping: dict[fx.Node, Any] = {}
    placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    mapping.update(zip(placeholders, args, strict=True))
    with graph.inserting_before(node):
        results: Any = ()
        for source in inner.graph.nodes:
            if source.op == "output":
                results = fx.node.map_arg(source.args[0], lambda n: mapping[n])
            elif source.op == "get_attr":
                # A constant or a region of a region; both are found from the outer module.
                name = f"{body.target}_{source.target}"
                setattr(module, name, getattr(inner, str(source.target)))
                mapping[source] = graph.get_attr(name)
                mapping[source].meta = dict(source.meta)
            elif source.op != "placeholder":
                mapping[source] = graph.node_copy(source, lambda n: mapping[n])
        if barrier:
            single = not isinstance(results, list | tuple)
            stopped = [_detached(graph, r) for r in ([results] if single else results)]
            results = stopped[0] if single else stopped
    if isinstance(results, list | tuple):
        for user in list(node.users):
            assert user.target is operator.getitem
            replacement = results[user.args[1]]
            user.replace_all_uses_with(replacement)
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(results)
    graph.erase_node(node)


def _detached(graph: fx.Graph, value: Any) -> Any:
    known = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(known, torch.Tensor) or not known.is_floating_point():
        return value
    return _like(graph, aten.detach.default, (value,), value)


def _like(graph: fx.Graph, target: Any, args: tuple[Any, ...], model: fx.Node) -> fx.Node:
    """A new node of the dtype, shape and origin of another."""
    node = graph.call_function(target, args)
    node.meta = dict(model.meta)
    return node


def remove_checks(module: fx.GraphModule) -> None:
    """Removes assertions, and what only they needed."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and node.target in _CHECKS:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def decompose(module: fx.GraphModule, covered: Callable[[set[Any]], set[Any]]) -> None:
    """Replaces operators without a translation by those that PyTorch composes them of.

    One by one: decomposing the whole program, as upstream does, costs as much as exporting it, and
    takes apart what should stay whole.
    """
    for _ in range(8):  # a decomposition may need another
        found = operators(module)
        missing = found - covered(found)
        nodes = [n for n in module.graph.nodes if n.target in missing]
        if not any([_decompose(module, node) for node in nodes]):
            return


def operators(module: fx.GraphModule) -> set[Any]:
    """What the graph calls, ``getitem`` apart."""
    calls = {n.target for n in module.graph.nodes if n.op == "call_function"}
    return calls - {operator.getitem}


def _decompose(module: fx.GraphModule, node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    table = torch.export.default_decompositions()
    composed = target._can_decompose()
    if not composed and target not in table:
        return False
    tensors = [n for n in node.all_input_nodes]
    values = [n.meta["val"] for n in tensors]

    def call(*replaced: Any) -> Any:
        given = dict(zip(tensors, replaced, strict=True))
        args = fx.node.map_arg(node.args, lambda n: given[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: given[n])
        return target.decompose(*args, **kwargs) if composed else table[target](*args, **kwargs)

    mode = torch._guards.detect_fake_mode(values)
    with mode if mode is not None else torch.no_grad():
        inner = make_fx(call, tracing_mode="real")(*values)
    inner.graph.eliminate_dead_code()
    graph = module.graph
    inside = [n for n in inner.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(inside, tensors, strict=True))
    with graph.inserting_before(node):
        for source in inner.graph.nodes:
            if source.op == "get_attr":
                name = f"_decomposed_{node.name}_{source.target}"
                setattr(module, name, getattr(inner, source.target))
                mapping[source] = graph.get_attr(name)
                mapping[source].meta = dict(source.meta)
            elif source.op == "output":
                result = fx.node.map_arg(source.args[0], lambda n: mapping[n])
            elif source.op != "placeholder":
                copied = graph.node_copy(source, lambda n: mapping[n])
                for key in ("nn_module_stack", "stack_trace"):
                    copied.meta[key] = node.meta.get(key)
                mapping[source] = copied
    if isinstance(result, list | tuple):
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    graph.erase_node(node)
    return True


# Element by element: the result's recorded dtype is the one that torch computes in.
_POINTWISE = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "pow", "where", "minimum", "maximum",
    "exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "sin", "cos", "erf", "gelu",
    "silu", "relu", "neg", "cat", "stack", "addcmul", "addcdiv", "lerp", "atan2", "fmod",
    "remainder", "floor_divide", "clamp", "clamp_min", "clamp_max", "log1p", "expm1", "log2",
    "log10", "softplus", "leaky_relu", "elu", "mean", "xlogy", "logaddexp", "__and__", "__or__",
    "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor", "masked_fill", "linear", "square",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy_with_logits", "baddbmm", "addmm",
}  # fmt: skip
_COMPARING = {"eq", "ne", "ge", "gt", "le", "lt"}
_LOGICAL = {"logical_and", "logical_or", "logical_xor", "logical_not"}


def promote(module: fx.GraphModule) -> None:
    """Makes torch's implicit casts explicit, from the dtypes that the export recorded."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        result = node.meta.get("val")
        if node.target.namespace != "aten" or not isinstance(result, torch.Tensor):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        tensors = [
            n
            for n in node.all_input_nodes
            if isinstance(n.meta.get("val"), torch.Tensor)
        ]
        if name in _COMPARING:
            dtype = _common_dtype(node)
        elif name in _LOGICAL:
            dtype = torch.bool
        elif name in _POINTWISE:
            dtype = result.dtype
        else:
            continue
        if name in ("where", "masked_fill"):  # the condition keeps its dtype
            condition = node.args[0] if name == "where" else node.args[1]
            tensors = [n for n in tensors if n is not condition]
        for tensor in tensors:
            known = tensor.meta["val"]
            if known.dtype == dtype:
                continue
            with graph.inserting_before(node):
                cast = _like(graph, aten.to.dtype, (tensor, dtype), tensor)
            cast.meta["val"] = _in_dtype(known, dtype)
            for key in ("nn_module_stack", "stack_trace"):
                cast.meta[key] = node.meta.get(key)
            node.replace_input_with(tensor, cast)


def _common_dtype(node: fx.Node) -> torch.dtype:
    left, right = node.args[:2]
    values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in (left, right)]
    return torch.result_type(*(_number(v) for v in values))


def _number(value: Any) -> Any:
    """Symbolic sizes promote as Python integers do."""
    return 2 if isinstance(value, torch.SymInt) else value


def _in_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mode = torch._guards.detect_fake_mode([value])
    if mode is None:
        return value.to(dtype)
    with mode:
        return value.to(dtype)


def clean(exported: ExportedProgram, covered: Callable[[set[Any]], set[Any]]) -> dict[str, fx.Node]:
    """Runs all passes on a program's graph.

    Args:
        exported: its graph is changed in place.
        covered: tells which of some operators have a translation.

    Returns:
        The buffers that the graph updates, with the node of each one's new value.
    """
    from ortrain.capture.functional import functionalise

    module = exported.graph_module
    inline_regions(module)
    remove_checks(module)
    updated = functionalise(exported)
    decompose(module, covered)
    promote(module)
    _name_outputs(exported)
    module.graph.lint()
    return updated


def _name_outputs(exported: ExportedProgram) -> None:
    """The signature names the nodes that are returned now; constants it has by value."""
    output = exported.graph_module.graph.output_node()
    (returned,) = output.args
    for spec, node in zip(exported.graph_signature.output_specs, returned, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
    output.args = (tuple(node for node in returned if isinstance(node, fx.Node)),)
