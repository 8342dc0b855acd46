"""Eager once more: a forward that a step ran, run by PyTorch, for its gradients.

A step's backward has no backward of its own, knows no tangents and no batches of gradients, and may
fail. PyTorch can do all of that: so the graph that the step is of runs again as PyTorch's, on the
inputs that the step read, and autograd differentiates that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from ortrain.errors import OrtrainError, UnsupportedGradient

Gradients = list[Tensor | None]

# A leaf that every backward reaches which was not asked for the gradients of some tensors alone.
PROBE = torch.zeros((), requires_grad=True)


class Caller(Protocol):
    """The form of call that a forward belongs to, which learns from its backwards."""

    def differentiated_again(self) -> None:
        """Gradients were asked for that can be differentiated again."""

    def recovers(self, error: OrtrainError, call: Any) -> bool:
        """Whether eager may answer a backward that failed in the graph; it is counted then."""


class Repeats(Protocol):
    """What runs the forward of a step again in PyTorch."""

    def around(self, call: Any) -> contextlib.AbstractContextManager[None]:
        """What has to be around a forward and its backward: all as it was in the graph's."""

    def forward(
        self, call: Any, wrt: Sequence[Tensor], buffers: Mapping[int, Tensor], *, seed: int | None
    ) -> Repeated:
        """The forward once more, inside of `around`."""


class Repeated:
    """A forward in PyTorch, for the gradients of one that a step ran.

    Args:
        outputs: of the program, None where one is a number. Views that the graph returns may stand
            behind them, and sizes.
        views: what stood for the arguments and parameters, by their ids.
        wrt: the ids of those, in order.
    """

    def __init__(
        self, outputs: Sequence[Any], views: Mapping[int, Tensor], wrt: Sequence[int]
    ) -> None:
        self.outputs, self.views, self.wrt = outputs, views, wrt

    def gradients(
        self,
        upstream: Sequence[Tensor | None],
        *,
        create_graph: bool,
        retain_graph: bool | None = None,
        whole: bool = False,
    ) -> Gradients:
        """The gradients of the arguments and parameters.

        Args:
            upstream: the gradient of each output.
            create_graph: whether the gradients can be differentiated again.
            retain_graph: whether others may be asked for afterwards; as ``create_graph`` if None.
            whole: whether the gradient of an output is the whole one, with what other outputs have
                sent to it.
        """
        pairs = [
            (output, gradient)
            for output, gradient in zip(self.outputs, upstream, strict=False)
            if gradient is not None and _has_gradient(output)
        ]
        total: dict[int, Tensor | None] = dict.fromkeys(self.views)
        if pairs:
            hooks = [output.register_hook(_giving(g)) for output, g in pairs if whole]
            views = self.outputs[len(upstream) :] if whole else ()
            # What has come to a view went on from it.
            hooks += [view.register_hook(_ended) for view in views if _has_gradient(view)]
            outputs, arriving = zip(*pairs, strict=True)
            try:
                gradients = torch.autograd.grad(
                    outputs, list(self.views.values()), arriving,
                    create_graph=create_graph, retain_graph=retain_graph, allow_unused=True,
                )  # fmt: skip
            finally:
                for hook in hooks:
                    hook.remove()
            total = dict(zip(self.views, gradients, strict=True))
        return [total.pop(each, None) for each in self.wrt]

    def between(
        self,
        place: int,
        gradient: Tensor,
        before: Sequence[int],
        given: Sequence[bool],
        *,
        create_graph: bool,
    ) -> Gradients:
        """What an output sends to those that it is computed from, on ways that meet no third.

        Args:
            place: of the output.
            gradient: of it.
            before: the places of the others.
            given: of each output, whether the graph has given it: what it has not, since nobody
                reads it, ends no way.
            create_graph: whether the gradients can be differentiated again.
        """
        output = self.outputs[place]
        result: Gradients = [None] * len(before)
        if not _has_gradient(output):
            return result
        heard: dict[int, Tensor | None] = {}

        def listening(number: int) -> Callable[[Tensor | None], Tensor | None]:
            def listen(gradient: Tensor | None) -> Tensor | None:
                heard[number] = gradient
                return _ended(gradient)

            return listen

        others = [
            (number, each)
            for number, each in enumerate(self.outputs)
            if number != place and each is not output and _has_gradient(each)
            if number >= len(given) or given[number]
        ]
        hooks = [each.register_hook(listening(number)) for number, each in others]
        wanted = [each for number, each in others if number in before]
        try:
            if wanted:
                torch.autograd.grad(
                    output, wanted, gradient,
                    create_graph=create_graph, retain_graph=True, allow_unused=True,
                )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()
        return [heard.get(number) for number in before]


def _has_gradient(output: Any) -> TypeGuard[Tensor]:
    """Whether autograd leads back from an output.

    To ask for its node also renews that of a view whose memory was written to since. PyTorch 2.13
    crashes where a hook comes to such a view before.
    """
    if not isinstance(output, Tensor) or not output.requires_grad:
        return False
    _ = output.grad_fn
    return True


def _giving(gradient: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: gradient


def _ended(gradient: Tensor | None) -> Tensor | None:
    """A hook that lets nothing pass; of several views that are made at once, one may have none."""
    return None if gradient is None else torch.zeros_like(gradient)


def view_of(tensor: Tensor) -> Tensor:
    """A view of a tensor that is connected to it."""
    if tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()  # frozen since the forward


def instead_of(tensor: Tensor, views: Mapping[int, Tensor]) -> Tensor:
    """What stands for a tensor: its view, or the tensor itself without a gradient."""
    view = views.get(id(tensor))
    if view is not None:
        return view
    return tensor.detach() if tensor.requires_grad else tensor


class Sealed(torch.autograd.Function):
    """Gradients that cannot be differentiated again, and say so."""

    @staticmethod
    def forward(ctx: Any, why: OrtrainError, count: int, *tensors: Tensor | None) -> Any:
        """The first ``count`` tensors, connected to all of them."""
        ctx.why = why
        return tuple([None if g is None else g.view_as(g) for g in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        """Raises what stood in the way."""
        why: OrtrainError = ctx.why
        raise UnsupportedGradient(
            "a gradient of a gradient through ORTModule",
            because=f"{why.what}: {why.because}" if why.because else why.what,
            help=why.help,
        )
