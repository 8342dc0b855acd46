"""Outputs that are computed from other outputs, with nodes of their own in autograd's graph.

Autograd calls the hooks of an output, keeps its ``grad`` and gives it to ``autograd.grad`` when all
that was computed from it has sent its gradient. So logits must come behind the loss that the module
has made of them. An output that is computed from others is therefore given by a :class:`Follower`,
which has these as inputs. A view that the module returns, and has computed others from, is such an
input as well. Where nobody looks at what passes between outputs, nothing does: the followers only
note what arrives, and the graph's backward runs once for all of it. Where somebody does, the
module's own forward runs again, and autograd says what each output sends to the others.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled

from ortrain.errors import OrtrainError
from ortrain.pytorch.backwards import task_of_backward
from ortrain.pytorch.hooks import heard_even_if_freed
from ortrain.pytorch.nodes import executes
from ortrain.step.links import Linked, Views
from ortrain.step.replay import PROBE, Gradients
from ortrain.step.sample import Sample

if TYPE_CHECKING:
    from ortrain.step.saved_forward import SavedForward

_PROBED: Any = PROBE.view_as(PROBE).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class _Here(threading.local):
    looks = True


_here = _Here()


@contextlib.contextmanager
def nobody_looks() -> Iterator[None]:
    """What is asked for inside are gradients of parameters and arguments, and of no output."""
    _here.looks = False
    try:
        yield
    finally:
        _here.looks = True


class Chain:
    """The outputs of one forward on their way out, and their gradients on their way back.

    Args:
        kept: what the forward has left, which the node of the roots holds.
        outputs: of the forward.
        linked: how they are computed from one another.

    Attributes:
        arrived: the gradients of the other outputs in the backward that runs.
    """

    __slots__ = (
        "arrived", "hooks", "kept", "linked", "outputs", "plan", "task", "tensors", "told",
    )  # fmt: skip

    def __init__(self, kept: SavedForward, outputs: list[Tensor], linked: Linked) -> None:
        self.kept, self.plan, self.outputs = weakref.ref(kept), kept.step.plan, outputs
        self.linked = linked
        self.arrived: dict[int, Tensor] = {}
        self.task, self.told = -1, False
        self.hooks: dict[int, OrderedDict[int, Any]] = {}
        self.tensors: dict[int, weakref.ref[Tensor]] = {}

    def given(self, first: Sequence[Tensor], token: Tensor, inputs: Sequence[Any]) -> list[Tensor]:
        """All outputs, with their nodes, and the views of them and of arguments.

        Args:
            first: those that are computed from no other.
            token: by which their node comes behind all others.
            inputs: the arguments of the call.
        """
        linked, count = self.linked, self.plan.outputs
        results: dict[int, Tensor] = dict(zip(linked.roots, first, strict=True))
        for each in linked.order:
            if isinstance(each, Views):
                made = each.taken(inputs, results)
                results |= {count + i: view for i, view in made.items()}
            else:
                before = [results[i] for i in linked.before[each]]
                results[each] = Follower.apply(self, each, token, *before)
        self.outputs = []
        for place in linked.heard:
            tensor = results[place]
            if tensor.grad_fn is None:
                continue  # a view of an argument that requires no gradient
            self.hooks[place] = heard_even_if_freed(tensor)
            self.tensors[place] = weakref.ref(tensor)
        return [results[i] for i in range(len(results))]

    def arrives(self, place: int, gradient: Tensor | None) -> None:
        """Notes the gradient of an output in the backward that runs."""
        if (task := task_of_backward()) != self.task:
            # An earlier one may have ended before it came to the roots.
            self.task, self.arrived, self.told = task, {}, self._somebody_looks()
        if gradient is not None:
            self.arrived[place] = gradient

    def sent(self, place: int, gradient: Tensor | None) -> Gradients:
        """What an output sends to those that it is computed from; nothing where nobody looks.

        Raises:
            StateError: the module, or a tensor that the outputs depend on, was changed.
            UnsupportedGradient: the module cannot run again.
        """
        before, kept = self.linked.before[place], self.kept()
        if gradient is None or not self.told or kept is None:
            return [None] * len(before)
        try:
            with kept.repeated([i == place for i in range(self.plan.outputs)]) as repeated:
                return repeated.between(
                    place, gradient, before, self.plan.reachable, create_graph=is_grad_enabled()
                )
        except OrtrainError:
            if self._has_hooks():
                raise
            # Gradients of parameters alone were probably asked for, which are right all the same.
            self.told = False
            return [None] * len(before)

    def upstream(self, first: Sequence[Tensor | None]) -> tuple[Gradients, bool]:
        """The gradients of all outputs, and whether each is the whole one.

        Args:
            first: those of the outputs that are computed from no other.
        """
        if task_of_backward() != self.task:
            self.arrived, self.told = {}, False
        result: Gradients = [None] * self.plan.outputs
        for place, gradient in zip(self.linked.roots, first, strict=True):
            result[place] = gradient
        for place, gradient in self.arrived.items():
            result[place] = gradient
        self.arrived = {}
        return result, self.told

    def _somebody_looks(self) -> bool:
        """Whether the gradients between outputs are seen: by hooks, or as what is asked for."""
        return self._has_hooks() or (_here.looks and not executes(_PROBED))

    def _has_hooks(self) -> bool:
        for hooks in self.hooks.values():
            for hook in hooks.values():
                if not isinstance(getattr(hook, "__self__", None), Sample):
                    return True
        for reference in self.tensors.values():
            tensor = reference()
            if tensor is not None and tensor.retains_grad:
                return True
        return False


class Follower(torch.autograd.Function):
    """The node of an output that is computed from others."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, place: int, token: Tensor, *before: Tensor) -> Tensor:
        """The output, which the graph has computed already."""
        ctx.chain, ctx.place = chain, place
        ctx.set_materialize_grads(False)
        return chain.outputs[place]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """What goes to the outputs before, and a sign to the node of the roots."""
        chain: Chain = ctx.chain
        chain.arrives(ctx.place, gradient)
        return (None, None, torch.zeros(()), *chain.sent(ctx.place, gradient))
