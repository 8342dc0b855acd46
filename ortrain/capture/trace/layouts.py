"""How tensors lie in memory, where the code of a module asks for it.

In a graph, inputs may lie otherwise than in the call that was traced. What the module makes itself
does not: the strides of ``linear(x).view(…)`` go by its sizes alone. So a module that asks is
called aside, once with each of a few layouts of its inputs, and may go by what it is told where
that is the same each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ortrain.capture.origin import origin
from ortrain.capture.trace.aside import answers_noted
from ortrain.capture.trace.decisions import STRIDED, Asked, Decision, asked, sizes_of
from ortrain.capture.trace.windows import WINDOWS, rows_of
from ortrain.module_state.untouched import call_aside


def layouts_that_decide(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    questions: Asked,
    program: ExportedProgram,
) -> list[str]:
    """What the forward asks of how tensors lie in memory that depends on how its inputs do.

    Args:
        module: whose forward it is; nothing of it is changed.
        args: of the call that was traced.
        kwargs: of the call that was traced.
        questions: what was asked in the trace; what windows of memory suppose of sizes is added.
        program: the trace.

    Returns:
        The questions; and where memory is read of which nobody has asked, the places.
    """
    asked_of = questions.layouts
    windows = [
        (f"{STRIDED} {origin(node, full=True)}", rows_of(node))
        for node in program.graph.nodes
        if node.target in WINDOWS
    ]
    unasked = len(windows) > sum(question.startswith(STRIDED) for question in asked_of)
    if places := [place for place, rows in windows if unasked or not rows.holds]:
        return places
    if not asked_of:
        return []
    for place, rows in windows:
        questions.decisions += [Decision(each, place) for each in rows.conditions]
    # An axis of one has no stride that matters, and PyTorch makes it what it likes.
    questions.decisions += [Decision(sympy.Ne(size, 1), asked_of[0]) for size in sizes_of(program)]
    (answers, ends), *others = (_told(module, args, kwargs, laid) for laid in LAYOUTS)
    if not ends:
        return asked_of
    found: dict[str, None] = {}
    for told, ends in others:
        pairs = zip_longest(answers, told) if ends else zip(answers, told, strict=False)
        found.update({(one or other)[0]: None for one, other in pairs if one != other})
    return list(found)


def _told(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], laid: Callable[[Tensor], Any]
) -> tuple[list[tuple[str, str]], bool]:
    """The answers in a call whose inputs lie in a way, and whether it comes to its end.

    PyTorch may have no such call: not every ``view`` is possible.
    """
    known: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            with torch.no_grad():
                known[id(tensor)] = laid(tensor.detach()).requires_grad_(tensor.requires_grad)
        return known[id(tensor)]

    args, kwargs = pytree.tree_map_only(Tensor, once, (args, kwargs))
    with asked(), answers_noted() as answers, contextlib.suppress(Exception):
        call_aside(module, args, kwargs, copies=False)
        return answers, True
    return answers, False


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _in_order(tensor: Tensor) -> Tensor:
    """One like a tensor, without gaps, that lies row by row."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _turned(tensor: Tensor) -> Tensor:
    """One like a tensor, without gaps, whose axes lie the other way round."""
    axes = [*reversed(range(tensor.dim()))]
    return tensor.permute(axes).contiguous().permute(axes)


def _last(tensor: Tensor) -> Tensor:
    """One like a tensor with the second axis last, as images may lie."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.dim() > 2 else tensor.clone()


def _apart(tensor: Tensor) -> Tensor:
    """One like a tensor with gaps, that begins somewhere in its memory."""
    return torch.stack([tensor, tensor], dim=-1)[..., 1]


LAYOUTS = (_as_it_is, _in_order, _turned, _last, _apart)
