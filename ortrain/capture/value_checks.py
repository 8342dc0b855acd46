"""Checks of values in a trace: ``if (variance < 0).any(): raise ValueError(...)``.

A trace has no values, and code that branches on them cannot become a graph. Where one of the ways
does nothing but raise, the graph takes the other one, and the condition becomes a check: an output
of the program (:attr:`ortrain.program.Role.CHECK`) that counts what the code would raise at. A call
for which it is not 0 runs in PyTorch, which raises the module's own error.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from ortrain.exclusive import this_thread

_class: Any = Tensor


@contextlib.contextmanager
def value_checks() -> Iterator[None]:
    """Answers a tensor's ``bool()`` in a trace, where it decides only whether to raise."""
    own, here = _class.__bool__, this_thread()

    def answer(tensor: Tensor) -> bool:
        passing = passes(sys._getframe(1)) if here() and _is_unknown(tensor) else None
        if passing is None:
            known: bool = own(tensor)
            return known
        torch._assert_async(tensor != 0 if passing else tensor == 0, "a check of values")
        return passing

    _class.__bool__ = answer
    try:
        yield
    finally:
        del _class.__bool__  # it was inherited


def _is_unknown(value: Tensor) -> bool:
    """Whether a trace does not know the value of a tensor of one element."""
    return value.ndim == 0 and getattr(value, "constant", None) is None


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
    for statement in _deciding(code.co_filename):
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


@functools.lru_cache(maxsize=64)
def _deciding(file: str) -> tuple[ast.If | ast.Assert, ...]:
    """The statements of a file with a test, the innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert)]
    return tuple(reversed(found))


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
