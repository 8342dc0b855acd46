"""Which outputs of a module are computed from others of them, as a loss is from logits.

What a hook on an output hears, what it keeps as its ``grad`` and what ``autograd.grad`` gives for
it is the gradient along all ways, those through later outputs among them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import onnx_ir as ir

from ortrain.autodiff.engine import led_on

Links = tuple[tuple[int, ...], ...]
"""For each output the others that it is computed from, without one of them in between."""


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


def ordered(linked: Links) -> list[int]:
    """The outputs that are computed from others, each behind those."""
    done = {place for place, before in enumerate(linked) if not before}
    result: list[int] = []
    while len(done) < len(linked):
        ready = [i for i in range(len(linked)) if i not in done and done.issuperset(linked[i])]
        assert ready, "outputs are computed from each other in a circle"
        result += ready
        done.update(ready)
    return result


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
