"""Functions and methods that stay PyTorch's in a trace: each call is one node.

In the trace it is not run: what was seen beside it (:class:`~ortrain.capture.trace.seen.Seen`) says
what the node gives. A call that does anything else later on is found out by
:class:`~ortrain.kept.routine.Routine`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ortrain.capture.trace.aside import aside, is_aside
from ortrain.capture.trace.found import Found, like, refused
from ortrain.capture.trace.functions import called_instead, twin_of
from ortrain.capture.trace.keeping import Keeper, keeper
from ortrain.capture.trace.seen import Seen, site_of
from ortrain.errors import CaptureError
from ortrain.exclusive import this_thread
from ortrain.kept.arguments import Arguments
from ortrain.kept.parameter import BUFFERS, Parameter
from ortrain.kept.routine import Routine
from ortrain.kept.shared import others
from ortrain.pytorch.autocast import active


@contextlib.contextmanager
def kept_routines(module: nn.Module) -> Iterator[None]:
    """Inside, calls of the functions that stay PyTorch's are nodes.

    Args:
        module: that is traced.
    """
    known, here = keeper(), this_thread()
    if known is None or not known.routines:
        yield
        return
    modules = {id(vars(each)): each for each in module.modules()}

    def keeping(function: FunctionType, own: FunctionType) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not here() or is_aside():
                return own(*args, **kwargs)
            # What a trace puts in the place of a module has its attributes.
            args, kwargs = pytree.tree_map_only(
                nn.Module, lambda m: modules.get(id(vars(m)), m), (args, kwargs)
            )
            try:
                return _keep(known, function, own, args, kwargs)
            except CaptureError as error:
                known.refused[function] = error.because
                raise

        return call

    twins = {function: twin_of(function) for function in known.routines}
    with called_instead({function: keeping(function, own) for function, own in twins.items()}):
        yield


def _keep(known: Keeper, function: FunctionType, own: FunctionType, args: Any, kwargs: Any) -> Any:
    """Records a call as one operator, and returns what it returns in the trace.

    Raises:
        CaptureError: the call cannot be a node of a graph.
    """
    site = site_of(function, known.routines[function])
    name = f"{site.name} {id(function)}"
    number = known.counts[name]
    known.counts[name] += 1
    if number >= len(known.seen.get(function, ())):
        raise refused(site, "the trace calls it, and the module itself does not")
    seen = known.seen[function][number]
    arguments = Arguments(args, kwargs)
    if seen.forms != [(t.dtype, t.dim()) for t in arguments.tensors]:
        raise refused(site, "the trace gives it other arguments than the module itself")
    if not seen.found.tensors and seen.found.repeatable:
        return own(*args, **kwargs)  # it changes nothing, and hands on what it is given
    if not seen.found.tensors:
        raise refused(site, "it returns no tensor of its own")
    if _in_checkpoint() and seen.drawn:
        raise refused(site, "it draws random numbers, and a checkpoint around it draws them anew")
    held = [Parameter(p.now(), p.places, p.registry) for p in seen.held]
    call = Routine(own, arguments, site, grad=torch.is_grad_enabled(), autocast=active(), held=held)
    call.buffers = others(known.assigned(), held)
    first = len(arguments.tensors)
    tensors = [*arguments.tensors, *[p.tensor for p in (*held, *call.buffers)]]
    users = {t.untyped_storage()._cdata: t for t in known.given}
    theirs = [i for i in range(first) if tensors[i].untyped_storage()._cdata in users]
    if not all(isinstance(tensors[i], FakeTensor) for i in seen.written):
        raise refused(site, "it changes a tensor in place that the module has as a plain attribute")
    call.written, call.own = seen.written, seen.own
    call.returned = [i for i in seen.written if i in theirs]
    if any(users[tensors[i].untyped_storage()._cdata] is not tensors[i] for i in call.returned):
        raise refused(site, "it changes a view of an argument of the module in place")
    buffers = [first + i for i, p in enumerate(held) if p.registry == BUFFERS]
    call.guarded = sorted({*seen.written, *theirs, *buffers})
    call.generators, call.original = list(known.generators), function
    found = like(_new_ones(seen), call, arguments.tensors)
    written = [_empty_like(tensors[i]) for i in seen.written]
    call.result, call.differentiable = seen.result, seen.found.differentiable
    call.connected, call.ways = seen.found.connected, seen.found.ways
    call.repeatable = seen.found.repeatable and not call.returned
    call.unreached = [
        i
        for i, (t, reached) in enumerate(zip(arguments.tensors, call.connected, strict=False))
        if call.grad and not reached and (t.is_floating_point() or t.is_complex())
    ]
    which = known.called(call, [*found.tensors, *written])
    given = torch.ops.ortrain.kept(tensors, arguments.sizes, which)
    outputs = [
        t if reached or not t.is_floating_point() else t.detach()
        for t, reached in zip(given, seen.found.differentiable, strict=True)
    ]
    new = outputs[: len(found.tensors)]
    for i, value in zip(seen.written, outputs[len(new) :], strict=True):
        tensors[i].copy_(value)
    left = iter(new)
    return seen.result.rebuilt([next(left) if i is None else tensors[i] for i in seen.own])


def _new_ones(seen: Seen) -> Found:
    """What was found of a call without what it wrote to."""
    found, count = seen.found, len(seen.found.tensors) - len(seen.written)
    return Found(
        found.result, found.tensors[:count], found.differentiable[:count], found.connected,
        found.repeatable, found.given, found.ways,
    )  # fmt: skip


def _empty_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, beside the trace."""
    mode: Any = torch._guards.detect_fake_mode([tensor])
    with aside(), mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _in_checkpoint() -> bool:
    """Whether a checkpoint is around the call."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False
