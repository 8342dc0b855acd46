"""Running a compiled step under autograd. Every microsecond here is paid at every step.

A three-layer perceptron of width 64 takes eager PyTorch about 115 µs forward and backward, so this
file prefers plain lists and local names, and does nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ortrain.capture.survey import contents
from ortrain.errors import StateError, UnsupportedGradient
from ortrain.program import Role
from ortrain.runtime.bridge import all_to_torch, to_ort
from ortrain.runtime.onnxruntime.executor import OrtValueVector
from ortrain.step.build import Plan

Received = tuple[bool, ...]
"""Which outputs receive a gradient."""


class Feeds:
    """The feeds of a forward: what changes at every call first, then parameters and buffers.

    The ``OrtValue`` of a parameter is made once, and again where its memory has moved. That of a
    parameter that is not contiguous is a copy, and made at every call.

    Args:
        plan: the compiled step.
        tensors: parameters and buffers by name.
        copied: buffers to copy, because this forward overwrites what its backward still reads.
    """

    def __init__(
        self, plan: Plan, tensors: dict[str, torch.Tensor], copied: Collection[str] = ()
    ) -> None:
        self.names = [name for _, name in plan.feeds]
        self.users = [i for i, (role, _) in enumerate(plan.feeds) if role is Role.USER_INPUT]
        self.seeded = any(role is Role.SEED for role, _ in plan.feeds)
        held = (Role.PARAMETER, Role.BUFFER)
        self.held = [tensors[name] for role, name in plan.feeds if role in held]
        roles = [role for role, _ in plan.feeds]
        assert roles == sorted(roles, key=_ORDER.__getitem__), "feeds come by role"
        names = [name for role, name in plan.feeds if role in held]
        self.copied = {i for i, name in enumerate(names) if name in copied}
        self.pointers = [_COPIED] * len(self.held)
        self.values = [self._again(i, tensor) for i, tensor in enumerate(self.held)]

    def __call__(self, users: Sequence[torch.Tensor]) -> Any:
        """All feeds of one forward, in the order of the program's inputs."""
        vector = OrtValueVector()
        push = vector.push_back
        for tensor in users:
            push(to_ort(tensor))
        if self.seeded:
            push(to_ort(draw_seed()))
        pointers = self.pointers
        for i, (tensor, value) in enumerate(zip(self.held, self.values, strict=True)):
            if tensor.data_ptr() != pointers[i] or not tensor.is_contiguous():
                value = self.values[i] = self._again(i, tensor)
            push(value)
        return vector

    def _again(self, i: int, tensor: torch.Tensor) -> Any:
        if i in self.copied:
            return to_ort(tensor.clone())
        self.pointers[i] = tensor.data_ptr() if tensor.is_contiguous() else _COPIED
        return to_ort(tensor)


_COPIED = -1  # the address of no tensor
_ORDER = {Role.USER_INPUT: 0, Role.SEED: 1, Role.BUFFER: 2, Role.PARAMETER: 2}


def draw_seed() -> torch.Tensor:
    """A seed from torch's generator, so that ``torch.manual_seed`` repeats a run."""
    return torch.empty((), dtype=torch.int64).random_()


class Step:
    """A plan bound to the tensors of one module.

    Args:
        plan: the compiled step.
        tensors: parameters and buffers by name.
        other: called where the outputs that receive a gradient are not those the plan expects;
            returns the step for them.

    Attributes:
        leaves: the parameters that receive a gradient.
    """

    def __init__(
        self, plan: Plan, tensors: dict[str, torch.Tensor], other: Callable[[Received], Step]
    ) -> None:
        self.plan = plan
        # With two outputs or more, the backward may be asked for gradients of others than expected,
        # and then the forward runs again.
        self.may_differ = sum(plan.reachable) > 1
        updated = {name for _, name in plan.updated}
        read = {plan.feeds[i][1] for i in plan.reads_back}
        self.feeds = Feeds(plan, tensors, updated if self.may_differ else updated & read)
        self.other = other
        self.buffers = [(i, tensors[name]) for i, name in plan.updated]
        self.parameters = [tensors[n] for n in plan.arguments if n in tensors]
        names = self.feeds.names
        users = [names[i] for i in self.feeds.users]
        self.inputs = [users.index(n) for n in plan.arguments if n not in tensors]
        place = {name: i for i, name in enumerate(plan.wrt)}
        self.order = [place.get(name, -1) for name in plan.arguments]
        self.leaves = [tensors[n] for n in plan.arguments if n in tensors and n in place]
        held = enumerate(self.feeds.held)
        self.lasting = [tensor for i, tensor in held if i not in self.feeds.copied]
        # Autograd is told of what the backward reads, to notice an in-place change of it.
        self.reads_users = [i for i in plan.reads_back if i < len(users)]
        first = len(names) - len(self.feeds.held)
        own = [i - first for i in plan.reads_back if i >= first]
        self.reads_held = [self.feeds.held[i] for i in own if i not in self.feeds.copied]

    def infer(self, users: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the forward alone."""
        fetches = self.plan.forward.run_values(self.feeds(users))
        tensors = all_to_torch(fetches, self.plan.bools)
        self.write_back(tensors)
        return tensors[: self.plan.outputs]

    def try_out(self, users: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the forward alone and updates no buffer."""
        fetches = self.plan.forward.run_values(self.feeds(users))
        return all_to_torch(fetches, self.plan.bools)[: self.plan.outputs]

    def train(self, users: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the forward and leaves a backward with autograd."""
        inputs = self.inputs
        result = _Function.apply(self, users, *[users[i] for i in inputs], *self.parameters)
        return result if isinstance(result, tuple) else (result,)

    def write_back(self, tensors: list[torch.Tensor]) -> None:
        """Updates the buffers in place."""
        for i, buffer in self.buffers:
            buffer.copy_(tensors[i])


class _Function(torch.autograd.Function):
    """One node of autograd's graph for the whole module."""

    @staticmethod
    def forward(ctx: Any, step: Step, users: Any, *tensors: torch.Tensor) -> Any:
        plan = step.plan
        feeds = step.feeds(users)
        fetches = plan.forward.run_values(feeds)
        count = plan.outputs
        outputs = [_at(fetches, i, i in plan.bools) for i in range(count)]
        ctx.replay = _Replay(step, feeds, users) if step.may_differ else None
        for i, buffer in step.buffers:
            buffer.copy_(_at(fetches, i, False))
        ctx.step, ctx.stash = step, _stash(plan, feeds, fetches)
        ctx.set_materialize_grads(False)
        watched = [users[i] for i in step.reads_users]
        ctx.save_for_backward(*watched, *step.reads_held, *[outputs[i] for i in plan.keeps_outputs])
        fixed = [t for t, reachable in zip(outputs, plan.reachable, strict=True) if not reachable]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return outputs[0] if count == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  (raises where one of them was changed in place)
        step, stash, replay = ctx.step, ctx.stash, ctx.replay
        if stash is None:
            raise StateError(
                "a second backward through the same forward of ORTModule",
                because="what the forward saved was freed by the first backward",
                help="call the module again, or sum the losses and call backward once",
            )
        ctx.stash = ctx.replay = None
        for given, expected in zip(upstream, step.plan.upstream, strict=True):
            if (given is not None) is not expected:
                step, stash = replay(tuple([g is not None for g in upstream]))
                break
        del replay
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                gradients = _run_backward(step, stash, upstream)
            sealed = [None if g is None else g.requires_grad_() for g in gradients]
            return (None, None, *_FirstOrder.apply(*sealed))
        return (None, None, *_run_backward(step, stash, upstream))


class _Replay:
    """A forward that can run again: for gradients of other outputs than the step expects.

    The seed is among the feeds, so what the forward saves is the same to the bit.
    """

    __slots__ = ("feeds", "step", "tensors", "versions")

    def __init__(self, step: Step, feeds: Any, users: Sequence[torch.Tensor]) -> None:
        self.step, self.feeds = step, feeds
        self.tensors = [*step.lasting, *users]
        self.versions = contents(self.tensors)

    def __call__(self, received: Received) -> tuple[Step, list[Any]]:
        """The step for these gradients, and what its forward saves."""
        if contents(self.tensors) != self.versions:
            raise StateError(
                "a parameter or an input was changed in place between forward and backward",
                because="the gradient arrives at other outputs than expected, so that the forward "
                "has to run again on the same values",
                help="call backward before the optimizer steps",
            )
        other = self.step.other(received)
        place = {name: i for i, name in enumerate(self.step.feeds.names)}
        feeds = OrtValueVector()
        for name in other.feeds.names:
            feeds.push_back(self.feeds[place[name]])
        return other, _stash(other.plan, feeds, other.plan.forward.run_values(feeds))


class _FirstOrder(torch.autograd.Function):
    """Gradients that cannot be differentiated again, and say so."""

    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return tuple([None if g is None else g.view_as(g) for g in gradients])

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        raise UnsupportedGradient(
            "a gradient of a gradient through ORTModule",
            because="its backward is a compiled graph without a backward of its own",
            help='run this module eagerly: Options(engine="torch")',
        )


def _stash(plan: Plan, feeds: Any, fetches: Any) -> list[Any]:
    """The feeds of each backward piece, as far as the forward knows them."""
    stash = []
    for piece in plan.pieces:
        vector = OrtValueVector()
        push = vector.push_back
        for source in piece.takes:
            if source.kind == "fetch":
                push(fetches[source.index])
            elif source.kind == "feed":
                push(feeds[source.index])
            else:
                break
        stash.append(vector)
    return stash


def _at(values: Any, index: int, is_bool: bool) -> torch.Tensor:
    tensor: torch.Tensor = torch._C._from_dlpack(values.dlpack_at(index))
    return tensor.view(torch.bool) if is_bool else tensor


def _run_backward(
    step: Step, stash: list[Any], upstream: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    plan = step.plan
    gradients: list[torch.Tensor | None] = [None] * len(plan.wrt)
    carried: list[Any] = []
    for number, piece in enumerate(plan.pieces):
        feeds = stash[number]
        stash[number] = None
        for source in piece.takes:
            if source.kind == "upstream":
                gradient = upstream[source.index]
                assert gradient is not None
                feeds.push_back(to_ort(gradient))
            elif source.kind == "carry":
                feeds.push_back(carried[source.index])
        fetches = piece.compiled.run_values(feeds)
        del feeds
        for i in piece.frees:
            carried[i] = None
        if piece.carries:
            carried += [fetches[i] for i in piece.carries]
            for position, target in piece.gives:
                gradients[target] = _at(fetches, position, False)
        else:
            tensors = all_to_torch(fetches)
            for position, target in piece.gives:
                gradients[target] = tensors[position]
    gradients.append(None)  # what -1 in the order finds
    return [gradients[i] for i in step.order]
