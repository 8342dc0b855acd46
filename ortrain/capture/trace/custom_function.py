"""A custom ``torch.autograd.Function`` has a backward that a trace of its forward does not know.

A trace records the operators of the forward and drops the backward that was written for them. That
is right only where the two say the same, everywhere: at gradients of 1,000 and at inputs that no
example has. Numbers alone cannot show it, so a function is taken apart only where its code leaves
nothing to be missed:

- forward and backward are straight lines of Python over a few analytic functions of torch. No name
  stands in them for a number from outside, a shape, a dtype or what autograd needs;
- their operators act element by element, and the gradient enters linearly;
- over magnitudes from 1e-6 to 1e4 the backward is the derivative of the forward, in float64.
  Two such expressions that agree there agree where they were not looked at.

BLOOM's GELU is such a function. All others stay PyTorch's, as one node of the graph each
(:mod:`~ortrain.capture.trace.keeping`); where nothing may stay, they are refused, and their module
runs in PyTorch.

However ``apply`` was reached, bound to a name before the trace, through a partial or from C++, each
call comes to the ``apply`` that ``Function`` inherits, and makes a context: an instance of a class
below ``BackwardCFunction``. There it is seen.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx
from torch._C import _FunctionBase
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ortrain.capture.origin import OWN, TORCH, own_reason
from ortrain.capture.trace.aside import answers_noted, aside, is_aside
from ortrain.capture.trace.keeping import Keeper, keep, keeper
from ortrain.capture.trace.patched import replaced
from ortrain.errors import CaptureError
from ortrain.exclusive import this_thread
from ortrain.kept.call import Site

aten = torch.ops.aten

_APPLY: Any = vars(_FunctionBase)["apply"]  # a class method in C
_EXPERTS = "GeneratedBackwardFor_transformers_grouped_mm_fallback_default"

_GENERATED = re.compile(r"GeneratedBackwardFor_(.+)_\w+?")
_NOT_CALLED = ", and a captured graph would not call it"
_RUN_AGAIN = "it runs code that only eager PyTorch can run again"

_TOLERANCE = 1e-6
_DECADES = range(-6, 4)
_POINTS = 256  # of each decade

# What the code of a function may name, beside functions of its own that name no more.
_NAMES = {
    "torch", "exp", "tanh", "sigmoid", "erf", "sin", "cos", "square", "mul", "add", "sub", "div",
    "neg", "save_for_backward", "saved_tensors",
}  # fmt: skip
# Analytic, and element by element.
_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar}
_PRODUCTS = {aten.mul.Tensor}
_QUOTIENTS = {aten.div.Tensor}
_FUNCTIONS = {aten.exp.default, aten.tanh.default, aten.sigmoid.default, aten.erf.default,
              aten.sin.default, aten.cos.default, aten.square.default, aten.reciprocal.default,
              aten.pow.Tensor_Scalar}  # fmt: skip
_LINEAR = {aten.neg.default, aten.detach.default, aten.alias.default}


@dataclass(frozen=True)
class Call:
    """A function as a trace called it, at a line of code; tensors as their dtypes."""

    function: type[torch.autograd.Function]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str


@contextlib.contextmanager
def checked_custom_functions() -> Iterator[None]:
    """Notes every custom function that is called inside with gradients on, and proves each after.

    Raises:
        CaptureError: a function's backward is not known to be the derivative of its forward.
    """
    seen: list[Call] = []
    here = this_thread()
    reasons: dict[Any, CaptureError | None] = {}
    applied = _applied(here, reasons)
    patches = contextlib.ExitStack()

    def noted(context: Any) -> None:
        if not here() or is_aside():
            return
        function, known = context._forward_cls, keeper()
        if function.__name__ == _EXPERTS:  # whose operator has a translation, and a rule
            return
        if _GENERATED.fullmatch(function.__qualname__) and known is not None and known.operators:
            return  # it is recorded as the operator that it is, which has no translation
        caller = sys._getframe(1)
        seen_here = caller.f_code is applied.__code__
        if _of_torch(function):  # control flow, and what `vmap` makes of a function
            if seen_here and _without_gradient(caller.f_locals["args"]):
                return  # what comes out is looked at where it does
            raise _refusal(function, _RUN_AGAIN)
        if not torch.is_grad_enabled():
            return
        if not seen_here:
            patches.enter_context(_met_later(function, here, reasons, seen, _line(caller)))
            return
        given = caller.f_locals
        args = tuple(map(_described, given["args"]))
        seen.append(Call(function, args, given["kwargs"], _line(caller)))

    BackwardCFunction.__init__ = noted  # type: ignore[method-assign, assignment]
    try:
        with _apply_replaced(applied), patches:
            yield
    finally:
        del BackwardCFunction.__init__
    for call in seen:
        try:
            _prove(call)
        except CaptureError as error:
            error.where = call.line
            raise


@contextlib.contextmanager
def _apply_replaced(apply: Callable[..., Any]) -> Iterator[None]:
    """Calls `apply` with a custom autograd function and its arguments in the place of ``_APPLY``.

    Until PyTorch 2.13 ``Function.apply`` is Python code that calls the ``apply`` which it inherits.
    Since 2.14 it is ``_APPLY`` itself, and what has been bound to a name before, as in
    ``gelu = GELU.apply``, is not met here.
    """

    def outermost(function: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():  # it makes a function that comes here
            return _APPLY.__get__(None, function)(*args, **kwargs)
        return apply(function, *args, **kwargs)

    function = torch.autograd.Function
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(_SingleLevelFunction, "apply", classmethod(apply)))
        if vars(function)["apply"] is _APPLY:
            stack.enter_context(replaced(function, "apply", classmethod(outermost)))
        yield


def _applied(
    here: Callable[[], bool], reasons: dict[Any, CaptureError | None]
) -> Callable[..., Any]:
    """``apply`` that keeps a function which cannot be taken apart, where functions may be kept."""

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        known = keeper()
        if _of_torch(function) and here() and not is_aside():
            result = _APPLY.__get__(None, function)(*args, **kwargs)
            if _without_gradient((args, kwargs)) and not _without_gradient(result):
                raise _refusal(function, _RUN_AGAIN)  # it may have read parameters by other ways
            return result
        if (
            known is None
            or not known.functions
            or not here()
            or is_aside()
            or function.__name__ == _EXPERTS
            or _of_torch(function)
            or not (torch.is_grad_enabled() or _asks_for_layout(function, args, kwargs))
        ):
            return _APPLY.__get__(None, function)(*args, **kwargs)
        call = Call(function, tuple(map(_described, args)), kwargs, _line(sys._getframe(1)))
        refused = _reason(call, reasons)
        if refused is None:
            return _APPLY.__get__(None, function)(*args, **kwargs)
        return _kept(known, call, refused, args)

    return apply


def _kept(known: Keeper, call: Call, refused: CaptureError, args: tuple[Any, ...]) -> Any:
    site = Site(_named(call.function), call.line, refused.because.partition(_NOT_CALLED)[0])
    return keep(known, call.function.apply, args, call.kwargs, site)


@contextlib.contextmanager
def _met_later(
    function: Any,
    here: Callable[[], bool],
    reasons: dict[Any, CaptureError | None],
    seen: list[Call],
    line: str,
) -> Iterator[None]:
    """Meets a call where its forward begins: ``apply`` has been bound to a name before the trace.

    Since PyTorch 2.14 such a call goes to C, which makes the context and then calls the forward.
    """
    own, known = function.forward, keeper()
    patch = contextlib.ExitStack()

    def forward(*given: Any, **kwargs: Any) -> Any:
        if not here() or is_aside():
            return own(*given, **kwargs)
        patch.close()
        args = given if _has_setup(function) else given[1:]
        call = Call(function, tuple(map(_described, args)), kwargs, line)
        if known is None or not known.functions or (refused := _reason(call, reasons)) is None:
            seen.append(call)
            return own(*given, **kwargs)
        with _gradients_on():  # as around the call
            return _kept(known, call, refused, args)

    with patch:
        patch.enter_context(replaced(function, "forward", staticmethod(forward)))
        yield


@contextlib.contextmanager
def _gradients_on() -> Iterator[None]:
    """Switches gradients on, and off again, of which a trace takes no note."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(True)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(False)


def _of_torch(function: type[torch.autograd.Function]) -> bool:
    return function.__module__.startswith("torch.")


def _without_gradient(values: Any) -> bool:
    """Whether no tensor among the values can have a gradient: they hold whole numbers or bits."""
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
    return not any(each.is_floating_point() or each.is_complex() for each in tensors)


def _asks_for_layout(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function's code asks how a tensor lies in memory, which no trace can answer."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    mode: Any = torch._guards.detect_fake_mode(tensors)
    if mode is None:
        return False
    copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
    with aside(), mode, answers_noted() as answers, contextlib.suppress(Exception):
        function.apply(*copies, **kwargs)
    return bool(answers)


def _reason(call: Call, known: dict[Any, CaptureError | None]) -> CaptureError | None:
    """Why a call cannot be taken apart; None where it can."""
    key = (call.function, *map(str, call.args), *sorted(call.kwargs))
    if key not in known:
        known[key] = None
        try:
            with aside():
                _prove(call)
        except CaptureError as error:
            known[key] = error
    return known[key]


def _line(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, OWN)):
        frame = frame.f_back
    return f"({frame.f_code.co_filename}:{frame.f_lineno})" if frame is not None else ""


def _described(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else value


def _prove(call: Call) -> None:
    """Raises unless the function's backward is the derivative of its forward."""
    function: Any = call.function
    unknown = _unknown_name(function)
    if unknown:
        raise _refusal(
            function, f"its code reads {unknown!r}, so that its backward may not be the derivative"
        )
    if call.kwargs or not all(
        isinstance(a, float | int | type(None))
        or (isinstance(a, torch.dtype) and a.is_floating_point)
        for a in call.args
    ):
        raise _refusal(function, "it takes other arguments than floating tensors and numbers")
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        try:
            drawn = [[_drawn(a, decade, generator) for a in call.args] for decade in _DECADES]
            form = _form(function, drawn[0])
            agree = form == "" and all(_agree(function, args) for args in drawn)
        except Exception as error:
            because = own_reason(error, "trying it") or f"trying it failed: {error}"
            raise _refusal(function, because) from error
    if not agree:
        raise _refusal(function, form or "its backward is not the derivative of its forward")


def _unknown_name(function: Any) -> str:
    """A name in the function's code that could stand for anything; empty if there is none."""
    base = torch.autograd.Function
    for name in ("vjp", "jvp"):
        if getattr(function, name) is not getattr(base, name):
            return name
    known: set[int] = set()
    written = [function.forward, function.backward]
    if _has_setup(function):
        written.append(function.setup_context)
    for code in written:
        if unknown := _unknown_in(code, known):
            return unknown
    return ""


def _has_setup(function: Any) -> bool:
    """Whether the context is made apart, by ``setup_context``, and no argument of the forward."""
    return function.setup_context is not torch.autograd.Function.setup_context


def _unknown_in(function: Any, known: set[int]) -> str:
    if not isinstance(function, FunctionType):
        return type(function).__name__
    code = function.__code__
    if id(code) in known:
        return ""
    known.add(id(code))
    if code.co_freevars or function.__kwdefaults__ or function.__defaults__:
        return (*code.co_freevars, "a default argument")[0]
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return "a function of its own"
    # As `getclosurevars` finds them: every name that the module of the function has.
    reached = inspect.getclosurevars(function).globals
    for name in code.co_names:
        value = reached.get(name)
        if isinstance(value, FunctionType):
            if unknown := _unknown_in(value, known):
                return unknown
        elif name not in _NAMES or not isinstance(
            value, ModuleType | BuiltinFunctionType | type(None)
        ):
            return name
    return ""


def _drawn(value: Any, decade: int, generator: torch.Generator) -> Any:
    """Numbers of either sign between ``10 ** decade`` and ten times that; other arguments as is."""
    if not isinstance(value, torch.dtype):
        return value
    exponents = decade + torch.rand(_POINTS, generator=generator, dtype=torch.float64)
    signs = torch.randint(2, (_POINTS,), generator=generator) * 2 - 1
    return (signs * 10**exponents).requires_grad_()


def _form(function: Any, args: list[Any]) -> str:
    """Why the function's operators leave room for surprises; empty where they do not."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def both(gradient: torch.Tensor, *replaced: torch.Tensor) -> Any:
        given = iter(replaced)
        output = function.apply(*[next(given) if isinstance(a, torch.Tensor) else a for a in args])
        return output, torch.autograd.grad(output, replaced, gradient)

    graph = make_fx(both)(torch.ones(_POINTS, dtype=torch.float64), *tensors).graph
    upstream, *inputs = [node for node in graph.nodes if node.op == "placeholder"]
    linear = {upstream}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target, operands = node.target, node.all_input_nodes
        through = [operand for operand in operands if operand in linear]
        if target in _SUMS:
            fits = not through or (len(through) == len(node.args) and not node.kwargs)
        elif target in _PRODUCTS:
            fits = sum(operand in linear for operand in node.args) <= 1
        elif target in _QUOTIENTS:
            fits = node.args[1] not in linear
        elif target in _FUNCTIONS:
            fits = not through and (target is not aten.pow.Tensor_Scalar or _whole(node.args[1]))
        else:
            fits = target in _LINEAR
        if not fits:
            return f"{target} in it may be another function elsewhere"
        if through:
            linear.add(node)
    returned: Any = graph.output_node().args[0]
    output, gradients = returned
    if not isinstance(output, fx.Node) or output in inputs or output in linear:
        return "it returns what it was given"
    if any(gradient not in linear for gradient in gradients):
        return "its backward does not depend on the gradient that comes in"
    return ""


def _whole(exponent: Any) -> bool:
    return isinstance(exponent, int) and exponent >= 0


def _agree(function: Any, args: list[Any]) -> bool:
    """Whether backward and derivative of the forward are the same numbers."""
    own = _gradients(function.apply(*args), args)
    context = [] if _has_setup(function) else [_Context()]
    true = _gradients(function.forward(*context, *args), args)
    return all(_close(a, b) for a, b in zip(own, true, strict=True))


def _gradients(output: torch.Tensor, args: list[Any]) -> tuple[torch.Tensor, ...]:
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    return torch.autograd.grad(output, inputs, torch.ones_like(output))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


class _Context:
    """Stands in for the context of a function whose backward is not called."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Keeps nothing."""


def _named(function: type) -> str:
    if made := _GENERATED.fullmatch(function.__qualname__):
        return f"the custom operator {made[1]} of torch.library"
    return f"the custom autograd function {function.__module__}.{function.__qualname__}"


def _refusal(function: type, because: str) -> CaptureError:
    return CaptureError(
        f"the module calls {_named(function)}",
        because=f"{because}{_NOT_CALLED}",
        help="wrap the parts of the model beside it, or, for checkpointing, pass "
        "use_reentrant=False",
    )
