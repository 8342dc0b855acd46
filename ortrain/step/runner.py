"""``Runner``: decides for each call of a module what runs it, and runs it.

A call is looked up by what a capture froze: the module's state (:class:`Guard`), the form of the
arguments and the ambient modes. What is found is a compiled step, or the reason why the call runs
in PyTorch. Nothing is ever replayed that has not been compared first.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ortrain.capture.export import Captured, capture
from ortrain.capture.guard import Ambient, Guard, ambient, inner_hooks
from ortrain.capture.structure import FlatCall, OutputStructure, flatten_call
from ortrain.config import DebugOptions, LogLevel, Options
from ortrain.errors import CaptureError, ExecutionError, GradientError, GraphError, OrtrainError
from ortrain.program import Role
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from ortrain.autodiff.partition import saved_bytes
from ortrain.step.build import Plan, build, likely_upstream
from ortrain.step.contest import Race, Sample
from ortrain.step.report import Report
from ortrain.step.run import Step

# Module states whose captures are kept: training and evaluation, adapters on and off, …
MOST_STATES = 8
# Captures of one form of call that differ in sizes which the module's code depends on.
MOST_SHAPES = 8

PROVIDERS = {"cpu": "CPUExecutionProvider"}


class OrtrainWarning(UserWarning):
    """ortrain did something else than was asked for, and says why."""


@dataclass
class Served:
    """One capture, ready to run.

    Attributes:
        captured: the capture.
        order: for each tensor of the capture its place among the call's tensors.
        positions: for each user input of the program its place among the call's tensors.
        structure: rebuilds the module's output.
        steps: compiled steps by (trainable inputs, outputs that receive a gradient).
    """

    captured: Captured
    order: list[int]
    positions: list[int]
    structure: OutputStructure
    steps: dict[tuple[Any, ...], Step] = field(default_factory=dict)


@dataclass
class Form:
    """All that is known of one form of call in one state of the module."""

    served: list[Served] = field(default_factory=list)
    reason: str = ""
    race: Race | None = None


@dataclass
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
    """

    def __init__(self, module: nn.Module, options: Options, debug_options: DebugOptions) -> None:
        self.module = module
        self.options = options
        self.debug_options = debug_options
        self.report = Report()
        self.states: OrderedDict[int, State] = OrderedDict()
        self.state: State | None = None
        self.warned = False
        self.tensors: dict[str, torch.Tensor] = {}

    # -- the hot path ------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self.state
        if state is None or state.guard.changed() is not None:
            state = self._find_state()
        try:
            flat = flatten_call(args, kwargs)
        except CaptureError as error:
            return self._eager_because(error, args, kwargs)
        key = (flat.key, ambient())
        form = state.forms.get(key)
        if form is None:
            form = state.forms[key] = self._new_form(key)
        if form.reason:
            return self._eager(form.reason, args, kwargs)
        sample = None
        race = form.race
        if race is not None:
            if race.winner == "eager" or (not race.winner and race.next() == "eager"):
                return self._raced_eager(race, flat, args, kwargs)
            if not race.winner and form.served:
                sample = race.sample("graph", _size(flat))
        try:
            served = self._served(form, flat)
            step = self._step(served, flat, state)
        except (CaptureError, GradientError, GraphError, ExecutionError) as error:
            return self._refused(form, error, args, kwargs)
        users = [flat.tensors[i] for i in served.positions]
        self.report.mode, self.report.reason = "graph", ""
        trains = bool(step.plan.arguments)
        try:
            outputs = step.train(users) if trains else step.infer(users)
        except ExecutionError as error:
            return self._refused(form, error, args, kwargs)
        if sample is not None:
            leaves = [users[i] for i in step.inputs] + step.parameters
            sample.forward_done(outputs, leaves, trains)
        return served.structure.rebuild(outputs)

    # -- finding ------------------------------------------------------------------------------

    def _find_state(self) -> State:
        for number, state in reversed(self.states.items()):
            if state is not self.state and state.guard.changed() is None:
                self.states.move_to_end(number)
                break
        else:
            state = State(Guard(self.module))
            self.states[time.perf_counter_ns()] = state
            while len(self.states) > MOST_STATES:
                self.states.popitem(last=False)
        self.state = state
        self.tensors = {
            **dict(self.module.named_buffers()),
            **dict(self.module.named_parameters()),
        }
        return state

    def _new_form(self, key: Any) -> Form:
        reason = self._not_served(Ambient(*key[1]))
        race = Race() if self.options.engine == "auto" and not reason else None
        if not reason and self.options.engine == "torch":
            reason = 'engine="torch"'
        if reason and self.options.engine != "torch":
            if self.options.fallback == "raise":
                raise CaptureError(
                    f"{type(self.module).__name__} cannot run as a graph here: {reason}"
                )
            self._warn(reason)
        return Form(reason=reason, race=race)

    def _not_served(self, modes: Ambient) -> str:
        """Why no graph can serve calls under these modes; empty where one can."""
        if modes.autocast is not None:
            return "autocast is on: mixed precision is not served yet"
        if modes.deterministic and self.options.provider not in (None, "CPUExecutionProvider"):
            return "deterministic algorithms are asked for"
        if modes.function_modes or modes.dispatch_modes or modes.transformed:
            return "a torch function mode or transform is active"
        for name, tensor in self.tensors.items():
            if tensor.device.type not in PROVIDERS and self.options.provider is None:
                return f"{name} is on {tensor.device}, for which there is no execution provider"
            if tensor.dtype in (torch.bfloat16, torch.float16):
                return f"{name} is {tensor.dtype}: reduced precision is not served yet"
            if tensor.layout is not torch.strided:
                return f"{name} is {tensor.layout}"
        return inner_hooks(self.module) or ""

    def _served(self, form: Form, flat: FlatCall) -> Served:
        for served in form.served:
            if served.captured.accepts([flat.tensors[i].shape for i in served.order]):
                return served
        if len(form.served) >= MOST_SHAPES:
            raise CaptureError(
                f"the module was captured {MOST_SHAPES} times for different input sizes",
                because="its code depends on sizes that change from call to call",
                help="pad the inputs to a few sizes, or wrap a sub-module whose code does not",
            )
        start = time.perf_counter()
        captured = capture(self.module, flat.args, flat.kwargs, opset=self.options.opset)
        self.report.stages = {"capture": time.perf_counter() - start}
        self.report.captures += 1
        if self.state is not None and self.state.guard.changed() is not None:
            # The trace ran the module's code, which may fill in what it finds missing, as it does
            # in eager: transformers writes `config.problem_type` in the first forward.
            self.state.guard = Guard(self.module)
        place = _places(flat)
        served = Served(
            captured,
            [place[t.position] for t in captured.tensors],
            [place[t.position] for t in captured.inputs],
            _structure(captured),
        )
        form.served.append(served)
        return served

    def _step(self, served: Served, flat: FlatCall, state: State) -> Step:
        key = state.guard.trainable() if torch.is_grad_enabled() else ()
        step = served.steps.get(key)
        if step is None:
            trainable: list[str] = []
            if torch.is_grad_enabled():
                users = served.captured.program.inputs(Role.USER_INPUT)
                needs = [flat.tensors[i].requires_grad for i in served.positions]
                trainable = [v.name or "" for v, need in zip(users, needs, strict=True) if need]
                held = served.captured.program.inputs(Role.PARAMETER)
                trainable += [v.name or "" for v in held if self.tensors[v.name or ""].requires_grad]
            sizes = _sizes(served, flat)
            upstream = likely_upstream(served.captured.program)
            step = self._build(served, key, trainable, upstream, sizes)
        return step

    def _build(
        self,
        served: Served,
        key: tuple[bool, ...],
        trainable: list[str],
        upstream: list[str],
        sizes: dict[str, int],
    ) -> Step:
        """Builds a step and enters it as the one to use for calls with this key."""
        program = served.captured.program
        executor = OnnxRuntimeExecutor(
            self.options.provider or "CPUExecutionProvider",
            self.options.threads or torch.get_num_threads(),
        )
        plan = build(
            program, trainable, upstream, executor, pieces=self.options.backward_pieces, sizes=sizes
        )

        def rebuild(received: tuple[bool, ...]) -> Step:
            users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
            names = [v.name or "" for v, given in zip(users, received, strict=True) if given]
            return self._build(served, key, trainable, names, sizes)

        self._describe(plan, executor, sizes)
        step = served.steps[key] = Step(plan, self.tensors, rebuild)
        return step

    def _describe(self, plan: Plan, executor: OnnxRuntimeExecutor, sizes: dict[str, int]) -> None:
        report = self.report
        report.engine = f"{executor.name} {executor.provider}"
        report.stages.update(plan.seconds)
        names = ["forward", *(f"backward {i + 1}" for i in range(len(plan.pieces)))]
        report.nodes = {
            name: (len(before.graph), len(after.graph))
            for name, before, after in zip(names, plan.programs, plan.lowered, strict=True)
        }
        report.saved_bytes = saved_bytes(list(plan.programs), sizes)
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
        if self.options.fallback == "raise":
            raise error
        self._warn(str(error))
        return self._eager(str(error), args, kwargs)

    def _refused(
        self, form: Form, error: OrtrainError, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.options.fallback == "raise":
            raise error
        if not self.options.retry:
            form.reason = str(error)
        self._warn(str(error))
        return self._eager(str(error), args, kwargs)

    def _raced_eager(
        self, race: Race, flat: FlatCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.report.contest = race.contest
        if race.winner:
            self.report.mode, self.report.reason = "eager", str(race.contest)
            return self.module(*args, **kwargs)
        self.report.mode, self.report.reason = "eager", "its turn in the contest with the graph"
        sample = race.sample("eager", _size(flat))
        output = self.module(*args, **kwargs)
        leaves = [p for p in self.module.parameters() if p.requires_grad]
        leaves += [t for t in flat.tensors if t.requires_grad]
        tensors, _ = OutputStructure.from_output(output)
        sample.forward_done(tensors, leaves, torch.is_grad_enabled() and bool(leaves))
        return output

    def _warn(self, reason: str) -> None:
        if self.warned or self.debug_options.log_level > LogLevel.WARNING:
            return
        self.warned = True
        warnings.warn(
            f"ORTModule runs {type(self.module).__name__} in PyTorch: {reason}",
            OrtrainWarning,
            stacklevel=6,
        )


def _places(flat: FlatCall) -> dict[int, int]:
    """Position in torch's flattening of the call → place among ``flat.tensors``.

    Capture flattens a call in torch's order, the hot path in its own; the tensors are the same.
    """
    places: dict[int, list[int]] = {}
    for i, tensor in enumerate(flat.tensors):
        places.setdefault(id(tensor), []).append(i)
    result: dict[int, int] = {}
    for position, leaf in enumerate(torch.utils._pytree.tree_leaves((flat.args, flat.kwargs))):
        own = places.get(id(leaf))
        if own is not None:
            result[position] = own.pop(0) if len(own) > 1 else own[0]
    return result


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
