"""``Machine``: what runs the calls of a held module, and when that changes.

::

    watching ── a graph pays ──▶ trying ── the clock decides ──▶ settled, on graphs or in PyTorch

The plain module runs while it is watched; a call that is tried or settled goes through Dynamo,
whose graphs are steps. Calls with and without gradients, in training and in evaluation, have a
policy each: what is fast in one need not be in the other.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.nn.parameter import is_lazy
from torch.overrides import has_torch_function

from ortrain.config import EXECUTORS, DebugOptions, Engine, LogLevel, Options
from ortrain.errors import CheckFailed, NotServed, OfThisCall, OrtrainError, warn_caller
from ortrain.exclusive import EXCLUSIVE
from ortrain.frontend.policy import (
    BLOCKS,
    MODULE,
    TORCH,
    Policy,
    Verdicts,
    challengers_of,
    padding_in,
)
from ortrain.pytorch import pytree
from ortrain.pytorch.autocast import active
from ortrain.pytorch.backwards import is_changing, is_checkpointed
from ortrain.pytorch.hooks import parts_of
from ortrain.pytorch.modes import FakeTensor, makes_numbers
from ortrain.pytorch.routes import is_routed
from ortrain.pytorch.saving import saving_hooks
from ortrain.pytorch.transforms import tangents, transform_around
from ortrain.runtime import engines
from ortrain.runtime.engines import candidates
from ortrain.runtime.memory import release_pools
from ortrain.step.eager_draws import AsGraphs, as_graphs
from ortrain.step.fallback import alone
from ortrain.step.marks import now
from ortrain.step.overhead import Overhead
from ortrain.step.prospect import CPU, Prospect, gain_of, share_of
from ortrain.step.report import Report
from ortrain.step.seeds import Seeds
from ortrain.step.unread import Unread, read
from ortrain.step.wrappers import needs_its_own_forward

if TYPE_CHECKING:
    from ortrain.frontend.graphs import Graphs, Outcome
    from ortrain.passes.tokens import Shown
    from ortrain.step.recalled import Note

# Kinds of calls without a graph; then all run in PyTorch.
MOST_REFUSED = 8
_CACHES = "transformers.cache_utils"
WITH_CACHE = "a key-value cache is among its arguments: calls that generate run in PyTorch"
FAKE = "its arguments are tensors of FakeTensorMode, which have no numbers"
REPEATED = "a checkpoint around it runs it twice, and both times must be alike"
LAZY = "it has parameters without a size, which the call gives them"
CHANGING = "hooks are set on saved tensors, of which a graph has others than PyTorch"
TRACED = "torch.jit traces it"
TRANSFORMED = "a transform of torch.func, or forward-mode derivatives, are taken around it"
TURN = "its turn in the contest with the graph"

# After so many calls, one after another, that draw nothing, others like them are not watched for
# draws: each of PyTorch's functions takes 2 to 8 µs more then. They are again, for good, once the
# generator of random numbers moves.
QUIET = 3

_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]

# How many modules of a kind have been held: processes that run the same script number them alike.
_held: Counter[str] = Counter()


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
        self.prospect = Prospect()
        self.only_loss = self.trains = self.warned = self.drawn = False
        self.calls = 0
        self._quiet: dict[tuple[bool, bool], int] = {}
        kind = f"{type(module).__name__}/{sum(1 for _ in module.parameters())}"
        _held[kind] += 1
        self._name = f"{kind}/{_held[kind]}"
        self.last = TORCH
        self.overhead = Overhead()
        self.device: torch.device | None = None
        self.use(options)

    def use(self, options: Options) -> None:
        """Takes other settings, under which everything is made anew."""
        self.options = options
        # Whether eager calls draw what graphs do, of which there may be some in other calls. What
        # the user has compiled is traced with whatever mode is around it.
        routed = any(map(is_routed, parts_of(self.module)))
        self.draws = options.engine == "auto" and not routed
        self.policies: dict[tuple[bool, bool], Policy] = {}
        self.graphs: Graphs | None = None

    def expect(self, steps: int | None) -> None:
        """Takes it that so many calls with gradients are to come; None where nobody knows."""
        self.prospect.steps = steps

    def expect_training(self) -> None:
        """Takes it that calls with gradients will come."""
        self.trains = True

    def show(self, debug_options: DebugOptions) -> None:
        """Takes other settings of what is shown."""
        self.debug_options = debug_options

    # -- a call ------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call, as graphs or in PyTorch."""
        modes = is_grad_enabled(), self.module.training
        if _is_tracing():
            return self.aside(TRACED, lambda: self.module(*args, **kwargs))
        self.calls += 1
        if Unread.exists:
            args, kwargs = read((args, kwargs))
        policy = self.policies.get(modes)
        if policy is None:
            if any(map(is_lazy, self.module.parameters())):
                return self._in_pytorch(LAZY, args, kwargs)
            with EXCLUSIVE:
                policy = self.policies[modes] = self._policy(modes, args, kwargs)
        if transform_around() is not None or tangents() >= 0:
            return self._served_by_none(TRANSFORMED, policy, args, kwargs)
        if modes[0] and saving_hooks(False) is not None and is_changing():
            return self._served_by_none(CHANGING, policy, args, kwargs)
        if policy.spell:
            policy.spell -= 1
            return self._in_pytorch(policy.reason, args, kwargs)
        given = (*args, *kwargs.values())
        if any(type(value).__module__ == _CACHES for value in given):
            return self._in_pytorch(WITH_CACHE, args, kwargs)
        if FakeTensor in {*map(type, given)}:
            return self._in_pytorch(FAKE, args, kwargs)
        if policy.contest is not None and is_checkpointed():
            return self._in_pytorch(REPEATED, args, kwargs)
        if policy.refused and (why := policy.refused.get(_form_of(args, kwargs))):
            return self._in_pytorch(why, args, kwargs)
        if not policy.settled:
            return self._tuned(policy, args, kwargs)
        return self._by(policy.way, policy, args, kwargs)

    def _by(self, way: str, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call by one of its ways."""
        if way == TORCH:
            return self._in_pytorch(policy.reason, args, kwargs)
        grad, may = is_grad_enabled(), policy.may_convert
        graphs, report = self._graphs(), self._described(grad)
        debug, shown = self.debug_options, _shown(self.only_loss)
        graphs.draws = None
        if policy.contest is not None and self._records():
            graphs.draws = AsGraphs if self.draws else _of_their_own
        graphs.tells = debug.log_level <= LogLevel.WARNING
        graphs.looks = grad and (debug.print_input_density or debug.print_memory_stats)
        if way == BLOCKS:
            outcome = graphs.by_blocks(policy.engine, args, kwargs, may_convert=may)
        else:
            outcome = graphs.whole(
                policy.engine, args, kwargs, shown, may_convert=may, may_part=policy.may_part
            )
        for saving in outcome.savings:
            report.note_tokens(saving)
        if graphs.describe(report, shown):
            report.overhead = self.overhead
            if self.debug_options.log_level <= LogLevel.INFO:
                print(report, file=sys.stderr)
            if self.debug_options.save_onnx and outcome.why is None:
                policy.saved = True
                ran = dict.fromkeys(graph for graph, _ in outcome.ran)
                graphs.save(self.debug_options, [*ran])
        if outcome.why is None:
            report.graph_calls += 1
            report.mode, report.reason = "graph", ""
            if outcome.looks:
                self._print(outcome, report)
            return outcome.output
        return self._without_graph(way, policy, outcome, outcome.why, args, kwargs)

    def _print(self, outcome: Outcome, report: Report) -> None:
        """Prints what is asked for of a step."""
        from ortrain.step.density import print_density
        from ortrain.step.memory_stats import print_memory

        looks = outcome.looks
        if self.debug_options.print_input_density:
            densities = {words: share for look in looks for words, share in look.densities.items()}
            saving = next((each for each in outcome.savings if each is not None), None)
            print_density(densities, report.graph_calls + report.eager_calls, saving)
        if self.debug_options.print_memory_stats and any(look.plan.pieces for look in looks):
            device = self.device or torch.device("cpu")
            print_memory(report.graph_calls, [(look.plan, look.sizes) for look in looks], device)

    def _without_graph(
        self,
        way: str,
        policy: Policy,
        outcome: Outcome,
        why: OrtrainError,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of a call none of whose graphs ran.

        Raises:
            OrtrainError: where no fallback is allowed. A call that is wrong raises its own error.
        """
        may = policy.may_convert
        if not outcome.waits:  # which is what such calls take
            policy.void()
        if isinstance(why, CheckFailed):
            self._described(is_grad_enabled()).astray += 1
        if outcome.done:
            self._note_eager(str(why))
        else:
            with alone(why):
                outcome.output = self._in_pytorch(str(why), args, kwargs)
        if outcome.meant:
            return outcome.output
        if not isinstance(why, CheckFailed) and not self.options.falls_back(why):
            raise why
        if not may:
            policy.missed()
        elif way == BLOCKS:
            policy.forfeit(BLOCKS, str(why))
            may = policy.settled  # nobody need hear of it where the whole will be tried
        elif outcome.done and is_checkpointed():
            pass  # the checkpoint's other run has to save as many tensors
        elif outcome.always and (outcome.lasting or policy.contest is not None):
            policy.forfeit(MODULE, str(why))
        elif outcome.lasting and not self.options.retry:
            policy.refused[_form_of(args, kwargs)] = str(why)
            if len(policy.refused) >= MOST_REFUSED:
                policy.forfeit(MODULE, str(why))
                policy.refused.clear()
        if may and not isinstance(why, CheckFailed | OfThisCall):
            self._warn(str(why))
        return outcome.output

    def _tuned(self, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call by the way whose turn it is, and measures it where that is asked for."""
        start = now(self.device)
        way = policy.next()
        if self.debug_options.save_onnx and not policy.saved and not policy.refused:
            way, policy.asked = MODULE, True  # for its files, whatever runs the next calls
        if policy.settled and not self.drawn and self._records():
            # The mode costs a microsecond for each of PyTorch's functions, and kernels for draws.
            self.draws &= any(each.way != TORCH for each in self.policies.values())
        if way != self.last:
            self.last = way
            release_pools()  # no two hold their memory at the same time
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
        self._note_eager(reason)
        if not self.draws:
            return self.module(*args, **kwargs)
        modes, seeds = (is_grad_enabled(), self.module.training), Seeds()
        quiet, before = self._quiet.get(modes, 0), torch.get_rng_state()
        # Where somebody else hears of functions, makes fakes, or takes derivatives of all that is
        # called, that state cannot be looked at.
        unheard = (
            makes_numbers() and transform_around() is None and not has_torch_function((before,))
        )
        looks = unheard and self.device == CPU
        plain = looks and quiet >= QUIET
        mode = nullcontext() if plain else as_graphs(self.module, seeds)
        with mode:
            output = self.module(*args, **kwargs)
        if isinstance(mode, AsGraphs) and mode.ends_a_graph and modes in self.policies:
            self.policies[modes].expect_parts()
        if looks and before.numpy().tobytes() == torch.get_rng_state().numpy().tobytes():
            self._quiet[modes] = quiet + 1
        else:
            self._quiet[modes] = -sys.maxsize
            self.drawn |= plain or bool(seeds.drawn)
        return output

    def _served_by_none(
        self, why: str, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a call that no graph serves, for what is around it.

        Raises:
            OfThisCall: no fallback is allowed.
        """
        if policy.engine != "torch":
            error = OfThisCall(why, help="none is needed: such calls run in PyTorch")
            if not self.options.falls_back(error):
                raise error
            self._warn(why)
        return self._in_pytorch(why, args, kwargs)

    def aside(self, reason: str, call: Callable[[], Any]) -> Any:
        """Runs a call in PyTorch that nobody means to be a graph; the report has the reason."""
        self.calls += 1
        self._note_eager(reason)
        return call()

    def _recovered(self, error: OrtrainError | None) -> None:
        """Hears of a backward that PyTorch has answered, and why; None where that is told."""
        self.report.recovered += 1
        if error is not None:
            self._warn(str(error))

    def _records(self) -> bool:
        """Whether graphs are recorded where the module is."""
        return self.device is not None and engines.records(self.device)

    def _note_eager(self, reason: str) -> None:
        report = self._described(is_grad_enabled())
        report.mode, report.reason = "eager", reason
        report.eager_calls += 1

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
        if why := needs_its_own_forward(self.module) or _partitioned(self.module):
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
        dtypes |= {dtype for kind, dtype in active() if kind == device.type}
        able = candidates(
            device, dtypes, self.options.provider,
            cuda_graphs=self.options.cuda_graphs is not False,
        )  # fmt: skip
        if not able:
            self.draws = False  # nothing else will ever draw
            why = f"there is no engine for tensors on {device}"
            return Policy(TORCH, self.overhead, reason=why)
        self.device = device
        chosen = cast(Engine, "aten" if "aten" in able else able[0])
        if self.options.deterministic or torch.are_deterministic_algorithms_enabled():
            return Policy(MODULE, self.overhead, engine=chosen)  # which no clock decides
        gain, padding = gain_of(dtypes, device), 0.0
        if device.type == "cpu":
            gain *= share_of(self.module)
            if transform_around() is None:  # within vmap a tensor has no single number
                padding = padding_in(kwargs)
        ways = challengers_of(self.module, gain, trains=grad, padding=padding)
        if not self.draws:
            ways = [each for each in ways if each.way != BLOCKS]
        prospect = self.prospect if grad else None
        verdicts = Verdicts(f"{self._name}/{'/'.join(map(str, modes))}")
        return Policy(
            TORCH, self.overhead, ways, prospect, verdicts, reason=TURN, engine=chosen,
            note=self._note(modes, chosen, args, kwargs) if verdicts.leads else None,
        )  # fmt: skip

    def _note(
        self,
        modes: tuple[bool, bool],
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Note | None:
        """The note on what earlier processes have found of such calls; None where none is kept."""
        if self.options.cache_dir is None:
            return None
        from ortrain.cache import Cache  # which loads onnx, as graphs do
        from ortrain.step.recalled import Note

        cache = Cache(self.options.cache_dir, self.options.cache_bytes)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        size = max((t.numel() for t in tensors), default=1)
        key = [(t.dtype, t.dim()) if isinstance(t, Tensor) else t for t in leaves]
        if self._records():
            key.append(_name_of(self.device))
        shown = _shown(self.only_loss)
        engines = BLOCKS, str(engine)
        return Note.of(cache, engines, self.module, self.options, key, size, modes, shown)

    def _graphs(self) -> Graphs:
        if self.graphs is None:
            # What is made as files are loaded is not made for this call's modes.
            with (
                EXCLUSIVE, self.overhead.of("imports"), torch.inference_mode(False),
                torch.enable_grad(),
            ):  # fmt: skip
                from ortrain.frontend.graphs import Graphs
            if self.options.keep_in_torch:
                from ortrain.frontend.parts import expect_sub_modules

                expect_sub_modules(self.module, self.options.keep_in_torch)
            self.graphs = Graphs(self.module, self.options, self.overhead, self._recovered)
        return self.graphs

    # -- what is told ----------------------------------------------------------------------------

    def _described(self, grad: bool) -> Report:
        """The report on calls with or without gradients; the latter have one beside the former."""
        if grad or not self.trains:
            return self.report
        if self.report.inference is None:
            self.report.inference = Report()
        return self.report.inference

    def _warn(self, reason: str) -> None:
        """Warns once, at the line outside of ortrain and torch that called the module."""
        if self.warned or self.debug_options.log_level > LogLevel.WARNING:
            return
        self.warned = True
        warn_caller(f"ORTModule runs {type(self.module).__name__} in PyTorch: {reason}")


def _of_their_own(seeds: Seeds) -> AbstractContextManager[None]:
    """What PyTorch runs draws numbers of its own."""
    return nullcontext()


def _name_of(device: torch.device | None) -> str:
    """Of a card, by its maker."""
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else str(device)


def _shown(only_loss: bool) -> Shown:
    return "loss" if only_loss else "all"


def _partitioned(module: nn.Module) -> str:
    """Why no graph can stand for a module whose parameters another library takes apart."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_status"):
            return (
                f"{name} is partitioned by DeepSpeed ZeRO stage 3, which gathers it for the "
                "modules that it calls; stages 1 and 2 leave parameters whole"
            )
    return ""


def _form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What tells calls apart that Dynamo treats alike or not: types, sizes and autocast."""
    leaves = pytree.tree_leaves((args, kwargs))
    kinds = sorted({leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)})
    able = filter(torch.amp.is_autocast_available, kinds)
    around = [torch.get_autocast_dtype(kind) for kind in able if torch.is_autocast_enabled(kind)]
    return (*around, *kwargs, *(_kind_of(leaf) for leaf in leaves))


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.shape, leaf.device, leaf.requires_grad, leaf.layout)
    return type(leaf), leaf if type(leaf) in (bool, int, float, str) else None
