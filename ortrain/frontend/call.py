"""What graphs know of the call of a held module that they run in, and what it hears of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import is_grad_enabled, nn

from ortrain.errors import OrtrainError
from ortrain.passes.tokens import Shown
from ortrain.step.build import Plan
from ortrain.step.report import Saving
from ortrain.step.seeds import Seeds, draw_of

if TYPE_CHECKING:
    from ortrain.frontend.compiled import Compiled


class _Here(threading.local):
    call: Heard | None = None


_here = _Here()


@dataclass(frozen=True)
class Look:
    """What a graph's step was made for in a call.

    Attributes:
        plan: of the step.
        sizes: the value of each symbolic dimension.
        densities: of the sets of tokens, by what they are in words.
    """

    plan: Plan
    sizes: dict[str, int]
    densities: dict[str, float]


class Reads:
    """What is known of who reads a module's outputs beside its loss.

    Attributes:
        some: whether somebody has read one, or holds one at the backward.
        asked: whether there was a call in which that would have shown.
    """

    some = asked = False

    def heard(self) -> None:
        """Somebody has read one."""
        self.some = True


class Heard:
    """A call of a held module, which a ``with`` statement has around it.

    Args:
        module: it.
        compiled: it through Dynamo.
        given: the arguments.
        shown: what of its outputs somebody reads.

    Attributes:
        ran: its graphs that have run as steps, each with what it has returned.
        failed: why the last one that PyTorch ran in its place is none.
        savings: of those that may leave tokens out; None of those that are too small.
        begun: whether a graph of it has run, as a step or in PyTorch.
        made: how many graphs there were before it.
        converts: whether Dynamo converts what runs, for the module; around blocks, a function that
            the user has compiled is the user's.
        seeds: of its draws.
        grad: whether it has gradients.
        mode: around it, where what PyTorch runs draws as graphs do.
        draws: gives such a mode for a graph that PyTorch runs, where there is no recording to
            replay; None where steps run without one.
        may_convert: whether graphs and recordings may be made for it.
        may_part: asked once code has turned out to be several graphs, each of which is traced anew:
            whether it is worth it still.
        reads: learns whether anything but the loss is read; None where all outputs are computed.
        looks: of its graphs that have run as steps, what :class:`Look` tells; None where nobody
            asks.
    """

    def __init__(self, module: nn.Module, compiled: Compiled, given: Any, shown: Shown) -> None:
        self.module, self.compiled, self.given, self.shown = module, compiled, given, shown
        self.ran: list[tuple[Any, Any]] = []
        self.failed: OrtrainError | None = None
        self.savings: list[Saving | None] = []
        self.begun, self.made, self.converts = False, len(compiled.made), False
        self.seeds, self.grad = Seeds(), is_grad_enabled()
        self.mode: Any = None
        self.draws: Callable[[Seeds], AbstractContextManager[Any]] | None = None
        self.may_convert = True
        self.may_part: Callable[[], bool] = lambda: True
        self.looks: list[Look] | None = None
        self.reads: Reads | None = None
        self._before: tuple[Heard | None, Seeds | None] = (None, None)

    def __enter__(self) -> Self:
        self._before = _here.call, draw_of(self.seeds)
        _here.call = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.call, seeds = self._before
        draw_of(seeds)


def heard() -> Heard | None:
    """The call of a held module that this thread is in; None where it is in none."""
    return _here.call


def draws_of(call: Heard | None) -> AbstractContextManager[Any]:
    """Around what PyTorch runs in the place of a step, so that it draws what that would draw."""
    return nullcontext() if call is None or call.draws is None else call.draws(call.seeds)


@contextmanager
def spent(kind: str) -> Iterator[None]:
    """What is inside is overhead of the call that this thread is in, where it is in one."""
    call = _here.call
    if call is None:
        yield
        return
    with call.compiled.overhead.of(kind):
        yield


class NothingDone(Exception):
    """No code of a call has run, or only what raises and has written to nothing.

    The module itself can run the call.

    Args:
        why: there is no graph; None where its first one raises.
        always: whether no call will have one, as long as the code is what it is.
    """

    def __init__(self, why: OrtrainError | None = None, *, always: bool = False) -> None:
        super().__init__(why)
        self.why, self.always = why, always
