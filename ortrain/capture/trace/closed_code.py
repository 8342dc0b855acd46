"""Code of a custom function that does the same at each call, whatever else happens.

A trace shows which operators code has called, once. That it calls the same ones every time follows
only where it cannot see anything that changes: so its instructions are read. It may name functions
of torch that compute, numbers, and functions of its own that name no more; what it keeps, it keeps
in its context, which is a call's own. It sees sizes of tensors, of which a trace with symbols shows
what they decide, and no addresses, strides, devices, modes or classes of its arguments.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.autograd.function

from ortrain.kept.premises import Premises

_NUMBERS = (type(None), bool, int, float, str, torch.dtype)
_MODULES = (torch, torch.nn, torch.nn.functional, math)
_BUILTINS = frozenset(
    {"range", "len", "float", "int", "bool", "abs", "min", "max", "sum", "tuple", "list", "zip",
     "enumerate", "reversed"}
)  # fmt: skip
_FLOW = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF", "DELETE_ATTR",
         "IMPORT_NAME", "IMPORT_FROM", "LOAD_NAME", "STORE_NAME", "LOAD_CLASSDEREF",
         "LOAD_BUILD_CLASS", "MAKE_FUNCTION", "YIELD_VALUE", "SEND")  # fmt: skip

# Of tensors, of torch, of math and of a context: what computes, and what tells of sizes and dtypes.
_READ = frozenset(
    """abs acos acosh add addcdiv addcmul addmm all amax amin any argmax argmin asin asinh atan
    atan2 atanh bmm bool cat ceil celu chunk clamp clamp_max clamp_min clip clone contiguous cos
    cosh cumprod cumsum deg2rad detach diff digamma dim div double dtype e elu eq erf erfc
    erfinv exp exp2 expand expand_as expm1 flatten flip float float16 float32 float64 bfloat16
    floor floor_divide fmod frac full full_like functional gather ge gelu gt half hardshrink
    hardsigmoid hardswish hardtanh heaviside index_select inf int int8 int32 int64 uint8
    isfinite isinf isnan layer_norm le leaky_relu lerp lgamma linalg linear log log10 log1p log2
    log_softmax logaddexp logical_and logical_not logical_or logical_xor logsigmoid logsumexp
    long lt masked_fill matmul max maximum mean min minimum mish mm movedim mul narrow ndim ne
    neg negative new_full new_ones new_zeros nan nan_to_num nn norm normalize numel ones
    ones_like outer permute pi pow prod rad2deg reciprocal relu relu6 remainder repeat reshape
    reshape_as roll round rsqrt rsub select selu sgn shape sigmoid sign silu sin sinh size
    softmax softplus softshrink softsign sort split sqrt square squeeze stack std sub sum
    swapaxes swapdims t tan tanh tensor tile to topk transpose tril triu true_divide trunc
    type_as unbind unflatten unfold unsqueeze var vector_norm view view_as where xlogy zeros
    zeros_like T mT mul_ add_ sub_ div_ neg_ clamp_ masked_fill_ sigmoid_ tanh_ relu_ sign_ exp_
    square_ sqrt_ abs_ round_ floor_ pow_ reciprocal_ copy_ zero_ fill_ append save_for_backward
    saved_tensors mark_non_differentiable needs_input_grad set_materialize_grads""".split()
)
_NEVER_STORED = frozenset({"data", "grad", "requires_grad", "names", "real", "imag"})


def is_number(value: Any) -> bool:
    """Whether a value is a number, or as fixed as one."""
    return isinstance(value, _NUMBERS)


class Unproved(Exception):
    """Why something is not known."""


def premises_of(function: Any, *, alone: bool) -> Premises:
    """What a custom function is when its calls always do the same.

    Args:
        function: the class.
        alone: whether it has one argument that a gradient may reach, so that its backward runs
            where that needs one, and nowhere else.

    Raises:
        Unproved: its code can see something that changes.
    """
    base: Any = torch.autograd.Function
    found = Premises()
    if type(function) is not torch.autograd.function.FunctionMeta:
        raise Unproved("its class has a metaclass of its own")
    own = [each for each in function.__mro__ if each not in base.__mro__]
    if any("apply" in vars(each) for each in own):
        raise Unproved("it has an apply of its own")
    reader = _Reader(found)
    apart = getattr(function, "setup_context", None) is not base.setup_context
    for name in ("forward", "setup_context", "backward", "vjp", "jvp"):
        code = found.attribute(function, name)
        if name in ("vjp", "jvp"):
            if code is not getattr(base, name):
                raise Unproved(f"it has a {name}")
        elif name == "backward" or code is not getattr(base, name):
            has_context = name != "forward" or not apart
            asks = name == "backward" and alone
            reader.read(_once(code), asks=asks, has_context=has_context)
    reader.finish()
    return found


def _once(code: Any) -> Any:
    """What ``once_differentiable`` has around a backward calls."""
    plain = torch.autograd.function.once_differentiable(lambda ctx: None)
    if isinstance(code, FunctionType) and code.__code__ is plain.__code__:
        assert code.__closure__ is not None
        return code.__closure__[code.__code__.co_freevars.index("fn")].cell_contents
    return code


class _Reader:
    """Reads functions, and what they call.

    Args:
        premises: gets what is under the names.
    """

    def __init__(self, premises: Premises) -> None:
        self.premises = premises
        self._known: set[tuple[int, bool]] = set()
        self._loaded: set[str] = set()
        self._stored: set[str] = set()

    def read(self, function: Any, *, asks: bool, has_context: bool = False) -> None:
        """Notes what a function names.

        Args:
            function: any.
            asks: whether it may ask what gradients are for, as the answer is always the same.
            has_context: whether its first argument is the context of a call.

        Raises:
            Unproved: something of it may change.
        """
        if not isinstance(function, FunctionType):
            raise Unproved(f"its code is in an object of type {type(function).__name__}")
        if (id(function), asks) in self._known:
            return
        self._known.add((id(function), asks))
        code = self.premises.attribute(function, "__code__")
        given = self.premises.attribute(function, "__defaults__") or ()
        named = self.premises.attribute(function, "__kwdefaults__") or {}
        taken = [*given, *named.values(), *self._outside(function, code, has_context)]
        if "needs_input_grad" in code.co_names and not asks:
            raise Unproved("its code asks which gradients are needed")
        for value in taken:
            self._take(value, asks)

    def _outside(self, function: FunctionType, code: CodeType, has_context: bool) -> Iterator[Any]:
        """What code loads from outside of it.

        Raises:
            Unproved: it does more than to load.
        """
        if code.co_exceptiontable:
            raise Unproved("its code catches exceptions, or has a with statement")
        if code.co_flags & (
            inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
        ):
            raise Unproved("its code is a generator")
        if any(isinstance(constant, CodeType) for constant in code.co_consts):
            raise Unproved("its code makes a function")
        context = code.co_varnames[0] if has_context and code.co_varnames else None
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        before: Any = None
        for each in dis.get_instructions(code):
            name = str(each.argval)
            if each.opname in _FLOW or (each.opname == "STORE_FAST" and name == context):
                raise Unproved(f"its code has a {each.opname.lower()} of {name!r}")
            if each.opname == "LOAD_GLOBAL":
                value = self.premises.item(function.__globals__, name)
                if name in function.__globals__:
                    yield value
                elif name not in _BUILTINS:
                    raise Unproved(f"its code reads {name!r}")
                else:
                    self.premises.item(vars(builtins), name)
            elif name in cells and each.opname in ("LOAD_DEREF", "LOAD_CLOSURE"):
                yield self.premises.attribute(cells[name], "cell_contents")
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                self._loaded.add(name)
            elif each.opname == "STORE_ATTR":
                if context is None or not _loads(before, context):
                    raise Unproved(f"its code writes to an attribute {name!r}")
                self._stored.add(name)
            before = each

    def _take(self, value: Any, asks: bool) -> None:
        """What code has from outside: never something that changes."""
        if is_number(value):
            return
        if isinstance(value, tuple):
            for each in value:
                self._take(each, asks)
        elif isinstance(value, ModuleType):
            if value not in _MODULES:
                raise Unproved(f"its code reads the module {value.__name__}")
        elif isinstance(value, BuiltinFunctionType) or _is_torch(value):
            if value.__name__ not in _READ:
                raise Unproved(f"its code calls {value.__name__}")
        elif isinstance(value, FunctionType):
            self.read(value, asks=asks)
        else:
            raise Unproved(f"its code reads an object of type {type(value).__name__}")

    def finish(self) -> None:
        """Looks at the attributes that all of the code has named.

        Raises:
            Unproved: one may tell of more than values, sizes and dtypes.
        """
        for name in self._stored:
            if name in _NEVER_STORED or (name not in _READ and hasattr(torch.Tensor, name)):
                raise Unproved(f"its code writes to an attribute {name!r}")
        unknown = self._loaded - _READ - self._stored
        if unknown:
            raise Unproved(f"its code reads {min(unknown)!r}")


def _is_torch(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == "torch.nn.functional"


def _loads(instruction: Any, name: str) -> bool:
    """Whether an instruction puts a local variable on top."""
    if instruction is None or not instruction.opname.startswith("LOAD_FAST"):
        return False
    loaded = instruction.argval
    return bool((loaded[-1] if isinstance(loaded, tuple) else loaded) == name)
