"""A program of a graph, and its steps: one for each set of outputs that receive gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed

from ortrain.autodiff.engine import reachable
from ortrain.autodiff.held import largest, peak
from ortrain.errors import CheckFailed, NotServed, OrtrainError
from ortrain.frontend.call import heard, spent
from ortrain.program import Program, Role
from ortrain.pytorch.autocast import without_autocast
from ortrain.step.autograd import Step
from ortrain.step.build import Plan, build, likely_upstream
from ortrain.step.evidence import Certificate
from ortrain.step.saved_forward import Received, SavedForward, matters
from ortrain.step.unread import Values, Waiting

if TYPE_CHECKING:
    from ortrain.frontend.graph import Graph
    from ortrain.step.tokens import Tokens

# Backwards for the same outputs after which others are not reckoned with.
ENOUGH = 2


# No lack of a graph, so that it is never an error.
AGAIN = NotServed("its gradients are differentiated again, which PyTorch does")

# Sizes of calls at which a program has failed; then all of them run in PyTorch.
MOST_FAILED = 8


def sizes_of(args: Sequence[Any]) -> Any:
    """The sizes of all tensors of a call."""
    return tuple([each.shape for each in args if isinstance(each, Tensor)])


@dataclass(frozen=True)
class Way:
    """A step for gradients of some outputs, and what it takes of a call.

    Attributes:
        step: the step.
        places: of its inputs among the graph's.
        numbers: which of these are numbers.
        pairs: which are complex, and pairs of real numbers in the program.
        held: places of its parameters and buffers among the graph's inputs.
        copied: of which it takes copies. Its backward reads these and PyTorch's does not, so that
            the user may write to them.
        first: of which it does where other outputs may receive gradients than is thought.
    """

    step: Step
    places: list[int]
    numbers: list[int]
    pairs: list[int]
    held: list[int]
    copied: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)


class Form:
    """A program of a graph: the whole, or one without the tokens that nobody reads.

    Args:
        graph: that it is of.
        program: it.
        hidden: places of outputs that are zeros, since nobody reads them.
        tokens: what it leaves out; None where it is the whole.
        sizes: of a call, as an example; None for those of the graph's first call.
        waits: whether hidden outputs are computed when somebody reads them; else nobody does.

    Attributes:
        partial: places of outputs that are zero at tokens which were left out.
        way: that the next call takes.
        confirmed: backwards that came for the outputs which it expects.
        certificate: how it agrees with PyTorch; None where that was not looked at.
        refused: why PyTorch runs its calls; None where it does not.
        failed: by the sizes of a call, why PyTorch runs others of these.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        hidden: Sequence[int] = (),
        tokens: Tokens | None = None,
        sizes: dict[str, int] | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.graph, self.program, self.hidden, self.tokens = graph, program, hidden, tokens
        self.partial = () if tokens is None else tokens.partial
        self.sizes = graph.example if sizes is None else sizes
        self.waits = waits and bool(hidden)
        self.users = [v.name or "" for v in program.outputs(Role.USER_OUTPUT, Role.LOSS)]
        self.ways: dict[tuple[str, ...], Way] = {}
        upstream = likely_upstream(program, graph.wrt)
        if graph.loss is not None and (loss := self.users[graph.loss]) in self._reached():
            upstream = [loss]
        self.way, self.confirmed = self._way(tuple(upstream)), 0
        self.certificate: Certificate | None = None
        self.refused: OrtrainError | None = None
        self.failed: dict[Any, OrtrainError] = {}

    def differentiated_again(self) -> None:
        """Its next calls run in PyTorch: a graph has first derivatives only."""
        self.refused = self.refused or AGAIN

    def recovers(self, error: OrtrainError, call: Any) -> bool:
        """Whether PyTorch may answer a backward that failed."""
        if not self.graph.options.falls_back(error):
            return False
        if kept := self.distrusts(error):
            self.graph.cache.remade()
        else:
            self.fails(error, call)
        if self.graph.tell is not None:
            self.graph.tell(None if kept else error)
        return True

    def fails(self, error: OrtrainError, args: Sequence[Any]) -> None:
        """Has calls of these sizes run in PyTorch: memory may be enough for others."""
        if not self.graph.options.retry:
            self.failed[sizes_of(args)] = error
            if len(self.failed) > MOST_FAILED:
                self.refused = error

    def distrusts(self, error: OrtrainError) -> bool:
        """Whether a failure may be that of a kept graph, so that the next call has a new one."""
        if isinstance(error, CheckFailed) or not self.graph.cache.distrust():
            return False
        self.graph.forms.clear()
        return True

    @property
    def certain(self) -> bool:
        """Whether gradients of other outputs than expected are not reckoned with."""
        return self.confirmed >= ENOUGH

    def learn(self, outputs: Sequence[Tensor]) -> None:
        """Counts the backwards through a call's outputs."""

        def learned(*_: Any) -> None:
            self.confirmed += 1

        for node in {each.grad_fn for each in outputs if each.grad_fn is not None}:
            node.register_prehook(learned)

    def _reached(self) -> Collection[str]:
        """Outputs that depend on what requires a gradient."""
        found = reachable(self.program.graph, self.program.named(self.graph.wrt))
        return {v.name or "" for v in found}

    def _way(self, upstream: tuple[str, ...]) -> Way:
        way = self.ways.get(upstream)
        if way is None:
            graph, found = self.graph, self.graph.translated
            numbers = [name for name, place in found.places.items() if place in found.fixed]
            step = Step(self._plan(upstream), None, self._other, found.original, numbers)
            step.orders, step.further = graph.orders, lambda: self._further
            step.layouts, step.linked = found.layouts, found.outside.linked(step.plan.reachable)
            step.feeds.streams = graph.streams  # also where some are left out
            step.hidden, step.is_partial = tuple(self.hidden), bool(self.partial)
            step.unread = self._unread
            places = [found.places[step.feeds.names[i]] for i in step.feeds.users]
            way = self.ways[upstream] = Way(
                step,
                places,
                [n for n, i in enumerate(places) if i in found.numbers],
                [n for n, i in enumerate(places) if i in found.pairs],
                [found.places[name] for name in step.names],
            )
            self.copy(way)
            ceiling, plan = graph.executor.ceiling, way.step.plan
            if ceiling is not None and plan.pieces and graph.options.memory_budget is not None:
                ceiling.limit = peak(plan.programs, self.sizes)
                ceiling.margin = largest(plan.programs, self.sizes)
        return way

    def copy(self, way: Way) -> None:
        """Says of which inputs a step takes copies."""
        copied, unread = self.graph.translated.copied, self.graph.unread
        first = [n for n, i in enumerate(way.places) if i in copied or i in unread]
        back = way.step.plan.reads_back
        way.first[:] = first
        way.copied[:] = [n for n in first if way.places[n] in copied or n in back]

    def _other(self, received: Received) -> Step:
        """The step where other outputs receive gradients than was thought, as they probably will.

        The first time, the forward runs again for it.
        """
        upstream = tuple(n for n, given in zip(self.users, received, strict=True) if given)
        if any(received[i] for i in self.hidden):
            with spent("build"):
                return self.graph.whole()._way(upstream).step
        with spent("build"):
            self.way, self.confirmed = self._way(upstream), 0
        return self.way.step

    def _unread(self, kept: SavedForward, outputs: Sequence[Tensor]) -> Waiting | None:
        """What nobody may read of a call."""
        graph = self.graph

        def compute() -> list[Tensor]:
            with without_autocast():
                with spent("build"):
                    step = graph.whole().way.step
                return step.lie(kept.outputs_of(step))

        reads = None if (call := heard()) is None else call.reads
        if reads is None:
            return None
        if self.waits:
            return self.hidden, Values(compute, reads.heard)
        if reads.asked or self.hidden or not graph.beside:
            return None
        reads.asked = True  # by a call that has computed them
        made = [*outputs]
        return graph.beside, Values(lambda: kept.step.lie(made), reads.heard)

    @cached_property
    def _further(self) -> Collection[str]:
        """Inputs that gradients of other outputs may need than those that are expected to."""
        plan = self.way.step.plan
        every = tuple(n for n, own in zip(self.users, plan.reachable, strict=True) if own)
        if len(every) == 1:
            return ()
        try:
            return matters(self._way(every).step.plan, saved_only=True)
        except OrtrainError:  # which is about gradients that nobody may ask for
            return self.graph.translated.places

    def _plan(self, upstream: Sequence[str]) -> Plan:
        graph, options = self.graph, self.graph.options
        plan = build(
            self.program,
            graph.wrt,
            upstream,
            graph.executor,
            pieces=options.backward_pieces,
            early=graph.early or (distributed.is_available() and distributed.is_initialized()),
            sizes=self.sizes,
            budget=options.memory_budget,
            cache=graph.cache,
        )
        if not self.waits:
            return plan
        whole = graph.program  # of which the outputs are that nobody has read
        users = whole.outputs(Role.USER_OUTPUT, Role.LOSS)
        reached = reachable(whole.graph, whole.named(graph.wrt))
        return replace(plan, reachable=tuple(v in reached for v in users))
