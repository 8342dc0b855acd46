"""What of a module stays PyTorch's in its graphs: asked for by name, or found to be without one."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Sequence
from types import FunctionType

from torch import nn

from ortrain.capture.trace.candidates import candidates
from ortrain.capture.trace.keeping import Keeper
from ortrain.errors import CaptureError, InputError

# Sub-modules whose code a capture refuses that may stay PyTorch's, before the whole does.
MOST_REFUSED = 8
ASKED = "keep_in_torch names it"


class Search:
    """What was tried to make a graph of a module by leaving functions of it to PyTorch.

    Attributes:
        first: error of the first capture.
        last: of the last one that told where it fails, rather than which function cannot be kept.
        useless: functions that can be no nodes, or with which the same fails.
        begun: whether a capture has failed.
    """

    def __init__(self) -> None:
        self.first = self.last = CaptureError("nothing was captured")
        self.useless: set[FunctionType] = set()
        self._waiting: list[FunctionType] = []
        self.begun = False

    def failed(self, module: nn.Module, error: CaptureError, keep: Keeper | None) -> None:
        """Notes that a capture has failed, with what stayed PyTorch's in it."""
        if not self.begun:
            self.first, self.begun = error, True
        refused = {} if keep is None else keep.refused
        self.useless.update(refused)
        if not refused:
            self.last = error
            self._waiting = candidates(module, error)

    def next(self, kept: Collection[FunctionType]) -> FunctionType | None:
        """The innermost function around the place of the error that may be kept besides others."""
        left = (f for f in self._waiting if f not in self.useless and f not in kept)
        return next(left, None)


def named_modules(module: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """The sub-modules that patterns match, each with the reason why it stays; the outermost alone.

    Args:
        module: that they are in.
        patterns: names as of ``named_modules()``, with ``*``, ``?`` and ``[…]`` for others.

    Raises:
        InputError: a pattern matches none.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, names, 3, 0.0)
            raise InputError(
                f"keep_in_torch={pattern!r} is no sub-module of {type(module).__name__}",
                because=f"the nearest are {', '.join(map(repr, near))}"
                if near
                else "it has no sub-modules",
                help="take a name of named_modules(), or a pattern such as '*.router'",
            )
        found.update(matching)
    return dict.fromkeys(outermost(found, names), ASKED)


def still_there(module: nn.Module, kept: dict[str, str], before: dict[str, nn.Module]) -> set[str]:
    """Of the names of what is kept those that mean something, and what was refused under them.

    Args:
        module: that they are in.
        kept: names of sub-modules, each with the reason.
        before: what stood under the names when they were taken.
    """
    now = dict(module.named_modules())
    return {
        name
        for name, why in kept.items()
        if name in now and (why is ASKED or now[name] is before.get(name))
    }


def with_refused(module: nn.Module, kept: dict[str, str], error: CaptureError) -> dict[str, str]:
    """What is kept, and the innermost sub-module around the line that an error is about.

    Where that is kept already, or inside of one, what is around it is taken; never the whole.

    Args:
        module: that was to be captured.
        kept: names of sub-modules, each with the reason.
        error: of the capture.
    """
    names = [name for name, _ in module.named_modules() if name]
    path = error.where.partition(" (")[0].partition(",")[0]
    if path not in names:
        return kept
    parts = path.split(".")
    inside = [i for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in kept]
    if inside:
        parts = parts[: inside[0] - 1]
    while parts and not _runs(module.get_submodule(".".join(parts))):
        parts = parts[:-1]  # a list of layers is never called
    if not parts:
        return kept
    found = {**kept, ".".join(parts): error.what}
    inside_ids = {id(p) for name in found for p in module.get_submodule(name).parameters()}
    if not any(p.ndim > 1 and id(p) not in inside_ids for p in module.parameters()):
        return kept  # no product would be left in the graph
    return {name: found[name] for name in outermost(set(found), names)}


def _runs(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def outermost(wanted: set[str], names: Sequence[str]) -> list[str]:
    """Of some names those that are inside of no other, in the order of all names."""

    def around(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:i]) in wanted for i in range(1, len(parts)))

    return [name for name in names if name in wanted and not around(name)]
