"""Calls that stay PyTorch's, in a trace: each goes through one operator of which it sees no more.

What a call gives is found beside the trace, by running its code on tensors without contents: the
shapes and dtypes of its tensors, and which inputs a gradient reaches. The trace then has one
operator, ``ortrain::kept``, with the tensors that the call was given and the number of the call among
those of the trace (:class:`Keeper`).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.capture.trace.aside import aside
from ortrain.errors import CaptureError, OrtrainError
from ortrain.guards.autocast import active
from ortrain.kept.arguments import Arguments, Result
from ortrain.kept.call import Kept, Parameter, Site
from ortrain.ops.kept import keys_of
from ortrain.program import Program

_LIBRARY = torch.library.Library("ortrain", "FRAGMENT")
_LIBRARY.define("kept(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")


@dataclass
class Keeper:
    """What of a module stays PyTorch's in its graph.

    Attributes:
        functions: whether custom autograd functions do that cannot be taken apart.
        operators: whether operators do that a graph has not.
        modules: names of sub-modules that do, each with the reason.
        calls: of the trace that is under way or was the last, by their numbers.
        results: of each call, tensors without contents.
    """

    functions: bool = True
    operators: bool = True
    modules: Mapping[str, str] = field(default_factory=dict)
    calls: list[Kept] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """A trace begins."""
        self.calls, self.results = [], []

    def called(self, call: Kept, results: list[Tensor]) -> int:
        """Notes a call and what it gives; returns its number."""
        self.calls.append(call)
        self.results.append(results)
        return len(self.calls) - 1

    def kept(self, program: Program) -> tuple[Kept, ...]:
        """The calls of a program's nodes, in their order; the trace is forgotten.

        Raises:
            CaptureError: a call that does more than to compute is not among them.
        """
        keys = keys_of(program.graph)
        by_key = {call.key: call for call in self.calls}
        for call in self.calls:
            if call.key not in keys and not call.repeatable:
                raise _refused(call.site, "nothing reads what it returns, and it does more")
        self.release()
        return tuple(by_key[key] for key in keys)

    def release(self) -> None:
        """Forgets the tensors of the trace."""
        self.results = []
        for call in self.calls:
            call.arguments.release()
            if call.result is not None:
                call.result.release()


_current: contextvars.ContextVar[Keeper | None] = contextvars.ContextVar(
    "ortrain.capture.keeper", default=None
)


def keeper() -> Keeper | None:
    """Of the trace that is under way; None where all is to be taken apart or refused."""
    return _current.get()


@contextlib.contextmanager
def keeping(wanted: Keeper | None) -> Iterator[None]:
    """Inside, traces keep what is wanted."""
    token = _current.set(wanted)
    try:
        yield
    finally:
        _current.reset(token)


@torch.library.register_fake("ortrain::kept")
def _kept(tensors: Sequence[Tensor], sizes: Sequence[int], number: int) -> list[Tensor]:
    """New tensors like those that the call of a number gives."""
    known = _current.get()
    assert known is not None, "a call is kept outside of its capture"
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        for t in known.results[number]
    ]


def keep(
    keeper: Keeper,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    site: Site,
    module: nn.Module | None = None,
) -> Any:
    """Records a call as one operator, and returns what it returns in the trace.

    Args:
        keeper: of the trace.
        function: that is called.
        args: of the trace.
        kwargs: of the trace.
        site: of the call.
        module: whose forward the function is; its parameters are inputs, too.

    Raises:
        CaptureError: the call cannot be a node of a graph.
    """
    arguments = Arguments(args, kwargs)
    call = Kept(
        function, arguments, site,
        grad=torch.is_grad_enabled(), autocast=active(), module=module,
    )  # fmt: skip
    held = [] if module is None else [p.tensor for p in Parameter.all_of(module)]
    tensors, sizes = [*arguments.tensors, *held], arguments.sizes
    if not tensors:
        raise _refused(site, "it is given no tensor, so that nothing says when it is to run")
    try:
        results, differentiable = _found_out(call, tensors, sizes)
    except OrtrainError:
        raise
    except Exception as error:
        raise _refused(
            site, f"on tensors without contents it raises {type(error).__name__}: {error}"
        ) from error
    if not results:
        raise _refused(site, "it returns no tensor")
    number = keeper.called(call, results)
    given = torch.ops.ortrain.kept(tensors, sizes, number)
    outputs = [
        t if reached or not t.is_floating_point() else t.detach()
        for t, reached in zip(given, differentiable, strict=True)
    ]
    assert call.result is not None
    return call.result.rebuilt(outputs)


def _found_out(
    call: Kept, tensors: Sequence[Tensor], sizes: Sequence[Any]
) -> tuple[list[Tensor], list[bool]]:
    """Runs a call beside the trace.

    Notes how its tensors make up its result, which inputs a gradient reaches, and whether it draws.

    Returns:
        Its tensors, and whether each of them has a gradient.
    """
    mode: Any = torch._guards.detect_fake_mode(list(tensors))
    plain = [*call.arguments.plain, *[True] * (len(tensors) - len(call.arguments.plain))]
    draws = _Draws()
    with aside(), mode, torch.set_grad_enabled(call.grad), draws, _marked_dirty() as dirty:
        leaves = [
            t.detach().requires_grad_(call.grad and p and t.is_floating_point())
            for t, p in zip(tensors, plain, strict=True)
        ]
        versions = [t._version for t in leaves]
        output = call.call([*leaves, *sizes])
        if dirty or versions != [t._version for t in leaves]:
            raise _refused(call.site, "it changes one of its arguments in place")
        call.result = Result(output)
        results = call.result.tensors
        call.repeatable = not draws.seen
        call.connected = _connected(results, leaves)
        return [t.detach() for t in results], [t.requires_grad for t in results]


def _connected(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[bool]:
    """Of each input whether a gradient reaches it; of all that may where that cannot be tried."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    roots = [t for t in results if t.requires_grad]
    if not wanted or not roots:
        return [False] * len(leaves)
    try:
        found = torch.autograd.grad(
            roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True
        )
    except Exception:  # its backward needs values
        return [leaf.requires_grad for leaf in leaves]
    reached = {id(leaf) for leaf, g in zip(wanted, found, strict=True) if g is not None}
    return [id(leaf) in reached for leaf in leaves]


class _Draws(TorchDispatchMode):
    """Sees whether random numbers are drawn."""

    seen = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in operator.tags
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def _marked_dirty() -> Iterator[list[Tensor]]:
    """Collects the tensors that custom functions say they change."""
    context: Any = torch.autograd.function.FunctionCtx
    own, found = context.mark_dirty, list[Tensor]()

    def mark(self: Any, *tensors: Tensor) -> None:
        found.extend(tensors)
        own(self, *tensors)

    context.mark_dirty = mark
    try:
        yield found
    finally:
        context.mark_dirty = own


def _refused(site: Site, because: str) -> CaptureError:
    return CaptureError(
        f"{site.name} can be no node of a graph that PyTorch runs",
        where=site.where,
        because=f"{because}; and it cannot be taken apart, as {site.because}",
        help="change it, or leave this module to PyTorch",
    )
