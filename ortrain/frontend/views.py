"""Outputs that show the memory of an input, or of one another, and are made outside of a step.

A step's outputs are new tensors. In PyTorch one may be a view: of an argument, of a buffer, or of
the tensor that another output is a view of as well. A write to one is then seen in the other, also
behind a break, where the next graph has it among its inputs. So a step gives what the memory
belongs to, and the views are taken of that by PyTorch, under autograd, as AOTAutograd does::

    y = x.view(-1); z = y[0]       step: nothing     outside: y = x.view(-1); z = y[0]
    h = f(x); a, b = h.chunk(2)    step: h           outside: a, b = h.chunk(2)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ortrain.capture.fx.memory import memory
from ortrain.capture.origin import IN_PYTORCH, captured_error
from ortrain.capture.trace.returned import written_by
from ortrain.errors import CaptureError


@dataclass(frozen=True)
class Outside:
    """What PyTorch makes of a step's outputs.

    Attributes:
        roots: nodes that the step returns, in order; new tensors, or none of its own.
        results: for each leaf of the graph's output a constant, an input, a root or a view.
        views: makes the views; None where there are none.
        given: what it takes, inputs and roots by their places: ``("input", 2)``.
    """

    roots: list[fx.Node]
    results: list[Result]
    views: fx.GraphModule | None
    given: list[tuple[str, int]]


@dataclass(frozen=True)
class Result:
    """A leaf of a graph's output.

    Attributes:
        kind: ``"constant"``, ``"input"``, ``"root"`` or ``"view"``.
        index: among the inputs, the roots or the views.
        constant: where it is one.
    """

    kind: str
    index: int = -1
    constant: Any = None


def outside_of(module: fx.GraphModule, leaves: Sequence[Any]) -> Outside:
    """Parts what a step returns from what PyTorch makes of it.

    Args:
        module: a graph of ATen operators, before writes in place are taken out of it.
        leaves: of its output.

    Raises:
        CaptureError: an output shares memory in a way that its operators do not tell.
    """
    return _Parting(module, leaves).run()


class _Parting:
    def __init__(self, module: fx.GraphModule, leaves: Sequence[Any]) -> None:
        self.module, self.leaves = module, leaves
        self.inputs = module.graph.find_nodes(op="placeholder")
        self.owners: dict[int | None, fx.Node] = {}
        for node in self.inputs:
            self.owners.setdefault(memory(node), node)
        self.roots: list[fx.Node] = []
        self.views = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.holders: list[fx.Node] = []
        self.given: list[tuple[str, int]] = []

    def run(self) -> Outside:
        shared: dict[int | None, list[fx.Node]] = {}
        for leaf in self.leaves:
            if isinstance(leaf, fx.Node) and memory(leaf) is not None:
                shared.setdefault(memory(leaf), []).append(leaf)
        results: list[Any] = []
        viewed: list[fx.Node] = []
        for leaf in self.leaves:
            if not isinstance(leaf, fx.Node):
                results.append(Result("constant", constant=leaf))
                continue
            if not isinstance(leaf.meta.get("val"), Tensor):  # a size
                viewed.append(leaf)
                results.append(Result("view", len(viewed) - 1))
                continue
            own = written_by(leaf)
            if own in self.inputs:
                results.append(Result("input", self.inputs.index(own)))
                continue
            owner = self.owners.get(memory(own))
            alone = len({written_by(each) for each in shared[memory(own)]}) == 1
            if owner is None and alone:
                results.append(Result("root", self._root(own)))
                continue
            if own not in viewed:
                viewed.append(own)
            results.append(Result("view", viewed.index(own)))
        views = self._module(viewed)
        return Outside(self.roots, results, views, self.given)

    def _root(self, node: fx.Node) -> int:
        if node not in self.roots:
            self.roots.append(node)
        return self.roots.index(node)

    def _module(self, viewed: Sequence[fx.Node]) -> fx.GraphModule | None:
        if not viewed:
            return None
        results = [self._taken(node) for node in viewed]
        self.views.output(tuple(results))
        return fx.GraphModule(self.module, self.views)

    def _taken(self, node: fx.Node) -> fx.Node:
        """A node among those that PyTorch runs."""
        node = written_by(node)
        if node in self.made:
            return self.made[node]
        if node in self.inputs:
            return self._given(node)
        if not _is_view(node):
            if memory(node) in self.owners:
                raise self._hidden(node)
            return self._given(node)
        given = {each: self._taken(each) for each in node.all_input_nodes}
        self.made[node] = made = self.views.node_copy(node, given.__getitem__)
        return made

    def _given(self, node: fx.Node) -> fx.Node:
        """What an input or a root is called there."""
        if node not in self.made:
            known = node in self.inputs
            place = self.inputs.index(node) if known else self._root(node)
            self.given.append(("input" if known else "root", place))
            last = self.holders[-1] if self.holders else self.views._root
            with self.views.inserting_after(last):
                name = f"given_{len(self.holders)}"
                self.made[node] = holder = self.views.placeholder(name)
            self.holders.append(holder)
        return self.made[node]

    def _hidden(self, node: fx.Node) -> CaptureError:
        return captured_error(
            node,
            f"{node.target} returns memory of one of its arguments",
            because="a graph returns new tensors",
            help=IN_PYTORCH,
        )


def _is_view(node: fx.Node) -> bool:
    """Whether an operator gives a view of its first argument, or no tensor at all."""
    if not isinstance(node.meta.get("val"), Tensor):
        return True
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0]
    if node.target is operator.getitem and source.args and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    return memory(source) == memory(node)
