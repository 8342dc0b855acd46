"""``StepCompiler``: finds the compiled step of a call, and makes it where there is none."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import distributed, is_grad_enabled, nn

from ortrain.autodiff.engine import influences
from ortrain.autodiff.held import largest, peak, saved_bytes
from ortrain.cache import Cache
from ortrain.capture.origin import own_failure
from ortrain.capture.trace.records import records_registered
from ortrain.capture.trace.refusal import located
from ortrain.capture.trace.stand_ins import stand_ins_watched
from ortrain.config import (
    DebugOptions,
    LogLevel,
    Options,
)
from ortrain.errors import CaptureError, CheckFailed, OrtrainError
from ortrain.exclusive import EXCLUSIVE
from ortrain.graph.cost import Multiplications
from ortrain.guards.attributes import WithAttributes
from ortrain.guards.call_kinds import Kinds
from ortrain.guards.numbers import WithNumbers
from ortrain.guards.record import classes_of
from ortrain.guards.structure import FlatCall
from ortrain.ops.kept import keys_of
from ortrain.passes.linear_loss import blocks_of, in_blocks
from ortrain.passes.tokens import Shown, packed
from ortrain.program import Program, Role
from ortrain.pytorch.saving import unhooked
from ortrain.runtime import engines
from ortrain.runtime.base import Executor
from ortrain.runtime.memory import HOLES, Ceiling, release_free_memory
from ortrain.step.autograd import Step
from ortrain.step.build import Plan, build, likely_upstream
from ortrain.step.capturer import Capturer
from ortrain.step.certificate import certify, refuted
from ortrain.step.evidence import Certificate
from ortrain.step.forms import (
    CallForm,
    CompiledCapture,
    ModuleState,
    Sizes,
    StepVariants,
    Variant,
)
from ortrain.step.places import axes_of, device_of, distinct, placed, structure_of
from ortrain.step.progress import progress
from ortrain.step.ranges import marked
from ortrain.step.replay import Original
from ortrain.step.report import Report
from ortrain.step.saved_forward import Received
from ortrain.step.saved_graphs import save_pieces, save_stages
from ortrain.step.tokens import TokenCounts, Tokens, dense
from ortrain.uncollected import uncollected

# Captures of one form of call that differ in sizes which the module's code depends on.
MOST_SHAPES = 8
# Sizes of calls that are remembered with the capture that serves them.
MOST_SIZES = 4096

# Below this many multiplications in the forward, waking a second thread of onnxruntime's costs more
# than it brings: a perceptron of width 64 at batch 32 (0.4 M) takes 110 us on one thread and 147 on
# two.
_SMALL = 4 << 20


class StepCompiler:
    """Captures one module and builds its steps.

    Args:
        module: the module.
        options: settings.
        debug_options: what to show.

    Attributes:
        report: on what was built, and on the calls.
        plan: of the step that was built last; None before.
        sizes: that it was built for.
        most_tokens: how many tokens its sets have at most, at any sizes.
        rewrites: run on each captured program before it is differentiated.
        trains: whether calls with gradients were seen.
        certificate: the last one.
        capturer: of the module, which knows what stays PyTorch's.
    """

    def __init__(self, module: nn.Module, options: Options, debug_options: DebugOptions) -> None:
        self.module = module
        self.debug_options = debug_options
        # Whether a call was left to PyTorch for what it makes and the next ones find.
        self.has_waited = False
        self.use(options)
        self.report = Report()
        self.plan: Plan | None = None
        self.sizes: dict[str, int] = {}
        self.most_tokens: Callable[[Mapping[str, int]], dict[str, int]] = _none
        self.rewrites: Sequence[Callable[[Program], object]] = ()
        self.trains = False
        self.certificate: Certificate | None = None

    def use(self, options: Options) -> None:
        """Takes other settings."""
        self.options = options
        self.cache = Cache(options.cache_dir, options.cache_bytes)
        self.capturer = Capturer(self.module, options, self.cache)

    def find(
        self, state: ModuleState, form: CallForm, flat: FlatCall, sizes: Sizes
    ) -> CompiledCapture:
        """The capture for a call of these sizes, made anew where none serves it."""
        with EXCLUSIVE, uncollected():
            served = form.by_sizes.get(sizes)  # another thread may have found it meanwhile
            if served is not None:
                return served
            known = len(form.served)
            try:
                return self._find(state, form, flat, sizes)
            except OrtrainError as error:
                if isinstance(error, CheckFailed) or not self.cache.distrust():
                    raise
                del form.served[known:]
                served = self._find(state, form, flat, sizes)
                self.cache.remade()
                return served

    def _find(
        self, state: ModuleState, form: CallForm, flat: FlatCall, sizes: Sizes
    ) -> CompiledCapture:
        refused = form.refused.get(sizes)
        if refused is not None:
            raise CaptureError(refused)
        apart = False  # whether the module's code treats a size of 1 apart
        for served in form.served:
            own = [sizes[i] for i in served.order]
            if served.captured.accepts(own):
                if self._holds(state, form, served, flat, own):
                    break
                apart = True
        else:
            served = self._capture(state, form, flat, exact=apart)
            form.served.append(served)
            own = [sizes[i] for i in served.order]
            if not apart and not self._holds(state, form, served, flat, own):
                served = self._capture(state, form, flat, exact=True)
                form.served.append(served)
        if served.threads == 1 < self._threads(form.engine, served, served.sizes(flat)):
            served.variants.clear()  # built for small batches: from now on with more threads
        if isinstance(self.options.memory_budget, int) and served.outgrown(flat):
            served.variants.clear()  # what kept to so many bytes was built for smaller sizes
        if self.options.certificate == "each size":
            known = served.variants.get(self.variant(state, form, served, flat))
            if known is not None:
                self.compare(state, served, flat, known.step)
        if len(form.by_sizes) >= MOST_SIZES:
            form.by_sizes.clear()
        form.by_sizes[sizes] = served
        return served

    def _capture(
        self, state: ModuleState, form: CallForm, flat: FlatCall, *, exact: bool
    ) -> CompiledCapture:
        if len(form.served) + len(form.refused) >= MOST_SHAPES:
            raise CaptureError(
                f"the module was captured {MOST_SHAPES} times for different input sizes",
                because="its code depends on sizes that change from call to call",
                help="pad the inputs to a few sizes, or wrap a sub-module whose code does not",
            )
        self.cache.begin()
        start = time.perf_counter()
        with (
            _no_bug("capturing"),
            marked("capture"),
            progress(
                f"capturing {type(self.module).__name__}",
                shown=self.debug_options.log_level <= LogLevel.WARNING,
            ),
            records_registered(self.module, *flat.traced),
            torch.inference_mode(False),
            torch.set_grad_enabled(form.grad),
            unhooked(),  # of what the trace saves for a backward that never runs
            self._numbers_as_tensors(state, flat),
            state.reads_noted(self.module),
        ):
            place, args, kwargs = distinct(flat)
            # Where engines are measured the first calls are PyTorch's anyway.
            waits = not self.has_waited and self.options.engine_for(form.grad) != "auto"
            captured = self.capturer.capture(
                args,
                kwargs,
                exact=exact,
                still=not form.served,
                waits=waits,
                uncompared=state.guard.uncompared,
            )
        positions = [place[t.position] for t in captured.inputs]
        if state.moving:
            first = len(flat.tensors) - len(state.attributes)
            positions += [first + i for i in state.moving.enter(captured.program)]
        for rewrite in self.rewrites:
            rewrite(captured.program)
        state.leave(self.module, self.capturer.live())
        state.know(self.module, classes_of((flat.args, flat.kwargs)))
        form.report.stages = {"capture": time.perf_counter() - start}
        self.report.captures += 1
        state.settle(self.module, form)
        cost = Multiplications(captured.program.graph)
        structure, ordered, changes = structure_of(captured)
        device = device_of(flat, state.tensors)
        shown = form.shown if ordered and changes is None else "all"
        program, hidden = in_blocks(captured.program, shown) or (captured.program, ())
        compares = self.options.certificate != "off"
        served = CompiledCapture(
            captured,
            program,
            hidden,
            [place[t.position] for t in captured.tensors],
            positions,
            structure,
            axes_of(captured.program, positions),
            cost,
            returned={
                i: placed(source, place, self.module, state.tensors)
                for i, source in captured.returned.items()
            },
            changes=changes,
            kinds=Kinds(flat.tensors) if captured.by_values and compares else None,
        )
        self._leave_out(served, form, flat, device, shown)
        return served

    def _leave_out(
        self,
        served: CompiledCapture,
        form: CallForm,
        flat: FlatCall,
        device: torch.device,
        shown: Shown,
    ) -> None:
        """Finds what leaves tokens out of a capture, or why that cannot be.

        Args:
            served: the capture.
            form: of the calls.
            flat: the call that was captured.
            device: of its tensors.
            shown: what is read of its outputs, which come in the order of the program's.
        """
        program = served.captured.program
        executor = self._executor(form.engine, device, 1, program)
        # Of a GPU one would have to wait for the number of tokens.
        if self.options.skip_padding is not False and device.type == "cpu":
            found = packed(program, shown)
            if found is not None and TokenCounts.serves(found):
                found.program, hidden = in_blocks(found.program, shown) or (found.program, ())
                served.tokens = Tokens(found, program, served.cost, executor, hidden)
            form.report.dense = dense(program, shown, served.cost, served.sizes(flat))
        if self.debug_options.print_input_density:
            found = packed(program, "loss") or packed(program, "tokens")
            if found is not None and TokenCounts.serves(found):
                served.counts = TokenCounts(found, program, executor)

    @contextlib.contextmanager
    def _numbers_as_tensors(self, state: ModuleState, flat: FlatCall) -> Iterator[None]:
        """Tensors are where the module's code has numbers that are inputs of its graph."""
        moving, plain = state.moving, flat.plain if isinstance(flat, WithAttributes) else flat
        if moving is None and not isinstance(plain, WithNumbers):
            yield
            return
        held = moving.stand_ins if moving else list
        with (
            moving.as_buffers() if moving else contextlib.nullcontext(),
            stand_ins_watched(self.module, held, arguments_too=isinstance(plain, WithNumbers)),
        ):
            if moving is not None:
                self.capturer.numbers = frozenset((id(a.owner), a.name) for a in moving.attributes)
            try:
                yield
            finally:
                self.capturer.numbers = frozenset()

    def _holds(
        self,
        state: ModuleState,
        form: CallForm,
        served: CompiledCapture,
        flat: FlatCall,
        sizes: Sequence[torch.Size],
    ) -> bool:
        """Whether the capture computes what the module does at these sizes.

        PyTorch treats a size of 1 as different from all others, a graph does not. Where one is a 1
        that the trace saw larger, the outputs are compared with the module's own, once for each
        pattern of ones.
        """
        untraced = served.captured.constraints.untraced(sizes)
        if not untraced:
            return True
        if untraced not in served.ones:
            variant = self.variant(state, form, served, flat)
            variants = served.variants.get(variant)
            if variants is None:
                variants = self._step(state, form, served, flat, variant)
            certificate = certify(self.module, state.tensors, served, flat, variants.step)
            served.ones[untraced] = not certificate.faults
            served.agrees(flat, certificate)
        return served.ones[untraced]

    def variant(
        self, state: ModuleState, form: CallForm, served: CompiledCapture, flat: FlatCall
    ) -> Variant:
        """What selects among the steps of a capture."""
        trainable = state.guard.trainable() if is_grad_enabled() else ()
        saving = served.saving(flat)
        return form.engine, trainable, saving is not None and saving.share > 0

    def first_step(
        self,
        state: ModuleState,
        form: CallForm,
        served: CompiledCapture,
        flat: FlatCall,
        variant: Variant,
    ) -> Step:
        """Builds the step of a variant, and compares it with the module.

        Raises:
            ParityError: they do not agree.
        """
        with EXCLUSIVE:
            variants = served.variants.get(variant)
            if variants is None:
                variants = self._step(state, form, served, flat, variant)
                if self.options.certificate != "off":
                    self.compare(state, served, flat, variants.step)
                    variants.certificate = self.certificate
                served.variants[variant] = variants
            return variants.step

    def compare_first(
        self, state: ModuleState, served: CompiledCapture, flat: FlatCall, step: Step
    ) -> None:
        """Compares a step with the module on the first call of its kind.

        Raises:
            ParityError: they do not agree.
        """
        kinds = served.kinds
        if kinds is not None and kinds.of(flat.tensors) not in kinds.compared:
            with EXCLUSIVE:
                self.compare(state, served, flat, step)

    def compare(
        self, state: ModuleState, served: CompiledCapture, flat: FlatCall, step: Step
    ) -> None:
        """Compares a step with the module on one call and notes the result.

        Raises:
            ParityError: they do not agree.
        """
        start = time.perf_counter()
        with uncollected():
            certificate = certify(self.module, state.tensors, served, flat, step)
        release_free_memory(beyond=HOLES)
        report = self.described(is_grad_enabled())
        report.stages["certificate"] = time.perf_counter() - start
        report.certificate, self.certificate = str(certificate), certificate
        if certificate.faults:
            raise refuted(self.module, certificate)
        served.agrees(flat, certificate)
        self.cache.begin()  # what was taken from it until now is right

    def _step(
        self,
        state: ModuleState,
        form: CallForm,
        served: CompiledCapture,
        flat: FlatCall,
        variant: Variant,
    ) -> StepVariants:
        """Builds the step of a variant, by the likely outputs."""
        program, hidden, partial = served.program, served.hidden, False
        if variant[-1]:
            assert served.tokens is not None
            program, hidden = served.tokens.program, served.tokens.hidden
            partial = bool(served.tokens.partial)
        grad = is_grad_enabled()
        trainable: list[str] = []
        if grad:
            users = program.inputs(Role.USER_INPUT)
            needs = [flat.tensors[i].requires_grad for i in served.positions]
            trainable = [v.name or "" for v, need in zip(users, needs, strict=True) if need]
            held = [v.name or "" for v in program.inputs(Role.PARAMETER)]
            trainable += [name for name in held if state.tensors[name].requires_grad]
            # Autograd hears of no others, as in eager: DistributedDataParallel waits for those that
            # it has heard of, and finds the rest unused.
            users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
            influential = {v.name for v in influences(program.graph, users)}
            trainable = [name for name in trainable if name in influential]
        sizes = served.sizes(flat)
        served.threads = threads = self._threads(form.engine, served, sizes)
        served.planned = max(served.planned, served.cost(sizes))
        tokens = served.tokens if variant[-1] else None
        self.most_tokens = _none if tokens is None else tokens.most
        sizes |= self.most_tokens(sizes)
        tensors = state.tensors | served.captured.held
        runs = self._executor(form.engine, device_of(flat, tensors), threads, program)
        outputs = _users(program)

        original = Original(
            self.module, lambda: state.guard, served.structure.rebuild, len(outputs)
        )

        def make(upstream: Sequence[str]) -> Step:
            plan = self._build(program, trainable, upstream, sizes, runs)
            if (debug := self.debug_options).save_onnx:
                trains, whole = self.module.training and bool(plan.pieces), served.captured.program
                save_stages(debug, trains, whole, program, trainable, upstream, runs, sizes)
            step = Step(plan, tensors, other, original)
            step.is_partial, step.hidden, step.orders = partial, hidden, served.orders
            return step

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

        own = {outputs[i] for i, source in served.returned.items() if source.kind != "stored"}
        upstream = tuple(likely_upstream(program))
        upstream = tuple(name for name in upstream if name not in own) or upstream
        step = make(upstream)
        variants = StepVariants(step, {upstream: step}, runs, sizes)
        return variants

    def _build(
        self,
        program: Program,
        trainable: Sequence[str],
        upstream: Sequence[str],
        sizes: dict[str, int],
        executor: Executor,
    ) -> Plan:
        pieces = self.options.backward_pieces
        early = distributed.is_available() and distributed.is_initialized()
        # Such as those of an optimizer that steps in the backward, and frees each gradient.
        early |= any(p._post_accumulate_grad_hooks for p in self.module.parameters())
        with (
            EXCLUSIVE,
            located(self.module),
            _no_bug("building"),
            uncollected(),
            marked("build"),
        ):
            plan = build(
                program,
                trainable,
                upstream,
                executor,
                pieces=pieces,
                early=early,
                sizes=sizes,
                budget=self.options.memory_budget,
                cache=self.cache,
            )
        self._describe(plan, executor, sizes)
        return plan

    def _executor(
        self, engine: str, device: torch.device, threads: int, program: Program
    ) -> Executor:
        options = self.options
        bounded = options.memory_budget is not None and options.arena and Ceiling.serves()
        return engines.executor(
            engine,
            device=device,
            provider=options.provider,
            threads=threads,
            arena=options.arena,
            cuda_graphs=bool(options.cuda_graphs),
            ceiling=Ceiling() if bounded else None,
            mixed=bool(keys_of(program.graph)),
        )

    def line_up(
        self, served: CompiledCapture, flat: FlatCall
    ) -> Callable[[Sequence[str]], engines.LineUp]:
        """Lines engines up by a capture and the sizes of a call."""
        program = served.captured.program

        def of(known: Sequence[str]) -> engines.LineUp:
            return engines.line_up(known, program.graph, served.cost(served.sizes(flat)))

        return of

    def _threads(self, engine: str, served: CompiledCapture, sizes: dict[str, int]) -> int:
        """The threads for a program at these sizes: one where more would only be woken up."""
        if engine != "onnxruntime":  # the others have those of PyTorch, or one
            return 0
        small = served.cost(sizes) < _SMALL
        return self.options.threads or (1 if small else torch.get_num_threads())

    def describe(self, form: CallForm) -> None:
        """Describes what runs calls of a form: the engine that was built last may have lost."""
        built = [each for served in form.served for each in served.variants.values()]
        if not built or built[-1].step.plan is self.plan:
            return
        runs = built[-1]
        self._describe(runs.step.plan, runs.executor, runs.sizes)
        if runs.certificate is not None:
            self.certificate = runs.certificate
            self.described(is_grad_enabled()).certificate = str(runs.certificate)

    def described(self, grad: bool) -> Report:
        """The report on calls with or without gradients.

        The latter have one of their own only where there are both.
        """
        if grad or not self.trains:
            return self.report
        if self.report.inference is None:
            self.report.inference = Report()
        return self.report.inference

    def _describe(self, plan: Plan, executor: Executor, sizes: dict[str, int]) -> None:
        self.plan, self.sizes = plan, sizes
        report = self.described(is_grad_enabled())
        report.engine, report.replays = str(executor), executor.replays
        report.stages.update(plan.seconds)
        names = ["forward", *(f"backward {i + 1}" for i in range(len(plan.pieces)))]
        report.nodes = {
            name: (len(before.graph), len(after.graph))
            for name, before, after in zip(names, plan.programs, plan.lowered, strict=True)
        }
        report.kept = plan.kept
        report.blocks = tuple(blocks_of(plan.programs[0]))
        report.saved_bytes = saved_bytes(plan.programs, sizes)
        report.peak_bytes = peak(plan.programs, sizes) if plan.pieces else 0
        if executor.ceiling is not None and plan.pieces:
            executor.ceiling.limit = report.peak_bytes
            executor.ceiling.margin = largest(plan.programs, sizes)
        if self.debug_options.log_level <= LogLevel.INFO:
            print(report, file=sys.stderr)
        if self.debug_options.save_onnx:
            save_pieces(self.debug_options, plan)


def _none(sizes: Mapping[str, int]) -> dict[str, int]:
    """Of a program that computes all tokens."""
    return {}


@contextlib.contextmanager
def _no_bug(doing: str) -> Iterator[None]:
    """An error that nobody foresaw becomes one that has a fallback."""
    try:
        yield
    except OrtrainError:
        raise
    except Exception as error:
        raise CaptureError(**own_failure(error, f"{doing} the graph")) from error


def _users(program: Program) -> list[str]:
    """Names of the outputs that the user gets."""
    return [v.name or "" for v in program.outputs(Role.USER_OUTPUT, Role.LOSS)]
