"""What made an export fail, in a few words."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import torch

from ortrain.capture.origin import TORCH
from ortrain.errors import CaptureError, listing

_OWN = f"{Path(__file__).resolve().parent.parent}/"
_CACHE = re.compile(r"Found <class '[\w.]*Cache'> in output|type `?\w*Cache`? .*flattenable")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Refusal(CaptureError):
    """A failed export.

    Attributes:
        final: whether another way of exporting would fail in the same way.
        failed: what was tried, each with its reason.
    """

    final: bool = False
    failed: tuple[str, ...] = ()

    def after(self, failed: list[str]) -> Refusal:
        """The same error, with what else was tried."""
        because = self.because if len(failed) < 2 else "; ".join(failed)
        result = Refusal(self.what, where=self.where, because=because, help=self.help)
        result.failed, result.final = tuple(failed), self.final
        return result


# (what the message contains, what it means, the way out, whether no other rung can help)
_KNOWN: tuple[tuple[str, str, str, bool], ...] = (
    (
        "Could not guard on data-dependent expression",
        "the Python code branches on the values of a tensor",
        "compute both ways and choose with torch.where",
        True,
    ),
    (
        "Could not extract specialized integer from data-dependent expression",
        "the Python code needs a number out of a tensor",
        "keep the computation in tensors",
        True,
    ),
    (
        "is not supported or pytree-flattenable",
        "an output is of a type that is no pytree",
        "return tensors, tuples, lists, dicts or ModelOutput",
        True,
    ),
)


def refusal(module: torch.nn.Module, error: BaseException) -> Refusal:
    """The reason for which an export failed, and where in the user's code."""
    text = _ANSI.sub("", str(error))
    where = _where(module, error)
    if isinstance(error, CaptureError):  # raised on purpose inside the trace
        result = Refusal(
            error.what, where=where or error.where, because=error.because, help=error.help
        )
        result.final = True
        return result
    if _CACHE.search(text):
        result = Refusal(
            "the output holds a key-value cache",
            where=where,
            because="past_key_values is no tuple of tensors, and training has no use for it",
            help="set model.config.use_cache = False, or call the model with use_cache=False",
        )
        result.final = True
        return result
    for needle, meaning, help, final in _KNOWN:
        if needle in text:
            result = Refusal(
                "the module cannot be exported",
                where=where,
                because=f"{meaning} ({_first_line(text)})",
                help=help,
            )
            result.final = final
            return result
    return Refusal(
        "the module cannot be exported",
        where=where,
        because=f"{type(error).__name__}: {_first_line(text)}",
        help="change the code there, or leave this module to eager",
    )


def assigning(attributes: list[str]) -> Refusal:
    """The refusal of a forward that changes attributes."""
    return _side_effect(
        f"assigns {_quoted(attributes)}",
        because="a graph computes outputs and updates buffers, and nothing else",
        help="make it a buffer and update that in place, or assign it outside of forward",
    )


def filling(containers: list[str]) -> Refusal:
    """The refusal of a forward that puts something into lists, dicts or sets of the module."""
    return _side_effect(
        f"changes what {_quoted(containers)} holds",
        because="a graph computes outputs and updates buffers, and nothing else",
        help="return what is to be kept, and keep it outside of forward",
    )


def recasting(buffers: list[str]) -> Refusal:
    """The refusal of a forward that puts tensors of another shape or dtype in place of buffers."""
    return _side_effect(
        f"gives {_quoted(buffers)} another shape or dtype",
        because="a graph writes a buffer's new value where the old one is",
        help="keep the buffer as it is, or assign it outside of forward",
    )


def drawing(generators: list[str]) -> Refusal:
    """The refusal of a forward that draws random numbers with Python or numpy."""
    return _side_effect(
        f"draws random numbers from {_quoted(generators)}",
        because="they would be constants of the graph, the same in every step",
        help="draw them outside and pass them in as tensors, or leave this to eager",
    )


def asking_for_layout(question: str) -> Refusal:
    """The refusal of a forward that asks how a tensor lies in memory."""
    return _side_effect(
        f"asks for {question}",
        because="how tensors lie in memory changes from call to call, and a graph has one answer",
        help="use contiguous() or reshape(), which need no question, or leave this to eager",
    )


def unseen(places: dict[str, str]) -> Refusal:
    """The refusal of a forward whose code names what can neither be compared nor put back."""
    first, why = next(iter(places.items()))
    return _side_effect(
        f"names {_quoted(list(places))}",
        because=f"{first!r} {why}, and a graph would go on with what it is now",
        help="pass it in as an argument, make it a buffer or parameter, or leave this to eager",
    )


def ending(tensors: list[str]) -> Refusal:
    """The refusal of a forward that reads tensors which autograd follows beyond the module."""
    return _side_effect(
        f"reads {_quoted(tensors)}, which requires a gradient",
        because="it is no parameter of the module, so that a graph would give it none",
        help="make it an nn.Parameter, pass it in as an argument, or detach it",
    )


def empty(name: str, shape: tuple[int, ...]) -> Refusal:
    """The refusal of an example without elements."""
    result = Refusal(
        f"{name} is empty: its shape is {[*shape]}",
        because="ONNX reads a 0 in a shape as the size of another tensor there",
        help="capture a call that is not empty; PyTorch runs those that are",
    )
    result.final = True
    return result


def seeding_itself() -> Refusal:
    """The refusal of a forward that sets the state of PyTorch's generator."""
    return _side_effect(
        "seeds PyTorch's random generator, or puts its state back",
        because="the numbers that it draws then are the same at every step, a graph's are not",
        help="seed outside of the forward, or make the fixed numbers once and keep them in a "
        "buffer",
    )


def _side_effect(what: str, *, because: str, help: str) -> Refusal:
    result = Refusal(f"the forward {what}", because=because, help=help)
    result.final = True
    return result


def _quoted(names: list[str]) -> str:
    return listing([repr(name) for name in names])


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")[:300]


def _where(module: torch.nn.Module, error: BaseException) -> str:
    """Module path and source line of the innermost frame that is neither torch's nor ours."""
    names: dict[int, str] = {id(child): name for name, child in module.named_modules()}
    found, path = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith((TORCH, _OWN, "<")):
            continue
        owner: Any = frame.f_locals.get("self")
        if id(owner) in names:
            path = names[id(owner)]
        found = f"{file}:{line}"
    if not found:
        return path
    return f"{path} ({found})" if path else f"({found})"
