"""What a trace has decided about the sizes of its inputs.

A trace stands for all calls that would take the same way through the module's code and through
PyTorch's operators. Its shape environment keeps the relations between sizes that the way depended
on, but leaves out those that hold for every size above 1. Where Python code asked for them
(``if x.shape[0] == 1``), they are kept here: a 1 would take it another way.

Two more things depend on a call and leave no relation at all: a size that becomes text or a key of
a dictionary, which fixes it here, and the memory layout of a tensor, which is noted.

Used of torch beyond what it documents (``tests/capture/trace/test_constraints.py`` pins each):

- ``torch.fx.experimental.sym_node``: ``SymNode.guard_bool``, the place where relations are decided;
- ``torch.fx.experimental.symbolic_shapes``: of ``ShapeEnv`` its ``guards``, ``replace``,
  ``deferred_runtime_asserts``, ``var_to_range`` and ``backed_var_to_val``;
- ``torch._dynamo.variables.tensor``: ``SymNodeVariable.evaluate_expr``, which asks for Python code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from ortrain.capture.origin import OWN, TORCH, origin
from ortrain.capture.trace.aside import note_answer
from ortrain.capture.trace.patched import replaced
from ortrain.capture.trace.statements import can_do_without_memo, only_makes_contiguous
from ortrain.exclusive import this_thread
from ortrain.module_state.memo import forget_sizes

aten = torch.ops.aten

_MODULES = (f"{TORCH}nn/", f"{TORCH}distributions/")  # Python code as a user could have written it
_DYNAMO = f"{TORCH}_dynamo/"
_LOGGING = f"{Path(logging.__file__).parent}/"
_STANDARD = f"{Path(contextlib.__file__).parent}/"
_INSTALLED = (f"{_STANDARD}site-packages/", f"{_STANDARD}dist-packages/")
_PLUMBING = (
    f"{TORCH}__init__.py",
    f"{TORCH}fx/experimental/",
    f"{OWN}capture/trace/symbols.py",
    f"{OWN}capture/trace/value_checks.py",
)
# What these ask, they ask for code that reads a number from a tensor, through operators too.
_FOR_CODE = tuple(
    f"{OWN}capture/trace/{name}.py" for name in ("exact_numbers", "number_rules", "known_numbers")
)
STRIDED = "as_strided"
_LARGEST = 2**62  # the shape environment has bounds near 2**63 that only stand for "none"


@dataclass(frozen=True)
class Decision:
    """A relation between sizes under which the trace went the way it did.

    Attributes:
        relation: it holds at the traced sizes.
        where: the place in the user's code, empty where it is not known.
        by_code: Python code asked, not an operator for its own purposes.
        above_one: the relation follows from sizes above 1, and from the other decisions.
    """

    relation: sympy.Basic
    where: str = ""
    by_code: bool = False
    above_one: bool = False


@dataclass
class Asked:
    """What Python code asked about the tensors of a trace, while it ran.

    Attributes:
        decisions: relations between sizes, those that hold for all sizes above 1 among them.
        layouts: the places that asked how a tensor lies in memory.
        by_values: whether code that asks if it is traced goes by values in a call that is not.
        about_tracing: whether there is such code.
    """

    decisions: list[Decision] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    by_values: bool = False
    about_tracing: bool = False


@dataclass(frozen=True)
class Decided:
    """All that a trace depends on in the sizes of its inputs.

    Attributes:
        decisions: in terms of the symbols of the program's inputs, each once.
        values: of the symbols in the traced example.
        bounds: of symbols: smallest and largest size.
    """

    decisions: tuple[Decision, ...] = ()
    values: dict[sympy.Symbol, int] = field(default_factory=dict)
    bounds: dict[sympy.Symbol, tuple[int | None, int | None]] = field(default_factory=dict)


# -- while the trace runs ------------------------------------------------------------------------


@contextlib.contextmanager
def asked() -> Iterator[Asked]:
    """Notes what Python code asks about sizes and layouts of tensors that are being traced."""
    found = Asked()
    decide, here = SymNode.guard_bool, this_thread()
    stride, offset = torch.Tensor.stride, torch.Tensor.storage_offset

    def guard_bool(node: Any, file: str, line: int) -> bool:
        relation = node.expr
        answer = decide(node, file, line)
        asker = _asker(sys._getframe(1))
        if asker is not None and here():
            held = relation if answer else sympy.Not(relation)
            found.decisions.append(Decision(held, _place(asker), by_code=True))
        return answer

    def note(asker: FrameType, name: str, answer: Callable[[], object]) -> None:
        question = f"{name} ({_place(asker)})"
        if not note_answer(question, answer()):
            found.layouts.append(question)

    def layout(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def method(*args: Any, **kwargs: Any) -> Any:
            asker, answer = sys._getframe(1), function(*args, **kwargs)
            if here() and _is_code(asker) and not only_makes_contiguous(asker):
                note(asker, function.__name__, lambda: answer)
            return answer

        return method

    def strided(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def method(*args: Any, **kwargs: Any) -> Any:
            asker, tensor = sys._getframe(1), args[0] if args else kwargs.get("input")
            if here() and _is_code(asker) and isinstance(tensor, torch.Tensor):
                note(asker, STRIDED, lambda: (stride(tensor), offset(tensor)))
            return function(*args, **kwargs)

        return method

    keys: list[torch.SymInt] = []

    def hashed(method: Callable[..., Any]) -> Callable[..., Any]:
        def hash_of(size: torch.SymInt) -> Any:
            asker = sys._getframe(1)
            if not _is_code(asker) or can_do_without_memo(asker):
                return method(size)  # torch refuses, as code may expect it to
            keys.append(size)
            return hash(int(size))

        return hash_of

    with contextlib.ExitStack() as patches:
        patches.callback(lambda: forget_sizes() if keys else None)

        def patch(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
            patches.enter_context(replaced(owner, name, change(getattr(owner, name))))

        patch(SymNode, "guard_bool", lambda _: guard_bool)
        for number in (torch.SymInt, torch.SymFloat):
            patch(number, "__repr__", _fixing(str))
            patch(number, "__format__", _fixing(format))
        patch(torch.SymInt, "__hash__", hashed)
        for name in ("stride", "is_contiguous", "storage_offset"):
            patch(torch.Tensor, name, layout)
        patch(torch.Tensor, STRIDED, strided)
        for name in (STRIDED, f"{STRIDED}_copy"):
            patch(torch, name, strided)
        yield found


def _fixing(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A method that converts a size, for Python code the number, which fixes it."""

    def change(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def fixed(size: Any, *how: str) -> Any:
            if not _is_code(sys._getframe(1)):
                return method(size, *how)
            return convert(int(size) if isinstance(size, torch.SymInt) else float(size), *how)

        return fixed

    return change


def _asker(frame: FrameType | None) -> FrameType | None:
    """The Python code that asked for the truth of a relation; None where it was an operator.

    Python asks through ``SymBool.__bool__`` or ``torch._check``; operators ask the node itself.
    """
    through_python = False
    while frame is not None and frame.f_code.co_filename.startswith(_PLUMBING):
        through_python |= frame.f_code.co_filename == _PLUMBING[0]
        frame = frame.f_back
    if frame is None:
        return None
    if frame.f_code.co_filename in _FOR_CODE:
        while frame is not None and not _is_code(frame):
            frame = frame.f_back
        return frame
    if frame.f_code.co_filename.startswith(_DYNAMO):
        return frame if frame.f_code.co_name == "evaluate_expr" else None
    return frame if through_python and _is_code(frame) else None


def _is_code(frame: FrameType | None) -> bool:
    """Whether a frame runs code of a module, rather than PyTorch's own or a line of a log.

    What the standard library does, it does for whoever called it.
    """
    file = _LOGGING
    while frame is not None:
        file = frame.f_code.co_filename
        standard = file.startswith(_STANDARD) and not file.startswith(_INSTALLED)
        if file.startswith(_LOGGING) or not (standard or file == "<string>"):  # of a dataclass
            break
        frame = frame.f_back
    if file.startswith((_LOGGING, OWN)):
        return False
    return file.startswith(_MODULES) or not file.startswith(TORCH)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- of what it has left -------------------------------------------------------------------------


def decided(exported: ExportedProgram, asked: Asked, checked: bool) -> Decided:
    """What a program depends on: guards, run-time assertions, ranges, and what code asked.

    Args:
        exported: the program, before anything is removed from its graph.
        asked: what was noted while it was traced.
        checked: leave out what depends on sizes that values decide. The graph asserts it, and a
            call for which that fails runs in PyTorch.
    """
    environment = _shape_environment(exported)
    if environment is None:
        return Decided()
    guards = [Decision(guard.expr, _user_place(guard)) for guard in environment.guards]
    asserted = [*_assertions(exported)]
    kept = {environment.replace(each.relation) for each in (*guards, *asserted)}
    decisions: dict[sympy.Basic, Decision] = {}
    for each in (*asked.decisions, *guards, *asserted):
        relation = environment.replace(each.relation)
        if checked and free_unbacked_symbols(relation):
            continue
        if relation != sympy.true and relation not in decisions:
            decisions[relation] = replace(each, relation=relation, above_one=relation not in kept)
    bounds = environment.var_to_range.items()
    return Decided(
        tuple(decisions.values()),
        dict(environment.backed_var_to_val),
        {symbol: (_bound(each.lower), _bound(each.upper)) for symbol, each in bounds},
    )


def sizes_of(exported: ExportedProgram) -> list[sympy.Symbol]:
    """The symbols of the sizes of a program's inputs."""
    environment = _shape_environment(exported)
    return [] if environment is None else [*environment.backed_var_to_val]


def fixed_sizes(exported: ExportedProgram) -> set[str]:
    """The symbols of sizes that stand for numbers by now.

    An operator that is run on tensors without contents may ask for the number behind a symbol
    (``kthvalue`` for its ``k``), long after the conditions on the sizes were put down.
    """
    environment = _shape_environment(exported)
    if environment is None:
        return set()
    return {str(k) for k, v in environment.replacements.items() if v.is_number}


def _shape_environment(exported: ExportedProgram) -> ShapeEnv | None:
    for node in exported.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            environment: ShapeEnv = mode.shape_env
            return environment
    return None


def _user_place(guard: Any) -> str:
    """Where an operator was called that decided; empty where only PyTorch's own code is known."""
    frame = guard.sloc.framework_loc
    file = getattr(frame, "filename", TORCH)
    return "" if file.startswith((TORCH, OWN)) else f"{file}:{frame.lineno}"


_RANGES = (aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)


def _assertions(exported: ExportedProgram) -> Iterator[Decision]:
    """The relations that the graph asserts, in its regions too."""
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    bound = [
        (symbol, path, origin(node, full=True))
        for node in nodes
        for symbol, path in (node.meta.get("unbacked_bindings") or {}).items()
    ]
    places = {symbol: place for symbol, _, place in bound}
    # With a path into a tensor, the symbol is a size of it, which is never negative.
    sizes = {
        symbol: sympy.Dummy(integer=True, nonnegative=True) for symbol, path, _ in bound if path
    }
    for node in nodes:
        for relation in _asserted(node):
            if relation.xreplace(sizes) != sympy.true:
                known = [places[s] for s in relation.free_symbols & places.keys()]
                yield Decision(relation, origin(node, full=True) or next(iter(known), ""))


def _asserted(node: fx.Node) -> Iterator[sympy.Basic]:
    if node.target is aten._assert_scalar.default:
        relation = _expression(node.args[0])
        if relation is not None:
            yield relation
    elif node.target in _RANGES:
        size = _expression(node.args[0])
        for name, compare in (("min", sympy.Ge), ("max", sympy.Le)):
            bound = node.kwargs.get(name)
            if size is not None and bound is not None:
                yield compare(size, bound)


def _expression(argument: Any) -> sympy.Basic | None:
    value: Any = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    symbolic = isinstance(value, torch.SymBool | torch.SymInt | torch.SymFloat)
    return value.node.expr if symbolic else None


def _bound(bound: Any) -> int | None:
    return int(bound) if getattr(bound, "is_Integer", False) and abs(bound) < _LARGEST else None
