"""Functions and methods that stay PyTorch's in a trace: each call is one node.

What such code looks at (the values of tensors, numpy's random numbers) is not there in a trace. So
each call is seen once beside it, as the module calls it on the example's own tensors: what it
gives, what it changes in place, and which parameters its gradients reach (:class:`Seen`). In the
trace it is not run. A call that does anything else later on is found out by
:class:`~ortrain.kept.routine.Routine`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ortrain.capture.origin import place
from ortrain.capture.trace.aside import aside, is_aside
from ortrain.capture.trace.functions import called_instead, twin_of
from ortrain.capture.trace.keeping import Found, Keeper, keeper, like, refused
from ortrain.errors import CaptureError, listing
from ortrain.exclusive import this_thread
from ortrain.guards.autocast import active, autocast_as
from ortrain.kept.arguments import Arguments, Result
from ortrain.kept.call import Parameter, Site, instead, memory_of
from ortrain.kept.routine import Routine, leaves_of
from ortrain.module_state.holder import Holder, Memo, same_elements
from ortrain.module_state.survey import Survey
from ortrain.module_state.untouched import FREE, call_apart, generator_state, set_state

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device,
             torch.layout, torch.memory_format, torch.Size, slice, type, FunctionType,
             BuiltinFunctionType)  # fmt: skip
_PARAMETERS, _BUFFERS = "_parameters", "_buffers"


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


# -- beside the trace ------------------------------------------------------------------------------


def seen_routines(known: Keeper, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Runs a module aside, and notes what the calls of its kept functions do.

    Raises:
        CaptureError: one of them can be no node of a graph; the keeper knows which.
    """
    known.seen = {function: [] for function in known.routines}
    state, inside = _State(module), list[FunctionType]()
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
                because = f"beside the trace it raises {type(error).__name__}: {error}"
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
        call_apart(module, args, kwargs)
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
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.survey = module, Survey(module)
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
    """Sees which tensors are read, and which are made."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}
        self.versions: dict[int, int] = {}
        self.made: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self.made:
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
        *Parameter.all_of(state.module, _PARAMETERS),
        *Parameter.all_of(state.module, _BUFFERS),
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
    reads = _Reads()
    with instead(registered, stand_ins), torch.set_grad_enabled(grad), autocast_as(active()):
        before = state.holders()
        filled, named = arguments.filled(given)
        with reads, warnings.catch_warnings():
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
    written = [
        i for i, (t, v) in enumerate(zip(everything, versions, strict=True)) if t._version != v
    ]
    _check_written(site, written, everything, leaves, registered, reads)
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
        if p.registry == _BUFFERS and (id(stand_ins[i]) in reads.read or count + i in written)
    }
    chosen = sorted(reached | buffers)
    place_of = {count + i: count + n for n, i in enumerate(chosen)}
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
        ),
        result,
        [registered[i] for i in chosen],
        [place_of.get(i, i) for i in written],
        own_places,
        drawn,
        [(t.dtype, t.dim()) for t in tensors],
    )


def _stand_in(parameter: Parameter, grad: bool) -> Tensor:
    """A tensor in the place of a parameter, which has a gradient of its own, or of a buffer."""
    own = parameter.tensor.detach()
    if parameter.registry == _BUFFERS:
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
) -> None:
    """Raises where something is written to that a node cannot hand on."""
    count = len(leaves)
    for i in written:
        if i >= count and registered[i - count].registry == _PARAMETERS:
            raise refused(site, "it changes a parameter in place")
    for i, leaf in enumerate(leaves):
        if i not in written and not same_elements(everything[i].detach(), leaf.detach()):
            raise refused(site, "it changes an argument in a way that PyTorch does not see")
    known = {id(t) for t in everything}
    for tensor in reads.read.values():
        if id(tensor) not in known and tensor._version != reads.versions[id(tensor)]:
            raise refused(site, "it changes a tensor in place that it is not given")


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


# -- in the trace ----------------------------------------------------------------------------------


@contextlib.contextmanager
def kept_routines(module: nn.Module) -> Iterator[None]:
    """Inside, calls of the functions that stay PyTorch's are nodes.

    Args:
        module: that is traced.
    """
    known, here = keeper(), this_thread()
    if known is None or not known.routines:
        yield
        return
    modules = {id(vars(each)): each for each in module.modules()}

    def keeping(function: FunctionType, own: FunctionType) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not here() or is_aside():
                return own(*args, **kwargs)
            # What a trace puts in the place of a module has its attributes.
            args, kwargs = pytree.tree_map_only(
                nn.Module, lambda m: modules.get(id(vars(m)), m), (args, kwargs)
            )
            try:
                return _keep(known, function, own, args, kwargs)
            except CaptureError as error:
                known.refused[function] = error.because
                raise

        return call

    twins = {function: twin_of(function) for function in known.routines}
    with called_instead({function: keeping(function, own) for function, own in twins.items()}):
        yield


def _keep(known: Keeper, function: FunctionType, own: FunctionType, args: Any, kwargs: Any) -> Any:
    """Records a call as one operator, and returns what it returns in the trace.

    Raises:
        CaptureError: the call cannot be a node of a graph.
    """
    site = site_of(function, known.routines[function])
    name = f"{site.name} {id(function)}"
    number = known.counts[name]
    known.counts[name] += 1
    if number >= len(known.seen.get(function, ())):
        raise refused(site, "the trace calls it, and the module itself does not")
    seen = known.seen[function][number]
    arguments = Arguments(args, kwargs)
    if seen.forms != [(t.dtype, t.dim()) for t in arguments.tensors]:
        raise refused(site, "the trace gives it other arguments than the module itself")
    if not seen.found.tensors and seen.found.repeatable:
        return own(*args, **kwargs)  # it changes nothing, and hands on what it is given
    if not seen.found.tensors:
        raise refused(site, "it returns no tensor of its own")
    if _in_checkpoint() and seen.drawn:
        raise refused(site, "it draws random numbers, and a checkpoint around it draws them anew")
    held = [Parameter(p.now(), p.places, p.registry) for p in seen.held]
    call = Routine(own, arguments, site, grad=torch.is_grad_enabled(), autocast=active(), held=held)
    first = len(arguments.tensors)
    tensors = [*arguments.tensors, *[p.tensor for p in held]]
    users = {t.untyped_storage()._cdata: t for t in known.given}
    theirs = [i for i in range(first) if tensors[i].untyped_storage()._cdata in users]
    call.written, call.own = seen.written, seen.own
    call.returned = [i for i in seen.written if i in theirs]
    if any(users[tensors[i].untyped_storage()._cdata] is not tensors[i] for i in call.returned):
        raise refused(site, "it changes a view of an argument of the module in place")
    buffers = [first + i for i, p in enumerate(held) if p.registry == _BUFFERS]
    call.guarded = sorted({*seen.written, *theirs, *buffers})
    call.generators, call.original = list(known.generators), function
    found = like(_new_ones(seen), call, arguments.tensors)
    written = [_empty_like(tensors[i]) for i in seen.written]
    call.result, call.differentiable = seen.result, seen.found.differentiable
    call.connected = seen.found.connected
    call.repeatable = seen.found.repeatable and not call.returned
    call.unreached = [
        i
        for i, (t, reached) in enumerate(zip(arguments.tensors, call.connected, strict=False))
        if call.grad and not reached and (t.is_floating_point() or t.is_complex())
    ]
    which = known.called(call, [*found.tensors, *written])
    given = torch.ops.ortrain.kept(tensors, arguments.sizes, which)
    outputs = [
        t if reached or not t.is_floating_point() else t.detach()
        for t, reached in zip(given, seen.found.differentiable, strict=True)
    ]
    new = outputs[: len(found.tensors)]
    for i, value in zip(seen.written, outputs[len(new) :], strict=True):
        tensors[i].copy_(value)
    left = iter(new)
    return seen.result.rebuilt([next(left) if i is None else tensors[i] for i in seen.own])


def _new_ones(seen: Seen) -> Found:
    """What was found of a call without what it wrote to."""
    found, count = seen.found, len(seen.found.tensors) - len(seen.written)
    return Found(
        found.result, found.tensors[:count], found.differentiable[:count], found.connected,
        found.repeatable, found.given,
    )  # fmt: skip


def _empty_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, beside the trace."""
    mode: Any = torch._guards.detect_fake_mode([tensor])
    with aside(), mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _in_checkpoint() -> bool:
    """Whether a checkpoint is around the call."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False
