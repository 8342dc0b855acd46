"""What calls that stay PyTorch's may come to besides what they are given, told to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain.errors import CaptureError
from ortrain.kept.call import Kept
from ortrain.kept.parameter import BUFFERS, Parameter, memory_of
from ortrain.kept.routine import Routine
from ortrain.kept.shared import buffers_of, named, others, place_of
from ortrain.module_state.survey import Survey
from ortrain.module_state.untouched import FREE
from ortrain.program import Program, Role, target_of


def share(
    calls: Sequence[Kept],
    module: nn.Module,
    program: Program,
    numbers: Collection[tuple[int, str]],
) -> None:
    """Tells calls which buffers their graph has in hand, and whose state they are to leave alone.

    Args:
        calls: of the program's nodes.
        module: that was captured.
        program: its graph.
        numbers: places of buffers that stand for numbers.

    Raises:
        CaptureError: one may read a buffer under a name under which it is not as it is by then.
    """
    names = {value.name or "" for value in program.inputs(Role.BUFFER)}
    names |= {target_of(value) for value in program.outputs(Role.UPDATED_BUFFER)}
    graph = [each for each in named(module, names) if place_of(each) not in numbers]
    for call in calls:
        if call.comes_to_more:
            call.around = module
            call.shared = others(graph, [*call.parameters, *call.buffers])
    _check_names(calls, module)


def _check_names(calls: Sequence[Kept], module: nn.Module) -> None:
    """Raises where what stands for a buffer during a call does so under some of its names alone."""
    replaced = {id(call): _replaced(call) for call in calls}
    wanted = {memory_of(b.tensor) for buffers in replaced.values() for b in buffers}
    if not wanted:
        return
    known = {memory for memory, count in _shown(module).items() if count > 1} & wanted
    for call in calls:
        for buffer in replaced[id(call)]:
            if memory_of(buffer.tensor) in known:
                name = buffer.places[0][1]
                raise CaptureError(
                    f"{call.site.name} can be no node of a graph that PyTorch runs",
                    where=call.site.where,
                    because=f"{name!r}, which is written to in the forward, is also known under "
                    f"another name, or a part of it is; and it stays PyTorch's as "
                    f"{call.site.because}",
                    help="keep the tensor in one place, or leave this module to PyTorch",
                )


def _replaced(call: Kept) -> list[Parameter]:
    """The buffers that another tensor stands for during a call, and holds something else."""
    first = len(call.arguments.plain)
    written = set(call.written) if isinstance(call, Routine) else set()
    own = [p for i, p in enumerate(call.parameters, first) if i in written]
    return [*(p for p in own if p.registry == BUFFERS), *call.buffers]


def _shown(module: nn.Module) -> Counter[int]:
    """How many names each memory has, of all under which the module's code may come to it."""
    registered = [each.tensor for each in (*Parameter.all_of(module), *buffers_of(module))]
    held = {id(tensor): tensor for tensor in _held(module)}
    return Counter(map(memory_of, (*registered, *held.values())))


def _held(module: nn.Module) -> Iterator[Tensor]:
    """The tensors in attributes, containers and free variables."""
    for holder in Survey(module).holders:
        held: Any = holder.object if isinstance(holder.object, Tensor) else holder.read()
        if isinstance(held, dict):
            held = [value for name, value in held.items() if name not in FREE]
        for leaf in pytree.tree_leaves([*held] if isinstance(held, set) else held):
            if isinstance(leaf, Tensor):
                yield leaf
