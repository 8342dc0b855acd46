"""``Runner``: decides for each call of a module what runs it, and runs it.

A call is looked up by what a capture froze: the module's state (:class:`Guard`), the form of the
arguments and the ambient modes. What is found is a compiled step, or the reason why the call runs
in PyTorch. Nothing is ever replayed that has not been compared first.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import is_grad_enabled, nn
from torch.utils import _pytree as pytree

from ortrain.autodiff.partition import saved_bytes
from ortrain.cache import Cache
from ortrain.capture.export import Captured, capture
from ortrain.capture.guard import Ambient, Guard, ambient, inner_hooks
from ortrain.capture.records import records_registered
from ortrain.capture.structure import FlatCall, OutputStructure, flatten_call
from ortrain.capture.untouched import untouched
from ortrain.config import DebugOptions, LogLevel, Options
from ortrain.errors import (
    CaptureError,
    ExecutionError,
    GradientError,
    GraphError,
    NotServed,
    OrtrainError,
    OrtrainWarning,
)
from ortrain.graph.cost import multiplications
from ortrain.program import Program, Role
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from ortrain.runtime.onnxruntime.executor import SMALL
from ortrain.step import contest
from ortrain.step.build import Plan, build, likely_upstream
from ortrain.step.contest import Race
from ortrain.step.report import Report
from ortrain.step.run import Received, Step

# Module states whose captures are kept: training and evaluation, adapters on and off, …
MOST_STATES = 8
# Captures of one form of call that differ in sizes which the module's code depends on.
MOST_SHAPES = 8
# Sizes of calls that are remembered with the capture that serves them.
MOST_SIZES = 4096
# So many new states of the module within so many calls, and captures will never pay.
RESTLESS_STATES, RESTLESS_CALLS = 8, 16
# Calls that go to the module unseen once eager has won the contest; then one is looked at again.
EAGER_SPELL = 256
# Agreement that is asked of the outputs where sizes of 1 are tried for the first time.
SAME = 1e-3

PROVIDERS = {"cpu": "CPUExecutionProvider"}

Sizes = tuple[torch.Size, ...]


@dataclass
class Variants:
    """The steps of one capture that differ in the outputs which receive a gradient.

    Attributes:
        step: the one that the next forward runs.
        by_outputs: all that were built.
        misses: backwards that came for other outputs, since the last change of ``step``.
        patience: how many it takes to change ``step``; doubles each time, so that a loop which
            alternates settles.
    """

    step: Step
    by_outputs: dict[tuple[str, ...], Step]
    misses: int = 0
    patience: int = 1


@dataclass
class Served:
    """One capture, ready to run.

    Attributes:
        captured: the capture.
        order: for each tensor of the capture its place among the call's tensors.
        positions: for each user input of the program its place among the call's tensors.
        structure: rebuilds the module's output.
        variants: steps by what is trainable.
        ones: which patterns of sizes of 1 were compared with the module, and whether they agree.
        threads: of the steps.
    """

    captured: Captured
    order: list[int]
    positions: list[int]
    structure: OutputStructure
    variants: dict[tuple[bool, ...], Variants] = field(default_factory=dict)
    ones: dict[tuple[tuple[int, int], ...], bool] = field(default_factory=dict)
    threads: int = 0


@dataclass
class Form:
    """All that is known of one form of call in one state of the module.

    Attributes:
        grad: whether gradients are enabled.
        reason: why calls of this form run in PyTorch; empty where they do not.
        lost: whether that is because eager is faster.
        race: the contest with eager, until it is decided.
        served: captures.
        by_sizes: the capture that serves calls of these sizes.
        refused: sizes for which there is no capture, and why; there is one for others.
    """

    grad: bool
    reason: str = ""
    lost: bool = False
    race: Race | None = None
    served: list[Served] = field(default_factory=list)
    by_sizes: dict[Sizes, Served] = field(default_factory=dict)
    refused: dict[Sizes, str] = field(default_factory=dict)


@dataclass(eq=False)
class State:
    """A state of the module, as its guard saw it, with what was captured in it."""

    guard: Guard
    forms: dict[Any, Form] = field(default_factory=dict)


class Runner:
    """Runs the calls of one module.

    Args:
        module: the module.
        options: settings.
        debug_options: what to show.

    Attributes:
        report: what ran where.
        plan: of the step that was built last; None before.
        rewrites: run on each captured program before it is differentiated.
    """

    def __init__(self, module: nn.Module, options: Options, debug_options: DebugOptions) -> None:
        self.module = module
        self.options = options
        self.debug_options = debug_options
        self.report = Report()
        self.cache = Cache(options.cache_dir)
        self.trains = False
        self.plan: Plan | None = None
        self.rewrites: Sequence[Callable[[Program], object]] = ()
        self.states: list[State] = []
        self.state: State | None = None
        self.warned = False
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls = 0
        self.arrivals: deque[int] = deque(maxlen=RESTLESS_STATES)
        # Calls that go to the module unseen, while it trains or not and gradients are on or not.
        self.spell = 0
        self.spell_is_for = (True, True)

    # -- the hot path ------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call, as a graph or in PyTorch."""
        if self.spell:
            if (self.module.training, is_grad_enabled()) == self.spell_is_for:
                self.spell -= 1
                return self.module(*args, **kwargs)
            self.spell = 0
        start = contest.clock()
        self.calls += 1
        state = self.state
        if state is None or (change := state.guard.changed()) is not None:
            state = self._find_state("" if state is None else change)
            if state is None:
                return self._eager(self.report.reason, args, kwargs)
        try:
            flat = flatten_call(args, kwargs)
        except CaptureError as error:
            return self._eager_because(error, args, kwargs)
        key = (flat.key, ambient())
        form = state.forms.get(key)
        if form is None:
            form = state.forms[key] = self._new_form(key, flat)
        if form.reason:
            if form.lost:
                self._begin_spell()
            return self._eager(form.reason, args, kwargs)
        race, sample = form.race, None
        if race is not None:
            if race.next() == "eager":
                return self._eager_turn(race, form, flat)
            if race.winner:
                form.race = None
            elif form.served:
                sample = race.sample("graph", _size(flat), start)
        sizes = tuple([t.shape for t in flat.tensors])
        served = form.by_sizes.get(sizes)
        try:
            if served is None:
                served = self._find_capture(form, flat, sizes)
            variants = served.variants.get(state.guard.trainable() if form.grad else ())
            step = self._first_step(served, flat) if variants is None else variants.step
            tensors = flat.tensors
            users = [tensors[i] for i in served.positions]
            trains = bool(step.plan.arguments)
            outputs = step.train(users) if trains else step.infer(users)
        except (CaptureError, GradientError, GraphError, ExecutionError) as error:
            return self._refused(form, flat, sizes, error)
        report = self.report
        if report.reason or not report.mode:
            report.mode, report.reason = "graph", ""
        if sample is not None:
            leaves = [t for i in step.inputs if (t := users[i]).requires_grad] + step.leaves
            sample.forward_done(outputs, leaves, trains)
        return served.structure.rebuild(outputs)

    # -- finding ------------------------------------------------------------------------------

    def _find_state(self, change: str | None) -> State | None:
        """The state that the module is in now; None where it never stays in one."""
        for state in reversed(self.states):
            if state is not self.state and state.guard.changed() is None:
                self.states.remove(state)
                break
        else:
            self.arrivals.append(self.calls)
            if (
                len(self.arrivals) == RESTLESS_STATES
                and self.calls - self.arrivals[0] < RESTLESS_CALLS
            ):
                self._give_up(change or "")
                return None
            state = State(Guard(self.module))
        self.states.append(state)
        del self.states[:-MOST_STATES]
        self.state = state
        self.tensors = {
            **dict(self.module.named_buffers()),
            **dict(self.module.named_parameters()),
        }
        return state

    def _give_up(self, change: str) -> None:
        """Runs the module eagerly from now on: each of its states is new.

        Raises:
            CaptureError: where no fallback is allowed.
        """
        error = CaptureError(
            f"{type(self.module).__name__} changes at nearly every call, and each capture is for "
            "one state",
            because=f"last, {change}",
            help="make what changes an input or a buffer, so that the graph reads it",
        )
        self.arrivals.clear()
        if not self.options.falls_back(error):
            raise error
        self._warn(str(error))
        self.states.clear()
        self.report.reason = str(error)
        self.state = None
        self.spell = sys.maxsize
        self.spell_is_for = _Anything()  # type: ignore[assignment]

    def _new_form(self, key: Any, flat: FlatCall) -> Form:
        modes = Ambient(*key[1])
        self.trains |= modes.grad
        reason = self._not_served(modes, flat)
        race = Race() if self.options.engine == "auto" and not reason else None
        if self.options.engine == "torch":
            reason = 'engine="torch"'
        elif reason:
            error = NotServed(f"{type(self.module).__name__} cannot run as a graph here: {reason}")
            if not self.options.falls_back(error):
                raise error
            self._warn(reason)
        return Form(modes.grad, reason=reason, race=race)

    def _not_served(self, modes: Ambient, flat: FlatCall) -> str:
        """Why no graph can serve calls under these modes; empty where one can."""
        if modes.autocast is not None:
            return "autocast is on: mixed precision is not served yet"
        if modes.deterministic and self.options.provider not in (None, "CPUExecutionProvider"):
            return "deterministic algorithms are asked for"
        if modes.function_modes or modes.dispatch_modes or modes.transformed:
            return "a torch function mode or transform is active"
        inputs = {f"an input of shape {[*t.shape]}": t for t in flat.tensors}
        for name, tensor in {**self.tensors, **inputs}.items():
            if tensor.device.type not in PROVIDERS and self.options.provider is None:
                return f"{name} is on {tensor.device}, for which there is no execution provider"
            if tensor.dtype in (torch.bfloat16, torch.float16):
                return f"{name} is {tensor.dtype}: reduced precision is not served yet"
            if tensor.layout is not torch.strided:
                return f"{name} is {tensor.layout}"
        return inner_hooks(self.module) or ""

    def _find_capture(self, form: Form, flat: FlatCall, sizes: Sizes) -> Served:
        """The capture for a call of these sizes, made anew where none serves it."""
        refused = form.refused.get(sizes)
        if refused is not None:
            raise CaptureError(refused)
        apart = False  # whether the module's code treats a size of 1 apart
        for served in form.served:
            own = [sizes[i] for i in served.order]
            if served.captured.accepts(own):
                if self._holds(served, flat, own):
                    break
                apart = True
        else:
            served = self._capture(form, flat, exact=apart)
            form.served.append(served)
            if not apart and not self._holds(served, flat, [sizes[i] for i in served.order]):
                served = self._capture(form, flat, exact=True)
                form.served.append(served)
        if served.threads == 1 < self._threads(served.captured.program, _sizes(served, flat)):
            served.variants.clear()  # built for small batches: from now on with more threads
        if len(form.by_sizes) >= MOST_SIZES:
            form.by_sizes.clear()
        form.by_sizes[sizes] = served
        return served

    def _capture(self, form: Form, flat: FlatCall, *, exact: bool) -> Served:
        if len(form.served) + len(form.refused) >= MOST_SHAPES:
            raise CaptureError(
                f"the module was captured {MOST_SHAPES} times for different input sizes",
                because="its code depends on sizes that change from call to call",
                help="pad the inputs to a few sizes, or wrap a sub-module whose code does not",
            )
        start = time.perf_counter()
        with (
            _no_bug("capturing"),
            records_registered(self.module, flat.args, flat.kwargs),
            torch.inference_mode(False),
            torch.set_grad_enabled(form.grad),
            # What the trace saves for a backward that never runs is not for the caller's hooks:
            # checkpointing would count it.
            torch.autograd.graph.saved_tensors_hooks(_itself, _itself),
        ):
            place, args, kwargs = _distinct(flat)
            captured = capture(
                self.module,
                args,
                kwargs,
                opset=self.options.opset,
                exact=exact,
                cache=self.cache,
            )
        for rewrite in self.rewrites:
            rewrite(captured.program)
        self._described(form.grad).stages = {"capture": time.perf_counter() - start}
        self.report.captures += 1
        if self.state is not None and self.state.guard.changed() is not None:
            # The trace ran the module's code, which may fill in what it finds missing, as it does
            # in eager: transformers writes `config.problem_type` in the first forward.
            self.state.guard = Guard(self.module)
        return Served(
            captured,
            [place[t.position] for t in captured.tensors],
            [place[t.position] for t in captured.inputs],
            _structure(captured),
        )

    def _holds(self, served: Served, flat: FlatCall, sizes: Sequence[torch.Size]) -> bool:
        """Whether the capture computes what the module does at these sizes.

        PyTorch treats a size of 1 as different from all others, a graph does not. Where one is a 1
        that the trace saw larger, the outputs are compared with the module's own, once for each
        pattern of ones.
        """
        if served.captured.constraints.assumes(sizes):
            return True
        ones = tuple(
            (i, axis) for i, shape in enumerate(sizes) for axis, n in enumerate(shape) if n == 1
        )
        if ones not in served.ones:
            served.ones[ones] = self._agrees(served, flat)
        return served.ones[ones]

    def _agrees(self, served: Served, flat: FlatCall) -> bool:
        """Whether one call of the graph and one of the module have the same outputs.

        Neither changes a buffer or a random state. Shapes alone count where the graph draws random
        numbers.
        """
        module = self.module
        copies = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with untouched(module), torch.no_grad():
            output = torch.func.functional_call(module, copies, flat.args, flat.kwargs)
        expected, _ = OutputStructure.from_output(output)
        with untouched(module):
            step = self._any_step(served, flat)
            outputs = step.try_out([flat.tensors[i] for i in served.positions])
        found, _ = OutputStructure.from_output(served.structure.rebuild(outputs))
        drawn = bool(served.captured.program.inputs(Role.SEED))
        return len(found) == len(expected) and all(
            _same(a, b, shapes_only=drawn) for a, b in zip(found, expected, strict=True)
        )

    def _any_step(self, served: Served, flat: FlatCall) -> Step:
        for variants in served.variants.values():
            return variants.step
        return self._first_step(served, flat)

    def _first_step(self, served: Served, flat: FlatCall) -> Step:
        """Builds the step for what is trainable now, by the likely outputs."""
        assert self.state is not None
        program = served.captured.program
        grad = is_grad_enabled()
        trainable: list[str] = []
        if grad:
            users = program.inputs(Role.USER_INPUT)
            needs = [flat.tensors[i].requires_grad for i in served.positions]
            trainable = [v.name or "" for v, need in zip(users, needs, strict=True) if need]
            held = [v.name or "" for v in program.inputs(Role.PARAMETER)]
            trainable += [name for name in held if self.tensors[name].requires_grad]
        sizes = _sizes(served, flat)
        served.threads = threads = self._threads(program, sizes)
        tensors = self.tensors
        outputs = [v.name or "" for v in program.outputs(Role.USER_OUTPUT, Role.LOSS)]

        def make(upstream: Sequence[str]) -> Step:
            plan = self._build(program, trainable, upstream, sizes, threads)
            return Step(plan, tensors, other)

        def other(received: Received) -> Step:
            names = tuple(name for name, given in zip(outputs, received, strict=True) if given)
            step = variants.by_outputs.get(names)
            if step is None:
                step = variants.by_outputs[names] = make(names)
            variants.misses += 1
            if variants.misses >= variants.patience:
                variants.step, variants.misses = step, 0
                variants.patience *= 2
            return step

        upstream = tuple(likely_upstream(program))
        step = make(upstream)
        variants = Variants(step, {upstream: step})
        served.variants[self.state.guard.trainable() if grad else ()] = variants
        return step

    def _build(
        self,
        program: Program,
        trainable: Sequence[str],
        upstream: Sequence[str],
        sizes: dict[str, int],
        threads: int,
    ) -> Plan:
        executor = OnnxRuntimeExecutor(self.options.provider or "CPUExecutionProvider", threads)
        pieces = self.options.backward_pieces
        with _no_bug("building"):
            plan = build(
                program, trainable, upstream, executor, pieces=pieces, sizes=sizes, cache=self.cache
            )
        self.plan = plan
        self._describe(plan, executor, sizes)
        return plan

    def _threads(self, program: Program, sizes: dict[str, int]) -> int:
        """The threads for a program at these sizes: one where more would only be woken up."""
        small = multiplications(program.graph, sizes) < SMALL
        return self.options.threads or (1 if small else torch.get_num_threads())

    def _described(self, grad: bool) -> Report:
        """The report on calls with or without gradients.

        The latter have one of their own only where there are both.
        """
        if grad or not self.trains:
            return self.report
        if self.report.inference is None:
            self.report.inference = Report()
        return self.report.inference

    def _describe(self, plan: Plan, executor: OnnxRuntimeExecutor, sizes: dict[str, int]) -> None:
        report = self._described(is_grad_enabled())
        report.engine = f"{executor.name} {executor.provider}"
        report.stages.update(plan.seconds)
        names = ["forward", *(f"backward {i + 1}" for i in range(len(plan.pieces)))]
        report.nodes = {
            name: (len(before.graph), len(after.graph))
            for name, before, after in zip(names, plan.programs, plan.lowered, strict=True)
        }
        report.saved_bytes = saved_bytes(list(plan.programs), sizes)
        if self.debug_options.log_level <= LogLevel.INFO:
            print(report, file=sys.stderr)
        debug = self.debug_options
        if debug.save_onnx:
            mode = "training" if plan.pieces else "inference"
            debug.folder.mkdir(parents=True, exist_ok=True)
            for name, before, after in zip(names, plan.programs, plan.lowered, strict=True):
                stem = f"{debug.onnx_prefix}_{name.replace(' ', '_')}"
                before.save(debug.folder / f"{stem}_{mode}.onnx")
                after.save(debug.folder / f"{stem}_lowered_{mode}.onnx")

    # -- running in PyTorch ------------------------------------------------------------------

    def _eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.report.mode, self.report.reason = "eager", reason
        return self.module(*args, **kwargs)

    def _eager_because(
        self, error: OrtrainError, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.options.falls_back(error):
            raise error
        self._warn(str(error))
        return self._eager(str(error), args, kwargs)

    def _refused(self, form: Form, flat: FlatCall, sizes: Sizes, error: OrtrainError) -> Any:
        """Runs a call eagerly that cannot be captured, or that the graph failed to run."""
        if not self.options.falls_back(error):
            raise error
        # If the module raises too, the call was wrong, and nothing is noted about the form.
        output = self._eager(str(error), flat.args, flat.kwargs)
        self._warn(str(error))
        if not self.options.retry:
            if not form.served:
                form.reason = str(error)
            elif len(form.refused) < MOST_SHAPES:  # other sizes are served
                form.refused[sizes] = str(error)
                form.by_sizes.pop(sizes, None)
        return output

    def _eager_turn(self, race: Race, form: Form, flat: FlatCall) -> Any:
        """A step that eager runs because it is its turn, or because it has won."""
        self._described(form.grad).contest = race.contest
        if race.winner:
            # The captures of this form will not be used again.
            form.race, form.reason, form.lost = None, str(race.contest), True
            form.served, form.by_sizes, form.refused = [], {}, {}
            self._begin_spell()
            return self._eager(form.reason, flat.args, flat.kwargs)
        sample = race.sample("eager", _size(flat), contest.clock())
        output = self._eager("its turn in the contest with the graph", flat.args, flat.kwargs)
        held: list[torch.Tensor] = [*self.module.parameters(), *flat.tensors]
        leaves = [t for t in held if t.requires_grad]
        try:
            tensors, _ = OutputStructure.from_output(output)
        except CaptureError:  # which the graph's turn will report
            tensors = []
        sample.forward_done(tensors, leaves, is_grad_enabled() and bool(leaves))
        return output

    def _begin_spell(self) -> None:
        self.spell = EAGER_SPELL
        self.spell_is_for = (self.module.training, is_grad_enabled())

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


_INNER = ("ortrain.", "torch.nn.modules.module")


class _Anything:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def _no_bug(doing: str) -> Iterator[None]:
    """An error that nobody foresaw becomes one that has a fallback."""
    try:
        yield
    except OrtrainError:
        raise
    except Exception as error:
        raise CaptureError(
            f"an error of ortrain's own while {doing} the graph",
            because=f"{type(error).__name__}: {error}",
            help="please report it; the module runs in PyTorch meanwhile",
        ) from error


def _itself(value: Any) -> Any:
    return value


def _distinct(flat: FlatCall) -> tuple[dict[int, int], tuple[Any, ...], dict[str, Any]]:
    """The call with a tensor object of its own at each place where one stands.

    Returns:
        Position in torch's flattening of the call → place among ``flat.tensors``, and the
        arguments. Capture flattens a call in torch's order, the hot path in its own; where a tensor
        is passed twice, the objects alone do not tell which is which.
    """
    leaves, spec = pytree.tree_flatten((flat.args, flat.kwargs))
    own = [_alias(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(own, spec)
    places = {id(tensor): i for i, tensor in enumerate(flatten_call(args, kwargs).tensors)}
    return {p: places[id(leaf)] for p, leaf in enumerate(own) if id(leaf) in places}, args, kwargs


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return tensor  # which capture refuses by name
    detached = tensor.clone() if tensor.is_inference() else tensor.detach()
    return detached.requires_grad_(tensor.requires_grad)


def _structure(captured: Captured) -> OutputStructure:
    """How the program's outputs make up the module's, from stand-ins in their places."""
    count = len(captured.program.outputs(Role.USER_OUTPUT, Role.LOSS))
    tensors = [torch.empty(()) for _ in range(count)]
    found, structure = OutputStructure.from_output(captured.rebuild(tensors))
    order = [next(i for i, t in enumerate(tensors) if t is f) for f in found]
    if order != list(range(count)):
        rebuild = structure.rebuild
        structure.rebuild = lambda outputs: rebuild([outputs[i] for i in order])
    return structure


def _sizes(served: Served, flat: FlatCall) -> dict[str, int]:
    """The value that each symbolic dimension has in this call."""
    sizes: dict[str, int] = {}
    users = served.captured.program.inputs(Role.USER_INPUT)
    for value, place in zip(users, served.positions, strict=True):
        for dim, size in zip(value.shape or (), flat.tensors[place].shape, strict=True):
            if not isinstance(dim, int) and dim.value is not None:
                sizes[dim.value] = size
    return sizes


def _size(flat: FlatCall) -> int:
    """Elements of the call's largest tensor: what the time of a step is proportional to."""
    return max((t.numel() for t in flat.tensors), default=1)


def _same(a: torch.Tensor, b: torch.Tensor, *, shapes_only: bool) -> bool:
    """Whether two outputs agree but for roundings."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if shapes_only or not a.numel():
        return True
    if not a.is_floating_point():
        return bool((a == b).all())
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=SAME, atol=SAME * scale, equal_nan=True)
