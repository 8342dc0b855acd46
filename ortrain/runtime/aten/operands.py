"""What kernels speak of: tensors by their names in the function that is being written, and sizes.

Sizes are Python numbers at run time, never tensors: ``Shape``, ``Gather`` and ``Concat`` of sizes
become arithmetic of ints. A :class:`Size` is such a number that is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ortrain.graph.shapes import Dim

if TYPE_CHECKING:
    from ortrain.runtime.aten.writer import Writer


@dataclass(frozen=True)
class Size:
    """An expression for a Python int of the running function. Arithmetic writes a longer one."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: int | Size) -> int | Size:
        return self if _is(other, 0) else Size(f"({self} + {other})")

    def __radd__(self, other: int | Size) -> int | Size:
        return self if _is(other, 0) else Size(f"({other} + {self})")

    def __sub__(self, other: int | Size) -> int | Size:
        if other == self:
            return 0
        return self if _is(other, 0) else Size(f"({self} - {other})")

    def __rsub__(self, other: int | Size) -> int | Size:
        return Size(f"({other} - {self})")

    def __mul__(self, other: int | Size) -> int | Size:
        return self if _is(other, 1) else Size(f"({self} * {other})")

    def __rmul__(self, other: int | Size) -> int | Size:
        return self if _is(other, 1) else Size(f"({other} * {self})")

    def __neg__(self) -> int | Size:
        return Size(f"(-{self})")


def _is(number: int | Size, value: int) -> bool:
    return isinstance(number, int) and number == value


def product(sizes: Sequence[int | Size]) -> int | Size:
    """Of several sizes."""
    result: int | Size = 1
    for size in sizes:
        result = result * size
    return result


@dataclass(eq=False)
class Host:
    """A few whole numbers that the function has as Python ints: mostly a scalar or a vector.

    Attributes:
        items: the numbers, row by row.
        is_scalar: whether it has rank 0, and one item.
        dtype: that ONNX gives it. Only :mod:`~ortrain.runtime.aten.host` meets one of bools.
        tensor: the same as a tensor, once something asked for it.
        sizes: its shape, where it has several axes.
    """

    items: list[int | Size]
    is_scalar: bool
    dtype: ir.DataType = ir.DataType.INT64
    tensor: Tensor | None = None
    sizes: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""
        if self.sizes is not None:
            return self.sizes
        return () if self.is_scalar else (len(self.items),)

    @property
    def known(self) -> list[int] | None:
        """The numbers, where each is known."""
        known = [item for item in self.items if not isinstance(item, Size)]
        return known if len(known) == len(self.items) else None


@dataclass(eq=False)
class Tensor:
    """A tensor of the running function.

    Attributes:
        writer: of the function.
        name: in it.
        dtype: that ONNX gives it; None where nobody has said.
        dims: its shape, as far as it is known; None for an unknown rank.
        roots: names of the tensors whose memory it may share, itself where it has its own.
        array: its value, where it is a constant.
        is_contiguous: whether it is known to lie in one piece, row by row.
        is_context: whether it is no tensor, but what autograd has saved of a call.
    """

    writer: Writer
    name: str
    dtype: ir.DataType | None = None
    dims: tuple[Dim, ...] | None = None
    roots: frozenset[str] = frozenset()
    array: np.ndarray | None = None
    is_contiguous: bool = False
    is_context: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def rank(self) -> int:
        """The number of axes."""
        assert self.dims is not None, f"the rank of {self.name} is not known"
        return len(self.dims)

    @property
    def scalar(self) -> float | int | bool | None:
        """The number that it is, where it is a constant of rank 0; an unsigned one by its bits."""
        if self.array is None or self.array.ndim:
            return None
        held = self.array
        if held.dtype.kind == "u" and held.itemsize > 1:
            held = held.view(f"i{held.itemsize}")
        number: float | int | bool = held.item()
        return number

    def size(self, axis: int) -> int | Size:
        """Of one axis, as a Python int of the running function."""
        return self.writer.size(self, axis)

    @property
    def shape(self) -> list[int | Size]:
        """All sizes."""
        return [self.size(axis) for axis in range(self.rank)]

    def __getattr__(self, method: str) -> Callable[..., Tensor]:
        """Writes a call of one of the tensor's methods."""
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self.writer.call(f".{method}", self, *args, **kwargs)

    def __add__(self, other: Any) -> Tensor:
        return self.writer.add(self, other)

    def __sub__(self, other: Any) -> Tensor:
        return self.writer.sub(self, other)

    def __mul__(self, other: Any) -> Tensor:
        return self.writer.mul(self, other)

    def __truediv__(self, other: Any) -> Tensor:
        return self.writer.div(self, other)

    def __neg__(self) -> Tensor:
        return self.writer.neg(self)


Operand = Tensor | Host
