"""Complex tensors become real ones with an axis more: of real and imaginary parts.

A graph computes with real numbers. What makes a complex tensor of a pair, or a pair of it, is a
copy then, and a product is written out::

    z = view_as_complex(x) * w; y = view_as_real(z)  →  products and sums of halves of x and w

Other operators are refused, as are complex parameters and outputs of a graph, and inputs that
nobody gives as pairs (:func:`given_as_pairs`); constants are not.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from ortrain.capture.fx.checks import complex_error
from ortrain.capture.fx.splice import from_same_place, substitute
from ortrain.capture.origin import captured_error, operator_name
from ortrain.capture.traced import Traced
from ortrain.pytorch import pytree
from ortrain.pytorch.operators import OpOverload
from ortrain.pytorch.tracing import fake_mode_of

aten = torch.ops.aten

# What moves elements along one axis, with the place of the axis among its arguments and of those
# that are pairs as well.
_ALONG: dict[Any, tuple[int, tuple[int, ...]]] = {
    aten.slice.Tensor: (1, (0,)),
    aten.select.int: (1, (0,)),
    aten.slice_scatter.default: (2, (0, 1)),
    aten.select_scatter.default: (2, (0, 1)),
}
_COPIES = {aten.view_as_complex.default, aten.view_as_real.default}
_ALIKE = {aten.detach.default, aten.clone.default, aten.alias.default}
_PAIR = "ortrain_pair"


def given_as_pairs(node: fx.Node) -> bool:
    """Has an input stand for pairs of real numbers; False where no fake tensor says what it is."""
    value: Any = node.meta["val"]
    mode: Any = fake_mode_of([value])
    if mode is None:
        return False
    with mode:
        node.meta["val"] = as_real(value)
    node.meta[_PAIR] = True
    return True


def complex_as_pairs(traced: Traced) -> None:
    """Puts pairs of real numbers in the place of complex numbers, as far as they can be.

    Args:
        traced: its graph is changed in place; nothing in it writes to a tensor.

    Raises:
        CaptureError: there is no form of an operator on pairs.
    """
    graph = traced.graph
    if not any(_is_complex(node) for node in graph.nodes):
        return
    _Pairs(traced).run()
    graph.eliminate_dead_code()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers along a further axis; others as they are."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj()).contiguous()


class _Pairs:
    def __init__(self, traced: Traced) -> None:
        self.traced, self.graph = traced, traced.graph
        # Nodes that stand for complex tensors by now, each with the name of what made it.
        self.pairs: dict[fx.Node, str] = {}

    def run(self) -> None:
        specs = {s.arg.name: s for s in self.traced.inputs if hasattr(s.arg, "name")}
        for node in list(self.graph.nodes):
            if node.meta.get(_PAIR):
                self.pairs[node] = node.name
            elif node.op == "placeholder":
                self._constant(node, specs.get(node.name))
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._call(node)
        for node in self.graph.output_node().all_input_nodes:
            if node in self.pairs:
                raise captured_error(
                    node,
                    f"{self.pairs[node]} is complex",
                    because="a graph computes with real numbers",
                    help="return the real and the imaginary part (torch.view_as_real), or leave "
                    "this to eager",
                )

    def _constant(self, node: fx.Node, spec: Any) -> None:
        if spec is None or spec.kind is not InputKind.CONSTANT_TENSOR or not _is_complex(node):
            return
        held = self.traced.constants[spec.target]
        if not isinstance(held, torch.Tensor) or held.requires_grad:
            return
        if given_as_pairs(node):
            self.traced.constants[spec.target] = as_real(held)
            self.pairs[node] = node.name

    def _call(self, node: fx.Node) -> None:
        given = [n for n in node.all_input_nodes if n in self.pairs]
        left = [n for n in node.all_input_nodes if _is_complex(n)]
        if left or not (given or _is_complex(node)):
            return
        along = _ALONG.get(node.target)
        if node.target is aten.zeros.default:
            self._zeros(node)
        elif not any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes):
            return  # nothing would say when it is to run
        elif along is not None and all(
            isinstance(each, fx.Node) and each in self.pairs
            for each in (node.args[i] for i in along[1])
        ):
            self._along(node, along[0])
        elif node.target is aten.sym_size.int:
            source: Any = node.args[0]
            dim: Any = node.args[1]
            node.args = (source, dim % (source.meta["val"].dim() - 1))
        elif node.target in _COPIES:
            self._replace(node, self._emit(node, aten.clone.default, node.args[0]))
        elif node.target in _ALIKE:
            target: Any = node.target
            self._replace(node, self._emit(node, target, node.args[0]))
        elif _is_cast(node):
            real: Any = node.meta["val"].real.dtype
            new = self._emit(node, aten._to_copy.default, node.args[0], dtype=real)
            self._replace(node, new)
        elif node.target is aten.mul.Tensor and all(isinstance(a, fx.Node) for a in node.args):
            self._product(node)
        elif isinstance(node.target, OpOverload):
            raise complex_error(node)

    def _zeros(self, node: fx.Node) -> None:
        size: Any = node.args[0]
        with self.graph.inserting_before(node):
            new = self.graph.call_function(aten.zeros.default, ([*size, 2],), dict(node.kwargs))
        value: Any = node.meta["val"]
        new.kwargs = {**new.kwargs, "dtype": value.real.dtype}
        with fake_mode_of([value]) or contextlib.nullcontext():
            new.meta["val"] = as_real(value)
        from_same_place(new, node)
        self._replace(node, new)

    def _along(self, node: fx.Node, place: int) -> None:
        """The same on pairs, along the same axis counted from the front."""
        source: Any = node.args[0]
        args: list[Any] = [*node.args]
        if len(args) > place:
            args[place] %= source.meta["val"].dim() - 1
        target: Any = node.target
        if node.kwargs:
            raise complex_error(node)
        self._replace(node, self._emit(node, target, *args))

    def _product(self, node: fx.Node) -> None:
        one: Any
        two: Any
        one, two = node.args
        if one not in self.pairs:
            one, two = two, one
        if two not in self.pairs:
            last = self._emit(node, aten.unsqueeze.default, two, -1)
            self._replace(node, self._emit(node, aten.mul.Tensor, one, last))
            return
        a, b = (self._emit(node, aten.select.int, one, -1, i) for i in range(2))
        c, d = (self._emit(node, aten.select.int, two, -1, i) for i in range(2))

        def product(x: fx.Node, y: fx.Node) -> fx.Node:
            return self._emit(node, aten.mul.Tensor, x, y)

        real = self._emit(node, aten.sub.Tensor, product(a, c), product(b, d))
        imaginary = self._emit(node, aten.add.Tensor, product(a, d), product(b, c))
        self._replace(node, self._emit(node, aten.stack.default, [real, imaginary], -1))

    def _emit(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call in front of a node, with what it gives for tensors without contents."""
        with self.graph.inserting_before(node):
            new = self.graph.call_function(target, args, kwargs)
        values: Any = fx.node.map_arg(args, lambda n: n.meta["val"])
        mode: Any = fake_mode_of(pytree.tree_leaves(values))
        with mode:
            new.meta["val"] = target(*values, **kwargs)
        from_same_place(new, node)
        return new

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        if _is_complex(node):
            self.pairs[new] = operator_name(node.target)
        name = node.name
        substitute(node, new)
        new.name = name


def _is_cast(node: fx.Node) -> bool:
    """Whether a node makes complex numbers of one precision of others."""
    is_copy = node.target is aten._to_copy.default and [*node.kwargs] == ["dtype"]
    return (is_copy or node.target is aten.to.dtype) and _is_complex(node)


def _is_complex(node: fx.Node) -> bool:
    """Whether a node is a complex tensor, or several tensors with one among them."""
    return any(
        isinstance(value, torch.Tensor) and value.is_complex()
        for value in pytree.tree_leaves(node.meta.get("val"))
    )
