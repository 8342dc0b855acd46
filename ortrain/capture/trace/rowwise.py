"""Which kept calls treat tokens alone: then a graph gives them the tokens that somebody reads.

A custom function is known to where its code does the same at each call
(:mod:`~ortrain.capture.trace.closed_code`), and its operators, forward and backward, carry the axes
of tokens (:mod:`~ortrain.capture.trace.token_axes`). Which operators they are is seen on tensors
without contents whose sizes are symbols: a number that decides anything would leave a condition
behind, or raise. Symbols stand for two places or more, and a size of 1 may be told apart in
silence, so it is run with each of them as 1, too, and has to call the same operators.

In a backward, tokens whose gradient is zero have to get zero: PyTorch hands zeros to those that
nobody reads, a graph leaves them out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.capture.trace.closed_code import Unproved, is_number, premises_of
from ortrain.capture.trace.token_axes import Axes, Ref, Step, Walk
from ortrain.kept.call import Kept
from ortrain.module_state.dispatch import without_modes

MOST = 2  # symbols; the runs are two to the power of that


@dataclass
class Trace:
    """What a call has done.

    Attributes:
        steps: in order.
        turn: how many of them are the forward's.
        symbols: of its sizes.
        sizes: of each tensor, by its number.
        inputs: numbers of the tensors that it was given.
        outputs: of those that it gave.
        arriving: of the gradients of these; None where there is none.
        gradients: of the inputs; None where there is none.
    """

    symbols: list[Any]
    steps: list[Step] = field(default_factory=list)
    turn: int = 0
    sizes: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    arriving: list[int | None] = field(default_factory=list)
    gradients: list[int | None] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    """Notes the operators that run inside.

    Args:
        trace: gets them.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def number(self, tensor: Tensor, *, new: bool = False) -> int:
        """Of a tensor.

        Raises:
            Unproved: it comes from outside.
        """
        if id(tensor) not in self._numbers:
            if not new:
                raise Unproved("it comes to a tensor that it was not given")
            number = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
            self.trace.sizes[number] = tuple(map(_size, tensor.shape))
        return self._numbers[id(tensor)]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = operator(*args, **(kwargs or {}))
        results = made if isinstance(made, list | tuple) else [made]
        tensors = [each for each in results if isinstance(each, Tensor)]
        if not tensors:
            if operator.namespace != "prim":
                raise Unproved(f"{operator} makes no tensor")
            return made
        if operator.namespace != "aten" or torch.Tag.nondeterministic_seeded in operator.tags:
            raise Unproved(f"it calls {operator}")
        if len(tensors) != len(results):
            raise Unproved(f"{operator} gives something else than tensors")
        given, named = self._plain(args), self._plain(kwargs or {})
        if operator._schema.is_mutable:
            self._expect_own(args[0])
        numbers = tuple(self.number(each, new=True) for each in tensors)
        sizes = tuple(self.trace.sizes[number] for number in numbers)
        self.trace.steps.append(Step(operator, given, named, numbers, sizes))
        return made

    def _plain(self, value: Any) -> Any:
        """Arguments without tensors and symbols."""
        if isinstance(value, Tensor):
            if type(value) is Tensor and not value.dim():  # a number that PyTorch has made one of
                with without_modes():
                    return value.item()
            return Ref(self.number(value))
        if isinstance(value, torch.SymInt):
            return _size(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise Unproved("it computes with a number of tokens")
        if isinstance(value, list | tuple):
            return tuple(map(self._plain, value))
        if isinstance(value, dict):
            return {key: self._plain(each) for key, each in value.items()}
        return value

    def _expect_own(self, written: Tensor) -> None:
        """Raises where others show what is written to."""
        memory, number = written.untyped_storage()._cdata, self.number(written)
        if not any(number in step.results for step in self.trace.steps[self.trace.turn :]):
            raise Unproved("it writes to what it was given, or to what it has saved")
        for each in self._alive:
            if each is not written and each.untyped_storage()._cdata == memory:
                raise Unproved("it writes to what another tensor shows, too")


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def axes_of(call: Kept, tensors: Sequence[Tensor], known: dict[Any, Any]) -> None:
    """Notes at a call which axes of its inputs and outputs are those of tokens, where it is proved.

    Args:
        call: that was found to be one.
        tensors: that it is given in the trace.
        known: what was found of calls before, by what they are.
    """
    function = call.custom_function
    if function is None or call.arguments.sizes or call.buffers or call.sizes is not None:
        return
    try:
        shapes, count = _shapes(tensors)
        if not 0 < count <= MOST or not call.repeatable:
            return
        if not all(call.arguments.plain) or not all(map(is_number, call.arguments.objects)):
            raise Unproved("it is given something else than tensors and numbers")
        key = (function, str(call.arguments.fixed), *map(str, shapes), call.grad, call.autocast,
               *(t.dtype for t in tensors), *call.connected)  # fmt: skip
        if key not in known:
            known[key] = None
            premises = premises_of(function, alone=sum(call.connected) == 1)
            known[key] = premises, _proved(call, tensors, shapes, count)
        if known[key] is not None:
            call.premises, call.axes = known[key]
    except Exception as error:  # user code, on tensors that it has never seen
        call.mixes = str(error).partition("\n")[0]


def _shapes(tensors: Sequence[Tensor]) -> tuple[list[list[Any]], int]:
    """Sizes as numbers, or as ``(label,)`` of what is a symbol; and how many symbols there are."""
    labels: dict[Any, int] = {}
    shapes = []
    for tensor in tensors:
        shape: list[Any] = []
        for size in map(_size, tensor.shape):
            is_known = isinstance(size, int) or size.is_number
            shape.append(int(size) if is_known else (labels.setdefault(size, len(labels)),))
        shapes.append(shape)
    return shapes, len(labels)


def _proved(
    call: Kept, tensors: Sequence[Tensor], shapes: list[list[Any]], count: int
) -> list[int]:
    """The label of each axis of each input and output, one behind another; -1 where it has none.

    Raises:
        Unproved: it may mix tokens.
    """
    whole = _traced(call, tensors, shapes, frozenset(), count)
    found = _walked(whole, shapes)
    for size in range(1, count + 1):
        for single in itertools.combinations(range(count), size):
            other = _traced(call, tensors, shapes, frozenset(single), count)
            if not _same(whole, other, single):
                raise Unproved("it does something else with a single token")
    return found


def _walked(trace: Trace, shapes: list[list[Any]]) -> list[int]:
    """What the steps of a trace say of the axes.

    Raises:
        Unproved: they mix tokens.
    """
    walk = Walk(trace.symbols, {})
    for number, shape in zip(trace.inputs, shapes, strict=True):
        labels = tuple(size if isinstance(size, tuple) else () for size in shape)
        walk.known[number] = Axes(trace.sizes[number], labels)
    for step in trace.steps[: trace.turn]:
        walk.through(step)
    every = set(range(len(trace.symbols)))
    for output, arriving in zip(trace.outputs, trace.arriving, strict=True):
        axes = walk.known[output]
        if axes.total or set(axes.tokens) not in (every, set()):
            raise Unproved("what it gives has some axes of tokens, and not all")
        if arriving is not None:
            walk.known[arriving] = replace(axes, zero=True)
    for step in trace.steps[trace.turn :]:
        walk.through(step)
    for given, gradient in zip(trace.inputs, trace.gradients, strict=True):
        own = walk.known[given]
        if set(own.tokens) not in (every, set()):
            raise Unproved("what it is given has some axes of tokens, and not all")
        if gradient is None:
            continue
        axes = walk.known[gradient]
        if axes.labels != own.labels or (own.tokens and not axes.zero):
            raise Unproved("tokens without a gradient get one")
    return [
        labels[0] if labels else -1
        for number in (*trace.inputs, *trace.outputs)
        for labels in _single(walk.known[number])
    ]


def _single(axes: Axes) -> Sequence[tuple[int, ...]]:
    if any(len(labels) > 1 for labels in axes.labels):
        raise Unproved("what it gives has rows and positions in one axis")
    return axes.labels


def _traced(
    call: Kept,
    tensors: Sequence[Tensor],
    shapes: list[list[Any]],
    single: frozenset[int],
    count: int,
) -> Trace:
    """A run of a call, and of its backward, on tensors without contents.

    Args:
        call: the call.
        tensors: that it is given in the trace.
        shapes: of them, as of :func:`_shapes`.
        single: symbols that are 1.
        count: of symbols.

    Raises:
        Unproved: it does what cannot be recorded, or a number decides about what it does.
    """
    environment = ShapeEnv(duck_shape=False)
    sizes = [1 if i in single else _symbol(environment, f"tokens{i}", 5 + i) for i in range(count)]
    trace = Trace([_size(size) for size in sizes])
    recorder = _Recorder(trace)
    with FakeTensorMode(shape_env=environment), torch.set_grad_enabled(call.grad):
        leaves = [
            torch.empty(
                [sizes[s[0]] if isinstance(s, tuple) else s for s in shape], dtype=tensor.dtype
            ).requires_grad_(call.grad and tensor.is_floating_point())
            for shape, tensor in zip(shapes, tensors, strict=True)
        ]
        trace.inputs = [recorder.number(leaf, new=True) for leaf in leaves]
        with recorder:
            made = call.call([*leaves], own=False)
        assert call.result is not None
        outputs = call.result.taken_apart(made)
        trace.outputs = [recorder.number(output) for output in outputs]
        trace.turn = len(trace.steps)
        roots = [t for t in outputs if t.requires_grad]
        arriving = {id(root): torch.empty_like(root) for root in roots}
        trace.arriving = [
            recorder.number(arriving[id(t)], new=True) if id(t) in arriving else None
            for t in outputs
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found: dict[int, Any] = {}
        if roots and wanted:
            with recorder:
                gradients = torch.autograd.grad(
                    roots, wanted, [*arriving.values()], allow_unused=True
                )
            found = {id(leaf): g for leaf, g in zip(wanted, gradients, strict=True)}
        trace.gradients = [
            None if found.get(id(leaf)) is None else recorder.number(found[id(leaf)])
            for leaf in leaves
        ]
    if environment.guards or environment.replacements or environment.deferred_runtime_asserts:
        raise Unproved("a number of tokens decides about what it does")
    return trace


def _symbol(environment: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    source = ConstantSource(name)
    symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    found: Any = environment.create_symintnode(symbol, hint=hint, source=source)
    return found


def _same(whole: Trace, other: Trace, single: Sequence[int]) -> bool:
    """Whether another trace has done the same as a whole one, where some symbols are 1."""
    values = dict(zip(whole.symbols, other.symbols, strict=True))

    def put(value: Any) -> Any:
        if isinstance(value, sympy.Basic):
            made = value.subs(values, simultaneous=True)
            return int(made) if made.is_number else made
        if isinstance(value, tuple):
            return tuple(map(put, value))
        if isinstance(value, dict):
            return {key: put(each) for key, each in value.items()}
        return value

    mine = [(s.operator, put(s.args), put(s.kwargs), s.results, put(s.sizes)) for s in whole.steps]
    theirs = [(s.operator, s.args, s.kwargs, s.results, s.sizes) for s in other.steps]
    same = (whole.inputs, whole.outputs, whole.arriving, whole.gradients) == (
        other.inputs, other.outputs, other.arriving, other.gradients,
    )  # fmt: skip
    # A number is itself alone, as 1 is not True nor 1.0.
    return same and mine == theirs and str(mine) == str(theirs)
