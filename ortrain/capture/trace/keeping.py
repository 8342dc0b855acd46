"""Calls that stay PyTorch's, in a trace: each goes through one operator of which it sees no more.

What a call gives is found beside the trace, by running its code on tensors without contents: the
shapes and dtypes of its tensors, and which inputs a gradient reaches. The trace then has one
operator, ``ortrain::kept``, with the tensors that the call was given and the number of the call
among those of the trace (:class:`Keeper`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ortrain.capture.origin import own_reason, place
from ortrain.capture.trace.aside import answers_noted, aside, is_aside
from ortrain.capture.trace.found import Found, UnseenWrites, find, like, refused
from ortrain.capture.trace.refusal import first_line, line_of
from ortrain.capture.trace.rowwise import axes_of
from ortrain.errors import OrtrainError
from ortrain.exclusive import this_thread
from ortrain.kept.arguments import Arguments, Result
from ortrain.kept.call import Kept, Site
from ortrain.kept.effects import undone
from ortrain.kept.parameter import Parameter
from ortrain.kept.shared import buffers_of, place_of
from ortrain.module_state.untouched import call_aside
from ortrain.ops.kept import keys_of
from ortrain.program import Program
from ortrain.pytorch.autocast import active

_LIBRARY = torch.library.Library("ortrain", "FRAGMENT")
_LIBRARY.define("kept(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")


@dataclass
class Keeper:
    """What of a module stays PyTorch's in its graph.

    Attributes:
        functions: whether custom autograd functions do that cannot be taken apart.
        operators: whether operators do that a graph has not.
        modules: names of sub-modules that do, each with the reason.
        examples: what calls of these have given for the example's own tensors.
        writers: names of those whose calls have written to them where a trace does not see it.
        routines: functions and methods that do, each with the reason.
        seen: what calls of these have done beside the trace.
        refused: those of them that can be no nodes, each with the reason.
        generators: of random numbers that the module may draw from, besides PyTorch's.
        given: tensors that the forward is given in the trace.
        counts: of the calls of each in the trace.
        calls: of the trace that is under way or was the last, by their numbers.
        results: of each call, tensors without contents.
        module: that is captured.
        begun: the buffers that its forward began with in the trace, by their places.
        numbers: places of buffers that stand for numbers which the module holds.
        proofs: what was found of calls that may treat tokens alone.
        layouts: what calls of the trace go by of how that lies in memory which they are given.
    """

    functions: bool = True
    operators: bool = True
    modules: dict[str, str] = field(default_factory=dict)
    examples: dict[str, list[Found]] = field(default_factory=dict)
    writers: set[str] = field(default_factory=set)
    routines: dict[FunctionType, str] = field(default_factory=dict)
    seen: dict[FunctionType, list[Any]] = field(default_factory=dict)
    refused: dict[FunctionType, str] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    calls: list[Kept] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)
    module: nn.Module | None = None
    begun: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    numbers: frozenset[tuple[int, str]] = frozenset()
    proofs: dict[Any, Any] = field(default_factory=dict)
    layouts: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """A trace begins."""
        self.calls, self.results, self.layouts = [], [], []
        self.counts.clear()

    def called(self, call: Kept, results: list[Tensor]) -> int:
        """Notes a call and what it gives; returns its number."""
        self.calls.append(call)
        self.results.append(results)
        return len(self.calls) - 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, it is noted with which buffers the module's forward begins."""
        module = self.module

        def begin(*_: object) -> None:
            assert module is not None
            self.begun = {place_of(each): each.tensor for each in buffers_of(module)}

        handle = None if module is None else module.register_forward_pre_hook(begin)
        try:
            yield
        finally:
            self.begun = {}
            if handle is not None:
                handle.remove()

    def assigned(self) -> list[Parameter]:
        """The buffers in whose places the forward has put other tensors by now."""
        if self.module is None or not self.begun:
            return []
        return [
            each
            for each in buffers_of(self.module)
            if self.begun.get(place_of(each)) is not each.tensor
            and place_of(each) not in self.numbers
        ]

    def kept(self, program: Program) -> tuple[Kept, ...]:
        """The calls of a program's nodes, in their order; the trace is forgotten.

        Raises:
            CaptureError: a call that does more than to compute is not among them.
        """
        keys = keys_of(program.graph)
        by_key = {call.key: call for call in self.calls}
        for call in self.calls:
            if call.key not in keys and not call.repeatable:
                raise refused(call.site, "nothing reads what it returns, and it does more")
        self.release()
        return tuple(by_key[key] for key in keys)

    def release(self) -> None:
        """Forgets the tensors of the trace."""
        self.results = []
        for call in self.calls:
            call.release()


_current: contextvars.ContextVar[Keeper | None] = contextvars.ContextVar(
    "ortrain.capture.keeper", default=None
)


def keeper() -> Keeper | None:
    """Of the trace that is under way; None where all is to be taken apart or refused."""
    return _current.get()


@contextlib.contextmanager
def keeping(wanted: Keeper | None) -> Iterator[None]:
    """Inside, traces keep what is wanted."""
    token = _current.set(wanted)
    try:
        yield
    finally:
        _current.reset(token)


def live_modules(module: nn.Module) -> list[nn.Module]:
    """The sub-modules that stay PyTorch's in the trace."""
    known = keeper()
    return [] if known is None else [module.get_submodule(name) for name in known.modules]


def _kept(tensors: Sequence[Tensor], sizes: Sequence[int], number: int) -> list[Tensor]:
    """New tensors like those that the call of a number gives."""
    known = _current.get()
    assert known is not None, "a call is kept outside of its capture"
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        for t in known.results[number]
    ]


_register: Any = torch.library.register_fake
_register("ortrain::kept")(_kept)


def keep(
    keeper: Keeper,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    site: Site,
    module: nn.Module | None = None,
) -> Any:
    """Records a call as one operator, and returns what it returns in the trace.

    Args:
        keeper: of the trace.
        function: that is called.
        args: of the trace.
        kwargs: of the trace.
        site: of the call.
        module: whose forward the function is; its parameters are inputs, too.

    Raises:
        CaptureError: the call cannot be a node of a graph.
    """
    arguments = Arguments(args, kwargs)
    call = Kept(
        function, arguments, site,
        grad=torch.is_grad_enabled(), autocast=active(), module=module,
    )  # fmt: skip
    call.buffers = keeper.assigned()
    tensors, sizes = _inputs(call), arguments.sizes
    if not tensors:
        raise refused(site, "it is given no tensor, so that nothing says when it is to run")
    found = _found_in_trace(keeper, call, tensors, sizes)
    if not found.tensors:
        raise refused(site, "it returns no tensor")
    return _recorded(keeper, call, found)


def kept_as(
    keeper: Keeper,
    function: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    site: Site,
    made: Tensor,
) -> Any:
    """Records a call of an operator that changes nothing and that a trace cannot look into.

    Args:
        keeper: of the trace.
        function: that is called.
        args: of the trace, the first of which alone has a gradient.
        kwargs: of the trace.
        site: of the call.
        made: a tensor like the one that it returns.

    Raises:
        CaptureError: values of tensors decide about the sizes of what it is given.
    """
    arguments = Arguments(args, kwargs)
    tensors = arguments.tensors
    if any(_is_of_a_value(size) for t in tensors for size in t.shape):
        raise refused(site, "the values of a tensor decide about the sizes of what it is given")
    grad = torch.is_grad_enabled()
    call = Kept(function, arguments, site, grad=grad, autocast=active())
    first = [grad and each is args[0] and each.requires_grad for each in tensors]
    shapes = [tuple(t.shape) for t in tensors]
    return _recorded(keeper, call, Found(Result(made), [made], [any(first)], first, True, shapes))


def _recorded(keeper: Keeper, call: Kept, found: Found) -> Any:
    """The operator in the trace that stands for a call, and what that returns."""
    tensors, sizes = _inputs(call), call.arguments.sizes
    call.result, call.connected, call.ways = found.result, found.connected, found.ways
    call.repeatable = found.repeatable
    with aside():
        axes_of(call, tensors, keeper.proofs)
    number = keeper.called(call, found.tensors)
    given = torch.ops.ortrain.kept(tensors, sizes, number)
    outputs = [
        t if reached or not t.is_floating_point() else t.detach()
        for t, reached in zip(given, found.differentiable, strict=True)
    ]
    return found.result.rebuilt(outputs)


def _inputs(call: Kept) -> list[Tensor]:
    """The tensors that a call is given, the parameters of its module, and buffers."""
    held = [] if call.module is None else Parameter.all_of(call.module)
    return [*call.arguments.tensors, *[p.tensor for p in (*held, *call.buffers)]]


def _found_in_trace(
    keeper: Keeper, call: Kept, tensors: Sequence[Tensor], sizes: Sequence[Any]
) -> Found:
    """What a call gives in a trace: as its code says, or as its example lets one expect.

    Raises:
        CaptureError: neither says it.
    """
    name, number = call.site.name, keeper.counts[call.site.name]
    keeper.counts[name] += 1
    if name in keeper.writers:
        raise refused(call.site, "it changes one of its arguments in place")
    mode: Any = torch._guards.detect_fake_mode(list(tensors))
    environment = mode.shape_env
    fresh: Any = contextlib.nullcontext()
    if environment is not None:  # numbers out of tensors that nobody asks for again
        fresh = environment.ignore_fresh_unbacked_symbols()
    try:
        with aside(), mode, fresh, answers_noted() as answers:
            found = find(call, tensors, sizes)
            if answers:
                keeper.layouts += _layouts_that_decide(call, tensors, sizes, answers)
            if not any(_is_of_a_value(size) for t in found.tensors for size in t.shape):
                return found
            why = "the values of a tensor decide about the sizes of what it returns"
    except OrtrainError:
        raise
    except Exception as error:
        why = own_reason(error, "running it on tensors without contents") or (
            f"on tensors without contents it raises {type(error).__name__}: {first_line(error)}"
        )
    keeper.layouts += [question for question, _ in answers]  # nobody knows what they go by
    examples = keeper.examples.get(name, [])
    if number >= len(examples):
        raise refused(call.site, why)
    with aside(), mode:
        return like(examples[number], call, tensors)


def _layouts_that_decide(
    call: Kept, tensors: Sequence[Tensor], sizes: Sequence[Any], answers: list[tuple[str, str]]
) -> list[str]:
    """What code asks of how tensors lie in memory that depends on how those lie that it is given.

    In a graph these may lie otherwise than in PyTorch. What the code makes itself does not: a
    buffer for a kernel has the strides that it has.
    """
    count = len(call.arguments.plain)
    found: dict[str, None] = {}
    for turned in (False, True):
        given = [*(_laid(t, turned) for t in tensors[:count]), *tensors[count:]]
        with answers_noted() as others:
            find(call, given, sizes)
        pairs = zip_longest(answers, others)
        found.update({(one or other)[0]: None for one, other in pairs if one != other})
    return list(found)


def _laid(tensor: Tensor, turned: bool) -> Tensor:
    """One like a tensor, without gaps, whose axes lie in order or the other way round."""
    axes = range(tensor.dim()) if turned else reversed(range(tensor.dim()))
    strides, step = [0] * tensor.dim(), 1
    for axis in axes:
        strides[axis], step = step, step * tensor.shape[axis]
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _is_of_a_value(size: Any) -> bool:
    """Whether a size of a trace is a number out of a tensor."""
    return isinstance(size, torch.SymInt) and any(
        str(symbol).startswith("u") for symbol in size.node.expr.free_symbols
    )


@contextlib.contextmanager
def kept_modules(module: nn.Module) -> Iterator[None]:
    """Inside, the forwards of sub-modules that stay PyTorch's are kept calls.

    Args:
        module: that they are in.
    """
    known, here = keeper(), this_thread()
    if known is None:
        yield
        return

    def forward_of(name: str, child: nn.Module) -> Callable[..., Any]:
        own = child.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not here() or is_aside():
                return own(*args, **kwargs)
            site = Site(name, place(name, line_of(child)), known.modules[name])

            def call(*args: Any, **kwargs: Any) -> Any:
                return child.forward(*args, **kwargs)  # whatever it is by then

            return keep(known, call, args, kwargs, site, child)

        return forward

    with _forwards(module, known.modules, forward_of):
        yield


def recorded_examples(known: Keeper, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Runs a module aside, and notes what the calls give that are to stay PyTorch's."""
    known.examples, known.writers = {name: [] for name in known.modules}, set()

    def forward_of(name: str, child: nn.Module) -> Callable[..., Any]:
        own = child.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Before the call itself, which may leave something for the next one to find.
            with contextlib.suppress(Exception):  # which the trace will meet as well
                site = Site(name, "", "")
                call = Kept(own, Arguments(args, kwargs), site, grad=torch.is_grad_enabled(),
                            autocast=active(), module=child)  # fmt: skip
                try:
                    with undone([call]):
                        known.examples[name].append(find(call, _inputs(call), []))
                except UnseenWrites:
                    known.writers.add(name)
            return own(*args, **kwargs)

        return forward

    with contextlib.suppress(Exception), _forwards(module, known.modules, forward_of):
        call_aside(module, args, kwargs)


@contextlib.contextmanager
def _forwards(
    module: nn.Module, names: Iterable[str], made: Callable[[str, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Other forwards for some sub-modules."""
    children: dict[str, Any] = {name: module.get_submodule(name) for name in names}
    before = {name: vars(child).get("forward") for name, child in children.items()}
    for name, child in children.items():
        child.forward = made(name, child)
    try:
        yield
    finally:
        for name, child in children.items():
            if before[name] is None:
                del child.forward
            else:
                child.forward = before[name]
