"""Outputs that show the memory of an input, or of one another, and are made outside of a step.

A step's outputs are new tensors. In PyTorch one may be a view: of an argument, of a buffer, or of
the tensor that another output is a view of as well. A write to one is then seen in the other, also
behind a break, where the next graph has it among its inputs. So a step gives what the memory
belongs to, and the views are taken of that by PyTorch, under autograd, as AOTAutograd does::

    y = x.view(-1); z = y[0]       step: nothing     outside: y = x.view(-1); z = y[0]
    h = f(x); a, b = h.chunk(2)    step: h           outside: a, b = h.chunk(2)

Another output may be computed from such a view. Then its gradient comes to the hooks of the view
(:mod:`ortrain.step.chain`), for which the links between results are found here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ortrain.capture.fx.functional import DETACHES
from ortrain.capture.fx.memory import memory
from ortrain.capture.origin import IN_PYTORCH, captured_error
from ortrain.capture.writes import written_tensor
from ortrain.errors import CaptureError
from ortrain.frontend.writes import writes_of
from ortrain.step.links import Linked, Links, Views


@dataclass(frozen=True)
class Outside:
    """What PyTorch makes of a step's outputs.

    Attributes:
        roots: nodes that the step returns, in order; new tensors, or none of its own.
        results: for each leaf of the graph's output a constant, an input, a root or a view.
        viewed: nodes of the views.
        views: makes them all.
        links: for each root the others that it is computed from, and behind these places the views.
    """

    roots: list[fx.Node]
    results: list[Result]
    viewed: list[fx.Node]
    views: list[Views]
    links: Links

    def linked(self, reachable: Sequence[bool]) -> Linked | None:
        """How the roots of a step are computed from one another; None where none is.

        Args:
            reachable: for each root whether it requires a gradient.
        """
        given = {i for i, each in enumerate(reachable) if not each}
        before = tuple(
            tuple(i for i in each if i not in given) if own else ()
            for own, each in zip(reachable, self.links, strict=False)
        )
        return Linked(before, self.views) if any(before) else None


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


def all_inside(leaves: Sequence[Any]) -> Outside:
    """A step that returns all tensors itself, those that show other memory as copies.

    Args:
        leaves: of the output of a graph of ATen operators.
    """
    tensors = [
        each
        for each in leaves
        if isinstance(each, fx.Node) and isinstance(each.meta.get("val"), Tensor)
    ]
    return Outside([written_tensor(each) for each in tensors], [], [], [], ())


class _Parting:
    def __init__(self, module: fx.GraphModule, leaves: Sequence[Any]) -> None:
        self.module, self.leaves = module, leaves
        self.inputs = module.graph.find_nodes(op="placeholder")
        self.owners: dict[int | None, fx.Node] = {}
        for node in self.inputs:
            self.owners.setdefault(memory(node), node)
        self.roots: list[fx.Node] = []
        self.position = {node: i for i, node in enumerate(module.graph.nodes)}
        self.last = {
            memory(each): i for node, i in self.position.items() for each in writes_of(node)
        }

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
            own = written_tensor(leaf)
            if own in self.inputs:
                results.append(Result("input", self.inputs.index(own)))
                continue
            owner = self.owners.get(memory(own))
            alone = len({written_tensor(each) for each in shared[memory(own)]}) == 1
            if owner is None and (alone or not _is_view(own)):
                results.append(Result("root", self._root(own)))
                continue
            if own not in viewed:
                viewed.append(own)
            results.append(Result("view", viewed.index(own)))
        views = self._views(viewed)
        return Outside(self.roots, results, viewed, views, self._links(viewed))

    def _root(self, node: fx.Node) -> int:
        if node not in self.roots:
            self.roots.append(node)
        return self.roots.index(node)

    def _views(self, viewed: Sequence[fx.Node]) -> list[Views]:
        """What makes the views, those of each memory by themselves, and sizes too."""
        groups: dict[int | None, list[int]] = {}
        for i, node in enumerate(viewed):
            groups.setdefault(memory(node), []).append(i)
        return [self._group(viewed, places) for places in groups.values()]

    def _group(self, viewed: Sequence[fx.Node], places: list[int]) -> Views:
        graph = fx.Graph()
        sources: dict[fx.Node, fx.Node] = {}
        given: list[tuple[str, int]] = []
        for node in self._sources([viewed[i] for i in places]):
            is_input = node in self.inputs
            place = self.inputs.index(node) if is_input else self._root(node)
            given.append(("input" if is_input else "root", place))
            sources[node] = graph.placeholder(f"given_{len(given)}")

        def taken(node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
            node = written_tensor(node)
            if node in sources:
                return sources[node]
            if node not in made:
                # After a write to their memory autograd takes older views anew, each of the whole:
                # no gradient of one comes through another.
                before = {} if self._is_changed(node) else made
                made[node] = graph.node_copy(node, lambda each: taken(each, before))
            return made[node]

        made: dict[fx.Node, fx.Node] = {}
        graph.output(tuple([taken(viewed[i], made) for i in places]))
        return Views(fx.GraphModule(self.module, graph), given, places)

    def _sources(self, views: Sequence[fx.Node]) -> list[fx.Node]:
        """What views are taken of, and what gives them numbers: inputs, and new tensors."""
        found: dict[fx.Node, bool] = {}
        ahead = [*views]
        while ahead:
            node = written_tensor(ahead.pop())
            if node in found:
                continue
            found[node] = is_source = node in self.inputs or not _is_view(node)
            if not is_source:
                ahead += node.all_input_nodes
            elif node not in self.inputs and memory(node) in self.owners:
                raise self._hidden(node)
        return [node for node, is_source in found.items() if is_source]

    def _links(self, viewed: Sequence[fx.Node]) -> Links:
        """The links between the results: at least those that autograd's graph has."""
        place = {node: i for i, node in enumerate([*self.roots, *viewed])}
        owner = {memory(node): i for i, node in enumerate(self.roots)}
        # What a memory has in it by writes, and what a tensor has: sets of places, in bits.
        here: dict[int | None, int] = {}
        bits: dict[fx.Node, int] = {}
        found = [0] * len(self.roots)
        for i, node in enumerate(self.module.graph.nodes):
            arriving = 0
            for each in node.all_input_nodes:
                arriving |= bits[each] | here.get(memory(each), 0)
            if not _is_differentiable(node):
                bits[node] = 0
                continue
            own = place.get(node)
            if own is not None and own < len(found):
                found[own] |= arriving
            if own is not None and not self._is_changed(node):
                arriving = 1 << own
            bits[node] = arriving
            for each in writes_of(node):
                written = memory(each)
                if written in owner:
                    found[owner[written]] |= arriving
                here[written] = here.get(written, 0) | arriving
                if self.last[written] == i:
                    for other, number in place.items():
                        here[written] |= (memory(other) == written) << number
        result = tuple(
            tuple(i for node, i in place.items() if each >> i & 1 and memory(node) != memory(root))
            for root, each in zip(self.roots, found, strict=True)
        )
        return result if any(result) else ()

    def _is_changed(self, node: fx.Node) -> bool:
        """Whether the memory that a node shows is written to behind it."""
        return self.position[node] < self.last.get(memory(node), -1)

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


def _is_differentiable(node: fx.Node) -> bool:
    """Whether a gradient may come to what a node makes, and go on to what it is made of."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value is None or isinstance(value, list | tuple)  # of several tensors
    return (value.is_floating_point() or value.is_complex()) and node.target not in DETACHES
