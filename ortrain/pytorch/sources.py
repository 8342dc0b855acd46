"""Where Dynamo found an input of a graph, as a name that a user would give it.

Private: ``meta["grapharg"]`` of a placeholder, with the ``name`` of its source. Without it the
placeholder's own name serves: ``l_self_modules_head_parameters_weight_``.
"""

from __future__ import annotations

import re

from torch import fx

_STEP = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|(\d+))\]|\.(\w+)""")
_TABLES = {"_modules", "_parameters", "_buffers", "__dict__", "self"}


def name_of(placeholder: fx.Node) -> str:
    """The way to an input: ``encoder.0.weight`` of a module, ``batch.input_ids`` of a call."""
    path = _path(placeholder)
    if path is None:
        return placeholder.name.removeprefix("l_").strip("_")
    steps = [next(filter(None, found), "") for found in _STEP.findall(path)]
    return ".".join(step for step in steps if step not in _TABLES) or placeholder.name


def is_buffer(placeholder: fx.Node) -> bool:
    """Whether an input is a buffer of a module."""
    return "_buffers" in (_path(placeholder) or placeholder.name)


def _path(placeholder: fx.Node) -> str | None:
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    path = getattr(source, "name", None)
    path = path() if callable(path) else path
    return path if isinstance(path, str) else None
