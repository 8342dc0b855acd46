"""The table of our ATen translations, and what they have in common.

A translation is a function ``(op, *arguments)``: ``op`` emits ONNX nodes, and the arguments are
those of the ATen operator, tensors and symbolic sizes as ONNX values, dtypes as
``onnx_ir.DataType``. Tensors have been promoted to the dtypes that the operator computes in.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ortrain.capture.onnx.registry import Emitted
from ortrain.capture.origin import BESIDE
from ortrain.errors import CaptureError
from ortrain.graph.build import Builder
from ortrain.graph.rounding import rounding_once, values_in
from ortrain.ops.base import DOMAIN

aten = torch.ops.aten
INT64_MAX = 2**63 - 1

Size = int | ir.Value
Scalar = int | float | bool | ir.Value


_emitted: contextvars.ContextVar[Emitted] = contextvars.ContextVar("ortrain.capture.emitted")


@contextlib.contextmanager
def translating() -> Iterator[Emitted]:
    """Starts a graph: nothing is emitted, and there is no seed yet."""
    token = _emitted.set(shared := Emitted())
    try:
        yield shared
    finally:
        _emitted.reset(token)


class Translator(Builder):
    """A builder with the phrases that ATen needs."""

    def ours(
        self, op_type: str, *operands: ir.Value | None, outputs: int = 1, **kwargs: Any
    ) -> Any:
        """Emits one of ortrain's operators."""
        return self.node(op_type, operands, domain=DOMAIN, outputs=outputs, **kwargs)

    def seed(self) -> ir.Value:
        """The program's seed input; asking for it is what makes a program have one."""
        shared = _emitted.get()
        if shared.seed is None:
            shared.seed = ir.Value(
                name="seed", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64)
            )
        return shared.seed

    def sizes(self, sizes: Sequence[Size]) -> ir.Value:
        """Sizes, some of them symbolic, as one int64 tensor."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(np.array(sizes, np.int64))
        parts = [
            self.constant(np.array([size], np.int64))
            if isinstance(size, int)
            else self.Unsqueeze(size, [0])
            for size in sizes
        ]
        return parts[0] if len(parts) == 1 else self.Concat(*parts, axis=0)

    def index(self, size: Size) -> ir.Value:
        """A size as an int64 tensor of shape [1]."""
        return self.sizes([size])

    def beside(self, scalar: Scalar, value: ir.Value) -> Scalar:
        """A scalar or tensor in the dtype of the value that it meets."""
        if isinstance(scalar, ir.Value):
            assert value.dtype is not None
            return self.cast(scalar, value.dtype)
        return scalar


Function = Callable[..., Any]
TRANSLATIONS: dict[Any, Function] = {}


def translation(*targets: Any) -> Callable[[Function], Function]:
    """Registers the decorated function for some ATen overloads or Python operators."""

    def register(function: Function) -> Function:
        for target in targets:
            assert target not in TRANSLATIONS, f"{target} is translated twice"
            TRANSLATIONS[target] = function
        return function

    return register


def recorded(function: Function, opset: int) -> Function:
    """The form in which the registry calls a translation."""

    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        shared = _emitted.get()
        for each in values_in((args, kwargs)):
            each.shape = numbered(each.shape)
        builder = Translator(None, opset=opset, constants=shared.constants)
        with builder as op:
            result = rounding_once(op, function, args, kwargs)
            made = {id(value) for node in builder.nodes for value in node.outputs}
            # The registry renames results, so that an operand or a shared constant cannot be one.
            if isinstance(result, ir.Value):
                if id(result) not in made or result.const_value is not None:
                    result = op.Identity(result)
            else:
                result = tuple(v if id(v) in made else op.Identity(v) for v in result)
        shared.nodes.extend(builder.nodes)
        return result

    return record


def numbered(shape: ir.Shape | None) -> ir.Shape | None:
    """The shape with numbers as numbers: a size that was fixed late is written as "3"."""
    if shape is None or all(isinstance(dim, int) for dim in shape):
        return shape
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    return ir.Shape([int(d) if isinstance(d, str) and d.isdigit() else d for d in dims])


def dtype_or(dtype: Any, default: ir.DataType) -> ir.DataType:
    """A dtype argument of ATen, which is -1 where it is absent."""
    return default if dtype is None or dtype == -1 else ir.DataType(dtype)


class SymbolicSize(CaptureError):
    """A translation needs a size as a number. Remedy: capture with that dimension fixed.

    Attributes:
        values: of the trace, the sizes of which it is about; empty where that is not known.
    """

    values: Sequence[Any] = ()


def symbolic(what: str) -> SymbolicSize:
    """The error of a translation that meets a symbol where it needs a number."""
    return SymbolicSize(
        f"{what} cannot be captured",
        because="its size differs from call to call, as far as the trace knows",
        help=f"pad it to one size; or {BESIDE}",
    )


def refuse(
    what: str, because: str = "ortrain has no graph of this form", help: str = BESIDE
) -> CaptureError:
    """The error of a translation that does not cover a form of its operator."""
    return CaptureError(f"{what} cannot be captured", because=because, help=help)
