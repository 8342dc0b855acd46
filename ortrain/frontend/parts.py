"""A graph that has what no engine serves: that runs in PyTorch, between steps.

The statements of a graph stay in their order, so that whatever one writes is there for the next::

    h = linear(x); z = fft(h).abs(); y = linear(z)
    →  step: h = linear(x)   PyTorch: z = fft(h).abs()   step: y = linear(z)

Each part is a graph of its own, and autograd goes through them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from ortrain.capture.origin import module_paths, origin, source_lines
from ortrain.errors import CaptureError, InputError, OrtrainError
from ortrain.pytorch.operators import OpOverload
from ortrain.pytorch.switches import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS

# For fewer nodes no step is made. One costs 80 µs more than PyTorch does (Zen 5), which parts of
# small tensors do not earn back at any number; products of a thousand rows do at the first.
LEAST = 4

_AUTOCAST = {ENTER_AUTOCAST, EXIT_AUTOCAST}


def responsible(module: fx.GraphModule, reason: OrtrainError) -> set[fx.Node]:
    """The nodes of Dynamo's graph that a refusal is about: all that come from its statement.

    Empty where it tells no place.
    """
    lines = reason.lines if isinstance(reason, CaptureError) else ()
    calls = [node for node in module.graph.nodes if node.op.startswith("call")]
    while lines:  # of what is inside of a call's graph, that call
        if found := {node for node in calls if source_lines(node) == lines}:
            return found
        lines = lines[:-1]
    if not reason.where:
        return set()
    return {
        node
        for node in calls
        if reason.where in (origin(node, full=True), origin(node, full=False))
    }


def expect_sub_modules(module: nn.Module, patterns: Sequence[str]) -> None:
    """Raises where a pattern of ``Options(keep_in_torch=…)`` names no sub-module.

    Raises:
        InputError: it tells the nearest names.
    """
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        near = ", ".join(map(repr, get_close_matches(pattern, names, 3, 0.0)))
        raise InputError(
            f"keep_in_torch={pattern!r} is no sub-module of {type(module).__name__}",
            because=f"the nearest are {near}" if near else "it has no sub-modules",
            help="take a name of named_modules(), or a pattern such as '*.router'",
        )


def asked_for(module: fx.GraphModule, patterns: Collection[str]) -> set[fx.Node]:
    """The nodes of sub-modules that ``Options(keep_in_torch=…)`` names.

    Args:
        module: the graph.
        patterns: names as of ``named_modules()``, with ``*``, ``?`` and ``[…]`` for others.
    """
    return {
        node
        for node in module.graph.nodes
        if node.op.startswith("call")
        and any(fnmatchcase(path, each) for path in module_paths(node) for each in patterns)
    }


def divided(module: fx.GraphModule, left: Collection[fx.Node]) -> fx.GraphModule | None:
    """The graph as calls of parts; those that PyTorch runs are marked (:func:`is_pytorchs`).

    Args:
        module: the graph; its nodes get no new names.
        left: nodes for PyTorch.

    Returns:
        A graph whose modules are the parts; None where PyTorch would run all.
    """
    numbers: dict[fx.Node, int] = {}
    pytorchs: list[bool] = []
    for unit, pytorch in _merged([(u, any(n in left for n in u)) for u in _units(module.graph)]):
        pytorchs.append(pytorch)
        numbers.update(dict.fromkeys(unit, len(pytorchs) - 1))
    if all(pytorchs) or len(pytorchs) == 1:
        return None
    result: fx.GraphModule = split_module(
        module, module, numbers.__getitem__, keep_original_order=True
    )
    for i, pytorch in enumerate(pytorchs):
        part = getattr(result, f"submod_{i}")
        part.meta[_PYTORCHS] = pytorch
    return result


def is_pytorchs(part: fx.GraphModule) -> bool:
    """Whether a part of a divided graph is left to PyTorch."""
    return bool(part.meta[_PYTORCHS])


_PYTORCHS = "ortrain.pytorchs"


def _units(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """What stays together: statements between which something else than a tensor is handed on."""
    nodes = [node for node in graph.nodes if node.op.startswith("call")]
    at = {node: i for i, node in enumerate(nodes)}
    last = [*range(len(nodes))]  # of the nodes that may not be parted from each
    switched = [i for i, node in enumerate(nodes) if _switches(node)]
    if switched:
        last[switched[0]] = switched[-1]
    outside, begin = torch.is_grad_enabled(), 0
    now = outside
    for i, node in enumerate(nodes):
        if node.target is SET_GRADIENTS:
            before, now = now, bool(node.args[0])
            if before == outside:
                begin = i
            last[begin] = max(last[begin], i)
        elif now != outside:
            last[begin] = max(last[begin], i)
        if not _can_be_handed_on(node):
            for user in node.users:
                last[i] = max(last[i], at.get(user, len(nodes) - 1))
    unit: list[fx.Node] = []
    end = -1
    for i, node in enumerate(nodes):
        unit.append(node)
        end = max(end, last[i])
        if i == end:
            yield unit
            unit = []


def _switches(node: fx.Node) -> bool:
    """Whether a call changes how later ones run, as the beginning of ``vmap`` does."""
    return (
        "example_value" not in node.meta
        and node.target is not SET_GRADIENTS
        and node.target not in _AUTOCAST
        and not isinstance(node.target, OpOverload)  # an assertion
        and node.target is not torch._check
    )


def _can_be_handed_on(node: fx.Node) -> bool:
    """Whether a part may return what a call gives."""
    if node.target in _AUTOCAST:
        return True  # it is entered again in each part
    value = node.meta.get("example_value")
    known = isinstance(value, torch.Tensor | torch.SymInt)
    return known or not node.users


def _merged(units: list[tuple[list[fx.Node], bool]]) -> list[tuple[list[fx.Node], bool]]:
    """Neighbours of one kind as one; what is too small for a step goes to PyTorch."""
    joined = _joined(units)
    return _joined([(unit, pytorch or _work(unit) < LEAST) for unit, pytorch in joined])


def _joined(units: list[tuple[list[fx.Node], bool]]) -> list[tuple[list[fx.Node], bool]]:
    result: list[Any] = []
    for unit, pytorch in units:
        if result and result[-1][1] is pytorch:
            result[-1] = ([*result[-1][0], *unit], pytorch)
        else:
            result.append((unit, pytorch))
    return result


def _work(unit: list[fx.Node]) -> int:
    """How many calls compute floating tensors."""
    values = [node.meta.get("example_value") for node in unit]
    return sum(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)
