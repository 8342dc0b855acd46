"""In-place operators become functional ones, and buffer updates become results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from ortrain.capture.origin import captured_error

aten = torch.ops.aten

# How a new value of a view is written back into the tensor that it is a view of:
# (base, view's arguments after the base, new value) → arguments of the operator.
_WRITE_BACK = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.default, aten.flatten.using_ints,
}  # fmt: skip
_TRANSPOSES = {aten.transpose.int, aten.t.default}
_RANDOM = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_",
           "log_normal_", "geometric_"}  # fmt: skip


def functionalise(exported: ExportedProgram) -> dict[str, fx.Node]:
    """Rewrites every in-place operator of a program's graph.

    Covered are writes to a tensor that the graph itself made, to a buffer, and to a slice,
    a selection or a reshape of one of these.

    Returns:
        The buffers that the graph updates, with the node of each one's new value.
    """
    specs = exported.graph_signature.input_specs
    return _Functional(exported.graph_module.graph, specs).run()


def functionalise_composed(graph: fx.Graph) -> None:
    """The same for the graph of what one operator is composed of, which changes no input."""
    _Functional(graph, []).run()


class _Functional:
    def __init__(self, graph: fx.Graph, specs: Sequence[InputSpec]) -> None:
        self.graph = graph
        self.inputs = {s.arg.name: s for s in specs if hasattr(s.arg, "name")}
        self.current: dict[fx.Node, fx.Node] = {}  # a placeholder → the buffer's value by now
        self.owner: dict[fx.Node, fx.Node] = {}  # the other way
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}

    def run(self) -> dict[str, fx.Node]:
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                self.in_place(node)
        return {str(self.inputs[k.name].target): v for k, v in self.current.items()}

    # -- in-place operators ------------------------------------------------------------------

    def in_place(self, node: fx.Node) -> None:
        target: Any = node.target
        name = target._schema.name.removeprefix("aten::")
        if target.namespace != "aten" or not name.endswith("_") or name in _RANDOM:
            because = "it draws random numbers in place" if name in _RANDOM else ""
            raise captured_error(node, f"{target} cannot be captured", because=because)
        written = node.args[0]
        assert isinstance(written, fx.Node)
        with self.graph.inserting_before(node):
            new = self.functional(node, name)
        node.replace_all_uses_with(written)  # which the next line then takes from the new value
        self.replace(node, written, new)
        self.graph.erase_node(node)

    def functional(self, node: fx.Node, name: str) -> fx.Node:
        """The node that computes what the in-place operator leaves in its first argument."""
        original: Any = node.target
        args: Any = node.args
        target: Any
        kwargs: dict[str, Any] = {}
        written = args[0]
        if name == "copy_":
            source = self._cast(args[1], written)
            same = _layout(source)[0] == _layout(written)[0]
            target = aten.clone.default if same else aten.expand_as.default
            args = (source,) if same else (source, written)
        elif name in ("fill_", "zero_"):
            # What was there gets a gradient of zeros, if it was computed.
            target = aten.full_like.default if _is_blank(written) else aten.fill.Scalar
            args = (written, args[1] if name == "fill_" else 0)
        else:
            target = getattr(getattr(aten, name[:-1], None), original._overloadname, None)
            kwargs = dict(node.kwargs)
            if target is None:
                raise captured_error(node, f"{original} cannot be captured")
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {**node.meta, "val": written.meta["val"], _FRESH: True}
        return new

    def _cast(self, source: fx.Node, written: fx.Node) -> fx.Node:
        known, wanted = source.meta["val"], written.meta["val"].dtype
        if known.dtype == wanted:
            return source
        cast = self.graph.call_function(aten.to.dtype, (source, wanted))
        cast.meta = {**source.meta, "val": known.to(wanted)}
        return cast

    def replace(self, at: fx.Node, written: fx.Node, new: fx.Node) -> None:
        """Every later reader of the memory behind ``written`` sees the new value."""
        base, path = self._base(written)
        self._check(at, base)
        views = list(self._views(base))
        self._check_shared(at, base, views)
        with self.graph.inserting_before(at):
            for view in reversed(path):
                new = self._write_back(at, view, new)
        owner = base if base.op == "placeholder" else self.owner.get(base)
        if owner is not None:
            self.current[owner], self.owner[new] = new, owner
        # The other views of the same memory are taken again, from the new value.
        fresh: dict[fx.Node, fx.Node] = {base: new}
        for view in views:
            if self._later(view, at):
                with self.graph.inserting_before(at):
                    again = self.graph.node_copy(view, lambda n: fresh.get(n, n))
                fresh[view] = again
                self.order[again] = self.order[at]
        for old, latest in fresh.items():
            old.replace_all_uses_with(
                latest, delete_user_cb=lambda user: self.order.get(user, -1) > self.order[at]
            )

    def _later(self, view: fx.Node, at: fx.Node) -> bool:
        """Whether the view itself comes earlier but it, or a view of it, is read later."""
        if self.order.get(view, -1) >= self.order[at]:
            return False
        return any(
            self.order.get(user, -1) > self.order[at]
            or (_viewed(user) is view and self._later(user, at))
            for user in view.users
        )

    def _views(self, base: fx.Node) -> Iterator[fx.Node]:
        """Views of a tensor, each after what it is a view of."""
        for user in list(base.users):
            if _viewed(user) is base:
                yield user
                yield from self._views(user)

    def _base(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """The tensor whose memory a node shows, and the views on the way to the node."""
        path: list[fx.Node] = []
        while (source := _viewed(node)) is not None:
            path.insert(0, node)
            node = source
        return node, path

    def _check_shared(self, at: fx.Node, base: fx.Node, views: list[fx.Node]) -> None:
        """Refuses memory that is shared in a way that :meth:`_views` does not see.

        The pieces of ``chunk`` and ``split`` are such: each is a view, but of what the piece's
        node does not say.
        """
        memory, known = _memory(base), {base, *views, at}
        for node, order in self.order.items():
            if node in known or order > self.order[at] or _memory(node) != memory:
                continue
            if any(self.order.get(user, -1) > self.order[at] for user in node.users):
                raise captured_error(
                    at,
                    f"{at.target} writes into memory that {node.name} shows as well",
                    help="work on a copy (tensor.clone())",
                )

    def _check(self, at: fx.Node, base: fx.Node) -> None:
        if base.op == "call_function":
            return
        spec = self.inputs.get(base.name)
        if spec is not None and spec.kind is InputKind.BUFFER:
            return
        kind = "a parameter" if spec and spec.kind is InputKind.PARAMETER else "an argument"
        raise captured_error(
            at,
            f"{at.target} writes into {kind}",
            because="a graph does not change its inputs",
            help="work on a copy (tensor.clone())",
        )

    def _write_back(self, at: fx.Node, view: fx.Node, new: fx.Node) -> fx.Node:
        """The tensor that ``view`` was taken from, with ``new`` in the view's place."""
        source = view.args[0]
        assert isinstance(source, fx.Node)
        rest = view.args[1:]
        if view.target in _WRITE_BACK:
            args: tuple[Any, ...] = (source, new, *rest)
            target: Any = _WRITE_BACK[view.target]
        elif _layout(view) == _layout(source):
            return new
        elif view.target in _TRANSPOSES:
            target, args = view.target, (new, *rest)
        elif view.target in _RESHAPES:
            target, args = aten.reshape.default, (new, self._shape(source))
        else:
            raise captured_error(at, f"{at.target} into {view.target} cannot be captured")
        node = self.graph.call_function(target, args)
        node.meta = {**at.meta, "val": source.meta["val"], _FRESH: True}
        return node

    def _shape(self, source: fx.Node) -> list[int | fx.Node]:
        """A tensor's shape, of numbers and of nodes for what is symbolic."""
        shape: list[int | fx.Node] = []
        for axis, size in enumerate(source.meta["val"].shape):
            if isinstance(size, int):
                shape.append(size)
                continue
            node = self.graph.call_function(aten.sym_size.int, (source, axis))
            node.meta = {"val": size}
            shape.append(node)
        return shape


# Marks nodes of ours: their ``val`` is borrowed from the tensor whose new value they are.
_FRESH = "ortrain.fresh"


def _is_blank(node: fx.Node) -> bool:
    """Whether a tensor was made of a size alone."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_") or not node.all_input_nodes


def _memory(node: fx.Node) -> int | None:
    """What tells whether two nodes show the same memory."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _layout(node: fx.Node) -> tuple[str, ...]:
    """Shape, strides and offset, in words: comparing symbolic sizes would add conditions."""
    value = node.meta["val"]
    return (str(tuple(value.shape)), str(value.stride()), str(value.storage_offset()))


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a node's result shares; None where it has its own."""
    if node.op != "call_function" or not node.args or _FRESH in node.meta:
        return None
    source, memory = node.args[0], _memory(node)
    if memory is None or not isinstance(source, fx.Node) or _memory(source) != memory:
        return None
    return source
