"""``Runner``: decides for each call of a module what runs it, and runs it.

A call is looked up by what a capture froze: the module's state (:class:`Guard`), the form of the
arguments and the ambient modes. What is found is a compiled step, or the reason why the call runs
in PyTorch. Nothing is ever replayed that has not been compared first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import is_grad_enabled, nn

from ortrain.capture.onnx.lift import uninitialized
from ortrain.capture.returned import instead
from ortrain.capture.trace.keeping import keeping
from ortrain.capture.trace.refusal import Refusal
from ortrain.capture.trace.rehearsal import foretold, settled
from ortrain.config import EXECUTORS, DebugOptions, LogLevel, Options
from ortrain.errors import (
    CaptureError,
    CheckFailed,
    GradientError,
    NotServed,
    OrtrainError,
    ParityError,
    StateError,
    UnsupportedInput,
    listing,
    warn_caller,
)
from ortrain.exclusive import EXCLUSIVE
from ortrain.guards.attributes import WithAttributes
from ortrain.guards.guard import Ambient, ambient, inner_hooks
from ortrain.guards.handed import Changes, apart
from ortrain.guards.numbers import MOST_VALUES, WithNumbers
from ortrain.guards.structure import FlatCall, OutputStructure, flatten_call
from ortrain.module_state.untouched import call_aside
from ortrain.passes.tokens import Shown
from ortrain.pytorch.saving import saving_hooks
from ortrain.step.compiler import MOST_SHAPES, StepCompiler
from ortrain.step.contest import Race
from ortrain.step.density import print_density
from ortrain.step.draws import replayed_draws
from ortrain.step.eligibility import (
    EMPTY,
    NUMBERS_CHANGE,
    RUN_AGAIN,
    borrowed,
    draws_apart,
    dtypes_of,
    not_served,
    returns_views,
    runs_again,
    tried,
)
from ortrain.step.fakes import expect_own_fakes, holds_fakes
from ortrain.step.fallback import alone, unforeseen
from ortrain.step.forms import CallForm, CompiledCapture, ModuleState, Sizes, too_many_ways
from ortrain.step.kept import named_modules
from ortrain.step.marks import now
from ortrain.step.memory_stats import print_memory
from ortrain.step.parts import Parts
from ortrain.step.places import device_of
from ortrain.step.prospect import Prospect, gain_of
from ortrain.step.recalled import Note
from ortrain.step.report import Report
from ortrain.step.states import States
from ortrain.step.verdict import Verdict
from ortrain.step.wrappers import needs_its_own_forward
from ortrain.uncollected import uncollected

# Calls that go to the module unseen once eager has won the contest; then one is looked at again.
EAGER_SPELL = 256
TWICE = "a container that the forward changes stands twice in the call"
TURN = "its turn in the contest with the graph"

# Forms of call that are known in each state of the module; the oldest make way.
MOST_FORMS = 64


def _marked(name: str) -> CaptureError:
    return UnsupportedInput(
        f"an argument is a tensor with the attribute {name!r}, which the module's code names",
        because="a graph takes what is in a tensor, and what Python code has put on it may change",
        help="pass it as an argument of its own",
    )


class Runner:
    """Runs the calls of one module.

    Args:
        module: the module.
        options: settings.
        debug_options: what to show.
        refused: hears that the module, a part of another one, cannot be a graph.

    Attributes:
        compiler: finds and makes its compiled steps.
        report: what ran where.
        prospect: of its graphs; who knows how many steps are to come, says it there.
        only_loss: whether of the outputs nobody reads more than a loss in the first place.
        parts: what of the module runs as graphs where it cannot be one; None where it can.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        debug_options: DebugOptions,
        refused: Callable[[], None] | None = None,
    ) -> None:
        self.module = module
        self.debug_options = debug_options
        self.compiler = StepCompiler(module, options, debug_options)
        self.report: Report = self.compiler.report
        self.warned = False
        self.calls = self.contests = 0
        self.prospect = Prospect.of(module)
        self.only_loss = False
        self.refused = refused
        self.use(options)

    def use(self, options: Options) -> None:
        """Takes other settings, under which everything is captured anew."""
        self.options = options
        self.compiler.use(options)
        self.states = States(self.module, self.compiler.capturer.live)
        self.parts: Parts | None = None
        # So many steps of the graph, and it is compared with the module once more.
        every = options.certificate
        self.due = self.report.graph_calls + every if type(every) is int else sys.maxsize
        # On which the last contest has begun.
        self.device: torch.device | None = None
        # Calls that go to the module unseen, while it trains or not and gradients are on or not;
        # whatever these are where that is None.
        self.spell = 0
        self.spell_is_for: tuple[bool, bool] | None = (True, True)
        self.spell_reason = ""

    def expect(self, steps: int | None) -> None:
        """Takes it that so many calls with gradients are to come; None where nobody knows."""
        self.prospect.steps = steps
        for part in () if self.parts is None else self.parts.runners.values():
            part.expect(steps)

    def expect_training(self) -> None:
        """Takes it that calls with gradients will come."""
        self.compiler.trains = True

    def show(self, debug_options: DebugOptions) -> None:
        """Takes other settings of what is shown."""
        self.debug_options = self.compiler.debug_options = debug_options

    # -- the hot path ------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call, as a graph or in PyTorch."""
        if self.spell:
            modes, grad = self.spell_is_for, is_grad_enabled()
            if modes is None or (self.module.training, grad) == modes:
                self.spell -= 1
                self.compiler.described(grad).eager_calls += 1
                return self._in_pytorch(self.spell_reason, args, kwargs)
            self.spell = 0
        start = now(self.device)
        self.calls += 1
        state = self.states.current
        if state is None or state.guard.changed() is not None:
            with EXCLUSIVE:  # another thread may be comparing, with tensors lent to the module
                why = borrowed(self.module) or needs_its_own_forward(self.module)
                state = None if why else self._find_state()
            if why:
                return self._eager_because(self._unserved(why), args, kwargs)
            if state is None:
                return self._eager(self.report.reason, args, kwargs)
        try:
            flat = flatten_call(args, kwargs)
        except CaptureError as error:
            return self._eager_because(error, args, kwargs)
        if read := state.guard.read_of(flat.tensors):
            return self._eager_because(_marked(read), args, kwargs)
        key = (flat.key, ambient(), self.only_loss)
        form = state.forms.get(key)
        if form is None:
            with EXCLUSIVE:
                flat, form = self._find_form(state, flat, key[1])
        if form.reason:
            if form.lost:
                self._begin_spell()
            elif form.race is not None or form.served:
                form.retire()  # its last backward has given the reason
            return self._eager(form.reason, args, kwargs)
        if state.moving is not None:
            flat = state.moving.added_to(flat)
        race, sample = form.race, None
        if race is not None:
            turn = race.next()
            if turn == "eager":
                return self._eager_turn(race, state, form, flat)
            if turn != form.engine:
                form.engine = turn
            if race.winner:
                if not race.rivals:
                    form.race = None
                    form.forget_other_engines()
                    self.compiler.describe(form)
                race = None
            elif form.served:
                sample = race.sample(turn, _size(flat), start)
        sizes = tuple([t.shape for t in flat.tensors])
        served = form.by_sizes.get(sizes)
        try:
            if served is None:
                if any(0 in shape for shape in sizes) and self.options.falls_back(EMPTY):
                    return self._eager(EMPTY.what, args, kwargs)
                with _preparing(race):
                    served = self.compiler.find(state, form, flat, sizes)
                if self.refused is not None and served.captured.views:
                    raise returns_views(self.module)
                if draws_apart(self.module, self.options, form, served):
                    form.reason = RUN_AGAIN
                    return self._eager(form.reason, args, kwargs)
                if race is not None:
                    form.engine = race.choose(self.compiler.line_up(served, flat))
            trainable = state.guard.trainable() if form.grad else ()
            saving = served.saving(flat)
            variant = form.engine, trainable, saving is not None and saving.share > 0
            variants = served.variants.get(variant)
            if variants is None:
                with _preparing(race):
                    step = self.compiler.first_step(state, form, served, flat, variant)
            else:
                step = variants.step
                if form.report.graph_calls >= self.due:
                    self.due += int(self.options.certificate)
                    self.compiler.compare(state, served, flat, step)
                elif served.kinds is not None:
                    self.compiler.compare_first(state, served, flat, step)
            tensors = flat.tensors
            users = [tensors[i] for i in served.positions]
            trains = bool(step.plan.arguments)
            call = flat if served.changes is None else self._apart(served.changes, flat)
            outputs = step.train(users, call, form) if trains else step.infer(users)
        except CheckFailed as error:
            return self._astray(form, served, flat, error)
        except OrtrainError as error:
            if self.compiler.cache.distrust():
                return self._made_anew(form, flat)
            if race is not None and served is not None and race.forfeit(form.engine, str(error)):
                return self._eager(str(error), flat.args, flat.kwargs)
            if isinstance(flat, WithAttributes):
                return self._with_constant_attributes(state, flat)
            if isinstance(flat, WithNumbers):
                return self._with_constants(form, flat)
            return self._refused(form, flat, sizes, error)
        except Exception as error:
            if saving_hooks(False) is not None:
                raise  # a hook's own: checkpointing ends what it computes again so
            if self.compiler.cache.distrust():
                return self._made_anew(form, flat)
            return self._refused(form, flat, sizes, unforeseen(error))
        report = form.report
        report.graph_calls += 1
        if served.tokens is not None:
            report.note_tokens(saving)
        if self.debug_options.print_input_density and form.grad:
            densities = {} if served.counts is None else served.densities(flat)
            print_density(densities, report.graph_calls + report.eager_calls, saving)
        if self.debug_options.print_memory_stats and trains:
            device = device_of(flat, state.tensors)
            known = served.sizes(flat)
            if served.tokens is not None and variant[-1]:
                known |= served.tokens.most(known)
            print_memory(report.graph_calls, [(step.plan, known)], device)
        if report.reason or not report.mode:
            report.mode, report.reason = "graph", ""
        returned = outputs
        if served.returned:
            returned = instead(outputs, served.returned, tensors, state.tensors)
        output = served.structure.rebuild(returned)
        if served.changes is not None:
            output = output.over(flat.args, flat.kwargs)
        if sample is not None:
            sample.forward_ends()
            leaves = [t for i in step.inputs if (t := users[i]).requires_grad] + step.leaves
            sample.forward_done(outputs, leaves, trains)
        return output

    def _apart(self, changes: Changes, flat: FlatCall) -> FlatCall:
        """The call with containers of its own: a backward may ask for what was in them before.

        Raises:
            CaptureError: one stands in it twice, which the capture has not known.
        """
        if not changes.serve(flat.args, flat.kwargs):
            raise CaptureError(TWICE)
        return flat.rebuilt(*apart(flat.args, flat.kwargs))

    def _made_anew(self, form: CallForm, flat: FlatCall) -> Any:
        """Runs a call whose graph came from the cache and does not serve, captured anew."""
        form.drop()
        output = self(flat.args, flat.kwargs)
        if form.served:
            self.compiler.cache.remade()
        return output

    def _with_constants(self, form: CallForm, flat: WithNumbers) -> Any:
        """Runs a call whose numbers cannot be inputs, with each value a constant of a graph."""
        assert form.seen is not None
        form.seen.fixed = True
        form.retire()
        return self(flat.args, flat.kwargs)

    def _with_constant_attributes(self, state: ModuleState, flat: WithAttributes) -> Any:
        """Runs a call whose attributes cannot be inputs: each value is another state."""
        with EXCLUSIVE:
            self.states.fix_attributes(state)
        return self(flat.args, flat.kwargs)

    # -- states and forms -----------------------------------------------------------------------

    def _find_state(self) -> ModuleState | None:
        """The state that the module is in now; None where it is in none that stays."""
        change = self.states.find()
        if change is None:
            return self.states.current
        if names := uninitialized(self.module):
            self.report.reason = (
                f"{listing(names)} take their sizes from this call; the next ones are captured"
            )
            return None
        if self.states.is_restless(self.calls):
            self._give_up(change)
            return None
        if self.parts is not None:
            self.parts.refresh()
        return self.states.add()

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
        if not self.options.falls_back(error):
            raise error
        self._warn(str(error))
        self._divide(str(error), error)
        self.states.clear()
        for grad in (True, False):
            report = self.compiler.described(grad)
            report.mode, report.reason = "eager", str(error)
        self.spell, self.spell_is_for, self.spell_reason = sys.maxsize, None, str(error)

    def _find_form(
        self, state: ModuleState, flat: FlatCall, modes: tuple[Any, ...]
    ) -> tuple[FlatCall, CallForm]:
        """The form of a call that none is known for with these very numbers."""
        flat, seen = state.numbers.take(flat, modes)
        key: Any = (flat.key, modes, self.only_loss)
        if seen is not None and key not in state.forms:
            if seen.moving and not seen.fixed:  # one form for all of them from now on
                for other in seen.keys & state.forms.keys():
                    state.forms.pop(other).retire()
                seen.keys.clear()
            elif len(seen.keys) >= MOST_VALUES:
                key = (id(seen), modes, self.only_loss)
            seen.keys.add(key)
        form = state.forms.get(key)
        if form is None:
            for forgotten in [*state.forms][: len(state.forms) + 1 - MOST_FORMS]:
                state.forms.pop(forgotten).retire()
            form = state.forms[key] = self._new_form(state, Ambient(*modes), flat)
            form.seen = seen
            if seen is not None and key[0] == id(seen) and not form.reason:
                form.reason = NUMBERS_CHANGE
                self._divide(form.reason)
        return flat, form

    def _new_form(self, state: ModuleState, modes: Ambient, flat: FlatCall) -> CallForm:
        if modes.grad and not self.compiler.trains:
            self.compiler.trains = True
            for known in self.states:
                for form in known.forms.values():
                    form.report = self.compiler.described(form.grad)
        reason = not_served(self.module, self.options, state, modes, flat)
        engine = self.options.engine_for(modes.grad)
        device = device_of(flat, state.tensors)
        shown: Shown = "tokens" if self.options.skip_padding else "all"
        shown = "loss" if self.only_loss else shown
        race = None
        chosen: str = engine if engine in EXECUTORS else "onnxruntime"
        if engine == "auto" and not reason:
            # Who knows of steps to come, knows of those of training.
            dtypes = dtypes_of(state, modes, flat)
            prospect = self.prospect if modes.grad else Prospect(self.prospect.cost)
            able = tried(self.options, device, dtypes)
            verdict = self._verdict() if modes.grad else None
            note = None
            # Processes that train together have to agree; files that are asked for need a graph.
            if verdict is None and not self.debug_options.save_onnx:
                cache, options = self.compiler.cache, self.options
                size = _size(flat)
                note = Note.of(cache, able, self.module, options, flat.key, size, modes, shown)
            gain, chosen = gain_of(dtypes, device), able[0]
            race = Race(able, prospect, gain, verdict, note)
            self.device = device
        if engine == "torch":
            asked = "engine" if modes.grad or self.options.inference is None else "inference"
            reason = f'{asked}="torch"'
        elif reason:
            error = self._unserved(reason)
            if not self.options.falls_back(error):
                raise error
            self._warn(reason)
            if reason == inner_hooks(self.module):
                self._divide(reason)
        elif runs_again(self.options, modes):
            race, reason = None, RUN_AGAIN
        report = self.compiler.described(modes.grad)
        return CallForm(
            modes.grad,
            report,
            chosen,
            reason,
            race=race,
            recover=self._recovers,
            shown=shown,
        )

    def _verdict(self) -> Verdict | None:
        """Of the next contest of a training, which each process holds in the same order.

        A part has its own: what one process leaves out at a step, another may run.
        """
        if self.refused is not None:
            return None
        self.contests += 1
        module = self.module
        size = sum(1 for _ in module.parameters())
        return Verdict.of(f"{type(module).__name__}/{size}/{self.contests}")

    def _unserved(self, reason: str) -> NotServed:
        return NotServed(f"{type(self.module).__name__} cannot run as a graph here: {reason}")

    # -- running in PyTorch ------------------------------------------------------------------

    def aside(self, reason: str, call: Callable[[], Any]) -> Any:
        """Runs a call in PyTorch that nobody means to be a graph; the report has the reason."""
        self.calls += 1
        self._note_eager(reason)
        return call()

    def _eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note_eager(reason)
        return self._in_pytorch(reason, args, kwargs)

    def _in_pytorch(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module, and where it cannot be a graph for that reason, its parts as graphs."""
        if self.parts is None or reason not in self.parts.reasons:
            output = self.module(*args, **kwargs)
        else:
            output = self.parts(args, kwargs)
            if self.parts.ran_graphs:
                self.compiler.described(is_grad_enabled()).mode = "parts"
        if holds_fakes(output):
            expect_own_fakes(self.module, (args, kwargs))
        return output

    def _divide(self, reason: str, error: OrtrainError | None = None) -> None:
        """Has parts of the module run as graphs in calls that run in PyTorch for this reason.

        Args:
            reason: of these calls.
            error: the refusal; None where nobody has looked at the module's code yet.
        """
        if error is not None and not isinstance(error, CaptureError | GradientError):
            return
        if isinstance(error, NotServed):  # nor would it serve a part
            return
        if self.refused is not None:
            if not self.report.graph_calls:
                self.refused()
        elif self.options.parts and self.options.memory_budget is None:
            if self.parts is None:
                kept = named_modules(self.module, self.options.keep_in_torch)
                left = {self.module.get_submodule(name) for name in kept}
                self.parts = Parts(self.module, self._part, left)
                self.report.parts = self.parts.reports
            self.parts.reasons.add(reason)

    def _part(self, name: str, module: nn.Module, refused: Callable[[], None]) -> Runner:
        """A runner of a part of the module."""
        shown = self.debug_options
        if shown.save_onnx:
            shown = replace(shown, onnx_prefix=f"{shown.onnx_prefix}_{name}")
        kept = named_modules(self.module, self.options.keep_in_torch)
        inside = [each.removeprefix(f"{name}.") for each in kept if each.startswith(f"{name}.")]
        runner = Runner(module, self.options.of_part(inside), shown, refused)
        runner.expect(self.prospect.steps)
        runner.prospect.together = self.prospect.cost
        runner.warned = True  # the module's own warning tells of all of them
        return runner

    def _note_eager(self, reason: str) -> None:
        report = self.compiler.described(is_grad_enabled())
        report.mode, report.reason = "eager", reason
        report.eager_calls += 1

    def _eager_because(
        self, error: OrtrainError, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.options.falls_back(error):
            raise error
        self._warn(str(error))
        self._divide(str(error), error)
        with alone(error):
            return self._eager(str(error), args, kwargs)

    def _refused(self, form: CallForm, flat: FlatCall, sizes: Sizes, error: OrtrainError) -> Any:
        """Runs a call eagerly that cannot be captured, or that the graph failed to run.

        If the module raises too, the call was wrong: its error is the one to see, and nothing is
        noted about the form.
        """
        if self._settles(flat, error):
            reason = f"{error.what}; the next calls are captured"
            with alone(error):
                return self._eager(reason, flat.args, flat.kwargs)
        with alone(error):
            if not self.options.falls_back(error):
                if not isinstance(error, StateError):  # what has been done is not done twice
                    call_aside(self.module, flat.args, flat.kwargs)
                raise error
            self._divide(str(error), error)
            output = self._eager(str(error), flat.args, flat.kwargs)
        self._warn(str(error))
        self._note(form, sizes, error)
        return output

    def _settles(self, flat: FlatCall, error: OrtrainError) -> bool:
        """Whether a call is refused for what it leaves in the module, and the next would not be.

        ``if self.mask is None: self.mask = …``: the call that finds it is captured. So is the one
        behind ``if not self.initialized: self.scale.data = …``. One call of a module is let off so:
        where each length has a mask of its own, what makes it stays PyTorch's.
        """
        if self.compiler.has_waited or not isinstance(error, CaptureError):
            return False
        if error.settles is None:
            with EXCLUSIVE, uncollected(), keeping(self.compiler.capturer.keeper()):
                error.settles = settled(self.module, flat.args, flat.kwargs, error)
        self.compiler.has_waited = error.settles or (isinstance(error, Refusal) and error.effect)
        return error.settles

    def _astray(
        self, form: CallForm, served: CompiledCapture | None, flat: FlatCall, error: CheckFailed
    ) -> Any:
        """Runs a call in PyTorch at whose values the code goes another way than the graph.

        Where the random numbers that the graph drew have led it there, PyTorch takes the same:
        others would make some ways more likely than they are.
        """
        draws = nullcontext() if error.seed is None else replayed_draws(error.seed)
        with alone(error), draws:
            output = self._eager(str(error), flat.args, flat.kwargs)
        form.went_astray(served, error)
        if form.reason:
            refused = too_many_ways(error)
            if not self.options.falls_back(refused):
                raise refused
            self._warn(form.reason)
            self._divide(form.reason, refused)
        return output

    def _recovers(self, form: CallForm, error: OrtrainError, flat: FlatCall) -> bool:
        """Whether PyTorch may answer a backward in which the graph failed."""
        if anew := self.compiler.cache.distrust():
            form.drop()
        if not self.options.falls_back(error):
            return False
        form.report.recovered += 1
        if anew:  # the next call captures again
            self.compiler.cache.remade()
            return True
        self._note(form, tuple([t.shape for t in flat.tensors]), error)
        self._warn(str(error))
        return True

    def _note(self, form: CallForm, sizes: Sizes, error: OrtrainError) -> None:
        """Has the next calls like one that failed run in PyTorch."""
        if not self.options.retry:
            if isinstance(error, ParityError):
                form.drop()
            if not form.served:
                form.reason = str(error)
            elif len(form.refused) < MOST_SHAPES:  # other sizes are served
                form.refused[sizes] = str(error)
                form.by_sizes.pop(sizes, None)

    def _eager_turn(self, race: Race, state: ModuleState, form: CallForm, flat: FlatCall) -> Any:
        """A step that eager runs because it is its turn, or because it has won."""
        form.report.contest = race.contest
        if race.winner:
            # The captures of this form will not be used again.
            form.race, form.reason, form.lost = None, str(race.contest), True
            form.drop()
            self._begin_spell()
            return self._eager(form.reason, flat.args, flat.kwargs)
        if race.rest:
            self._begin_spell(race.rest)
            return self._eager(TURN, flat.args, flat.kwargs)
        start, again = now(self.device), form.differentiated_again
        sample = race.sample("eager", _size(flat), start, again)
        output = self._eager(TURN, flat.args, flat.kwargs)
        sample.forward_ends()
        state.settle(self.module, form)
        held: list[torch.Tensor] = [*self.module.parameters(), *flat.tensors]
        leaves = [t for t in held if t.requires_grad]
        tensors: list[torch.Tensor] = []
        refused = None
        try:
            tensors, _ = OutputStructure.from_output(output)
        except CaptureError as error:
            refused = error
        sample.forward_done(tensors, leaves, is_grad_enabled() and bool(leaves))
        if not form.asked:
            with race.preparing():
                self._foretell(state, form, flat, refused)
        return output

    def _foretell(
        self, state: ModuleState, form: CallForm, flat: FlatCall, error: OrtrainError | None
    ) -> None:
        """Says behind the first call of a form, and not when its graph is due, that there is none.

        The first call itself may be another than the next ones: it fills in what it finds missing.

        Args:
            state: of the module.
            form: of the call.
            flat: the call.
            error: why a graph cannot return what it returned; None where it can.
        """
        form.asked = True
        if not form.grad and self.compiler.trains:
            return
        with EXCLUSIVE, uncollected(), keeping(self.compiler.capturer.keeper()):
            with state.reads_noted(self.module):
                error = error or foretold(self.module, flat.args, flat.kwargs)
            by_value = isinstance(error, Refusal) and error.by_value  # of which a trace knows more
            if error is not None and (by_value or self.compiler.capturer.may_keep(error)):
                try:
                    self._find_early(state, form, flat)
                    error = None
                except CheckFailed:  # there is a graph, which another call may use
                    error = None
                except OrtrainError as traced:
                    error = traced
            if error is None and self.debug_options.save_onnx:
                error = self._saved(state, form, flat)
        if error is None:
            return
        if not self.options.falls_back(error):
            raise error
        self._warn(str(error))
        self._divide(str(error), error)
        form.reason = form.report.reason = str(error)

    def _saved(self, state: ModuleState, form: CallForm, flat: FlatCall) -> OrtrainError | None:
        """Builds a graph for its files, which are asked for before it is due.

        Returns:
            Why there is none.
        """
        try:
            served = self._find_early(state, form, flat)
            variant = self.compiler.variant(state, form, served, flat)
            self.compiler.first_step(state, form, served, flat, variant)
        except CheckFailed:
            return None  # of another call's values
        except OrtrainError as error:
            return error
        return None

    def _find_early(self, state: ModuleState, form: CallForm, flat: FlatCall) -> CompiledCapture:
        """The capture of a call before its graph is due; the contest's engines are lined up."""
        served = self.compiler.find(state, form, flat, tuple([t.shape for t in flat.tensors]))
        if form.race is not None:
            form.engine = form.race.first(self.compiler.line_up(served, flat))
        return served

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Runs all calls inside in PyTorch."""
        before = self.spell, self.spell_is_for, self.spell_reason
        self.spell, self.spell_is_for, self.spell_reason = sys.maxsize, None, ""
        try:
            yield
        finally:
            self.spell, self.spell_is_for, self.spell_reason = before

    def _begin_spell(self, calls: int = EAGER_SPELL) -> None:
        self.spell = min(calls, EAGER_SPELL)
        self.spell_is_for = (self.module.training, is_grad_enabled())

    def _warn(self, reason: str) -> None:
        """Warns once, at the line outside of ortrain and torch that called the module."""
        if self.warned or self.debug_options.log_level > LogLevel.WARNING:
            return
        self.warned = True
        warn_caller(f"ORTModule runs {type(self.module).__name__} in PyTorch: {reason}")


def _preparing(race: Race | None) -> AbstractContextManager[None]:
    """What is done inside is part of a contest's cost, where there is one."""
    return nullcontext() if race is None else race.preparing()


def _size(flat: FlatCall) -> int:
    """Elements of the call's largest tensor: what the time of a step is proportional to."""
    return max((t.numel() for t in flat.tensors), default=1)
