"""Where in the user's code a node of a graph comes from."""

from __future__ import annotations

import re
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from ortrain.errors import CaptureError
from ortrain.pytorch.operators import OpOverload, schema_of

_Error = TypeVar("_Error", bound=CaptureError)

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
TORCH = f"{Path(torch.__file__).parent}/"
OWN = f"{Path(__file__).resolve().parent.parent}/"
# The way out where nobody has to do anything.
IN_PYTORCH = "none is needed: PyTorch runs it"
# The way out where the code itself has to stay.
BESIDE = "wrap the sub-modules beside it, or leave this module to PyTorch"
# Of a node's `meta["custom"]`, which torch hands on wherever a graph is traced again.
CHECKPOINT = "ortrain_checkpoint"
_SYMBOLIC = f"{Path(getattr(find_spec('sympy'), 'origin', None) or '').parent}/"  # loads nothing
_STANDARD = f"{sysconfig.get_path('stdlib')}/"


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor Python's own."""
    return not is_standard(file) and not is_library(file) and not file.startswith("<")


def is_standard(file: str) -> bool:
    """Whether a file is Python's own."""
    return file.startswith("<frozen") or (
        file.startswith(_STANDARD) and "site-packages" not in file
    )


def is_library(file: str) -> bool:
    """Whether a file is torch's, with what it computes symbols with, or ours."""
    return file.startswith((TORCH, _SYMBOLIC, OWN, "<eval_with_key>"))


def is_own(error: BaseException) -> bool:
    """Whether a line of ortrain raised an error, be it in a builtin or in Python's own library."""
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    last = next((file for file in reversed(list(frames)) if not is_standard(file)), "")
    return last.startswith(OWN)


def own_failure(error: BaseException, doing: str) -> dict[str, str]:
    """The parts of an error that tells one of ortrain's own, which nobody foresaw.

    Args:
        error: as it was raised.
        doing: what ortrain did: ``"tracing the forward"``.
    """
    told = next(filter(None, map(str.strip, str(error).splitlines())), "no message")
    rows = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [f"(ortrain/{file.removeprefix(OWN)}:{n})" for file, n in rows if file.startswith(OWN)]
    return {
        "what": f"ortrain itself failed while {doing}",
        "where": own[-1] if own else "",
        "because": f"{type(error).__name__}: {told[:300]} (with torch {torch.__version__})",
        "help": "please report it; the module runs in PyTorch meanwhile",
    }


def own_reason(error: BaseException, doing: str) -> str:
    """The same in one line; empty for an error that no line of ortrain raised."""
    own = own_failure(error, doing)
    return f"{own['what']} {own['where']}: {own['because']}" if is_own(error) else ""


def place(path: str, line: str) -> str:
    """``module.path (file.py:line)``, as far as it is known."""
    if not line:
        return path
    return f"{path} ({line})" if path else f"({line})"


def operator_name(target: Any) -> str:
    """An operator as torch calls it: ``aten::svd``, ``math.sqrt`` of a size, a function."""
    if isinstance(target, OpOverload):
        return schema_of(target).name
    name = getattr(target, "__name__", str(target))
    return f"math.{name[5:]} of a size" if name.startswith("_sym_") else name


_STEP = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|(\d+))\]|\.(\w+)""")


def module_path(node: fx.Node) -> str:
    """Path of the innermost sub-module, empty for the module itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return module_paths(node)[-1]


def module_paths(node: fx.Node) -> list[str]:
    """Paths of the sub-modules that it is in, the innermost last."""
    return [_plain(str(path)) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _plain(path: str) -> str:
    if not path.startswith("L["):
        return path
    # As Dynamo names it, from a variable of its caller's on: L['module']._modules['encoder'][0].
    steps = [next(filter(None, found), "") for found in _STEP.findall(path)[1:]]
    return ".".join(step for step in steps if step != "_modules")


def source_line(node: fx.Node, *, full: bool = False) -> str:
    """``file:line`` of the innermost frame outside of torch."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if is_users(file):
            return f"{file if full else Path(file).name}:{line}"
    return ""


def origin(node: fx.Node, *, full: bool = False) -> str:
    """``module.path (file.py:line)``, as far as it is known."""
    return place(module_path(node), source_line(node, full=full))


def checkpoint_of(node: fx.Node) -> str:
    """The number of the user's checkpoint that a node is in; empty outside of any."""
    mark: str = (node.meta.get("custom") or {}).get(CHECKPOINT, "")
    return mark


def captured_error(
    node: fx.Node,
    what: str,
    *,
    because: str = "ortrain has no graph of this form",
    help: str = BESIDE,
) -> CaptureError:
    """An error that names the node's place in the user's code."""
    return located(node, CaptureError(what, because=because, help=help))


def located(node: fx.Node, error: _Error) -> _Error:
    """The error, with the place in the user's code that a node comes from."""
    placed = error.at(origin(node, full=True))
    placed.lines = source_lines(node)
    return placed


def source_lines(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """``(file, line)`` of where a node was made and of the calls around it, the innermost last."""
    found = FRAME.findall(node.meta.get("stack_trace") or "")
    return tuple((file, int(line)) for file, line in found)
