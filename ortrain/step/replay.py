"""Eager once more: a forward that a graph ran, run by the module itself, for its gradients.

A graph's backward has no backward of its own, knows no tangents and no batches of gradients, and
may fail. PyTorch can do all of that: so the module's own forward runs again, on the arguments,
parameters and buffers that the graph read, with nothing of the module changed by it, and autograd
differentiates that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from ortrain.errors import OrtrainError, StateError, UnsupportedGradient
from ortrain.guards.guard import Guard
from ortrain.guards.handed import Containers
from ortrain.guards.structure import FlatCall, OutputStructure
from ortrain.module_state.modes import modes_kept
from ortrain.module_state.stand_in import standing_in
from ortrain.module_state.untouched import untouched
from ortrain.pytorch.autocast import active, autocast_as, without_autocast
from ortrain.step.draws import replayed_draws
from ortrain.step.parts import without_stand_ins

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

    def expect_no_other(self, outputs: Sequence[Tensor], views: Collection[Tensor]) -> None:
        """Raises where autograd would go on from the outputs to something else than the views."""


class Original:
    """The module behind a capture, in the state in which it was captured.

    Args:
        module: the module.
        guard: what watches it, for that state.
        rebuild: makes the module's output of the program's.
        outputs: how many the program has.
    """

    def __init__(
        self,
        module: nn.Module,
        guard: Callable[[], Guard],
        rebuild: Callable[[Sequence[Tensor]], Any],
        outputs: int,
    ) -> None:
        self.module, self.guard = module, guard
        self.training = [(part, part.training) for part in module.modules()]
        self.dtype, self.autocast = torch.get_default_dtype(), active()
        stand_ins = [torch.zeros(()) for _ in range(outputs)]
        found, _ = OutputStructure.from_output(rebuild(stand_ins))
        # Where each output of the program stands among the module's; None where it is a number.
        self.places = [
            next((i for i, t in enumerate(found) if t is each), None) for each in stand_ins
        ]

    def gradients(
        self,
        call: FlatCall,
        wrt: Sequence[Tensor],
        buffers: Mapping[int, Tensor],
        upstream: Sequence[Tensor | None],
        *,
        seed: int | None,
        create_graph: bool,
    ) -> Gradients:
        """The gradients that autograd gives for one call.

        They are partial derivatives, at whatever produced the arguments autograd goes on by itself.
        So each tensor stands in the call, and in the module, as a view of its own, at which
        autograd stops: an argument may have been computed from the very parameters. With
        ``create_graph`` the gradients are functions of the tensors themselves, through these views.

        Args:
            call: the arguments as they came.
            wrt: arguments and parameters that required a gradient in the forward.
            buffers: what the forward read, by the id of each buffer that it has changed.
            upstream: the gradient of each output of the program.
            seed: of the random numbers that the graph drew; None where it drew none.
            create_graph: whether the gradients can be differentiated again.

        Returns:
            One for each of ``wrt``; of a tensor that is there twice, the whole at the first place.

        Raises:
            StateError: the module is in another state now.
            CaptureError: PyTorch cannot draw the same random numbers.
            UnsupportedGradient: the module reads parameters that are not its own.
        """
        with self.around(call):
            repeated = self.forward(call, wrt, buffers, seed=seed)
            return repeated.gradients(upstream, create_graph=create_graph)

    @contextlib.contextmanager
    def around(self, call: FlatCall) -> Iterator[None]:
        """What has to be around a forward and its backward: all as it was in the graph's."""
        with self._as_captured(), call.as_it_was(), torch.enable_grad():
            yield

    def forward(
        self,
        call: FlatCall,
        wrt: Sequence[Tensor],
        buffers: Mapping[int, Tensor],
        *,
        seed: int | None,
    ) -> Repeated:
        """The module's forward once more, inside of `around`; arguments and errors as above."""
        views = {id(tensor): view_of(tensor) for tensor in wrt}
        given, structure = OutputStructure.from_output((call.args, call.kwargs))
        args, kwargs = structure.rebuild([instead_of(t, views) for t in given])
        draws = contextlib.nullcontext() if seed is None else replayed_draws(seed)
        with untouched(self.module), draws, autocast_as(self.autocast):
            containers = Containers(args, kwargs)
            state = standing_in(self.module, self._state(views, buffers))
            output = torch.func.functional_call(self.module, state, args, kwargs, tie_weights=False)
            output = containers.handed(output)
        found, _ = OutputStructure.from_output(output)
        outputs = [None if place is None else found[place] for place in self.places]
        return Repeated(self, outputs, views, [id(tensor) for tensor in wrt])

    def _state(
        self, views: Mapping[int, Tensor], before: Mapping[int, Tensor]
    ) -> dict[str, Tensor]:
        """Parameters and buffers for one call: views of those asked for, copies of buffers."""
        copies: dict[int, Tensor] = {}
        state = {
            name: instead_of(parameter, views)
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            if id(buffer) not in copies:
                copies[id(buffer)] = before.get(id(buffer), buffer).detach().clone()
            state[name] = copies[id(buffer)]
        return state

    def expect_no_other(self, outputs: Sequence[Tensor], views: Collection[Tensor]) -> None:
        """Raises where autograd would go on from the outputs to something else than the views."""
        leaves = {id(view) for view in views}
        for other in leaves_behind(outputs, {view.grad_fn for view in views}):
            if id(other) not in leaves and other is not PROBE:
                raise UnsupportedGradient(
                    f"{type(self.module).__name__} cannot run again in PyTorch for its gradients",
                    because="it reads a parameter that requires a gradient from elsewhere than "
                    "its own attributes",
                    help='run this module eagerly: Options(engine="torch")',
                )

    @contextlib.contextmanager
    def _as_captured(self) -> Iterator[None]:
        """Sets modes, attributes, hooks and what lists hold as they were in the forward.

        Raises:
            StateError: something else about the module is different.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_stand_ins())
            stack.enter_context(modes_kept(self.module))
            for part, training in self.training:
                part.training = training
            guard = self.guard()
            stack.enter_context(guard.as_seen())
            why = guard.changed()
            if why is not None:
                raise StateError(
                    f"{type(self.module).__name__} was changed between forward and backward",
                    because=f"the forward has to run again in PyTorch, and since then {why}",
                    help="call backward before you change the module",
                )
            stack.enter_context(without_autocast())
            # Parts with a wrapper of their own would run as graphs where a checkpoint repeats them
            # in the backward, and not in a forward whose parameters stand for others.
            for part in self.module.modules():
                resting = getattr(part.__dict__.get("_runner"), "resting", None)
                if resting is not None:
                    stack.enter_context(resting())
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            yield


class Repeated:
    """A forward of the module itself, for the gradients of one that a graph ran.

    Args:
        original: what has run it.
        outputs: of the program, None where one is a number; as the module has computed them. Views
            that it returns may stand behind them, and sizes.
        views: what stood for the arguments and parameters, by their ids.
        wrt: the ids of those, in order.
    """

    def __init__(
        self,
        original: Repeats,
        outputs: Sequence[Any],
        views: Mapping[int, Tensor],
        wrt: Sequence[int],
    ) -> None:
        self.original, self.outputs, self.views, self.wrt = original, outputs, views, wrt

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
            self.original.expect_no_other(outputs, self.views.values())
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


def leaves_behind(outputs: Sequence[Tensor], stops: Collection[Any] = ()) -> Iterator[Tensor]:
    """The tensors that a backward from some outputs gives gradients to.

    Args:
        outputs: where it begins.
        stops: nodes of autograd's graph at which it ends.
    """
    for node in nodes_behind(outputs, stops):
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf


def nodes_behind(outputs: Sequence[Tensor], stops: Collection[Any] = ()) -> Iterator[Any]:
    """The nodes of autograd's graph that a backward runs; arguments as of `leaves_behind`."""
    nodes: list[Any] = [output.grad_fn for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None or node in stops:
            continue
        yield node
        further = {each for each, _ in node.next_functions} - seen
        seen |= further
        nodes += further


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
