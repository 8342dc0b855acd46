"""What made an export fail, in words of the user's code: what, where, because, help."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ortrain.capture.origin import (
    BESIDE,
    FRAME,
    TORCH,
    is_own,
    is_users,
    own_failure,
    place,
)
from ortrain.capture.trace.candidates import codes_of
from ortrain.errors import CaptureError, OrtrainError, UnsupportedOutput, listing
from ortrain.module_state.untouched import Effects

_LINE = re.compile(r":\d+\)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Refusal(CaptureError):
    """A failed export.

    Attributes:
        final: whether another way of exporting would fail in the same way.
        by_value: whether it needs the value of a tensor.
        several: whether it needs one value of a tensor that has several.
        effect: whether the forward leaves something in the module, which a later call may find.
        drawn: whether random numbers decide too often which way the code goes.
        failed: what was tried, each with its reason.
    """

    final: bool = False
    by_value: bool = False
    several: bool = False
    effect: bool = False
    drawn: bool = False
    failed: tuple[str, ...] = ()

    def after(self, others: list[Refusal], failed: list[str]) -> Refusal:
        """The same error, with what else was tried, and the place where one of these knows it."""
        places = (error.where for error in (self, *others) if error.where)
        result = type(self)(self.what, where=next(places, ""), because=self.because, help=self.help)
        result.failed, result.final = tuple(failed), self.final
        result.effect, result.settles, result.drawn = self.effect, self.settles, self.drawn
        codes = [code for error in (self, *others) for code in error.codes]
        result.codes, result.lines = tuple(dict.fromkeys(codes)), self.lines
        return result


def by_chance(line: str, chance: float) -> Refusal:
    """Why code has no graph that leaves out layers at random.

    Args:
        line: of the first branch: ``file:line``.
        chance: that a call goes the way of the one before.
    """
    result = Refusal(
        "random numbers decide which way the forward goes",
        where=f"({line})",
        because=f"a graph goes one way, and {chance:.0%} of the calls would go the way of this one",
        help="none is needed: the parts of the module can be graphs",
    )
    result.final = result.drawn = True
    return result


class RefusedOutput(Refusal, UnsupportedOutput):
    """A failed export of a module that returns what no graph can."""


@dataclass(frozen=True)
class _Known:
    """A failure that has a name.

    Attributes:
        sign: what its evidence contains; groups fill the texts.
        what: that the module does.
        because: why no graph does it.
        help: the way out.
        final: whether no other way of exporting can help.
        kind: of the error.
    """

    sign: re.Pattern[str]
    what: str
    because: str
    help: str
    final: bool = True
    kind: type[Refusal] = Refusal


def _known(sign: str, what: str, because: str, help: str, **others: Any) -> _Known:
    return _Known(re.compile(sign), what, because, help, **others)


_VALUES = "a graph is made once for all values, and the trace has sizes but no values"
_TRANSFORM = (
    "the forward uses a transform of torch.func (grad, vmap, jacrev, …)",
    "what a transform differentiates or batches is no part of the trace",
    f"write the derivative or the batch dimension out, {BESIDE}",
)
_TRACING = "tracing the forward"
_BROKEN = (AttributeError, NameError, ImportError, AssertionError)
_SEVERAL = "only a tensor of one element is true or false, or a number"

# In this order: the first that fits names the failure.
_KNOWN = (
    _known(
        r"Found <class '[\w.]*Cache'> in output|type `?\w*Cache`? .*flattenable",
        "the output holds a key-value cache",
        "past_key_values is no tuple of tensors, and training has no use for it",
        "set model.config.use_cache = False, or call the model with use_cache=False",
        kind=RefusedOutput,
    ),
    _known(
        r"in torch/_functorch/(?:apis|vmap|eager_transforms)\.py|_add_batch_dim|functorch tensor",
        *_TRANSFORM,
    ),
    _known(
        r"in torch/_higher_order_ops/(cond|while_loop|map|scan|associative_scan)\.py",
        "the forward uses torch's control-flow operator '{0}'",
        "ortrain has no gradient for loops and branches inside a graph",
        f"compute both ways and choose with torch.where, or unroll the loop; or {BESIDE}",
    ),
    _known(
        r"RuntimeError: (?:Boolean value of Tensor with more than one value is ambiguous"
        r"|a Tensor with \w+ elements cannot be converted to Scalar"
        r"|shape '\[\]' is invalid for input of size)",
        "the forward takes one value out of a tensor of several",
        _SEVERAL,
        f"reduce it with any(), all() or sum(); or {BESIDE}",
        final=False,
    ),
    _known(
        r"data-dependent expression [^(\n]*(?:Eq|Ne|[<>])|of Tensor with more than one value"
        r"|DataDependentOutputException: aten\.(?:equal|allclose|is_nonzero)",
        "the forward branches on the values of a tensor",
        _VALUES,
        f"compute both ways and choose with torch.where; or {BESIDE}",
    ),
    _known(
        r"data-dependent expression|DataDependentOutputException|DynamicOutputShapeException"
        r"|PendingUnbackedSymbolNotFound"
        r"|Object of type (?:float|int|bool) is not JSON|'?Sym(?:Float|Int|Bool)'? object",
        "the forward needs a number out of a tensor",
        _VALUES,
        f"keep the computation in tensors, without .item(), int(), float(); or {BESIDE}",
    ),
    _known(
        r"Found <class '([^']+)'> in output|Encountered unrecognized type (\w+)",
        "the forward returns an object of type {0}",
        "a graph returns tensors, and numbers, strings and None that no input changes",
        "return tensors in tuples, lists, dicts, dataclasses or ModelOutput, and make the object "
        "outside of the module",
        kind=RefusedOutput,
    ),
    _known(
        r"is not supported or pytree-flattenable",
        "the forward returns an object of a type that torch cannot take apart",
        "a graph returns tensors, and puts them into tuples, lists and dicts",
        "return tensors in tuples, lists, dicts or ModelOutput, or register the type with "
        "torch.export.register_dataclass",
        kind=RefusedOutput,
    ),
    _known(
        r"aten\.\w*sparse\w*|sparse_c\w\w|SparseC\w\w",
        "the forward computes with a sparse tensor",
        "a graph takes ordinary strided tensors",
        f"compute with the dense tensor, or with index_add and gather; or {BESIDE}",
    ),
    _known(
        r"aten\.(?:\w*quantize\w*|q_\w+|int_repr)|torch\.q(?:u?int|per)",
        "the forward computes with a quantized tensor",
        "a graph is trained in floating point",
        f"train the module as it was before quantization; or {BESIDE}",
    ),
    _known(
        r"aten\._?\w*nested\w*|NestedTensor|is not tracked with proxy|torch\.jagged",
        "the forward computes with a nested or jagged tensor",
        "the sizes of its parts are values of another tensor, which a graph does not know",
        f"pad the parts to one size and mask what is past their ends; or {BESIDE}",
    ),
    _known(
        r"fake tensor in the exported program constant",
        "the forward makes a tensor in a way that the trace does not see",
        "a thread, an assignment to .data, or code outside of PyTorch made it",
        f"compute it with PyTorch's functions, in the thread of the call; or {BESIDE}",
        final=False,  # Dynamo knows the line
    ),
    _known(
        r"data pointer of [Tt]ensor|data_ptr",
        "the forward, or what it calls, reads a tensor's memory",
        "the trace has sizes and dtypes, and no memory: a compiled extension or a copy of a "
        "module or tensor by the copy module needs some",
        f"copy modules in __init__ and tensors with clone(); or {BESIDE}",
    ),
    _known(
        r"Creating a new Tensor subclass (\w+)|tensor subclass",
        "the forward makes a tensor of a class of its own",
        "a graph computes with plain tensors and forgets the class",
        f"work on plain tensors (tensor.as_subclass(torch.Tensor)); or {BESIDE}",
    ),
    _known(
        r"UnsupportedOperatorException: ([\w.:]+)",
        "the forward uses {0}, which cannot be traced",
        "PyTorch does not say which shape its result has",
        f"replace it with operators that are; or {BESIDE}",
    ),
)


def refusal(module: torch.nn.Module, error: BaseException) -> Refusal:
    """The reason for which an export failed, and where in the user's code."""
    chain = _chain(error)
    result = _refusal(module, error, chain)
    result.codes = codes_of(chain)
    if isinstance(error, CaptureError):
        result.codes, result.lines = error.codes or result.codes, error.lines
    return result


def _refusal(module: torch.nn.Module, error: BaseException, chain: list[BaseException]) -> Refusal:
    where = _where(module, chain)
    if isinstance(error, CaptureError):  # raised on purpose inside the trace
        result = Refusal(
            error.what,
            where=error.where or where,
            because=error.because,
            help=error.help or BESIDE,
        )
        result.final = True
        return result
    if own := next(filter(_breaks, chain), None):
        return Refusal(**own_failure(own, _TRACING))
    if known := named(_evidence(chain), where):
        if _guesses_its_problem(module):
            known.help = (
                'set model.config.problem_type, such as "single_label_classification", without '
                f"which it looks at the labels; or {known.help}"
            )
        return known
    raised = chain[-1]
    if is_own(raised):
        return Refusal(**own_failure(raised, _TRACING))
    return Refusal(
        f"the forward raises {type(raised).__name__} while it is traced",
        where=where,
        because=f"{first_line(raised)} (it is traced with tensors that have no values)",
        help=f"change what the forward does there; or {BESIDE}",
    )


def _breaks(error: BaseException) -> bool:
    """Whether code of ortrain's fails, whatever it is given: with another PyTorch, a name is gone.

    Others that it seems to raise may be the user's: operators pass through it in a trace.
    """
    return isinstance(error, _BROKEN) and is_own(error)


def _guesses_its_problem(module: torch.nn.Module) -> bool:
    """Whether a classifier of transformers tells from its labels what they are, at every call."""
    names = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    unset = getattr(getattr(module, "config", None), "problem_type", "none") is None
    return unset and names is not None and "problem_type" in names.co_names


def named(evidence: str, where: str) -> Refusal | None:
    """The refusal of a failure that has a name; None for others."""
    for known in _KNOWN:
        if match := known.sign.search(evidence):
            groups = [group for group in match.groups() if group]
            what = known.what.format(*groups) if groups else known.what
            result = known.kind(what, where=where, because=known.because, help=known.help)
            result.final, result.by_value = known.final, known.because is _VALUES
            result.several = known.because is _SEVERAL
            return result
    return None


# -- side effects ----------------------------------------------------------------------------------


def assigning(attributes: list[str], module: torch.nn.Module | None = None) -> Refusal:
    """The refusal of a forward that changes attributes."""
    return _side_effect(
        f"assigns {_quoted(attributes)}",
        where=_touching(module, attributes),
        because="a graph computes outputs and updates buffers, and nothing else",
        help="make it a buffer and update that in place, or assign it outside of forward",
    )


def filling(containers: list[str], module: torch.nn.Module | None = None) -> Refusal:
    """The refusal of a forward that puts something into lists, dicts or sets of the module."""
    return _side_effect(
        f"changes what {_quoted(containers)} holds",
        where=_touching(module, containers),
        because="a graph computes outputs and updates buffers, and nothing else",
        help="return what is to be kept, and keep it outside of forward",
    )


def recasting(buffers: list[str], module: torch.nn.Module | None = None) -> Refusal:
    """The refusal of a forward that puts tensors of another shape or dtype in place of buffers."""
    return _side_effect(
        f"gives {_quoted(buffers)} another shape or dtype",
        where=_touching(module, buffers),
        because="a graph writes a buffer's new value where the old one is",
        help="keep the buffer as it is, or assign it outside of forward",
    )


def keeping(buffers: list[str]) -> Refusal:
    """The refusal of a forward that puts tensors in place of buffers which cannot be written to."""
    return _side_effect(
        f"puts another tensor in the place of {_quoted(buffers)}",
        because="a graph writes a buffer's new value where the old one is, which is not the same "
        "where autograd follows the new one, or something else holds one of them",
        help="write to the buffer in place under torch.no_grad(), or detach what is assigned",
    )


def drawing(generators: list[str], module: torch.nn.Module | None = None) -> Refusal:
    """The refusal of a forward that draws random numbers with Python or numpy."""
    return _side_effect(
        f"draws random numbers from {_quoted(generators)}",
        where=_touching(module, generators),
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


def sharing_memory(names: list[str]) -> Refusal:
    """The refusal of a forward that reads parameters or buffers past their registered names."""
    return _side_effect(
        f"reads {_quoted(names)} through another tensor or from a place that cannot be followed",
        because="a graph would go on with the values of now, unseen: memory that is shared is "
        "written to without a trace in the other tensor",
        help="read it under its registered name, as self.weight",
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


def side_effects(effects: Effects, module: torch.nn.Module) -> Refusal | None:
    """The refusal of a forward that does something besides computing; None where it does not."""
    if effects.unwatched:
        return unseen(effects.unwatched)
    found = None
    if effects.assigned:
        found = assigning(effects.assigned, module)
    elif effects.filled:
        found = filling(effects.filled, module)
    elif effects.recast:
        found = recasting(effects.recast, module)
    if found is None:
        return drawing(effects.drawn, module) if effects.drawn else None
    found.effect = True
    return found


def transforming() -> CaptureError:
    """A transform of torch.func runs."""
    what, because, help = _TRANSFORM
    return CaptureError(what, because=because, help=help)


def seeding_itself() -> Refusal:
    """The refusal of a forward that sets the state of PyTorch's generator."""
    return _side_effect(
        "seeds PyTorch's random generator, or puts its state back",
        because="the numbers that it draws then are the same at every step, a graph's are not",
        help="seed outside of the forward, or make the fixed numbers once and keep them in a "
        "buffer",
    )


def _side_effect(what: str, *, because: str, help: str, where: str = "") -> Refusal:
    result = Refusal(f"the forward {what}", where=where, because=because, help=help)
    result.final = True
    return result


def _quoted(names: list[str]) -> str:
    return listing([repr(name) for name in names])


def first_line(error: BaseException) -> str:
    """Of its message, as far as it helps."""
    lines = (line.strip() for line in _ANSI.sub("", str(error)).splitlines())
    return next(filter(None, lines), "no message")[:300]


# -- evidence --------------------------------------------------------------------------------------


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it was raised from, the innermost last."""
    chain = [error]
    while True:
        last = chain[-1]
        inner = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if inner is None or inner in chain:
            return chain
        chain.append(inner)


def _evidence(chain: list[BaseException]) -> str:
    """What tells one failure from another: types, messages, the parts of torch, odd tensors."""
    rows: dict[str, None] = {}
    for error in chain:
        name = type(error).__name__
        rows[f"{name}: {_ANSI.sub('', str(error))}"] = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            file = frame.f_code.co_filename
            if file.startswith(TORCH):
                rows[f"in torch/{file.removeprefix(TORCH)}"] = None
            elif name == "UnsupportedOperatorException" and is_users(file):
                rows.update(dict.fromkeys(map(_kind, frame.f_locals.values())))
    return "\n".join(rows)


def _kind(value: Any) -> str:
    """The ATen namespace of a tensor that is not strided and dense; empty for all else."""
    if not isinstance(value, torch.Tensor):
        return ""
    if value.is_nested:
        return "aten.nested"
    if value.is_quantized:
        return "aten.quantized"
    return "" if value.layout is torch.strided else "aten.sparse"


# -- places ----------------------------------------------------------------------------------------


def _where(module: torch.nn.Module, chain: list[BaseException]) -> str:
    """Module path and source line of the innermost frame of the user's code."""
    # What a trace puts in the place of a sub-module has its attributes.
    names = {id(vars(child)): name for name, child in module.named_modules()}
    found, path = "", ""
    for error in chain:
        for frame, line in traceback.walk_tb(error.__traceback__):
            file = frame.f_code.co_filename
            if not is_users(file):
                continue
            owner: Any = frame.f_locals.get("self")
            path = names.get(id(getattr(owner, "__dict__", None)), path)
            found = f"{file}:{line}"
    if not found:  # Dynamo and the recorded trace tell the user's stack in the message
        told = [frame for error in chain for frame in FRAME.findall(str(error))]
        found = next((f"{file}:{line}" for file, line in reversed(told) if is_users(file)), "")
    return place(path, found)


def forward_of(module: torch.nn.Module) -> str:
    """Where a module's forward is written; empty where it is torch's or cannot be found."""
    return place("", line_of(module))


def line_of(module: torch.nn.Module) -> str:
    """``file:line`` of a module's forward; empty where it is torch's or cannot be found."""
    forward: Any = inspect.unwrap(module.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def _touching(module: torch.nn.Module | None, names: list[str]) -> str:
    """The line that writes to the first of some attributes, or that mentions it."""
    if module is None:
        return ""
    path, _, name = names[0].rpartition(".")
    owner: Any = module
    for part in path.split(".") if path else ():
        owner = getattr(owner, part, module)
    for kind in type(owner).__mro__ if isinstance(owner, torch.nn.Module) else ():
        try:
            lines, first = inspect.getsourcelines(kind)
            file = inspect.getsourcefile(kind) or ""
        except (OSError, TypeError):
            continue
        if not is_users(file):
            break
        line = _mention(textwrap.dedent("".join(lines)), name)
        if line:
            return place(path, f"{file}:{first + line - 1}")
    return forward_of(module)


def _mention(source: str, name: str) -> int:
    """The line, outside of ``__init__``, of an attribute or a global name; 0 where there is none.

    One that stores into it comes before one that reads it.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return 0
    found: list[tuple[bool, int]] = []
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for node in (n for f in functions if f.name != "__init__" for n in ast.walk(f)):
        if isinstance(node, ast.Attribute) and node.attr == name:
            found.append((not isinstance(node.ctx, ast.Store), node.lineno))
        elif isinstance(node, ast.Name) and node.id == name:
            found.append((True, node.lineno))
    return min(found)[1] if found else 0


@contextlib.contextmanager
def located(module: torch.nn.Module) -> Iterator[None]:
    """Errors raised inside that know no line tell where the module's forward is."""
    try:
        yield
    except OrtrainError as error:
        if _LINE.search(error.where) or not (line := forward_of(module)):
            raise
        raise error.at(f"{error.where}, in the forward {line}".lstrip(", ")) from error.__cause__
