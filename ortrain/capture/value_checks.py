"""Checks of values in a trace: ``if (variance < 0).any(): raise ValueError(...)``.

A trace has no values, and code that branches on them cannot become a graph. Where one of the ways
does nothing but raise, the graph takes the other one, and the condition becomes a check: an output
of the program (:attr:`ortrain.program.Role.CHECK`) that is true where the code would not raise. A
call for which it is false runs in PyTorch, which raises the module's own error.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_class: Any = Tensor
_BOOL = _class.__bool__


@contextlib.contextmanager
def value_checks() -> Iterator[None]:
    """Records what decides in a trace only whether to raise."""
    with _Recording():
        yield


class _Recording(TorchFunctionMode):
    """Answers a tensor's ``bool()``, where its answer decides whether to raise."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _BOOL and _is_unknown(args[0]):
            passing = passes(_caller())
            if passing is not None:
                condition = args[0] != 0 if passing else args[0] == 0
                torch._assert_async(condition, "a check of values")
                return passing
        return func(*args, **(kwargs or {}))


def _is_unknown(value: Tensor) -> bool:
    """Whether a trace does not know the value of a tensor of one element."""
    return value.ndim == 0 and getattr(value, "constant", None) is None


def _caller() -> FrameType:
    """The frame that asked, behind torch's own that pass the question on."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def passes(frame: FrameType) -> bool | None:
    """The answer with which the statement that a frame is at goes on without raising.

    Returns:
        None where the statement is none that only decides whether to raise, or where its answer
        is not that of the test: ``any([a, b])``.
    """
    code, at = frame.f_code, frame.f_lasti
    if not dis.opname[code.co_code[at]].startswith("POP_JUMP"):
        return None
    line, _, column, _ = list(code.co_positions())[at // 2]
    if line is None or column is None:
        return None
    for statement in _deciding(code.co_filename):
        test = statement.test
        # The position of a jump is the statement's, or from Python 3.12 on that of its test.
        begins = (statement.lineno, statement.col_offset) == (line, column)
        if begins or _spans(test, line, column):
            wanted = _wanted(statement)
            signs = _signs(test)
            # Where some operands count as they are and others negated, it may be either.
            return None if wanted is None or len(signs) > 1 else wanted is signs.pop()
    return None


@functools.lru_cache(maxsize=64)
def _deciding(file: str) -> tuple[ast.If | ast.Assert, ...]:
    """The statements of a file with a test, the innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert)]
    return tuple(reversed(found))


def _spans(test: ast.expr, line: int, column: int) -> bool:
    end = (test.end_lineno or test.lineno, test.end_col_offset or test.col_offset)
    return (test.lineno, test.col_offset) <= (line, column) < end


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


def _signs(test: ast.expr) -> set[bool]:
    """Which of them occur: operands that count as they are (true), and negated (false)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return {not sign for sign in _signs(test.operand)}
    if isinstance(test, ast.BoolOp):
        return set().union(*map(_signs, test.values))
    return {True}
