"""New nodes, and graphs put into other graphs."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ortrain.pytorch.operators import schema_of
from ortrain.pytorch.tracing import fake_mode_of

# In the meta of what comes from a ``no_grad`` region.
WITHOUT_GRADIENT = "ortrain.no_grad"


def new_node(graph: fx.Graph, target: Any, args: tuple[Any, ...], model: fx.Node) -> fx.Node:
    """A new node of the dtype, shape and origin of another."""
    node = graph.call_function(target, args)
    node.meta = dict(model.meta)
    return node


def from_same_place(node: fx.Node, model: fx.Node) -> None:
    """Notes that a node comes from the same module, line, checkpoint and region as another."""
    for key in ("nn_module_stack", "stack_trace", "custom"):
        node.meta[key] = model.meta.get(key)
    if WITHOUT_GRADIENT in model.meta:
        node.meta[WITHOUT_GRADIENT] = True


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included; ``self`` is its ``input``."""
    schema: Any = schema_of(node.target)
    result = {argument.name: argument.default_value for argument in schema.arguments}
    result.update(zip(result, node.args, strict=False))
    return {("input" if k == "self" else k): v for k, v in {**result, **node.kwargs}.items()}


class Emitter:
    """Puts operators before a node, at its place in the user's code."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node for the call, with the fake tensors that it returns."""
        result = self.graph.call_function(target, args, kwargs)
        values: Any = fx.node.map_arg(args, lambda n: n.meta["val"])
        named: Any = fx.node.map_arg(kwargs, lambda n: n.meta["val"])
        mode = fake_mode_of(values) or self._mode()
        assert mode is not None
        with mode:
            result.meta["val"] = target(*values, **named)
        from_same_place(result, self.node)
        return result

    def _mode(self) -> Any:
        """That of the graph, where a call has sizes only."""
        values = [node.meta.get("val") for node in self.graph.nodes]
        return fake_mode_of(values)


def splice(
    module: fx.GraphModule, inner: fx.GraphModule, args: list[Any], prefix: str
) -> tuple[Any, list[fx.Node]]:
    """Copies the nodes of a graph into another, at its insertion point.

    Args:
        module: receives the nodes, and what they get by attribute (constants, regions).
        inner: whose nodes are copied.
        args: what its placeholders stand for.
        prefix: of the names of attributes.

    Returns:
        What the inner graph returns, and the new nodes.
    """
    graph = module.graph
    placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(placeholders, args, strict=True))
    made: list[fx.Node] = []
    results: Any = ()
    for source in inner.graph.nodes:
        if source.op == "output":
            results = fx.node.map_arg(source.args[0], lambda n: mapping[n])
        elif source.op == "get_attr":
            name = f"{prefix}_{source.target}"
            setattr(module, name, getattr(inner, str(source.target)))
            mapping[source] = graph.get_attr(name)
            mapping[source].meta = dict(source.meta)
        elif source.op != "placeholder":
            mapping[source] = graph.node_copy(source, lambda n: mapping[n])
            made.append(mapping[source])
    return results, made


def substitute(node: fx.Node, results: Any) -> None:
    """Readers of a node, or of its elements, read the results instead; the node goes."""
    if isinstance(results, list | tuple):
        for user in list(node.users):
            assert user.target is operator.getitem
            index: Any = user.args[1]
            user.replace_all_uses_with(results[index])
            node.graph.erase_node(user)
    else:
        node.replace_all_uses_with(results)
    node.graph.erase_node(node)
