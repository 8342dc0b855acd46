"""Where in the user's code a node of the exported graph comes from."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

from ortrain.errors import CaptureError

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
TORCH = f"{Path(torch.__file__).parent}/"


def module_path(node: fx.Node) -> str:
    """Path of the innermost sub-module, empty for the module itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return str(path)


def source_line(node: fx.Node, *, full: bool = False) -> str:
    """``file:line`` of the innermost frame outside of torch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if not file.startswith(TORCH):
            return f"{file if full else Path(file).name}:{line}"
    return ""


def origin(node: fx.Node, *, full: bool = False) -> str:
    """``module.path (file.py:line)``, as far as it is known."""
    path, line = module_path(node), source_line(node, full=full)
    if not line:
        return path
    return f"{path} ({line})" if path else f"({line})"


def captured_error(node: fx.Node, what: str, *, because: str = "", help: str = "") -> CaptureError:
    """An error that names the node's place in the user's code."""
    return CaptureError(what, where=origin(node, full=True), because=because, help=help)
