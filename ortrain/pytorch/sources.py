"""Where Dynamo found an input of a graph, as a name that a user would give it.

Private: ``meta["grapharg"]`` of a placeholder, with the ``name`` of its source, and whether it is a
number that is handed over in a tensor. Without it the placeholder's own name serves:
``l_self_modules_head_parameters_weight_``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, fx

_STEP = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|(\d+))\]|\.(\w+)""")
_TABLES = {"_modules", "_parameters", "_buffers", "__dict__"}


_NAME = "ortrain.name"


def rename(placeholder: fx.Node, names: Mapping[str, str]) -> None:
    """Has the first step of the way to an input be another one, or none.

    Args:
        placeholder: of the input.
        names: by what the way begins with.
    """
    name = name_of(placeholder)
    for begin, other in names.items():
        if name == begin or name.startswith(f"{begin}."):
            rest = name.removeprefix(begin).removeprefix(".")
            placeholder.meta[_NAME] = ".".join(filter(None, (other, rest))) or begin
            return


def name_of(placeholder: fx.Node) -> str:
    """The way to an input: ``encoder.0.weight`` of a module, ``batch.input_ids`` of a call."""
    if (known := placeholder.meta.get(_NAME)) is not None:
        return str(known)
    path = _path(placeholder)
    if path is None:
        return placeholder.name.removeprefix("l_").strip("_")
    steps = [next(filter(None, found), "") for found in _STEP.findall(path)]
    steps = steps[1:] if steps[:1] == ["self"] else steps
    return ".".join(step for step in steps if step not in _TABLES) or placeholder.name


def is_buffer(placeholder: fx.Node) -> bool:
    """Whether an input is a buffer of a module."""
    return "_buffers" in (_path(placeholder) or placeholder.name)


def is_number(placeholder: fx.Node) -> bool:
    """Whether an input is a number of the caller's code, as it is or in a tensor."""
    value, given = placeholder.meta.get("example_value"), placeholder.meta.get("grapharg")
    return not isinstance(value, Tensor) or bool(getattr(given, "pass_arg_as_tensor", False))


def _path(placeholder: fx.Node) -> str | None:
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    path = getattr(source, "name", None)
    path = path() if callable(path) else path
    return path if isinstance(path, str) else None
