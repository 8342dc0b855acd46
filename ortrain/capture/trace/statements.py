"""The statements of a source file, for frames that run them."""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType
from typing import Any

Span = tuple[int | None, int | None, int | None, int | None]


@functools.lru_cache(maxsize=64)
def nodes_of(file: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax, from the outside in; none where it cannot be read."""
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


@functools.lru_cache(maxsize=64)
def deciding(file: str) -> tuple[ast.If | ast.Assert, ...]:
    """The statements of a file with a test, the innermost first."""
    found = [node for node in nodes_of(file) if isinstance(node, ast.If | ast.Assert)]
    return tuple(reversed(found))


@functools.lru_cache(maxsize=256)
def only_called(file: str, name: str) -> bool:
    """Whether all that a file does with a name of Python's is to call it, or to ask isinstance().

    Annotations do not count. False where the file cannot be read.
    """
    nodes = nodes_of(file)
    fine: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            fine.add(id(node.func))
            if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
                asked = node.args[1:]
                fine |= {
                    id(e) for a in asked for e in (a.elts if isinstance(a, ast.Tuple) else [a])
                }
        for field in ("annotation", "returns"):
            annotation = getattr(node, field, None)
            if isinstance(annotation, ast.AST):
                fine |= {id(each) for each in ast.walk(annotation)}
    mentions = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return bool(nodes) and all(id(node) in fine for node in mentions)


def only_makes_contiguous(frame: FrameType) -> bool:
    """Whether a frame asks a tensor if it is contiguous only to make it so.

    ``if not x.is_contiguous(): x = x.contiguous()``, and as an expression. Whatever the answer,
    the values are the same.
    """
    running = _running(frame)
    for node in nodes_of(frame.f_code.co_filename):
        if not isinstance(node, ast.If | ast.IfExp):
            continue
        test = node.test
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        asked = test.operand if isinstance(test, ast.UnaryOp) else test
        if _span(asked) == running:
            return _is_made_contiguous(node, asked, negated)
    return False


def _is_made_contiguous(node: ast.If | ast.IfExp, asked: ast.expr, negated: bool) -> bool:
    if not isinstance(asked, ast.Call) or not isinstance(asked.func, ast.Attribute):
        return False
    tensor = ast.unparse(asked.func.value)
    made, kept = f"{tensor}.contiguous()", tensor
    if isinstance(node, ast.IfExp):
        ways = ast.unparse(node.body), ast.unparse(node.orelse)
        return ways == ((made, kept) if negated else (kept, made))
    body = "; ".join(ast.unparse(statement) for statement in node.body)
    return negated and not node.orelse and body == f"{tensor} = {made}"


def can_do_without_memo(frame: FrameType) -> bool:
    """Whether a frame calls a memo, and that memo's own function where a key has no hash.

    ``try: y = memo(x)``, ``except TypeError: y = function(x)``, as einops does for sizes that are
    symbols. Whichever of the two runs, the result is the same.
    """
    running = _running(frame)
    for node in nodes_of(frame.f_code.co_filename):
        if not isinstance(node, ast.Try):
            continue
        for call in _calls(node.body):
            if _span(call) != running:
                continue
            own = getattr(_value(call.func, frame), "__wrapped__", None)
            return own is not None and any(
                _value(other.func, frame) is own and _given(other) == _given(call)
                for handler in node.handlers
                if isinstance(handler.type, ast.Name) and handler.type.id == TypeError.__name__
                for other in _calls(handler.body)
            )
    return False


def _running(frame: FrameType) -> Span:
    """Where in the file the expression stands that a frame evaluates."""
    return [*frame.f_code.co_positions()][frame.f_lasti // 2]


def _span(node: ast.expr) -> Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _calls(body: list[ast.stmt]) -> list[ast.Call]:
    return [n for each in body for n in ast.walk(each) if isinstance(n, ast.Call)]


def _given(call: ast.Call) -> list[str]:
    """The arguments of a call."""
    return [ast.dump(each) for each in (*call.args, *call.keywords)]


def _value(name: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of one, stands for in a frame; None where that is unknown."""
    if isinstance(name, ast.Attribute):
        return getattr(_value(name.value, frame), name.attr, None)
    if not isinstance(name, ast.Name):
        return None
    return {**frame.f_globals, **frame.f_locals}.get(name.id)
