"""The lines of a function that is being written, and their source."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.runtime.aten.dtypes import DTYPES
from ortrain.runtime.aten.operands import Host, Size, Tensor

# A tensor of so many elements is large; an axis whose size is open counts as the second.
LARGE, USUAL = 1 << 18, 64


@dataclass(frozen=True)
class Raw:
    """Python source as it stands."""

    text: str


@dataclass(eq=False)
class Line:
    """``targets = function(*args, **kwargs)``.

    Attributes:
        targets: what it makes; none where the function gives nothing.
        function: ``torch.add``, ``aten.gelu_backward``, ``.view`` for a method, or ``=`` for a
            plain expression, the only argument.
        frees: tensors that nothing reads after it.
        origin: the user's code that it is for.
    """

    targets: list[Tensor | Size]
    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    body: Block | None = None
    is_tuple: bool = False
    frees: list[Tensor] = field(default_factory=list)
    origin: str = ""

    def reads(self) -> list[Tensor]:
        """The tensors that it reads; those of a function that it defines or calls, too."""
        found = _tensors(self.args, self.kwargs)
        if self.body is not None:
            found += self.body.outside()
        return found


@dataclass(eq=False)
class Block:
    """The lines of a function.

    Attributes:
        name: of the function.
        parameters: that it takes.
        numbers: that it takes before them.
        outer: the function around it.
        results: that it returns.
        sizes: that its lines have read, by tensor and axis.
    """

    name: str
    parameters: list[Tensor]
    outer: Block | None = None
    numbers: list[Size] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    sizes: dict[tuple[Tensor, int], Size] = field(default_factory=dict)

    def outside(self) -> list[Tensor]:
        """What its lines read of the functions around it."""
        own = {*self.parameters, *(t for line in self.lines for t in line.targets)}
        read = [t for line in self.lines for t in line.reads()]
        return [t for t in (*read, *_tensors(self.results)) if t not in own]


def _tensors(*values: Any) -> list[Tensor]:
    """The tensors among some values, in order."""
    found: list[Tensor] = []
    _add(values, found)
    return found


def _add(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _add(value, found)
        elif isinstance(value, dict):
            _add(value.values(), found)
        elif isinstance(value, Host):
            assert value.tensor is not None
            found.append(value.tensor)
        elif isinstance(value, Block):
            found += value.outside()


def render(
    block: Block, depth: int = 0, inputs: str | None = None, *, watched: bool = False
) -> str:
    """The source of a function.

    Args:
        block: its lines.
        depth: of indentation.
        inputs: name of the row that holds its parameters; None for a function of parameters.
        watched: whether ``ceiling`` is asked after each line that makes a large tensor.
    """
    margin, pad = "    " * depth, "    " * (depth + 1)
    names = [source(p) for p in (*block.numbers, *block.parameters)]
    if inputs is None:
        text = [f"{margin}def {block.name}({', '.join(names)}):"]
    else:
        text = [f"{margin}def {block.name}({inputs}):"]
        if names:
            text.append(f"{pad}({', '.join(names)},) = {inputs}")
        text.append(f"{pad}{inputs}.clear()")
    origin = ""
    for line in block.lines:
        if line.origin and line.origin != origin:
            origin = line.origin
            # One line whatever a graph of a cache says: what follows a line break would be code.
            text.append(f"{pad}# {' '.join(origin.split())}")
        if line.body is not None:
            text.append(render(line.body, depth + 1))
        else:
            asks = "; ceiling()" if watched and _makes_large(line) else ""
            text.append(f"{pad}{written(line)}{asks}")
        if line.frees:
            text.append(f"{pad}del {', '.join(t.name for t in line.frees)}")
    text.append(f"{pad}return [{', '.join(source(r) for r in block.results)}]")
    return "\n".join(text)


def _makes_large(line: Line) -> bool:
    """Whether a line makes a large tensor; a reshape may, or give a view."""
    for target in line.targets:
        if isinstance(target, Tensor):
            dims = target.dims
            if dims is None or math.prod(d if isinstance(d, int) else USUAL for d in dims) >= LARGE:
                return True
    return False


def written(line: Line) -> str:
    """The source of one line."""
    args = [source(a) for a in line.args]
    named = [f"{key}={source(a)}" for key, a in line.kwargs.items()]
    if line.function == "=":
        value = "".join(args)
    elif line.function.startswith("."):
        value = f"{args[0]}{line.function}({', '.join([*args[1:], *named])})"
    else:
        value = f"{line.function}({', '.join([*args, *named])})"
    if not line.targets:
        return value
    targets = ", ".join(map(source, line.targets))
    return f"{targets}{',' if line.is_tuple and len(line.targets) == 1 else ''} = {value}"


def source(value: Any) -> str:
    """The source of an argument."""
    if isinstance(value, (Tensor, Block)):
        return value.name
    if isinstance(value, Size):
        return value.text
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, ir.DataType):
        return str(DTYPES[value])
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(source, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if isinstance(value, np.generic):
        return source(value.item())
    assert value is None or isinstance(value, (bool, int, float, str)), f"{value!r} has no source"
    return repr(value)
