"""``Graphs``: a held module's calls as graphs, the whole or its equal blocks.

It is loaded with the first graph: Dynamo alone takes half a second to load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed, is_grad_enabled, nn

from ortrain.autodiff.held import peak, saved_bytes
from ortrain.config import DebugOptions, Engine, Options
from ortrain.errors import (
    NotServed,
    OfThisCall,
    OrtrainError,
    ParityError,
    listing,
)
from ortrain.frontend.blocks import Blocks
from ortrain.frontend.call import Heard, Look, NothingDone, Reads
from ortrain.frontend.compiled import HELP, LATER, ONES_MATTER, OVER_BUDGET, Compiled, line_of
from ortrain.frontend.equal import equal_blocks
from ortrain.frontend.form import AGAIN
from ortrain.frontend.graph import Graph, Waits
from ortrain.frontend.policy import BLOCKS, MODULE
from ortrain.frontend.separate import comparable
from ortrain.frontend.twin import FAR, Reference, roots_of, seen_of, tensors_of
from ortrain.frontend.watch import Watch
from ortrain.passes.linear_loss import blocks_of
from ortrain.passes.tokens import Shown
from ortrain.pytorch import pytree
from ortrain.pytorch.dynamo import without_conversions
from ortrain.pytorch.saving import saving_hooks
from ortrain.runtime.aten.graphs.recordings import unrecorded
from ortrain.runtime.memory import release_pools
from ortrain.step.eager_draws import as_graphs
from ortrain.step.overhead import Overhead
from ortrain.step.report import Report, Saving
from ortrain.step.saved_graphs import save_pieces, save_stages
from ortrain.step.seeds import Seeds

# Of one module, with other hooks and functions each; those used first make way.
MOST = 8

_BORROWED = OfThisCall(
    "some parameters are no parameters, as torch.func.functional_call sets them", help=HELP
)
_RAISES = OfThisCall("the call raises an error", help=HELP)


@dataclass
class Outcome:
    """What became of a call.

    Attributes:
        output: of the module.
        done: whether the module was called at all.
        why: why none of its graphs ran as a step; None where one did.
        lasting: whether calls like it will have no graph either.
        always: whether no call will, as long as the module's code is what it is.
        meant: whether PyTorch is meant to run it, so that it is no fallback.
        waits: whether that is since there is no recording for it yet.
        savings: of its graphs, by tokens that they leave out.
        looks: as of :class:`~ortrain.frontend.call.Heard`.
        ran: the graphs that have run as steps, in their order, each with what it has returned.
    """

    output: Any = None
    done: bool = True
    why: OrtrainError | None = None
    lasting: bool = False
    always: bool = False
    meant: bool = False
    waits: bool = False
    savings: Sequence[Saving | None] = field(default_factory=list)
    looks: Sequence[Look] = ()
    ran: Sequence[tuple[Graph, Any]] = ()


class Graphs:
    """Of one module.

    Args:
        module: the module.
        options: settings.
        overhead: of its calls.
        tell: hears of backwards that PyTorch has answered, since a graph's failed.

    Attributes:
        looks: whether outcomes tell what steps hold and which tokens they have.
        tells: whether conversions that take long say so.
        draws: as of :class:`~ortrain.frontend.call.Heard`.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        overhead: Overhead,
        tell: Callable[[OrtrainError | None], None],
    ) -> None:
        self.module, self.options, self.overhead = module, options, overhead
        self.looks, self.tells = False, True
        self.draws: Callable[[Seeds], AbstractContextManager[Any]] | None = None
        self._described: Compiled | None = None
        self._tell = tell
        self.compiled: dict[tuple[Any, ...], Compiled] = {}
        self.last: Compiled | None = None
        self._watch = Watch(module)
        self._blocks: Blocks | None = None
        self._reads = Reads()
        for part in module.modules():  # which may be held itself, and is called with the whole
            if (runner := part.__dict__.get("_runner")) is not None:
                runner.calls += 1

    def whole(
        self,
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shown: Shown,
        *,
        may_convert: bool,
        may_part: Callable[[], bool],
    ) -> Outcome:
        """Runs a call through Dynamo.

        Args:
            engine: runs the graphs.
            args: of the call.
            kwargs: of the call.
            shown: what of its outputs somebody reads.
            may_convert: whether graphs may be made for it.
            may_part: as of :class:`~ortrain.frontend.call.Heard`.
        """
        compiled = self.last = self._made(engine, MODULE)
        if self._blocks is not None:
            self._blocks.switch(False)
        if (why := self._refused(compiled, may_convert)) is not None:
            always = isinstance(why, NotServed | ParityError) and not isinstance(why, OfThisCall)
            return Outcome(done=False, why=why, always=always)
        reference = self._reference(compiled, args, kwargs, shown, may_convert, compiled.is_whole)
        with Heard(self.module, compiled, (args, kwargs), shown) as call:
            self._prepare(call, may_convert)
            call.may_part = may_part
            call.reads = self._reads if self._may_wait(compiled, reference) else None
            try:
                # Where PyTorch may run the whole, it does so from outside, and draws as graphs do.
                raises = compiled.is_whole
                with nullcontext() if may_convert else without_conversions(raises=raises):
                    output = compiled(self.module, args, kwargs)
            except NothingDone as nothing:
                if nothing.why is LATER:
                    return Outcome(done=False, why=LATER.at(""), meant=True)
                if nothing.why is OVER_BUDGET:
                    return Outcome(done=False, why=OVER_BUDGET.at(""))
                if nothing.why is None:
                    return Outcome(done=False, why=_RAISES.at(""))
                return Outcome(done=False, why=nothing.why, lasting=True, always=nothing.always)
        _learn_loss(output, call.ran)
        if (why := self._judged(compiled, reference, output, call)) is not None:
            return Outcome(done=False, why=why, lasting=True, always=True)
        return self._outcome(output, call, compiled, may_convert)

    def by_blocks(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_convert: bool
    ) -> Outcome:
        """Runs a call whose equal blocks are graphs; arguments as of :meth:`whole`."""
        compiled = self.last = self._made(engine, BLOCKS)
        if self._blocks is None or self._blocks.compiled is not compiled:
            if self._blocks is not None:
                self._blocks.switch(False)
            self._blocks = Blocks(equal_blocks(self.module), compiled)
        if (why := self._refused(compiled, may_convert)) is not None:
            return Outcome(done=False, why=why)
        reference = self._reference(compiled, args, kwargs, "all", may_convert, False)
        self._blocks.switch(True)
        with Heard(self.module, compiled, (args, kwargs), "all") as call:
            self._prepare(call, may_convert)
            call.mode = as_graphs(self.module, call.seeds)
            with call.mode, nullcontext() if may_convert else without_conversions():
                output = self.module(*args, **kwargs)
        if self._blocks.refused is not None:
            return Outcome(output, why=self._blocks.refused, lasting=True)
        if (why := self._judged(compiled, reference, output, call)) is not None:
            self._blocks.switch(False)
            return Outcome(done=False, why=why, lasting=True, always=True)
        return self._outcome(output, call, compiled, may_convert)

    def _prepare(self, call: Heard, may_convert: bool) -> None:
        call.looks = [] if self.looks else None
        call.draws, call.may_convert = self.draws, may_convert

    def _reference(
        self,
        compiled: Compiled,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shown: Shown,
        may_convert: bool,
        is_whole: bool,
    ) -> Reference | None:
        """What the graphs of this call are compared with, where that is due and can be.

        It is due at the second call with a graph that is the whole: the copy runs before it, so
        that the memory of both is not there at once. Where PyTorch runs some of the code between
        graphs, the copy would do once more whatever that does.

        Two kinds of calls are compared behind the first of them, before anybody has its outputs.
        One kind has no gradients: code may ask whether it is compiled, and compute something else
        then. The other has a checkpoint with reentrance, of which Dynamo keeps less than it means.
        """
        modes = is_grad_enabled(), self.module.training
        roots = compiled.roots.get(modes)
        if modes in compiled.compared or not may_convert or self.options.certificate == "off":
            return None
        if roots is not None and not is_whole:
            return None
        if not comparable(self.module, compiled.watch):
            return None
        with self._comparing(compiled):
            reference = Reference(self.module, compiled.watch, args, kwargs, compiled.narrow)
            if roots is not None:
                compiled.compared.add(modes)
                asked = [0] if shown == "loss" and 0 in roots else roots
                reference.run(asked, twice=_wavers(compiled.graphs))
            return reference
        return None

    @staticmethod
    def _at_once(compiled: Compiled, call: Heard) -> bool:
        """Whether graphs are compared behind the first call of them."""
        return compiled.reentrant or (compiled.is_whole and not call.grad)

    @contextlib.contextmanager
    def _comparing(self, compiled: Compiled) -> Iterator[None]:
        """What is raised inside, as by a function of the user's, ends a comparison, and is told."""
        with self.overhead.of("parity"):
            try:
                yield
            except Exception as error:
                compiled.uncompared, compiled.fresh = line_of(error), True

    def _may_wait(self, compiled: Compiled, reference: Reference | None) -> bool:
        """Whether outputs beside the loss may be computed when somebody reads them.

        Not before the graph has been compared with the module, and not where others look at
        outputs, nor where calls are to be equal to the bit: the loss alone is rounded otherwise.
        """
        modes = is_grad_enabled(), self.module.training
        if self._reads.some or modes != (True, True) or self.options.skip_padding:
            return False
        if self.options.deterministic or torch.are_deterministic_algorithms_enabled():
            return False
        if distributed.is_available() and distributed.is_initialized():
            return False
        first = modes not in compiled.roots or reference is not None
        return not first and compiled.is_whole and saving_hooks(False) is None

    def _judged(
        self, compiled: Compiled, reference: Reference | None, output: Any, call: Heard
    ) -> OrtrainError | None:
        """Why the graphs of a call are not the module's; where that is so, none has run."""
        modes = call.grad, self.module.training
        if not call.ran:
            if reference is not None and reference.seen is not None:
                compiled.compared.discard(modes)  # another time
            return None
        if modes not in compiled.roots:
            compiled.roots[modes] = roots = roots_of(output, call.ran)
            if reference is None or not self._at_once(compiled, call):
                return None
            compiled.compared.add(modes)
            with self._comparing(compiled):
                reference.run(roots, twice=False)
        if reference is None or reference.seen is None:
            return None
        reference.narrow |= compiled.narrow
        faults: list[str] = []
        with self._comparing(compiled):
            with unrecorded():  # a backward that does not come again
                seen = seen_of(
                    tensors_of(output), self.module, reference.wanting, reference.roots, again=True
                )
            everything = call.shown == "all" and not self.options.skip_padding
            faults = reference.faults(seen, all_are_read=everything)
        release_pools()  # the user's backward begins without the holes of this one
        if not faults:
            return None
        reference.take_back()
        compiled.wrong[modes] = error = ParityError(
            f"the graphs of {type(self.module).__name__} do not compute what it does",
            because=listing(faults),
            help="it runs in PyTorch instead; please report it with the module's code",
        )
        return error

    def _refused(self, compiled: Compiled, may_convert: bool) -> OrtrainError | None:
        if (wrong := compiled.wrong.get((is_grad_enabled(), self.module.training))) is not None:
            return wrong
        if why := compiled.watch.not_followed:
            return NotServed(why, help=HELP)
        if not compiled.watch.has_its_parameters():
            return _BORROWED.at("")
        return None if may_convert or compiled.made else OVER_BUDGET.at("")

    def _outcome(self, output: Any, call: Heard, compiled: Compiled, may_convert: bool) -> Outcome:
        if call.ran:
            return Outcome(output, savings=call.savings, looks=call.looks or (), ran=call.ran)
        if compiled.again:
            return Outcome(output, why=ONES_MATTER.at(""), meant=True)
        if call.failed is not None:
            waits = isinstance(call.failed, Waits)
            why = call.failed.at(call.failed.where)
            return Outcome(output, why=why, meant=waits or call.failed is AGAIN, waits=waits)
        if not may_convert:
            return Outcome(output, why=OVER_BUDGET.at(""))
        return Outcome(output, why=compiled.refusal(), lasting=True)

    def _made(self, engine: Engine, way: str) -> Compiled:
        """The module through Dynamo, as it was converted with the hooks and functions it has."""
        if not self._watch.holds():
            self._watch = Watch(self.module)
        key = way, engine, self._watch.key
        known = self.compiled.get(key)
        if known is None:
            while len(self.compiled) >= MOST:
                self.compiled.pop(next(iter(self.compiled)))
            options = replace(self.options, engine=engine)
            known = Compiled(options, self._watch, self.overhead, self._tell)
            self.compiled[key] = known
        known.doing = f"capturing {type(self.module).__name__}" if self.tells else ""
        return known

    # -- what is told -------------------------------------------------------------------------

    def save(self, debug_options: DebugOptions, graphs: Sequence[Graph]) -> None:
        """Writes graphs of a call as ONNX files, numbered where there are several."""
        for number, graph in enumerate(graphs, 1):
            prefix = debug_options.onnx_prefix + (f"_{number}" if len(graphs) > 1 else "")
            debug = replace(debug_options, onnx_prefix=prefix)
            form, step = graph.form, graph.step
            upstream = next(names for names, way in form.ways.items() if way is form.way)
            trains = self.module.training and bool(step.plan.pieces)
            save_stages(
                debug, trains, graph.program, form.program, graph.wrt, upstream, graph.executor,
                form.sizes,
            )  # fmt: skip
            save_pieces(debug, step.plan)

    def describe(self, report: Report, shown: Shown) -> bool:
        """Fills in a report on what the last call ran; whether some of its graphs are new."""
        compiled = self.last
        if compiled is None or not (compiled.fresh or compiled is not self._described):
            return False
        fresh, compiled.fresh, self._described = compiled.fresh, False, compiled
        graphs = compiled.graphs
        report.captures, report.breaks = len(compiled.made), compiled.breaks
        report.refused = compiled.refused
        plans = [form.way.step.plan for graph in graphs for form in graph.forms.values()]
        if not plans:
            return fresh
        last, executor = plans[-1], graphs[-1].executor
        report.engine, report.replays, report.stages = str(executor), executor.replays, {}
        for plan in plans:
            for stage, took in plan.seconds.items():
                report.stages[stage] = report.stages.get(stage, 0.0) + took
        names = ["forward", *(f"backward {i + 1}" for i in range(len(last.pieces)))]
        report.nodes = {
            name: (len(before.graph), len(after.graph))
            for name, before, after in zip(names, last.programs, last.lowered, strict=True)
        }
        report.blocks = tuple(blocks_of(last.programs[0]))
        made = [(graph.form.way.step.plan, graph.form.sizes) for graph in graphs]
        report.saved_bytes = sum(saved_bytes(plan.programs, sizes) for plan, sizes in made)
        report.peak_bytes = sum(peak(p.programs, sizes) for p, sizes in made if p.pieces)
        waits = any(graph.form.waits for graph in graphs) and not self._reads.some
        shown = "loss" if waits else shown
        report.dense = [each for graph in graphs for each in graph.dense(shown)]
        found = [graph.form.certificate for graph in graphs]
        told = [str(each) for each in found if each is not None]
        if compiled.uncompared:
            told.append(f"the module itself is not compared: {compiled.uncompared}")
        report.certificate = "; ".join(told)
        return fresh


def _wavers(graphs: Sequence[Graph]) -> bool:
    """Whether a graph's certificate has a difference that a comparison takes for a fault."""
    found = (form.certificate for graph in graphs for form in graph.forms.values())
    return any(max(each.differences.values(), default=0.0) > FAR for each in found if each)


def _learn_loss(output: Any, ran: Sequence[tuple[Graph, Any]]) -> None:
    """Tells a graph which of its results the module returns in the first place."""
    asking = [(graph, results) for graph, results in ran if graph.asks_for_loss]
    if not asking:
        return
    first = next((t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)), None)
    for graph, results in asking:
        graph.asks_for_loss -= 1
        for place, result in enumerate([results] if graph.alone else results):
            if result is first:
                graph.know_loss(place)
