"""``Machine``: what runs the calls of a held module, and when that changes.

::

    watching ── a graph pays ──▶ trying ── the clock decides ──▶ settled, on graphs or in PyTorch

The plain module runs while it is watched; a call that is tried or settled goes through Dynamo,
whose graphs are steps. Calls with and without gradients, in training and in evaluation, have a
policy each: what is fast in one need not be in the other.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.utils import _pytree as pytree

from ortrain.autodiff.held import peak, saved_bytes
from ortrain.config import EXECUTORS, DebugOptions, Engine, LogLevel, Options
from ortrain.errors import CaptureError, CheckFailed, NotServed, OrtrainError, OrtrainWarning
from ortrain.exclusive import EXCLUSIVE
from ortrain.frontend.blocks import Blocks, equal_blocks
from ortrain.frontend.call import Heard
from ortrain.frontend.compiled import Compiled, called
from ortrain.frontend.graph import Graph
from ortrain.frontend.policy import BLOCKS, CHANGES, MODULE, TORCH, Policy, challengers_of
from ortrain.frontend.watch import Watch
from ortrain.passes.linear_loss import blocks_of
from ortrain.pytorch.dynamo import ConversionFailed, without_conversions
from ortrain.pytorch.routes import plainly
from ortrain.step import contest
from ortrain.step.eager_draws import AsGraphs
from ortrain.step.eligibility import tried
from ortrain.step.fallback import alone
from ortrain.step.overhead import Overhead
from ortrain.step.prospect import Prospect, gain_of
from ortrain.step.report import Report
from ortrain.step.seeds import Seeds
from ortrain.step.verdict import Verdict
from ortrain.step.wrappers import needs_its_own_forward

# Calls that go to the module unseen once PyTorch has won; then one is looked at again.
SPELL = 256
# Kinds of calls without a graph; then all run in PyTorch.
MOST_REFUSED = 8
# Of one module, with other hooks and functions each; those used first make way.
MOST_CONVERTED = 8
_CACHES = "transformers.cache_utils"
WITH_CACHE = "a key-value cache is among its arguments: calls that generate run in PyTorch"
BORROWED = "some parameters are no parameters, as torch.func.functional_call sets them"
_HELP = "none is needed: such calls run in PyTorch"
TURN = "its turn in the contest with the graph"


class Machine:
    """Runs the calls of one module.

    Args:
        module: the module.
        options: settings.
        debug_options: what to show.

    Attributes:
        report: what ran where.
        prospect: of its graphs; who knows how many steps are to come, says it there.
        only_loss: whether of the outputs nobody reads more than a loss in the first place.
        calls: so far.
    """

    def __init__(self, module: nn.Module, options: Options, debug_options: DebugOptions) -> None:
        self.module, self.debug_options = module, debug_options
        self.report = Report()
        self.prospect = Prospect.of(module)
        self.only_loss = self.trains = self.warned = False
        self.calls = self.duels = 0
        self.overhead = Overhead()
        self.device: torch.device | None = None
        self.use(options)

    def use(self, options: Options) -> None:
        """Takes other settings, under which everything is made anew."""
        self.options = options
        # Whether eager calls draw what graphs do, of which there may be some in other calls.
        self.draws = options.engine == "auto"
        self.policies: dict[tuple[bool, bool], Policy] = {}
        self.compiled: dict[tuple[Any, ...], Compiled] = {}
        self.watch: Watch | None = None
        self.blocks: Blocks | None = None

    def expect(self, steps: int | None) -> None:
        """Takes it that so many calls with gradients are to come; None where nobody knows."""
        self.prospect.steps = steps

    def show(self, debug_options: DebugOptions) -> None:
        """Takes other settings of what is shown."""
        self.debug_options = debug_options

    # -- a call ------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call, as graphs or in PyTorch."""
        modes = is_grad_enabled(), self.module.training
        self.calls += 1
        policy = self.policies.get(modes)
        if policy is None:
            with EXCLUSIVE:
                policy = self.policies[modes] = self._policy(modes, args, kwargs)
        if policy.spell:
            policy.spell -= 1
            return self._in_pytorch(policy.reason, args, kwargs)
        if any(type(value).__module__ == _CACHES for value in (*args, *kwargs.values())):
            return self._in_pytorch(WITH_CACHE, args, kwargs)
        if policy.refused and (why := policy.refused.get(_form_of(args, kwargs))):
            return self._in_pytorch(why, args, kwargs)
        if not policy.settled:
            return self._tuned(policy, args, kwargs)
        return self._by(policy.way, policy, args, kwargs)

    def _by(self, way: str, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call by one of its ways."""
        if way == TORCH:
            return self._in_pytorch(policy.reason, args, kwargs)
        if way == BLOCKS:
            return self._by_blocks(policy, args, kwargs)
        return self._as_graphs(policy, args, kwargs)

    def _tuned(self, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call by the way whose turn it is, and measures it where that is asked for."""
        start = contest.now(self.device)
        way = policy.next()
        self._described(is_grad_enabled()).contest = policy.contest
        if not policy.measures:
            return self._by(way, policy, args, kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        size = max((t.numel() for t in tensors), default=1)
        sample = policy.sample(way, max(size, 1), start)
        output = self._by(way, policy, args, kwargs)
        sample.forward_ends()
        leaves = [t for t in (*self.module.parameters(), *tensors) if t.requires_grad]
        found = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        sample.forward_done(found, leaves, is_grad_enabled() and bool(leaves))
        return output

    def _in_pytorch(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        report = self._described(is_grad_enabled())
        report.mode, report.reason = "eager", reason
        report.eager_calls += 1
        if not self.draws:
            return self.module(*args, **kwargs)
        with AsGraphs(Seeds()):
            return self.module(*args, **kwargs)

    def aside(self, reason: str, call: Callable[[], Any]) -> Any:
        """Runs a call in PyTorch that nobody means to be a graph; the report has the reason."""
        self.calls += 1
        report = self._described(is_grad_enabled())
        report.mode, report.reason = "eager", reason
        report.eager_calls += 1
        return call()

    def _by_blocks(self, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call whose equal blocks are graphs."""
        blocks, report = self._blocks_of(policy), self._described(is_grad_enabled())
        if not self.watch_holds.has_its_parameters():
            return self._in_pytorch(BORROWED, args, kwargs)
        compiled = blocks.compiled
        with Heard(compiled, (args, kwargs), "all") as call:
            blocks.switch(True)
            call.mode = mode = AsGraphs(call.seeds)
            with mode:
                output = self.module(*args, **kwargs)
        if compiled.fresh:
            compiled.fresh = False
            self._describe(compiled)
        if call.ran:
            report.graph_calls += 1
            report.mode, report.reason = "graph", ""
            return output
        report.eager_calls += 1
        why = str(call.failed or compiled.refusal())
        report.mode, report.reason = "eager", why
        policy.forfeit(BLOCKS, why)
        blocks.switch(False)
        return output

    def _as_graphs(self, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiled = self._compiled(policy)
        if self.blocks is not None:
            self.blocks.switch(False)
        if not compiled.watch.has_its_parameters():
            return self._eager_because(NotServed(BORROWED, help=_HELP), args, kwargs)
        report, may = self._described(is_grad_enabled()), policy.may_convert
        if not may and not compiled.made:
            policy.missed()
            return self._in_pytorch(CHANGES, args, kwargs)
        with Heard(compiled, (args, kwargs), "loss" if self.only_loss else "all") as call:
            try:
                with nullcontext() if may else without_conversions():
                    output = compiled.run(self.module, args, kwargs)
            except ConversionFailed as unknown:
                return self._unconverted(policy, unknown, args, kwargs)
        if self.only_loss:
            _learn_loss(output, call.ran)
        for saving in call.savings:
            report.note_tokens(saving)
        if compiled.fresh:
            compiled.fresh = False
            self._describe(compiled)
        if call.ran:
            report.graph_calls += 1
            report.mode, report.reason = "graph", ""
            return output
        report.eager_calls += 1
        failed = call.failed
        if failed is None and not may:
            policy.missed()
            report.mode, report.reason = "eager", CHANGES
            return output
        if failed is None:
            error = compiled.refusal()
            self._refuse(policy, error, args, kwargs)
        else:
            error = failed.at(failed.where)
        report.mode, report.reason = "eager", str(error)
        if not self.options.falls_back(error):
            raise error
        if not isinstance(error, CheckFailed):
            self._warn(str(error))
        return output

    def _eager_because(
        self, error: OrtrainError, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call in PyTorch, and says why.

        Raises:
            OrtrainError: where no fallback is allowed.
        """
        if not self.options.falls_back(error):
            raise error
        self._warn(str(error))
        return self._in_pytorch(str(error), args, kwargs)

    def _unconverted(
        self, policy: Policy, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call that Dynamo has failed to convert: if it is wrong, its own error is seen."""
        own = CaptureError(
            f"PyTorch's Dynamo fails to convert {type(self.module).__name__}",
            because=f"{type(error).__name__}: {error}".partition("\n")[0],
            help=_HELP,
        )
        with alone(error):
            output = self._in_pytorch(str(own), args, kwargs)
        if not self.options.falls_back(own):
            raise own from error
        self._warn(str(own))
        self._refuse(policy, own, args, kwargs)
        return output

    def _refuse(
        self,
        policy: Policy,
        error: OrtrainError,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Has calls like one run in PyTorch, and all of them where there are too many kinds."""
        if self.options.retry or not self.options.falls_back(error):
            return
        policy.refused[_form_of(args, kwargs)] = str(error)
        if len(policy.refused) >= MOST_REFUSED:
            policy.forfeit(MODULE, str(error))
            policy.refused.clear()

    # -- which engine -----------------------------------------------------------------------------

    def _policy(
        self, modes: tuple[bool, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Policy:
        grad, _ = modes
        self.trains |= grad
        engine = self.options.engine_for(grad)
        if engine == "torch":
            asked = "engine" if grad or self.options.inference is None else "inference"
            return Policy(TORCH, self.overhead, reason=f'{asked}="torch"')
        if why := needs_its_own_forward(self.module):
            error = NotServed(f"{type(self.module).__name__} cannot run as a graph here: {why}")
            if not self.options.falls_back(error):
                raise error
            self._warn(why)
            return Policy(TORCH, self.overhead, reason=why)
        if engine in EXECUTORS:
            return Policy(MODULE, self.overhead, engine=engine)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        held = [*self.module.parameters(), *self.module.buffers(), *tensors]
        device = next((t.device for t in held), torch.device("cpu"))
        dtypes = {t.dtype for t in held}
        able = tried(self.options, device, dtypes)
        if not able:
            why = f"there is no engine for tensors on {device}"
            return Policy(TORCH, self.overhead, reason=why)
        chosen, self.device = "aten" if "aten" in able else able[0], device
        if torch.are_deterministic_algorithms_enabled():
            return Policy(MODULE, self.overhead, engine=chosen)  # which no clock decides
        ways = challengers_of(self.module, gain_of(dtypes, device), trains=grad)
        prospect = self.prospect if grad else None
        return Policy(
            TORCH, self.overhead, ways, prospect, self._verdict, reason=TURN, engine=chosen
        )

    def _verdict(self) -> Verdict | None:
        self.duels += 1
        size = sum(1 for _ in self.module.parameters())
        return Verdict.of(f"{type(self.module).__name__}/{size}/{self.duels}")

    def _compiled(self, policy: Policy, way: str = MODULE) -> Compiled:
        """The module through Dynamo, as it was converted with the hooks and functions it has."""
        watch = self.watch_holds
        key = way, policy.engine, watch.key
        known = self.compiled.get(key)
        if known is None:
            while len(self.compiled) >= MOST_CONVERTED:
                self.compiled.pop(next(iter(self.compiled)))
            options = replace(self.options, engine=cast(Engine, policy.engine))
            call = called if way == MODULE else plainly
            known = self.compiled[key] = Compiled(options, watch, self.overhead, call)
        return known

    @property
    def watch_holds(self) -> Watch:
        """What there is of the module beside its values, now."""
        if self.watch is None or not self.watch.holds():
            self.watch = Watch(self.module)
        return self.watch

    def _blocks_of(self, policy: Policy) -> Blocks:
        compiled = self._compiled(policy, BLOCKS)
        if self.blocks is None or self.blocks.compiled is not compiled:
            if self.blocks is not None:
                self.blocks.switch(False)
            self.blocks = Blocks(equal_blocks(self.module), compiled)
        return self.blocks

    # -- what is told ----------------------------------------------------------------------------

    def _described(self, grad: bool) -> Report:
        """The report on calls with or without gradients; the latter have one beside the former."""
        if grad or not self.trains:
            return self.report
        if self.report.inference is None:
            self.report.inference = Report()
        return self.report.inference

    def _describe(self, compiled: Compiled) -> None:
        report = self._described(is_grad_enabled())
        graphs = compiled.graphs
        report.captures = len(compiled.made)
        report.overhead = self.overhead
        plans = [form.way.step.plan for graph in graphs for form in graph.forms.values()]
        if not plans:
            return
        last, executor = plans[-1], graphs[-1].executor
        report.engine, report.replays = str(executor), executor.replays
        report.stages = {}
        for plan in plans:
            for stage, took in plan.seconds.items():
                report.stages[stage] = report.stages.get(stage, 0.0) + took
        names = ["forward", *(f"backward {i + 1}" for i in range(len(last.pieces)))]
        report.nodes = {
            name: (len(before.graph), len(after.graph))
            for name, before, after in zip(names, last.programs, last.lowered, strict=True)
        }
        report.blocks = tuple(blocks_of(last.programs[0]))
        shown = [graph.form for graph in graphs]
        report.saved_bytes = sum(
            saved_bytes(f.way.step.plan.programs, f.graph.example) for f in shown
        )
        trained = [f for f in shown if f.way.step.plan.pieces]
        report.peak_bytes = sum(peak(f.way.step.plan.programs, f.graph.example) for f in trained)
        certificates = [f.certificate for f in shown if f.certificate is not None]
        report.certificate = "; ".join(map(str, certificates[:3]))
        if self.debug_options.log_level <= LogLevel.INFO:
            print(report, file=sys.stderr)

    def _warn(self, reason: str) -> None:
        """Warns once, at the line outside of ortrain and torch that called the module."""
        if self.warned or self.debug_options.log_level > LogLevel.WARNING:
            return
        self.warned = True
        frame, level = sys._getframe(1), 2
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INNER):
            frame, level = frame.f_back, level + 1
        warnings.warn(
            f"ORTModule runs {type(self.module).__name__} in PyTorch: {reason}",
            OrtrainWarning,
            stacklevel=level,
        )


def _learn_loss(output: Any, given: Sequence[tuple[Graph, Any]]) -> None:
    """Tells a graph which of its results the module returns in the first place."""
    if all(graph.loss is not None for graph, _ in given):
        return
    first = next((t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)), None)
    for graph, results in given:
        for place, result in enumerate([results] if graph.alone else results):
            if result is first:
                graph.know_loss(place)


def _form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What tells calls apart that Dynamo treats alike or not: types and sizes."""
    leaves = pytree.tree_leaves((args, kwargs))
    return (*kwargs, *(_kind_of(leaf) for leaf in leaves))


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.shape, leaf.device, leaf.requires_grad, leaf.layout)
    return type(leaf), leaf if isinstance(leaf, bool | int | float | str) else None


_INNER = ("ortrain.", "torch.nn.modules.module")
