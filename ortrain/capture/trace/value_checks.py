"""Branches on values in a trace: ``if (variance < 0).any(): raise ValueError(...)``.

A trace has no values, so that it does not know which way such code goes. The graph takes one of
them, and the condition becomes a check: an output of the program
(:attr:`ortrain.program.Role.CHECK`) that counts the branches at which the code would go another
way. A call for which it is not 0 runs in PyTorch.

Where one of the ways does nothing but raise, the graph takes the other one. Anywhere else it takes
the way that the code goes with the example's own values (:class:`Ways`):
``if not torch.isfinite(hidden).all(): hidden = hidden.clamp(...)``. For that, ``item()`` returns a
tensor: ``if mask.sum().item() == 0`` is a branch on a value as well.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dis
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)

from ortrain.capture.trace.chances import Draws
from ortrain.capture.trace.known_numbers import known_number
from ortrain.capture.trace.patched import replaced
from ortrain.capture.trace.statements import deciding
from ortrain.exclusive import this_thread

_class: Any = Tensor
_TEXT = _class.__format__.__code__  # f"{tensor:.3f}" asks for its number, and for its text again


class Ways:
    """Which way a module's code goes at its branches on values, in a call with values.

    Attributes:
        missed: whether a trace came to a branch of which this is not known.
        known: whether a call was watched.
        numbers: what ``item()`` returned, in the place of numbers.
        chance: that another call goes the same way at the branches that random numbers decide, as
            far as it is known.
        drawn: the first of these: ``file:line``.
    """

    def __init__(self) -> None:
        self.chance, self.drawn = 1.0, ""
        self._noted: dict[_Place, list[bool]] = {}
        self._passed: collections.Counter[_Place] = collections.Counter()
        self.missed = self.known = False
        self.numbers: list[Tensor] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the ways of the one call inside."""
        draws = Draws()

        def note(own: Callable[[Tensor], Any], tensor: Tensor, frame: FrameType) -> Any:
            with torch._C.DisableTorchFunction():  # the mode would ask in its own line again
                value = own(tensor)
            self._noted.setdefault(_place(frame), []).append(bool(value))
            if (chance := draws.chance(tensor)) is not None and passes(frame) is None:
                self.chance *= chance if value else 1 - chance
                self.drawn = self.drawn or _line(frame)
            return value

        self.known = True
        with _truth(note, self.number), draws:
            yield

    @property
    def gone(self) -> Mapping[tuple[CodeType, int], Sequence[bool]]:
        """The ways of the call that was noted, by place."""
        return self._noted

    def begin(self, *_: object) -> None:
        """A forward is traced from its beginning."""
        self._passed.clear()

    def number(self, tensor: Tensor) -> Tensor:
        """A number out of a tensor, as a tensor: exactly, as Python's floats are."""
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        number = tensor.detach().reshape(()).to(wide)
        self.numbers.append(number)
        return number

    def at(self, frame: FrameType) -> bool | None:
        """The way at the branch that a frame has come to; None where it is not known."""
        place = _place(frame)
        noted, count = self._noted.get(place, []), self._passed[place]
        if count == len(noted):
            self.missed = True
            return None
        self._passed[place] += 1
        return noted[count]

    def passed(self, frame: FrameType) -> None:
        """A trace goes its own way at a branch, by numbers that it knows."""
        self._passed[_place(frame)] += self.known


_Place = tuple[CodeType, int]


def _place(frame: FrameType) -> _Place:
    return frame.f_code, frame.f_lasti


def _line(frame: FrameType) -> str:
    """Where a frame is: nodes know forwards only."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextlib.contextmanager
def value_checks(ways: Ways | None = None) -> Iterator[None]:
    """Answers what a trace asks of a tensor's truth, and makes a check of each answer.

    Args:
        ways: at branches of which neither way raises; None refuses them.
    """

    def answer(own: Callable[[Tensor], Any], tensor: Tensor, frame: FrameType) -> Any:
        if (known := known_number(tensor)) is not None:
            if ways is not None:
                ways.passed(frame)
            return bool(known)
        if not _is_unknown(tensor):
            if _may_be_several(tensor):
                raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
            return own(tensor)
        way = passes(frame)
        if way is None and ways is not None:
            way = ways.at(frame)
        if way is None:
            return own(tensor)
        why = f"the code goes another way at {_line(frame)}, or raises an error"
        torch._assert_async(tensor != 0 if way else tensor == 0, why)
        return way

    def number(tensor: Tensor) -> Any:
        if (known := known_number(tensor)) is not None:
            return known
        if _may_be_several(tensor):
            raise RuntimeError("a Tensor with several elements cannot be converted to Scalar")
        if ways is None or not ways.known or not _is_unknown(tensor) or tensor.is_complex():
            return own_item(tensor)
        return ways.number(tensor)

    own_item = _class.item
    with _truth(answer, number), _of_selected_sizes(), _ordinary() if ways else nullcontext():
        yield


# -- sizes that values decide --------------------------------------------------------------------


@contextlib.contextmanager
def _of_selected_sizes() -> Iterator[None]:
    """Answers relations between sizes that values decide, where one way does nothing but raise."""
    own, here = torch.SymBool.__bool__, this_thread()

    def ask(relation: torch.SymBool) -> bool:
        if here() and free_unbacked_symbols(relation):
            way = passes(sys._getframe(1))
            if way is not None:
                torch._check(relation if way else torch.sym_not(relation))  # kept as an assertion
                return way
        return own(relation)

    with replaced(torch.SymBool, "__bool__", ask):
        yield


@contextlib.contextmanager
def _ordinary() -> Iterator[None]:
    """Answers relations as every ordinary size does, which is neither 0 nor 1, and asserts it.

    ``if selected.shape[0] == 0: return …``; operators ask whether a tensor is empty.
    """
    own, here = SymNode.guard_bool, this_thread()

    def decide(node: SymNode, file: str, line: int) -> bool:
        try:
            return own(node, file, line)
        except GuardOnDataDependentSymNode:
            answer = _for_ordinary_sizes(node) if here() else None
            if answer is None:
                raise
            held = node.expr if answer else sympy.Not(node.expr)
            environment: Any = node.shape_env
            environment.guard_or_defer_runtime_assert(held, str(held))
            return answer

    with replaced(SymNode, "guard_bool", decide):
        yield


def _for_ordinary_sizes(node: SymNode) -> bool | None:
    """What a relation is for all sizes from 2 up; None where they do not agree, or are no sizes."""
    environment: Any = node.shape_env
    selected = free_unbacked_symbols(node.expr)
    if not selected <= environment.size_like:
        return None
    answers = {
        node.expr.xreplace(dict.fromkeys(selected, sympy.Integer(size)))
        for size in (2, 3, 5, 64, 1_000_003)
    }
    return {sympy.true: True, sympy.false: False}.get(answers.pop()) if len(answers) == 1 else None


@contextlib.contextmanager
def _truth(
    answer: Callable[[Callable[[Tensor], Any], Tensor, FrameType], Any],
    number: Callable[[Tensor], Any],
) -> Iterator[None]:
    """Puts questions between code and values: ``bool()``, ``item()``.

    Args:
        answer: says what a tensor's truth is.
        number: says what ``item()`` of another tensor than a bool is.
    """
    own_bool, own_item, here = _class.__bool__, _class.item, this_thread()

    def ask_bool(tensor: Tensor) -> Any:
        return answer(own_bool, tensor, sys._getframe(1)) if here() else own_bool(tensor)

    def ask_item(tensor: Tensor) -> Any:
        if not here() or sys._getframe(1).f_code is _TEXT:
            return own_item(tensor)
        if tensor.dtype is not torch.bool:
            return number(tensor)
        return answer(own_item, tensor, sys._getframe(1))

    with replaced(Tensor, "__bool__", ask_bool), replaced(Tensor, "item", ask_item):
        yield


def _is_unknown(value: Tensor) -> bool:
    """Whether a trace does not know the value of a tensor of one element."""
    single = all(type(size) is int and size == 1 for size in value.shape)
    return single and getattr(value, "constant", None) is None


def _may_be_several(value: Tensor) -> bool:
    """Whether a tensor has as many elements as the sizes of the inputs say, as in other calls."""
    shape: Any = value.shape
    sizes = [size for size in shape if isinstance(size, torch.SymInt)]
    return any(size.node.expr.free_symbols and not free_unbacked_symbols(size) for size in sizes)


def passes(frame: FrameType) -> bool | None:
    """The answer with which the statement that a frame is at goes on without raising.

    Returns:
        None where the statement is none that only decides whether to raise, or where its answer
        is not that of its test or of an operand of it: ``any([a, b])``.
    """
    code, at = frame.f_code, frame.f_lasti
    if not _is_jump(code, at):
        return None
    positions = list(code.co_positions())
    place = positions[at // 2]
    line, end, column, end_column = place
    for statement in deciding(code.co_filename):
        test = statement.test
        # The position of a jump is the statement's, or from Python 3.12 on that of the operand.
        if (statement.lineno, statement.col_offset) == (line, column):
            jumps = [2 * i for i, p in enumerate(positions) if p == place and _is_jump(code, 2 * i)]
            signs = [sign for _, sign in _operands(test, True)]
            if len(jumps) != len(signs) or _branches(test):
                return None
            sign = signs[jumps.index(at)]
        else:
            spans: dict[tuple[int | None, ...], bool] = {
                (e.lineno, e.end_lineno, e.col_offset, e.end_col_offset): sign
                for e, sign in _operands(test, True)
            }
            if (line, end, column, end_column) not in spans:
                continue
            sign = spans[line, end, column, end_column]
        wanted = _wanted(statement)
        return None if wanted is None else wanted is sign
    return None


def _is_jump(code: CodeType, at: int) -> bool:
    return dis.opname[code.co_code[at]].startswith(("POP_JUMP", "TO_BOOL"))


def _branches(test: ast.expr) -> bool:
    """Whether an operand of a test has jumps of its own."""
    return any(
        isinstance(node, ast.IfExp | ast.BoolOp) or (isinstance(node, ast.Compare) and node.ops[1:])
        for operand, _ in _operands(test, True)
        for node in ast.walk(operand)
    )


def _wanted(statement: ast.If | ast.Assert) -> bool | None:
    """The value of the test for which the statement does not raise."""
    if isinstance(statement, ast.Assert):
        return True
    if _raises(statement.body):
        return False
    return True if _raises(statement.orelse) else None


def _raises(body: list[ast.stmt]) -> bool:
    """Whether statements end in an error, whatever happens."""
    leaving = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Try)
    return (
        bool(body)
        and isinstance(body[-1], ast.Raise)
        and not any(isinstance(node, leaving) for each in body for node in ast.walk(each))
    )


def _operands(test: ast.expr, sign: bool) -> Iterator[tuple[ast.expr, bool]]:
    """What a test asks for the truth of, in order, and whether it counts as it is or negated."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand, not sign)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value, sign)
    else:
        yield test, sign
