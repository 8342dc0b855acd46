"""A forward is rehearsed: run on tensors without contents, in a tenth of the time of a trace.

A number that only values decide, or an attribute that is written, shows in it, so that a module of
which no graph can be made says so at its first call (:func:`foretold`), and one that only makes at
its first call what the later ones find does not (:func:`settles`). Where a value decides which
call is the first, the forward is run with contents, aside (:func:`turns`).

A forward that sets attributes is rehearsed before it is traced (:func:`rehearsed`). What it warns
of in a rehearsal, it warns of in the call.

transformers' classifiers write ``config.problem_type`` at their first call with labels, Swin's
layers write ``shift_size`` where the image is not larger than a window; every later call finds what
they have written, and does the same. A trace of the first call says what the module does when it
finds something else. So it is run twice, until nothing changes, and traced as it is then.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.capture.trace.autograd_calls import checked_autograd_calls
from ortrain.capture.trace.candidates import drawing_codes
from ortrain.capture.trace.exporter import quiet
from ortrain.capture.trace.keeping import live_modules
from ortrain.capture.trace.layers import traceable_layers
from ortrain.capture.trace.packed import no_packed_sequences
from ortrain.capture.trace.refusal import Refusal, refusal, side_effects
from ortrain.capture.trace.value_checks import Ways, value_checks
from ortrain.errors import CaptureError, NotServed, UnsupportedInput
from ortrain.guards.handed import apart
from ortrain.module_state.holder import Attributes
from ortrain.module_state.survey import Survey
from ortrain.module_state.untouched import (
    Effects,
    Filling,
    call_without_contents,
    calls_aside,
    calls_without_contents,
    random_states,
    untouched,
    watched,
)


def rehearsed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Filling]:
    """What the forward sets at its first call, which is so from now on, and is set now.

    The graph of what the module does then is the graph of every later call, and of this one too: at
    its sizes the operators were the same before and after. Where that cannot be said there are
    none, and the module's state is as before: it is for the trace to find out.
    """
    if not _may_set(module):
        return []
    args, kwargs = apart(args, kwargs)
    try:
        with untouched(module), quiet():
            with watched(module) as effects:
                first = _operators(module, args, kwargs)
            settings = effects.lasting
            if not settings:
                return []
            with watched(module) as later:
                alike = first == _operators(module, args, kwargs)
    except Exception:
        return []
    if not alike or not later.none:
        return []
    for setting in settings:
        setting.apply()
    return settings


def foretold(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CaptureError | None:
    """Why no graph of a module can be made, if its forward tells so without a trace.

    Nothing of the module is changed. Where it comes to a branch on values there is no telling.
    """
    args, kwargs = apart(args, kwargs)  # to whose containers it may write
    ways = Ways()
    ways.known = True  # so that `item()` is no reason yet
    try:
        with untouched(module), traceable_layers(), quiet():
            call = calls_without_contents(module, args, kwargs)
            effects = _effects(module, call, ways)
            if effects.lasting:  # what it sets at its first call it may find at the next
                effects = _effects(module, call, ways)
    except Exception as error:
        found = refusal(module, error)
        # One that was raised on purpose; not for what a custom function could not be tried on.
        meant = isinstance(error, CaptureError) and error.__context__ is None
        return found if (found.by_value or meant) and not ways.missed else None
    refused = None if ways.missed else side_effects(effects, module)
    if refused is not None and effects.drawn:
        refused.codes = drawing_codes(module, args, kwargs, effects.generators)
    return refused


def settled(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: CaptureError
) -> bool:
    """Whether a call was refused for what only the first one does.

    Nothing of the module is changed.
    """
    if isinstance(error, NotServed | UnsupportedInput):
        return False
    args, kwargs = apart(args, kwargs)
    effect = isinstance(error, Refusal) and error.effect
    return (effect and settles(module, args, kwargs)) or turns(module, args, kwargs)


def settles(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward does nothing but compute once it has been called like this.

    Nothing of the module is changed.
    """
    ways = Ways()
    ways.known = True
    try:
        with untouched(module), traceable_layers(), quiet():
            call = calls_without_contents(module, args, kwargs)
            _effects(module, call, ways)
            return _effects(module, call, ways).none
    except Exception:
        return False


def turns(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call goes another way at branches on values once it has been made.

    ``if not self.initialized: …`` with the flag in a buffer: of the code behind it the calls after
    the first need no graph. Two calls aside find out, with the same random numbers; of code whose
    state cannot all be put back, nothing is known.
    """
    if Survey(module).unwatched:
        return False
    ways = Ways(), Ways()
    try:
        with calls_aside(module, args, kwargs) as call:
            for each in ways:
                with random_states(module), each.noted():
                    call()
                if not each.gone:
                    return False
    except Exception:
        return False
    return ways[0].gone != ways[1].gone


def _effects(module: nn.Module, call: Callable[[Any], None], ways: Ways) -> Effects:
    """What a call without contents does besides computing its outputs."""
    with watched(module, live=live_modules(module)) as effects:
        call(_refusing(module, ways))
    return effects


@contextlib.contextmanager
def _refusing(module: nn.Module, ways: Ways) -> Iterator[None]:
    with value_checks(ways), checked_autograd_calls(module), no_packed_sequences():
        yield


def _may_set(module: nn.Module) -> bool:
    """Whether a forward's own code sets an attribute of its module, or one that another lacks."""
    stored: set[str] = set()
    for kind in {type(each) for each in module.modules()}:
        names = set(_stored(kind))
        stored |= names
        if any(names & vars(each).keys() for each in module.modules() if type(each) is kind):
            return True
    if not stored:
        return False
    holders = [h for h in Survey(module).holders if isinstance(h, Attributes)]
    objects = [h.object for h in holders if not isinstance(h.object, nn.Module)]
    return any(getattr(each, name, None) is None for each in objects for name in stored)


def _stored(kind: type[nn.Module]) -> Iterator[str]:
    """The names of the attributes that a forward sets, and the methods that it names."""
    names, known = ["forward"], {"forward"}
    for name in names:
        function = inspect.unwrap(getattr(kind, name))
        codes = [function.__code__] if isinstance(function, FunctionType) else []
        for code in codes:
            codes.extend(each for each in code.co_consts if isinstance(each, CodeType))
            methods = {n for n in code.co_names if n in vars(kind)} - known
            known |= methods
            names.extend(n for n in methods if isinstance(vars(kind)[n], FunctionType))
            for instruction in dis.get_instructions(code):
                if instruction.opname == "STORE_ATTR":
                    yield instruction.argval


def _operators(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The operators that a call runs, in order, with what each is given."""
    log = _Log()
    call_without_contents(module, args, kwargs, log)
    return log.operators


class _Log(TorchDispatchMode):
    """Writes down each operator; tensors are numbered as they come, and kept for their ids' sake.

    Attributes:
        operators: of each its name, its arguments and its results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []
        self.tensors: dict[int, tuple[Tensor, Any]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = pytree.tree_flatten((args, kwargs or {}))
        results = operator(*args, **(kwargs or {}))
        leaves = [*given[0], *pytree.tree_leaves(results)]
        self.operators.append((str(operator), given[1], [self._shown(leaf) for leaf in leaves]))
        return results

    def _shown(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return type(leaf), str(leaf)
        if id(leaf) not in self.tensors:
            written = leaf.constant if isinstance(leaf, FakeTensor) else leaf
            value = None if written is None else written.tolist()
            shown = (len(self.tensors), leaf.dtype, leaf.shape, leaf.stride(), str(value))
            self.tensors[id(leaf)] = leaf, shown
        return self.tensors[id(leaf)][1]
