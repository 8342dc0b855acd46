"""A graph of Dynamo's as a step: weights, buffers and inputs are arguments of every call."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, is_grad_enabled

from ortrain.autodiff.engine import influences
from ortrain.cache import Cache
from ortrain.capture.fx.complex_pairs import as_real
from ortrain.capture.origin import IN_PYTORCH
from ortrain.config import Options
from ortrain.errors import (
    CheckFailed,
    ExecutionError,
    NotServed,
    OfThisCall,
    OrtrainError,
)
from ortrain.exclusive import EXCLUSIVE
from ortrain.frontend.attempts import Attempts
from ortrain.frontend.call import Look, draws_of, heard, spent
from ortrain.frontend.form import Form, sizes_of
from ortrain.frontend.layouts import orders_of
from ortrain.frontend.original import higher_order_in, in_pytorch
from ortrain.frontend.program import translated
from ortrain.graph.cost import Multiplications
from ortrain.passes.linear_loss import in_blocks
from ortrain.passes.tokens import Shown, packed
from ortrain.passes.tokens.demand import is_loss
from ortrain.program import Program, Role, set_role
from ortrain.pytorch.autocast import active
from ortrain.pytorch.conditions import example_of
from ortrain.pytorch.hooks import has_late_hooks
from ortrain.pytorch.layout import inverse
from ortrain.pytorch.modes import FakeTensor
from ortrain.pytorch.saving import saving_hooks
from ortrain.pytorch.sources import name_of
from ortrain.pytorch.transforms import is_wrapped, tangents, transform_around
from ortrain.runtime import engines
from ortrain.runtime.aten.graphs.recordings import NotRecorded, unrecorded, waiting
from ortrain.runtime.memory import Ceiling
from ortrain.step.autograd import NODES, Step
from ortrain.step.fallback import unforeseen
from ortrain.step.feeds import streams_of
from ortrain.step.replay import Caller
from ortrain.step.report import Dense
from ortrain.step.tokens import TokenCounts, Tokens, dense

# A forward may differentiate what it has computed: what then runs is no code of the user's.
for node in NODES:
    node.backward = staticmethod(torch.compiler.disable(node.backward))


class Empty(NotServed):
    """A graph without operators. Remedy: none is needed."""


class Waits(NotServed):
    """A call of sizes for which there is no recording yet: PyTorch runs it. Remedy: none."""


# Calls after which a graph has no result that is the module's loss.
MOST_ASKED = 3


class Graph:
    """Runs calls of one graph.

    Args:
        module: Dynamo's graph.
        real: its inputs at the call that is being compiled.
        options: settings.
        guarded: whether Dynamo makes sure that inputs require gradients as they do at that call.

    Raises:
        OrtrainError: no engine serves it.
    """

    def __init__(
        self, module: fx.GraphModule, real: Sequence[Any], options: Options, *, guarded: bool = True
    ) -> None:
        if any(isinstance(each, Tensor) and is_wrapped(each) for each in real):
            raise NotServed(
                "an input belongs to a transform of torch.func",
                because="its gradients are the transform's",
                help=IN_PYTORCH,
            )
        if any(isinstance(each, Tensor) and each.is_meta for each in real):
            raise NotServed("a tensor is on meta, and has no values", help=IN_PYTORCH)
        check_devices(real, options)
        holders = module.graph.find_nodes(op="placeholder")
        check_precision(holders, real, options)
        self.fallback = in_pytorch(module)
        # A checkpoint reads its inputs again, and a function of the user's own keeps what it likes.
        self.has_bodies = any(True for _ in higher_order_in(module))
        self.alone = not isinstance(module.graph.output_node().args[0], tuple | list)
        self.translated = found = translated(module, real, options.opset)
        program = found.program
        if not len(program.graph):
            raise Empty(
                "the graph computes nothing",
                because="it hands on what it is given, and views of that",
                help="none is needed: PyTorch does so",
            )
        given = [v.name or "" for v in program.graph.inputs if v.name in found.places]
        users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
        influential = {v.name for v in influences(program.graph, users)}
        self.wrt = [
            name
            for name in given
            if name in influential and is_grad_enabled() and _wants(real[found.places[name]])
        ]
        self.options = options
        tensors = [each for each in real if isinstance(each, Tensor)]
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        self.orders = orders_of(program, {name: real[found.places[name]] for name in self.wrt})
        # Inputs that PyTorch's backward does not read, so that the user may write to them.
        self.unread = found.unread | {i for i, value in enumerate(real) if _is_copied(value)}
        # Such as those of an optimizer that steps in the backward, and frees each gradient.
        self.early = any(map(has_late_hooks, tensors))
        self.users = [found.places[v.name or ""] for v in program.inputs(Role.USER_INPUT)]
        self.axes = _axes_of(program, self.users)
        self.example = {s: example_of(real[place].shape[axis]) for s, place, axis in self.axes}
        values = [holder.meta["example_value"] for holder in holders]
        self.numbers = {
            i: str(v.node.expr) for i, v in enumerate(values) if isinstance(v, torch.SymInt)
        }
        self.cost = Multiplications(program.graph)
        self.streams = streams_of(program.graph)
        self.executor = self._executor()
        self.cache = Cache(options.cache_dir, options.cache_bytes)
        self.loss: int | None = None
        self.asks_for_loss = MOST_ASKED
        self.forms: dict[tuple[Shown, bool, bool], Form] = {}
        self.tokens: dict[Shown, Tokens | None] = {}
        self.form = self._first_form(real)
        wanting = {found.places[name] for name in self.wrt}
        self.without = [
            i for i, t in enumerate(real) if not (guarded or i in wanting) and isinstance(t, Tensor)
        ]
        self.written = found.original.written
        self.attempts = Attempts(self.fallback, self.written)
        self.filled = [i for i in self.users if isinstance(real[i], Tensor)]
        # Compares a program with PyTorch before a call, where that is due.
        self.prove: Callable[[Form, Sequence[Any]], None] | None = None
        self.tell: Callable[[OrtrainError | None], None] | None = (
            None  # of a backward that has failed
        )

    @property
    def program(self) -> Program:
        """The whole of it."""
        return self.translated.program

    @property
    def has_failed(self) -> bool:
        """Whether some of its calls run in PyTorch for what has happened: others get one anew."""
        return any(form.failed or form.refused is not None for form in self.forms.values())

    @property
    def step(self) -> Step:
        """The step that the last call ran."""
        return self.form.way.step

    def sizes(self, args: Sequence[Any]) -> dict[str, int]:
        """The value that each symbolic dimension has in a call."""
        return {symbol: args[place].shape[axis] for symbol, place, axis in self.axes}

    def rows(self, args: Sequence[Any], most: int) -> list[Any] | None:
        """The first rows of a batch: half at most, so many multiplications at most, two at least.

        PyTorch takes for half of them in float64 what it takes for all of them. None where there
        are no more than two, or it cannot be told what a row is.
        """
        sizes = self.sizes(args)
        cost = max(self.cost(sizes), 1)
        most = min(most, cost // 2)
        dims = [v.shape for v in self.program.inputs(Role.USER_INPUT)]
        names = [[str(dim) for dim in shape or ()] for shape in dims]
        first = next((shape[0] for shape in names if shape and shape[0] in sizes), "")
        if not first or sizes[first] <= 2:
            return None
        # Of inputs that nothing but their product ties to others, Dynamo names the rows otherwise.
        alike = {s[0] for s in names if s and sizes.get(s[0]) == sizes[first]}
        if any(each in dim for each in alike for s in names for dim in s[1:]):
            return None
        if any(each in name and each != name for each in alike for name in self.numbers.values()):
            return None
        rows = max(2, sizes[first] * most // cost)
        found = list(args)
        for place, shape in zip(self.users, names, strict=True):
            if shape and shape[0] in alike:
                found[place] = args[place].detach()[:rows].requires_grad_(args[place].requires_grad)
        for place, name in self.numbers.items():
            found[place] = rows if name in alike else found[place]
        return found

    # -- a call ------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs for a call's inputs; one of a part may be no tuple."""
        outputs, failed = self._stepped(args)
        if failed is not None:
            around = draws_of(heard()) if isinstance(failed, Waits) else contextlib.nullcontext()
            with around:
                outputs = self.attempts(args)  # where it raises, the call was wrong
            if isinstance(failed, ExecutionError) and not isinstance(failed, CheckFailed):
                self.form.fails(failed, args)
        if (call := heard()) is not None:
            call.begun = True
            if failed is None:
                call.ran.append((self, outputs))
                if call.looks is not None:
                    call.looks.append(self._look(args))
            else:
                call.failed = failed
        return outputs

    def _stepped(self, args: Sequence[Any]) -> tuple[Any, OrtrainError | None]:
        """The outputs of a step, or why there are none."""
        if (why := self._pytorchs(args)) is not None:
            return None, why
        outputs, failed = self._tried(args)
        if failed is not None and self.form.distrusts(failed):
            outputs, failed = self._tried(args)
            if failed is None:
                self.cache.remade()
        return outputs, failed

    def _tried(self, args: Sequence[Any]) -> tuple[Any, OrtrainError | None]:
        form = self._form(args)
        if form.failed and (why := form.failed.get(sizes_of(args))) is not None:
            return None, why
        try:
            if self.prove is not None:
                self.prove(form, args)
            if form.refused is None:
                return self._ran(form, args), None
        except NotRecorded as why:
            return None, Waits("it is recorded when it comes again", because=f"{why}", help=_HELP)
        except ExecutionError as error:
            return None, error
        except OrtrainError:
            raise
        except Exception as error:
            if saving_hooks(False) is not None:
                raise  # a hook's own: checkpointing ends what it computes again so
            return None, unforeseen(error)
        return None, form.refused

    def _ran(self, form: Form, args: Sequence[Any]) -> Any:
        """The outputs of a program, recorded where that is asked for.

        Raises:
            NotRecorded: there is nothing to replay, and PyTorch is to run the call then.
        """
        if self.executor.replays is None:
            return self.run(form, args, form)
        if saving_hooks(False) is not None:
            # They may keep what a replay would write over; a checkpoint's both runs are alike so.
            with unrecorded():
                return self.run(form, args, form)
        call = heard()
        if call is None or call.draws is None:
            return self.run(form, args, form)
        drawn = call.seeds.drawn
        try:
            with waiting(may_record=call.may_convert):
                return self.run(form, args, form)
        except NotRecorded:
            call.seeds.drawn = drawn
            raise

    def _pytorchs(self, args: Sequence[Any]) -> OrtrainError | None:
        """Why a call is none for a step, by its arguments; None where it may be one."""
        if transform_around() is not None or tangents() >= 0:
            return _TRANSFORMED
        if self.without and is_grad_enabled() and self._wants_more(args):
            return _WANTS
        if self.written and self._shared(args):
            return _SHARED
        if FakeTensor in {*map(type, args)}:
            return _FAKE
        return None if all(args[i].numel() for i in self.filled) else EMPTY

    def run(self, form: Form, args: Sequence[Any], caller: Caller | None = None) -> Any:
        """The outputs of one of the graph's programs.

        Args:
            form: the program.
            args: of the call.
            caller: hears of its backwards; None where one that fails shall fail, and where they
                tell nothing of those to come.
        """
        way = form.way
        users, held = [args[i] for i in way.places], [args[i] for i in way.held]
        for i in way.numbers:
            users[i] = torch.tensor(users[i])
        for i in way.pairs:
            users[i] = as_real(users[i])
        trains = bool(self.wrt) and is_grad_enabled()
        call, certain = tuple(args), form.certain or not trains
        if copied := way.copied if certain else way.first:
            given = list(args)
            for i in copied:
                given[way.places[i]] = args[way.places[i]].clone()
                users[i] = self._user(given, way.places[i])
            call = tuple(given)
        if trains:
            outputs = way.step.train(users, call, caller, held, certain=certain, viewed=args)
            if caller is not None and not certain:
                form.learn(outputs[: way.step.plan.outputs])
        else:
            outputs = way.step.infer(users, held)
        return self._handed_on(args, outputs)

    def _wants_more(self, args: Sequence[Any]) -> bool:
        """Whether an input requires a gradient that did not when the graph was made."""
        return any(_wants(args[i]) for i in self.without)

    def _shared(self, args: Sequence[Any]) -> bool:
        """Whether another input shows the memory of one that is written to, without guard."""
        places = Counter(_storage(each) for each in args if isinstance(each, Tensor))
        return any(places[_storage(args[i])] > 1 for i in self.written)

    def _user(self, args: Sequence[Any], place: int) -> Tensor:
        """What a program takes of an input."""
        value = args[place]
        return as_real(value) if isinstance(value, Tensor) else torch.tensor(value)

    def _handed_on(self, args: Sequence[Any], outputs: Sequence[Tensor]) -> Any:
        """The graph's outputs, of the step's."""
        outside, count = self.translated.outside, len(self.translated.outside.roots)
        roots, views = outputs[:count], dict[int, Any](enumerate(outputs[count:]))
        if not views:
            for group in outside.views:
                views |= group.taken(args, roots)
        known: dict[str, Any] = {"input": args, "root": roots, "view": views}
        results = tuple(
            each.constant if each.kind == "constant" else known[each.kind][each.index]
            for each in outside.results
        )
        return results[0] if self.alone else results

    # -- what is computed ----------------------------------------------------------------------

    def _form(self, args: Sequence[Any], *, runs: bool = True) -> Form:
        """The program for a call: without the tokens that nobody reads, where that saves enough."""
        call, shown, waits = heard(), _ALL, False
        if call is not None and self.loss is not None:
            reads = call.reads if call.shown == "all" else None
            waits = reads is not None and reads.asked and not reads.some and bool(self.waiting)
            shown = "loss" if waits or call.shown == "loss" else shown
        if shown == "all" and self.options.skip_padding:
            shown = "tokens"
        tokens, saving = self._tokens(shown), None
        if tokens is not None:
            saving = tokens.saving([self._user(args, i) for i in self.users], self.sizes(args))
            if call is not None and runs:
                call.savings.append(saving)
        if isinstance(self.options.memory_budget, int):
            self._make_room(args)
        key = shown, saving is not None and saving.share > 0, waits
        form = self.forms.get(key)
        if form is None:
            with EXCLUSIVE, spent("build"):
                form = self.forms[key] = self._made(*key)
            if call is not None:
                call.compiled.fresh = True
        self.form = form
        return form

    def _make_room(self, args: Sequence[Any]) -> None:
        """Has programs made anew where a call is larger than those that they keep a budget for."""
        sizes = self.sizes(args)
        if any(size > self.example[name] for name, size in sizes.items()):
            self.example |= {name: max(size, self.example[name]) for name, size in sizes.items()}
            self.forms.clear()

    def _first_form(self, real: Sequence[Any]) -> Form:
        """The program that the call which is being compiled will need."""
        if FakeTensor not in {*map(type, real)}:
            return self._form(real, runs=False)
        return self.whole()

    def whole(self) -> Form:
        """The program that computes everything."""
        form = self.forms.get((_ALL, False, False))
        if form is None:
            with EXCLUSIVE:
                form = self.forms[_ALL, False, False] = self._made(_ALL, False)
        return form

    @cached_property
    def beside(self) -> tuple[int, ...]:
        """The outputs beside the loss that the user gets as they are, and not in views of them.

        Further losses are none of them: a number is cheap, and probably read.
        """
        outside = self.translated.outside
        given = [each for group in outside.views for each in group.given]
        others = {i for kind, i in given if kind == "root"} | {self.loss}
        users = self.program.outputs(Role.USER_OUTPUT, Role.LOSS)
        roots = {
            each.index
            for each in outside.results
            if each.kind == "root" and len(users[each.index].shape or ()) > 1
        }
        return () if self.loss is None else tuple(sorted(roots - others))

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """The outputs that need not be computed for the loss; none where views are of them."""
        program, tokens = self.translated.program, self._tokens("loss")
        hidden = {*(() if tokens is None else tokens.hidden)}
        hidden |= {*(in_blocks(program, "loss") or (program, ()))[1]}
        return tuple(sorted(hidden)) if hidden <= {*self.beside} else ()

    def _look(self, args: Sequence[Any]) -> Look:
        sizes, densities = self.sizes(args), {}
        if (counts := self._counts) is not None:
            found = counts([self._user(args, i) for i in self.users])
            densities = counts.densities(found, sizes)
        if self.form.tokens is not None:
            sizes |= self.form.tokens.most(sizes)
        return Look(self.step.plan, sizes, densities)

    @cached_property
    def _counts(self) -> TokenCounts | None:
        """Counts the tokens of a call; None where there are none that could be left out."""
        found = packed(self.program, "loss") or packed(self.program, "tokens")
        if found is None or not TokenCounts.serves(found):
            return None
        return TokenCounts(found, self.program, self.executor)

    def dense(self, shown: Shown) -> list[Dense]:
        """What is computed for all tokens, and why."""
        if self.options.skip_padding is False or self.device.type != "cpu":
            return []
        return dense(self.program, shown, self.cost, self.example)

    def _tokens(self, shown: Shown) -> Tokens | None:
        """What leaves tokens out; None where all are read."""
        if shown not in self.tokens:
            with EXCLUSIVE:
                self.tokens[shown] = self._found(shown)
        return self.tokens[shown]

    def _found(self, shown: Shown) -> Tokens | None:
        program = self.translated.program
        # Of a GPU one would have to wait for the number of tokens.
        if self.options.skip_padding is False or self.device.type != "cpu":
            return None
        found = packed(program, shown)
        if found is None or not TokenCounts.serves(found):
            return None
        found.program, hidden = in_blocks(found.program, shown) or (found.program, ())
        return Tokens(found, program, self.cost, self.executor, hidden)

    def _made(self, shown: Shown, without: bool, waits: bool = False) -> Form:
        if without:
            tokens = self.tokens[shown]
            assert tokens is not None
            most = {**self.example, **tokens.most(self.example)}
            return Form(self, tokens.program, tokens.hidden, tokens, most, waits=waits)
        whole = self.translated.program
        program, hidden = in_blocks(whole, shown) or (whole, ())
        return Form(self, program, hidden, waits=waits)

    def know_loss(self, place: int) -> None:
        """Takes it that a result is the module's loss, where it is a floating scalar."""
        result = self.translated.outside.results[place]
        users = self.translated.program.outputs(Role.USER_OUTPUT, Role.LOSS)
        if self.loss is None and result.kind == "root" and is_loss(users[result.index]):
            self.loss, self.asks_for_loss = result.index, 0
            set_role(users[self.loss], Role.LOSS)

    def leave(self, places: Collection[int]) -> None:
        """Takes it that PyTorch's backward reads none of these inputs, so that they may change."""
        self.unread |= {*places} - {*self.written}
        for form in self.forms.values():
            for way in form.ways.values():
                form.copy(way)

    def lay(self, orders: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
        """Has results and gradients lie in memory as those of PyTorch do.

        Args:
            orders: as of :class:`~ortrain.step.evidence.Certificate`.
        """
        results = self.translated.outside.results
        for (kind, name), axes in orders.items():
            if kind == "gradient":
                self.orders[name] = axes
            else:
                place = int(name.rpartition(" ")[2])
                self.translated.layouts[results[place].index] = axes, inverse(axes)

    def _executor(self) -> Any:
        options = self.options
        bounded = options.arena and Ceiling.serves()
        return engines.executor(
            options.engine,
            device=self.device,
            provider=options.provider,
            threads=options.threads,
            arena=options.arena,
            cuda_graphs=options.cuda_graphs is not False,
            ceiling=Ceiling() if bounded else None,
        )


_ALL: Shown = "all"
_HELP = "none is needed: such calls run in PyTorch"
_TRANSFORMED = OfThisCall(
    "derivatives are taken around it by a transform of torch.func, or in forward mode", help=_HELP
)
_WANTS = OfThisCall("an input requires a gradient that did not before", help=_HELP)
_SHARED = OfThisCall("an input that is written to shares its memory with another", help=_HELP)
_FAKE = OfThisCall("an input is a tensor of FakeTensorMode, which has no numbers", help=_HELP)
EMPTY = OfThisCall(
    "an input is empty", because="each runtime has its own of statistics of nothing", help=_HELP
)


def _axes_of(program: Program, positions: Sequence[int]) -> list[tuple[str, int, int]]:
    """A place for each symbolic dimension of a program, among the tensors of a call."""
    places: dict[str, tuple[int, int]] = {}
    for value, position in zip(program.inputs(Role.USER_INPUT), positions, strict=True):
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, int) and dim.value is not None:
                places.setdefault(dim.value, (position, axis))
    return [(symbol, *place) for symbol, place in places.items()]


def check_devices(real: Sequence[Any], options: Options) -> None:
    """Refuses tensors that lie where an engine has no kernels.

    Raises:
        NotServed: one does.
    """
    away = (t.device for t in real if isinstance(t, Tensor) and t.device.type != "cpu")
    if options.engine != "aten" and (device := next(away, None)) is not None:
        raise NotServed(
            f"a tensor is on {device}, for which there is no execution provider",
            because="graphs in onnxruntime take tensors of the CPU",
            help='engine="aten" serves it, or "auto"',
        )


def check_precision(holders: Sequence[fx.Node], real: Sequence[Any], options: Options) -> None:
    """Refuses 16 bits where an engine has few kernels for them.

    Raises:
        NotServed: a tensor has them, or autocast casts to them.
    """
    if any(not engines.serves(options.engine, {dtype}) for _, dtype in active()):
        raise NotServed("autocast is on: mixed precision is not served by onnxruntime; " + _BY_ATEN)
    for holder, value in zip(holders, real, strict=True):
        if isinstance(value, Tensor) and not engines.serves(options.engine, {value.dtype}):
            raise NotServed(
                f"{name_of(holder)} is {value.dtype}: reduced precision is not served by "
                f"onnxruntime; {_BY_ATEN}"
            )


_BY_ATEN = 'engine="aten" serves it'


def _is_copied(value: Any) -> bool:
    """Whether PyTorch's products read a copy of a tensor, so that a user may write to it then."""
    return isinstance(value, Tensor) and value.dim() == 3 and not value.is_contiguous()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _wants(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
