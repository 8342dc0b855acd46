"""Why some operators have no translation, and what an error says in short."""

from __future__ import annotations

import re

from ortrain.capture.origin import BESIDE
from ortrain.errors import CaptureError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")

# What an operator's name contains; what the module does with it, why no graph does, the way out.
_KNOWN = (
    (
        r"aten\.\w*sparse\w*",
        "the forward computes with a sparse tensor",
        "a graph takes ordinary strided tensors",
        f"compute with the dense tensor, or with index_add and gather; or {BESIDE}",
    ),
    (
        r"aten\.(?:\w*quantize\w*|q_\w+|int_repr)",
        "the forward computes with a quantized tensor",
        "a graph is trained in floating point",
        f"train the module as it was before quantization; or {BESIDE}",
    ),
    (
        r"aten\._?\w*nested\w*",
        "the forward computes with a nested or jagged tensor",
        "the sizes of its parts are values of another tensor, which a graph does not know",
        f"pad the parts to one size and mask what is past their ends; or {BESIDE}",
    ),
)


def named(operator: str, where: str) -> CaptureError | None:
    """Why there is no translation of an operator; None where it is one like others.

    Args:
        operator: its name, such as ``aten.q_scale``.
        where: it is called.
    """
    for sign, what, because, help in _KNOWN:
        if re.search(sign, operator):
            return CaptureError(what, where=where, because=because, help=help)
    return None


def first_line(error: BaseException) -> str:
    """Of its message, as far as it helps."""
    lines = (line.strip() for line in _ANSI.sub("", str(error)).splitlines())
    return next(filter(None, lines), "no message")[:300]
