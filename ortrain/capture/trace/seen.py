"""What calls of functions that stay PyTorch's do, seen beside the trace.

Such code looks at what is not there in a trace: the values of tensors, numpy's random numbers. So
each call is seen once, as the module calls it on the example's own tensors: what it gives, what it
changes in place, and which parameters its gradients reach.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ortrain.capture.origin import own_reason, place
from ortrain.capture.trace.found import Effects, Found, refused, ways
from ortrain.capture.trace.functions import called_instead, twin_of
from ortrain.capture.trace.keeping import Keeper
from ortrain.errors import CaptureError, listing
from ortrain.kept.arguments import Arguments, Result
from ortrain.kept.call import Site
from ortrain.kept.history import leaves_of
from ortrain.kept.parameter import BUFFERS, PARAMETERS, Parameter, instead, memory_of
from ortrain.kept.shared import buffers_of, place_of, silent
from ortrain.module_state.holder import Contents, Holder, Memo, same_elements, were_written
from ortrain.module_state.survey import Survey
from ortrain.module_state.untouched import FREE, call_aside, generator_state, set_state
from ortrain.pytorch.autocast import active, autocast_as

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device,
             torch.layout, torch.memory_format, torch.Size, slice, type, FunctionType,
             BuiltinFunctionType)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What a call did that was seen.

    Attributes:
        found: what it gave that is no argument; the written tensors' contents come last.
        result: how the tensors make up what it returned, those that are arguments among them.
        held: places of the parameters and buffers that it reads, behind its arguments.
        written: places of the inputs that it changed in place.
        own: see :class:`~ortrain.kept.routine.Routine`.
        drawn: generators that it drew from.
        forms: dtypes and ranks of its arguments.
    """

    found: Found
    result: Result
    held: list[Parameter]
    written: list[int]
    own: list[int | None]
    drawn: list[Any]
    forms: list[tuple[torch.dtype, int]]


def site_of(function: FunctionType, because: str) -> Site:
    """Where a function is."""
    code = function.__code__
    line = place("", f"{code.co_filename}:{code.co_firstlineno}")
    return Site(f"{function.__qualname__}()", line, because)


def seen_routines(known: Keeper, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Runs a module aside, and notes what the calls of its kept functions do.

    Raises:
        CaptureError: one of them can be no node of a graph; the keeper knows which.
    """
    known.seen = {function: [] for function in known.routines}
    state, inside = _State(module, known.numbers), list[FunctionType]()
    known.generators = state.generators

    def noting(function: FunctionType, own: FunctionType) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return own(*args, **kwargs)
            inside.append(function)
            site = site_of(function, known.routines[function])
            try:
                known.seen[function].append(_seen(site, own, args, kwargs, state))
            except Exception as error:
                because = own_reason(error, "running it beside the trace") or (
                    f"beside the trace it raises {type(error).__name__}: {error}"
                )
                known.refused[function] = getattr(error, "because", because)
                raise
            else:
                return own(*args, **kwargs)
            finally:
                inside.pop()

        return call

    twins = {function: twin_of(function) for function in known.routines}
    with (
        contextlib.suppress(Exception),
        called_instead({function: noting(function, own) for function, own in twins.items()}),
    ):
        call_aside(module, args, kwargs)
    for function, why in known.refused.items():
        raise CaptureError(
            f"{function.__qualname__}() can be no node of a graph that PyTorch runs",
            where=site_of(function, "").where,
            because=why,
        )


class _State:
    """What calls may change of a module besides what they are given.

    Args:
        module: that calls them.
        numbers: places of buffers that stand for numbers: the code finds those themselves later on.
    """

    def __init__(self, module: nn.Module, numbers: Collection[tuple[int, str]]) -> None:
        self.module, self.survey, self.numbers = module, Survey(module), numbers
        self.objects = {id(each) for each in module.modules()}
        self.objects |= {id(value) for m in module.modules() for value in vars(m).values()}
        self.objects |= {id(owner) for owner in self.survey.owners}

    def holders(self) -> list[tuple[Holder, Any]]:
        """What holds something, with what it holds; results that are only remembered left out."""
        return [(h, h.read()) for h in self.survey.holders if not isinstance(h, Memo)]

    @property
    def generators(self) -> list[Any]:
        """Of random numbers, PyTorch's global one left out."""
        return list(self.survey.generators.values())


class _Reads(TorchFunctionMode):
    """Sees which tensors are read, and which are made.

    Args:
        own: tensors that lie where the module's own do. What those that are read held is known
            afterwards.
    """

    def __init__(self, own: Sequence[Tensor]) -> None:
        super().__init__()
        self._own = {id(each) for each in own}
        self.held: list[Contents] = []
        self.read: dict[int, Tensor] = {}
        self.versions: dict[int, int] = {}
        self.made: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self.made:
                if id(leaf) in self._own and id(leaf) not in self.read:
                    self.held.append(Contents(leaf))
                self.read.setdefault(id(leaf), leaf)
                self.versions.setdefault(id(leaf), leaf._version)
        output = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and id(leaf) not in self.read:
                self.made[id(leaf)] = leaf
        return output


def _seen(site: Site, own: FunctionType, args: Any, kwargs: Any, state: _State) -> Seen:
    """Calls a function on copies of its tensors, after which all is as before.

    Raises:
        CaptureError: it does what no node of a graph may do.
    """
    arguments = Arguments(args, kwargs)
    _check_objects(site, arguments, state.objects)
    tensors = arguments.tensors
    if not tensors:
        raise refused(site, "it is given no tensor, so that nothing says when it is to run")
    grad, count = torch.is_grad_enabled(), len(tensors)
    registered = [
        *Parameter.all_of(state.module),
        *[b for b in buffers_of(state.module) if place_of(b) not in state.numbers],
    ]
    leaves = [
        t.detach().clone().requires_grad_(grad and (t.is_floating_point() or t.is_complex()))
        for t in tensors
    ]
    given = [leaf.clone() for leaf in leaves]
    stand_ins = [_stand_in(p, grad) for p in registered]
    everything = [*given, *stand_ins]
    versions = [t._version for t in everything]
    states = [generator_state(each) for each in state.generators]
    torchs = _torch_states()
    weights = [t for t, p in zip(stand_ins, registered, strict=True) if p.registry == PARAMETERS]
    reads, effects = _Reads(weights), Effects()
    with instead(registered, stand_ins), torch.set_grad_enabled(grad), autocast_as(active()):
        before = state.holders()
        filled, named = arguments.filled(given)
        with reads, effects, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the call itself says it again
            output = own(*filled, **named)
        changed = _changed(before, registered, stand_ins)
    drawn = [g for g, s in zip(state.generators, states, strict=True) if _differ(g, s)]
    torch_drew = not all(map(torch.equal, torchs, _torch_states()))
    for holder, held in before:
        holder.write(held)
    for generator, held in zip(state.generators, states, strict=True):
        set_state(generator, held)
    _set_torch_states(torchs)
    if changed:
        raise refused(site, f"it changes {listing(changed)}")
    if were_written(reads.held):
        raise refused(site, "it changes a parameter in place")
    written = [
        i
        for i, (t, v) in enumerate(zip(everything, versions, strict=True))
        if t._version != v or (i >= count and _differs_unseen(t, registered[i - count]))
    ]
    _check_written(site, written, everything, leaves, registered, reads, effects)
    _check_given_once(site, written, [*tensors, *[p.tensor for p in registered]])
    result = Result(output)
    if result.constants:
        raise refused(
            site,
            f"it returns {result.constants[0]!r}, which may be another number at the next call",
        )
    places = {id(t): i for i, t in enumerate(given)}
    own_places = [places.get(id(t)) for t in result.tensors]
    new = [t for t, i in zip(result.tensors, own_places, strict=True) if i is None]
    _check_new(site, new, everything, reads)
    stands = {id(t): i for i, t in enumerate(stand_ins)}
    reached, arguments_reached = set(), set()
    finals = [everything[i] for i in written]
    leaf_of = {id(leaf): i for i, leaf in enumerate(leaves)}
    for leaf in leaves_of([*new, *finals]):
        if id(leaf) in stands:
            reached.add(stands[id(leaf)])
        elif id(leaf) in leaf_of:
            arguments_reached.add(leaf_of[id(leaf)])
        else:
            raise refused(site, "it reads a tensor that requires a gradient and is no parameter")
    buffers = {
        i
        for i, p in enumerate(registered)
        if p.registry == BUFFERS and (id(stand_ins[i]) in reads.read or count + i in written)
    }
    chosen = sorted(reached | buffers)
    at = {count + i: count + n for n, i in enumerate(chosen)}
    outputs = [*new, *finals]
    return Seen(
        Found(
            result,
            [t.detach() for t in outputs],
            [t.requires_grad for t in outputs],
            [
                *[i in arguments_reached for i in range(count)],
                *[i in reached for i in chosen],
            ],
            not drawn and not torch_drew,
            [tuple(t.shape) for t in tensors],
            ways(outputs, [*leaves[:count], *[stand_ins[i] for i in chosen]]),
        ),
        result,
        [registered[i] for i in chosen],
        [at.get(i, i) for i in written],
        own_places,
        drawn,
        [(t.dtype, t.dim()) for t in tensors],
    )


def _differs_unseen(stand_in: Tensor, buffer: Parameter) -> bool:
    """Whether a buffer was written to in a way that PyTorch does not count."""
    if buffer.registry != BUFFERS or not silent(stand_in):
        return False
    return not same_elements(stand_in.detach(), buffer.tensor.detach())


def _stand_in(parameter: Parameter, grad: bool) -> Tensor:
    """A tensor in the place of a parameter, which has a gradient of its own, or of a buffer."""
    own = parameter.tensor.detach()
    if parameter.registry == BUFFERS:
        return own.clone()
    return own.requires_grad_(grad and own.is_floating_point())


def _check_objects(site: Site, arguments: Arguments, known: set[int]) -> None:
    """Raises where an argument is an object that only this call has."""
    for leaf in arguments.objects:
        if not isinstance(leaf, _CONSTANT) and id(leaf) not in known:
            raise refused(
                site,
                f"it is given an object of type {type(leaf).__name__}, of which nothing says that "
                "the next call has the same",
            )


def _changed(
    before: Sequence[tuple[Holder, Any]],
    registered: Sequence[Parameter],
    stand_ins: Sequence[Tensor],
) -> list[str]:
    """What a call has changed of its module, as messages name it."""
    found = [
        f"'{path}'"
        for holder, held in before
        for path in holder.changed(held)
        if path.rpartition(".")[2] not in FREE
    ]
    for parameter, stand_in in zip(registered, stand_ins, strict=True):
        for owner, name in parameter.places:
            if owner.__dict__[parameter.registry].get(name) is not stand_in:
                found.append(f"what {name!r} is")
    return found


def _check_written(
    site: Site,
    written: Sequence[int],
    everything: Sequence[Tensor],
    leaves: Sequence[Tensor],
    registered: Sequence[Parameter],
    reads: _Reads,
    effects: Effects,
) -> None:
    """Raises where something is written to that a node cannot hand on."""
    count = len(leaves)
    for i in written:
        if i >= count and registered[i - count].registry == PARAMETERS:
            raise refused(site, "it changes a parameter in place")
    for i, leaf in enumerate(leaves):
        if i in written:
            continue
        given = everything[i]
        if effects.wrote_to([given]) or not same_elements(given.detach(), leaf.detach()):
            raise refused(site, "it changes an argument in a way that PyTorch does not see")
    known = {id(t) for t in everything}
    for tensor in reads.read.values():
        if id(tensor) not in known and tensor._version != reads.versions[id(tensor)]:
            raise refused(site, "it changes a tensor in place that it is not given")


def _check_given_once(site: Site, written: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Raises where what is written to is there under another name, which would not show it."""
    shown = Counter(memory_of(t) for t in {id(t): t for t in tensors}.values())
    twice = Counter(id(t) for t in tensors)
    for tensor in (tensors[i] for i in written):
        if shown[memory_of(tensor)] > 1 or twice[id(tensor)] > 1:
            raise refused(
                site, "it changes a tensor in place that it is given, or may read, another way, too"
            )


def _check_new(
    site: Site, new: Sequence[Tensor], everything: Sequence[Tensor], reads: _Reads
) -> None:
    """Raises where a result shares its memory with something that may be read or written to."""
    known = {memory_of(t) for t in everything}
    for tensor in new:
        if memory_of(tensor) in known:
            raise refused(
                site, "it returns a view of what it is given, or one tensor in two places"
            )
        if id(tensor) not in reads.made:
            raise refused(site, "it returns a tensor that was there before")
        known.add(memory_of(tensor))


def _differ(generator: Any, state: Any) -> bool:
    return pickle.dumps(generator_state(generator)) != pickle.dumps(state)


def _torch_states() -> list[Tensor]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def _set_torch_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])
