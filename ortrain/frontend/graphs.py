"""``Graphs``: a held module's calls as graphs, the whole or its equal blocks.

It is loaded with the first graph: Dynamo alone takes half a second to load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain.autodiff.held import peak, saved_bytes
from ortrain.config import DebugOptions, Engine, Options
from ortrain.errors import CaptureError, NotServed, OfThisCall, OrtrainError
from ortrain.frontend.blocks import Blocks
from ortrain.frontend.call import Heard, Look, NothingDone
from ortrain.frontend.compiled import Compiled
from ortrain.frontend.equal import equal_blocks
from ortrain.frontend.graph import Graph
from ortrain.frontend.policy import BLOCKS, MODULE
from ortrain.frontend.watch import Watch
from ortrain.passes.linear_loss import blocks_of
from ortrain.passes.tokens import Shown
from ortrain.pytorch.dynamo import is_of_conversion, not_followed, without_conversions
from ortrain.step.eager_draws import AsGraphs
from ortrain.step.overhead import Overhead
from ortrain.step.report import Report, Saving
from ortrain.step.saved_graphs import save_pieces, save_stages

# Of one module, with other hooks and functions each; those used first make way.
MOST = 8

HELP = "none is needed: such calls run in PyTorch"
_BORROWED = OfThisCall(
    "some parameters are no parameters, as torch.func.functional_call sets them", help=HELP
)
_RAISES = OfThisCall("the call raises an error", help=HELP)
_OVER_BUDGET = CaptureError(
    "what its code depends on changes from call to call",
    because="a graph for each change would take too much of the run",
    help=HELP,
)


@dataclass
class Outcome:
    """What became of a call.

    Attributes:
        output: of the module.
        done: whether the module was called at all.
        why: why none of its graphs ran as a step; None where one did.
        lasting: whether calls like it will have no graph either.
        always: whether no call will.
        savings: of its graphs, by tokens that they leave out.
        looks: as of :class:`~ortrain.frontend.call.Heard`.
    """

    output: Any = None
    done: bool = True
    why: OrtrainError | None = None
    lasting: bool = False
    always: bool = False
    savings: Sequence[Saving | None] = field(default_factory=list)
    looks: Sequence[Look] = ()


class Graphs:
    """Of one module.

    Args:
        module: the module.
        options: settings.
        overhead: of its calls.
        tell: hears of backwards that PyTorch has answered, since a graph's failed.

    Attributes:
        looks: whether outcomes tell what steps hold and which tokens they have.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        overhead: Overhead,
        tell: Callable[[OrtrainError | None], None],
    ) -> None:
        self.module, self.options, self.overhead = module, options, overhead
        self.looks = False
        self._tell = tell
        self.compiled: dict[tuple[Any, ...], Compiled] = {}
        self.last: Compiled | None = None
        self._watch = Watch(module)
        self._blocks: Blocks | None = None

    def whole(
        self,
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shown: Shown,
        *,
        may_convert: bool,
    ) -> Outcome:
        """Runs a call through Dynamo.

        Args:
            engine: runs the graphs.
            args: of the call.
            kwargs: of the call.
            shown: what of its outputs somebody reads.
            may_convert: whether graphs may be made for it.
        """
        compiled = self.last = self._made(engine, MODULE)
        if self._blocks is not None:
            self._blocks.switch(False)
        if (why := self._refused(compiled, may_convert)) is not None:
            return Outcome(done=False, why=why, always=bool(compiled.watch.not_followed))
        with Heard(self.module, compiled, (args, kwargs), shown) as call:
            call.looks = [] if self.looks else None
            try:
                with nullcontext() if may_convert else without_conversions():
                    output = compiled(self.module, args, kwargs)
            except NothingDone:
                return Outcome(done=False, why=_RAISES.at(""))
            except Exception as error:
                if not is_of_conversion(error):
                    raise
                if what := not_followed(error):
                    found = NotServed(f"a graph would be wrong about it: {what}", help=HELP)
                    return Outcome(done=False, why=found, always=True)
                if compiled.ones_are_sizes and not call.ran:
                    compiled.ones_are_sizes = False
                    again = self.whole(engine, args, kwargs, shown, may_convert=may_convert)
                    compiled.ones_are_sizes = again.why is not None
                    return again
                why = CaptureError(
                    f"PyTorch's Dynamo fails to convert {type(self.module).__name__}",
                    because=f"{type(error).__name__}: {error}".partition("\n")[0],
                    help=HELP,
                )
                why.__cause__ = error
                return Outcome(done=False, why=why, lasting=True)
        _learn_loss(output, call.ran)
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
        self._blocks.switch(True)
        with Heard(self.module, compiled, (args, kwargs), "all") as call:
            call.looks = [] if self.looks else None
            call.mode = AsGraphs(call.seeds)
            with call.mode, nullcontext() if may_convert else without_conversions():
                output = self.module(*args, **kwargs)
        return self._outcome(output, call, compiled, may_convert)

    def _refused(self, compiled: Compiled, may_convert: bool) -> OrtrainError | None:
        if name := compiled.watch.not_followed:
            return NotServed(f"{name} keeps its results, which a graph does not", help=HELP)
        if not compiled.watch.has_its_parameters():
            return _BORROWED.at("")
        return None if may_convert or compiled.made else _OVER_BUDGET.at("")

    def _outcome(self, output: Any, call: Heard, compiled: Compiled, may_convert: bool) -> Outcome:
        if call.ran:
            return Outcome(output, savings=call.savings, looks=call.looks or ())
        if call.failed is not None:
            return Outcome(output, why=call.failed.at(call.failed.where))
        if not may_convert:
            return Outcome(output, why=_OVER_BUDGET.at(""))
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
        return known

    # -- what is told -------------------------------------------------------------------------

    def save(self, debug_options: DebugOptions) -> None:
        """Writes the graphs of the last call as ONNX files, numbered where there are several."""
        graphs = [] if self.last is None else self.last.graphs
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
        """Fills in a report on what the last call ran, where that is new."""
        compiled = self.last
        if compiled is None or not compiled.fresh:
            return False
        compiled.fresh = False
        graphs = compiled.graphs
        report.captures = len(compiled.made)
        plans = [form.way.step.plan for graph in graphs for form in graph.forms.values()]
        if not plans:
            return True
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
        report.dense = [each for graph in graphs for each in graph.dense(shown)]
        found = [graph.form.certificate for graph in graphs]
        report.certificate = "; ".join(str(each) for each in found if each is not None)
        return True


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
