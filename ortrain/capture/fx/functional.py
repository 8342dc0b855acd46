"""In-place operators become functional ones, and buffer updates become results."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec

from ortrain.capture.fx.memory import FRESH, layout, memory, viewed
from ortrain.capture.fx.regions import without_gradient
from ortrain.capture.fx.splice import arguments_of
from ortrain.capture.origin import captured_error, operator_name
from ortrain.capture.traced import Traced
from ortrain.errors import CaptureError
from ortrain.pytorch.operators import OpOverload, is_mutable, overload_of, schema_of
from ortrain.pytorch.tracing import fake_mode_of

aten = torch.ops.aten

# How a new value of a view is written back into the tensor that it is a view of:
# (base, view's arguments after the base, new value) → arguments of the operator.
_WRITE_BACK = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.ravel.default,
}  # fmt: skip
# Which axis goes where, they tell on any tensor of their rank.
_PERMUTES = {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default,
    aten.mT.default, aten.mH.default, aten.adjoint.default, aten.swapaxes.default,
    aten.swapdims.default, aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int,
    aten.moveaxis.intlist,
}  # fmt: skip
# In-place draws whose functional form has another name.
_DRAWS = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}
DETACHES = {aten.detach.default, aten.detach_.default}
# They change what one tensor object is, not what is in its memory.
_RENAMES = {"squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_"}
_COMPARES = {"eq_", "ne_", "ge_", "gt_", "le_", "lt_", "logical_and_", "logical_or_",
             "logical_xor_", "logical_not_"}  # fmt: skip
# They put random numbers in the place of what was there.
_FILLS = {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_",
          "log_normal_", "cauchy_"}  # fmt: skip


def functionalise(traced: Traced) -> dict[str, fx.Node]:
    """Rewrites every in-place operator of a program's graph.

    Covered are writes to a tensor that the graph itself made, to a buffer, and to a slice,
    a selection or a reshape of one of these.

    Returns:
        The buffers that the graph updates, with the node of each one's new value.
    """
    functional = _Functional(traced.graph, traced.inputs)
    functional.one_name_each()
    return functional.run()


def functionalise_composed(graph: fx.Graph) -> None:
    """The same for the graph of what one operator is composed of, which changes no input."""
    _Functional(graph, []).run()


class _Functional:
    def __init__(self, graph: fx.Graph, specs: Sequence[InputSpec]) -> None:
        self.graph = graph
        self.inputs = {s.arg.name: s for s in specs if hasattr(s.arg, "name")}
        self.current: dict[fx.Node, fx.Node] = {}  # a placeholder → the buffer's value by now
        self.owner: dict[fx.Node, fx.Node] = {}  # the other way
        self.connected: dict[fx.Node, bool] = {}  # whether a node may have a gradient
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.other_names: set[fx.Node] = set()

    def one_name_each(self) -> None:
        """Reads a buffer that is registered under several names by the first of them alone."""
        first: dict[object, fx.Node] = {}
        for node in self.graph.find_nodes(op="placeholder"):
            spec = self.inputs.get(node.name)
            if spec is not None and spec.kind is InputKind.BUFFER:
                known = first.setdefault((memory(node), layout(node)), node)
                if known is not node:
                    node.replace_all_uses_with(known)
                    self.other_names.add(node)

    def run(self) -> dict[str, fx.Node]:
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if isinstance(node.target, OpOverload) and is_mutable(node.target):
                self.in_place(node)
        return {str(self.inputs[k.name].target): v for k, v in self.current.items()}

    # -- in-place operators ------------------------------------------------------------------

    def in_place(self, node: fx.Node) -> None:
        target: Any = node.target
        name = schema_of(target).name.removeprefix("aten::")
        out = node.kwargs.get("out")
        if target.namespace != "aten" or not (name.endswith("_") or isinstance(out, fx.Node)):
            raise captured_error(node, f"{operator_name(target)} cannot be captured")
        written = out if isinstance(out, fx.Node) else node.args[0]
        assert isinstance(written, fx.Node)
        if name in _RENAMES:
            self.rename(node, written, name)
            return
        with self.graph.inserting_before(node):
            new = self.functional(node, name) if written is not out else self.returned(node)
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
            same = layout(source)[0] == layout(written)[0]
            target = aten.clone.default if same else aten.expand_as.default
            args = (source,) if same else (source, written)
            if _is_computed(written):
                target, args = aten.copy.default, (written, source)
        elif name in ("fill_", "zero_"):
            # What was there gets a gradient of zeros, if it was computed.
            target = aten.full_like.default if _is_blank(written) else aten.fill.Scalar
            args = (written, args[1] if name == "fill_" else 0)
        elif name == "fill_diagonal_" and written.meta["val"].ndim == 2 and not any(args[2:]):
            target = aten.diagonal_scatter.default
            args = (written, self._filled_diagonal(written, args[1]))
        else:
            target = _DRAWS.get(original) or _not_in_place(original, name)
            kwargs = dict(node.kwargs)
            if target is None:
                raise captured_error(node, f"{operator_name(original)} cannot be captured")
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {**node.meta, "val": written.meta["val"], FRESH: True}
        if name in _COMPARES:
            known = written.meta["val"]
            new.meta["val"] = known.new_empty(known.shape, dtype=torch.bool)
            new = self._cast(new, written)
        if name in _COMPARES or name in _FILLS:
            for given in (a for a in args if isinstance(a, fx.Node)):
                new = self._overwriting(given, written, new)
        # What views are of, the memory of these values tells: it is what was written to.
        new.meta = {**new.meta, "val": written.meta["val"], FRESH: True}
        return new

    def _filled_diagonal(self, matrix: fx.Node, number: Any) -> fx.Node:
        """What stands on a matrix's diagonal once it is filled."""
        mode = fake_mode_of([matrix.meta["val"]])
        assert mode is not None
        node = self.graph.call_function(aten.diagonal.default, (matrix,))
        with mode:
            node.meta = {**matrix.meta, "val": torch.zeros_like(matrix.meta["val"]).diagonal()}
        fill = aten.full_like.default if _is_blank(matrix) else aten.fill.Scalar
        filled = self.graph.call_function(fill, (node, number))
        filled.meta = dict(node.meta)
        return filled

    def _overwriting(self, given: fx.Node, written: fx.Node, new: fx.Node) -> fx.Node:
        """A value that what was given does not influence, and that gives it a gradient of zeros."""
        if not _is_computed(given):
            return new
        given = self._cast(given, written)
        if layout(given)[0] != layout(written)[0]:
            meta = given.meta
            given = self.graph.call_function(aten.expand_as.default, (given, written))
            given.meta = {**meta, "val": written.meta["val"]}
        node = self.graph.call_function(aten.copy.default, (given, new))
        node.meta = dict(new.meta)
        return node

    def returned(self, node: fx.Node) -> fx.Node:
        """The node that returns what an operator with ``out=`` puts there."""
        original: Any = node.target
        taken = [argument.name for argument in schema_of(original).arguments]
        overloads = (
            getattr(original.overloadpacket, name) for name in original.overloadpacket.overloads()
        )
        plain = next(
            (o for o in overloads if [a.name for a in schema_of(o).arguments] == taken[:-1]), None
        )
        written: Any = node.kwargs["out"]
        args: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
        kwargs: dict[str, Any] = {k: v for k, v in node.kwargs.items() if k != "out"}
        if (
            plain is None
            or taken[-1] != "out"
            or any(isinstance(v, fx.Node) for v in kwargs.values())
        ):
            raise captured_error(node, f"{operator_name(original)} cannot be captured")
        mode = fake_mode_of(args)
        assert mode is not None
        new = self.graph.call_function(plain, node.args, kwargs)
        with mode:
            new.meta = {**node.meta, "val": plain(*args, **kwargs)}
        if layout(new)[0] != layout(written)[0]:
            raise captured_error(
                node,
                f"{operator_name(original)} cannot be captured",
                because="it gives its out= another shape",
            )
        new = self._cast(new, written)
        new.meta = {**new.meta, "val": written.meta["val"], FRESH: True}
        return new

    def rename(self, node: fx.Node, written: fx.Node, name: str) -> None:
        """What is read of a tensor from here on is a view of it, or detached."""
        if written.op == "placeholder":
            raise captured_error(
                node,
                f"{node.target} changes an argument or a tensor of the module",
                because="a graph does not change its inputs",
                help=f"use {name[:-1]}() in its place",
            )
        if without_gradient(node) and self._connected(written):
            raise self._past_autograd(node)
        target: Any = node.target
        functional = getattr(getattr(aten, name[:-1]), overload_of(target))
        with self.graph.inserting_before(node):
            new = self.graph.call_function(functional, node.args, dict(node.kwargs))
        new.meta = dict(node.meta)
        self.order[new] = self.order[node]
        written.replace_all_uses_with(new, delete_user_cb=lambda user: self._behind(user, node))
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _behind(self, user: fx.Node, at: fx.Node) -> bool:
        return self.order.get(user, -1) > self.order[at]

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
        new = self._constant(at, base, path, new)
        if path == [written] and self._is_read_alone(written, base, at):
            new.meta["val"] = written.meta["val"].clone()
            base, path, views = written, [], []
        self.order[new] = self.order[at]
        with self.graph.inserting_before(at):
            for view in reversed(path):
                new = self._write_back(at, view, new)
                self.order[new] = self.order[at]
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
            old.replace_all_uses_with(latest, delete_user_cb=lambda user: self._behind(user, at))

    def _later(self, view: fx.Node, at: fx.Node) -> bool:
        """Whether the view itself comes earlier but it, or a view of it, is read later."""
        if self.order.get(view, -1) >= self.order[at]:
            return False
        return any(
            self._behind(user, at) or (viewed(user) is view and self._later(user, at))
            for user in view.users
        )

    def _is_read_alone(self, piece: fx.Node, base: fx.Node, at: fx.Node) -> bool:
        """Whether later a piece is read by its own name alone: it is a tensor of its own then.

        Of the tensor that it is cut from, other pieces alone are read, as of the gates of a cell.
        """
        if base.op == "placeholder" or base in self.owner:
            return False
        if any(self._later(view, at) for view in self._views(piece)):
            return False
        return all(
            user is piece or _is_apart(piece, user)
            for user in base.users
            if self._behind(user, at) or (viewed(user) is base and self._later(user, at))
        )

    def _views(self, base: fx.Node) -> Iterator[fx.Node]:
        """Views of a tensor, each after what it is a view of."""
        for user in list(base.users):
            if viewed(user) is base:
                yield user
                yield from self._views(user)

    def _base(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """The tensor whose memory a node shows, and the views on the way to the node."""
        path: list[fx.Node] = []
        while (source := viewed(node)) is not None and not _is_result(node):
            path.insert(0, node)
            node = source
        return node, path

    def _constant(self, at: fx.Node, base: fx.Node, path: list[fx.Node], new: fx.Node) -> fx.Node:
        """The new value, which is none for autograd where the write goes past it.

        Under ``no_grad``, or through a detached tensor, autograd neither learns of a write nor
        forgets what was there: of a tensor with a gradient, the gradient goes to the old value, and
        operators that have saved it read the new one. That cannot be said in a graph.
        """
        detached = any(view.target in DETACHES for view in path)
        if not detached and not without_gradient(at):
            return new
        if self._connected(base):
            raise self._past_autograd(at)
        if detached:
            if self._is_read_with_gradient(at, base):
                raise self._past_autograd(at)
            if not self._connected(new):
                return new
            # ``buffer.data.add_(x)``: the detached name has a gradient by then, the buffer has not.
            if self._is_read_by_detached_name(at, path):
                raise self._past_autograd(at)
        with self.graph.inserting_before(at):
            constant = self.graph.call_function(aten.detach.default, (new,))
        constant.meta = dict(new.meta)
        return constant

    def _is_read_with_gradient(self, at: fx.Node, base: fx.Node) -> bool:
        """Whether something with a gradient has read a tensor, and may have saved it, before."""
        shown = {base, *self._views(base)}
        return any(
            user not in shown and not self._behind(user, at) and self._receives(user, at)
            for node in shown
            for user in node.users
        )

    def _receives(self, node: fx.Node, at: fx.Node) -> bool:
        """Whether a gradient may come to a node from an output, or from another write than ``at``.

        The distances to a codebook, of which only the least is asked for, receive none.
        """
        if node is at or not self._connected(node):
            return False
        left, seen = [node], {node}
        while left:
            for user in left.pop().users:
                if user is at:
                    continue
                mutable = is_mutable(user.target)
                if user.op != "call_function" or mutable:
                    return True
                if user not in seen and self._connected(user):
                    seen.add(user)
                    left.append(user)
        return False

    def _is_read_by_detached_name(self, at: fx.Node, path: list[fx.Node]) -> bool:
        """Whether anything reads the detached tensor behind a write, or a view of it."""
        name = next(view for view in path if view.target in DETACHES)
        shown = (name, *self._views(name))
        return any(self._behind(user, at) for node in shown for user in node.users)

    def _past_autograd(self, at: fx.Node) -> CaptureError:
        return captured_error(
            at,
            f"{at.target} changes a tensor behind autograd's back",
            because="under no_grad, or through detach() or .data, the gradient would still be that "
            "of the old value",
            help="make a new tensor, with torch.where or masked_fill, or write with gradients on",
        )

    def _connected(self, node: fx.Node) -> bool:
        """Whether a tensor may have a gradient."""
        if node not in self.connected:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                possible = value.is_floating_point() or value.is_complex()
            else:
                possible = isinstance(value, list | tuple)
            if node.op == "placeholder":
                spec = self.inputs.get(node.name)
                found = possible and (spec is None or spec.kind not in _WITHOUT_GRADIENT)
            elif not possible or node.target in DETACHES or without_gradient(node):
                found = False
            else:
                found = not _is_blank(node) and any(map(self._connected, node.all_input_nodes))
            self.connected[node] = found
        return self.connected[node]

    def _check_shared(self, at: fx.Node, base: fx.Node, views: list[fx.Node]) -> None:
        """Refuses memory that is shared in a way that :meth:`_views` does not see.

        Of what has several results each may be a view, but of what its node does not say. Memory of
        an input is to be written back to it, whether it is read later or not.
        """
        shared, known = memory(base), {base, *views, at, self.owner.get(base)}
        for node, order in list(self.order.items()):
            if node in known or order > self.order[at] or memory(node) != shared:
                continue
            if node in self.other_names and layout(node) == layout(base):
                continue
            if node.op == "placeholder" or any(self._behind(user, at) for user in node.users):
                raise captured_error(
                    at,
                    f"{operator_name(at.target)} writes into memory that {node.name} shows as well",
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
            f"{operator_name(at.target)} writes into {kind}",
            because="a graph does not change its inputs",
            help="work on a copy (tensor.clone()); parameters are changed outside of the forward",
        )

    def _write_back(self, at: fx.Node, view: fx.Node, new: fx.Node) -> fx.Node:
        """The tensor that ``view`` was taken from, with ``new`` in the view's place."""
        source = view.args[0]
        assert isinstance(source, fx.Node)
        rest = view.args[1:]
        if view.target in _WRITE_BACK:
            args: tuple[Any, ...] = (source, new, *rest)
            target: Any = _WRITE_BACK[view.target]
        elif layout(view) == layout(source):
            return new
        elif view.target in _PERMUTES:
            target, args = aten.permute.default, (new, _inverse(view))
        elif view.target is aten.narrow.default:
            dim, start, length = rest
            target = aten.slice_scatter.default
            args = (source, new, dim, start, self._end(at, start, length))
        elif view.target in _RESHAPES:
            target, args = aten.reshape.default, (new, self._shape(source))
        else:
            into = f"{operator_name(at.target)} into {operator_name(view.target)}"
            raise captured_error(at, f"{into} cannot be captured")
        node = self.graph.call_function(target, args)
        node.meta = {**at.meta, "val": source.meta["val"], FRESH: True}
        return node

    def _end(self, at: fx.Node, start: Any, length: Any) -> Any:
        """Where a range of some length ends, as a slice names it."""
        if isinstance(start, int) and isinstance(length, int):
            # From behind, 0 is what comes after the last.
            return None if start < 0 and start + length == 0 else start + length
        known = [v.meta["val"] if isinstance(v, fx.Node) else v for v in (start, length)]
        if isinstance(start, int) and start < 0:
            raise captured_error(at, f"{operator_name(at.target)} into aten::narrow from behind")
        node = self.graph.call_function(operator.add, (start, length))
        node.meta = {"val": known[0] + known[1]}
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


def _not_in_place(original: Any, name: str) -> Any:
    """The overload that returns what an in-place one writes, with the same arguments.

    That it has the same name says little: ``pow_.Scalar`` takes a tensor and a number, and
    ``pow.Scalar`` a number and a tensor.
    """
    packet = getattr(aten, name[:-1], None)
    wanted = [str(a.type) for a in schema_of(original).arguments]
    names = [] if packet is None else packet.overloads()
    for overload in sorted(names, key=lambda n: n != overload_of(original)):
        found = getattr(packet, overload)
        taken = schema_of(found).arguments
        if is_mutable(found) or [str(a.type) for a in taken[: len(wanted)]] != wanted:
            continue
        if all(a.has_default_value() for a in taken[len(wanted) :]):
            return found
    return None


def _is_result(node: fx.Node) -> bool:
    """Whether a node is all that is left of a tensor which was made under ``no_grad``.

    What is written to it with gradients on gives it one: it is the tensor, and no other name of it.
    """
    if node.target not in DETACHES or not without_gradient(node):
        return False
    while (source := viewed(node)) is not None:
        names = [user for user in source.users if viewed(user) is source]
        if names != [node] or not without_gradient(source):
            return False
        node = source
    shown = {memory(each) for each in node.all_input_nodes}  # as by an operator with ``out=``
    return node.op == "call_function" and memory(node) not in shown


def _is_apart(one: fx.Node, other: fx.Node) -> bool:
    """Whether two pieces of a tensor, cut along one axis, certainly have no number in common."""
    if one.target is not other.target or one.target not in (aten.slice.Tensor, aten.select.int):
        return False
    first, second = arguments_of(one), arguments_of(other)
    if first["dim"] != second["dim"]:
        return False
    if one.target is aten.select.int:
        bounds = [(places["index"], places["index"] + 1) for places in (first, second)]
    else:
        bounds = [(places["start"] or 0, places["end"]) for places in (first, second)]
    if not all(isinstance(bound, int) and bound >= 0 for ends in bounds for bound in ends):
        return False
    (start, end), (begin, stop) = bounds
    return bool(end <= begin or stop <= start)


def _inverse(view: fx.Node) -> list[int]:
    """The permutation that takes a permuted view back to what it is a view of."""
    target: Any = view.target
    source: Any = view.args[0]
    rank = source.meta["val"].ndim
    # Sizes that tell the axes apart.
    moved = target(torch.empty([*range(2, 2 + rank)], device="meta"), *view.args[1:], **view.kwargs)
    return [tuple(moved.shape).index(2 + axis) for axis in range(rank)]


_WITHOUT_GRADIENT = {InputKind.BUFFER, InputKind.CONSTANT_TENSOR}


def _is_computed(node: fx.Node) -> bool:
    """Whether a tensor may have a gradient: it comes from an input that is not detached."""
    stack, seen = [node], {node}
    while stack:
        each = stack.pop()
        value = each.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            continue
        if each.op == "placeholder":
            return True
        if not _is_blank(each) and each.target is not aten.detach.default:
            new = [n for n in each.all_input_nodes if n not in seen]
            seen.update(new)
            stack += new
    return False


def _is_blank(node: fx.Node) -> bool:
    """Whether a tensor was made of a size alone, be it that of another."""
    if not isinstance(node.target, OpOverload):
        return False
    name = schema_of(node.target).name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_") or not node.all_input_nodes
