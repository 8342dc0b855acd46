"""Every error that ortrain raises on purpose.

::

    OrtrainError
    ├── CaptureError          the module cannot become one ONNX graph
    │   ├── NotServed         a device, dtype or mode for which there is no graph yet
    │   └── UnsupportedData   a value of a type that a graph does not have          (also TypeError)
    │       ├── UnsupportedInput  an argument that a graph cannot take
    │       └── UnsupportedOutput a result that a graph cannot return
    ├── GradientError         a graph cannot be differentiated
    │   ├── NoGradientRule    an operator without a rule lies between loss and parameter
    │   └── UnsupportedGradient  a rule exists, but not for this form of the operator
    ├── GraphError            a graph breaks a contract of the stage that made it
    ├── ExecutionError        a runtime refuses or fails to run a graph
    │   └── CheckFailed       values at which the module's code goes another way than the graph
    ├── StateError            a call at the wrong time (a second backward, a pickled session)
    ├── InputError            data or a checkpoint that cannot be trained on      (also ValueError)
    ├── MissingPackage    an extra of ortrain is not installed        (also ModuleNotFoundError)
    ├── SaveError             a file could not be written                         (also OSError)
    ├── RemovedAttribute      an old name behind which there is nothing    (also AttributeError)
    ├── RemovedImport         the same where it is imported                (also ImportError)
    └── ParityError           two results that must agree do not

and the one warning, `OrtrainWarning`: ortrain does something else than was asked for.

Each message says what, where, why it matters and the way out.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Sequence
from typing import Self


class OrtrainError(Exception):
    """Base of all errors of ortrain."""

    def __init__(self, what: str, *, where: str = "", because: str = "", help: str = "") -> None:
        self.what, self.where, self.because, self.help = what, where, because, help
        rows = [what]
        for label, text in (("where", where), ("because", because), ("help", help)):
            if text:
                rows.append(f"  {label + ':':<9}{text}")
        super().__init__("\n".join(rows))

    def at(self, where: str) -> Self:
        """The same error with a place."""
        other = copy.copy(self)
        vars(other).update(vars(self))
        OrtrainError.__init__(other, self.what, where=where, because=self.because, help=self.help)
        return other

    def __reduce__(self) -> tuple[object, ...]:
        parts = (type(self), self.what, self.where, self.because, self.help)
        return (_rebuild, parts, vars(self))  # with what a kind of error adds


def _rebuild(
    kind: type[OrtrainError], what: str, where: str, because: str, help: str
) -> OrtrainError:
    return kind(what, where=where, because=because, help=help)


class CaptureError(OrtrainError):
    """The module cannot become one ONNX graph. Remedy: as the message says, or run it eagerly.

    Attributes:
        lines: ``(file, line)`` of the place and of the calls around it, the innermost last.
    """

    lines: tuple[tuple[str, int], ...] = ()


class NotServed(CaptureError):
    """A device, dtype or mode for which there is no graph yet. Remedy: run it eagerly."""


class OfThisCall(NotServed):
    """A call is none for a graph, for what is around it or in it; others are. Remedy: none."""


class UnsupportedData(CaptureError, TypeError):
    """A value that goes in or comes out, of a type that a graph does not have."""


class UnsupportedInput(UnsupportedData):
    """An argument of a type that a graph cannot take. Remedy: pass tensors, or nest them."""


class UnsupportedOutput(UnsupportedData):
    """A result of a type that a graph cannot return. Remedy: return tensors, or nest them."""


class GradientError(OrtrainError):
    """A graph cannot be differentiated."""


class NoGradientRule(GradientError):
    """An operator without a gradient rule lies on the way from the loss to what requires grad."""


class UnsupportedGradient(GradientError):
    """A gradient rule exists, but not for this form of the operator."""


class GraphError(OrtrainError, ValueError):
    """A graph breaks a contract of the stage that made it."""


class ExecutionError(OrtrainError, RuntimeError):
    """A runtime refuses or fails to run a graph."""


class BudgetError(OrtrainError, MemoryError):
    """A budget of memory that no choice of what is computed again can keep.

    Attributes:
        least: the least bytes that are possible.
    """

    least = 0


class CheckFailed(ExecutionError):
    """A call has values at which the module's code goes another way than the graph, or raises.

    Attributes:
        seed: of the random numbers that the graph drew, where the way depends on them.
    """

    seed: int | None = None


class StateError(OrtrainError, RuntimeError):
    """A call at the wrong time, such as a second backward through one forward."""


class InputError(OrtrainError, ValueError):
    """Data or a checkpoint that a trainer was given and cannot train on."""


class SaveError(OrtrainError, OSError):
    """A file could not be written; the message tells what stands in its place now."""


class MissingPackage(OrtrainError, ModuleNotFoundError):
    """A package that comes with an extra of ortrain is not installed."""


class RemovedAttribute(OrtrainError, AttributeError):
    """An old name of another library behind which there is nothing; the message has the way on."""


class RemovedImport(OrtrainError, ImportError):
    """The same of a name, or of a module, that is imported."""


class ParityError(OrtrainError, AssertionError):
    """Two results that must agree do not."""


class OrtrainWarning(UserWarning):
    """ortrain does something else than was asked for, and says why."""


def warn_caller(message: str) -> None:
    """Gives an ``OrtrainWarning`` at the line outside of ortrain and torch that has called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inner(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, OrtrainWarning, stacklevel=level)


def _is_inner(module: str) -> bool:
    inner = ("ortrain.", "torch.nn.modules.module", "torch._dynamo.", "torch._utils_internal")
    return module == "torch" or module.startswith(inner)


def listing(names: Sequence[str], limit: int = 5) -> str:
    """``"a, b, c and 4 more"``: a list in an error message, cut where it stops helping."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
