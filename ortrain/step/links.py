"""Which outputs of a module are computed from others of them, as a loss is from logits.

What a hook on an output hears, what it keeps as its ``grad`` and what ``autograd.grad`` gives for
it is the gradient along all ways, those through later outputs among them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import onnx_ir as ir
from torch import Tensor

from ortrain.autodiff.engine import led_on

Links = tuple[tuple[int, ...], ...]
"""For each output the others that it is computed from, without one of them in between."""


@dataclass(frozen=True)
class Views:
    """Makes results that are views of one tensor's memory.

    Attributes:
        run: makes them.
        given: what it takes, by places in the call and in the outputs: ``("input", 2)``.
        makes: which of all views they are.
    """

    run: Callable[..., Sequence[Any]]
    given: Sequence[tuple[str, int]]
    makes: Sequence[int]

    def taken(
        self, inputs: Sequence[Any], roots: Sequence[Tensor] | Mapping[int, Tensor]
    ) -> dict[int, Any]:
        """The views by their places.

        Args:
            inputs: the arguments of the call.
            roots: the outputs.
        """
        known: dict[str, Any] = {"input": inputs, "root": roots}
        made = self.run(*[known[kind][place] for kind, place in self.given])
        return dict(zip(self.makes, made, strict=True))


@dataclass(frozen=True)
class Linked:
    """How outputs are computed from one another, and from views of outputs and arguments.

    Attributes:
        before: for each output the others that it is computed from. The places of views come behind
            those of the outputs.
        views: makes these.
    """

    before: Links
    views: Sequence[Views] = ()

    @property
    def roots(self) -> list[int]:
        """Places of the outputs that are computed from no other."""
        return [place for place, before in enumerate(self.before) if not before]

    @cached_property
    def heard(self) -> set[int]:
        """Places whose gradient has in it what other outputs send."""
        roots = {i for views in self.views for kind, i in views.given if kind == "root"}
        return {i for before in self.before for i in before} | roots

    @cached_property
    def order(self) -> list[int | Views]:
        """The other outputs and the views, each behind what it is made of."""
        count, done = len(self.before), {*self.roots}
        wants: list[tuple[int | Views, set[int], Collection[int]]] = [
            (place, {*before}, [place]) for place, before in enumerate(self.before) if before
        ]
        for each in self.views:
            roots = {place for kind, place in each.given if kind == "root"}
            wants.append((each, roots, [count + i for i in each.makes]))
        result: list[int | Views] = []
        while wants:
            ready = [want for want in wants if want[1] <= done]
            assert ready, "outputs are computed from each other in a circle"
            for want in ready:
                wants.remove(want)
                result.append(want[0])
                done.update(want[2])
        return result


def links(graph: ir.Graph, outputs: Sequence[ir.Value], reached: Collection[ir.Value]) -> Links:
    """The links between the outputs of a forward, or none at all.

    There may be more than in PyTorch, where two expressions of the module are one value of the
    graph; there are never fewer.

    Args:
        graph: of the forward.
        outputs: those that the user gets.
        reached: the values that depend on what requires a gradient.
    """
    sources: dict[ir.Value, list[int]] = {}
    for place, value in enumerate(outputs):
        if value in reached:
            sources.setdefault(_source(value), []).append(place)
    found: list[set[int]] = [set() for _ in outputs]
    for source, places in sources.items():
        for earlier, later in pairwise(places):
            found[later].add(earlier)  # a copy of it
        for value in _reached_from(graph, source, sources.keys()):
            for place in sources.get(value, ())[:1]:
                found[place].add(places[0])
                # Either of two copies may be what the module goes on with.
                found[place].update(places)
    result = tuple(tuple(sorted(each)) for each in found)
    return result if any(result) else ()


def _source(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and node.op_type == "Identity":
        if node.domain or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def _reached_from(graph: ir.Graph, source: ir.Value, stops: Collection[ir.Value]) -> list[ir.Value]:
    """The outputs to which a gradient flows from a value, up to the first on each way."""
    reached, met = {source}, []
    for node in graph:
        found = led_on(node, reached)
        met += [v for v in found if v in stops]
        reached.update(v for v in found if v not in stops)
    return met
