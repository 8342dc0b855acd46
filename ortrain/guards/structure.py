"""Nested inputs and outputs: a call becomes a list of tensors and a key, and an output comes back.

A capture is made for one *form* of call: which arguments there are, how they nest, the values of
those that are not tensors, and the kind of each tensor. `flatten_call` reduces a call to its
tensors and a hashable key for the form; sizes are no part of it, for they are symbolic in the
graph. `OutputStructure` goes the other way: from the tensors that a graph returns to an object of
the same types as the module's own output.

Both run before and after every step, so both have a short way for the common cases.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import Enum
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ortrain.errors import UnsupportedInput, UnsupportedOutput
from ortrain.guards import user_dict
from ortrain.guards.key_value_cache import Count, is_cache
from ortrain.guards.record import attributes_of, new
from ortrain.module_state.scope import is_library
from ortrain.module_state.value import plain_scalar
from ortrain.pytorch.layout import layout_of

Path: TypeAlias = tuple[Hashable, ...]
Builder: TypeAlias = Callable[[Sequence[Tensor]], Any]


class FlatCall(NamedTuple):
    """The arguments of one call, as a graph sees them.

    Attributes:
        tensors: positional arguments first, then keyword arguments in the order of their names,
            each depth first. A tensor that is passed twice stands here twice.
        key: everything else; equal for two calls exactly if one capture can serve both.
        args: the positional arguments as they came.
        kwargs: the keyword arguments as they came.
    """

    tensors: list[Tensor]
    key: tuple[Hashable, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def traced(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that a capture traces."""
        return self.args, self.kwargs

    def rebuilt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Another call of the same form."""
        return flatten_call(args, kwargs)

    def as_it_was(self) -> contextlib.AbstractContextManager[None]:
        """What of the module was an input of the call is as it was."""
        return contextlib.nullcontext()


# Keyword arguments in the order of a call, to the same names sorted: sorting afresh costs 0.2 us a
# step, and a program has few places that call a model.
_SORTED_NAMES: dict[tuple[str, ...], tuple[str, ...]] = {}


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
    """Split a call into its tensors and a key for its form.

    The key holds the tree (types, lengths, names), each tensor's dtype, rank, device,
    ``requires_grad`` and the order of its axes in memory, and the value of every other leaf. ``1``,
    ``1.0`` and ``True`` are three values, ``0.0`` and ``-0.0`` are two, and a NaN equals itself.
    The order of keyword arguments does not matter; that of a dict's entries does, as it does to a
    loop over them.

    Costs 0.5 us for one positional tensor and 1.2 us for three keyword tensors.

    Raises:
        UnsupportedInput: a leaf is neither a tensor nor a constant (a cache object, an array).
    """
    tensors: list[Tensor] = []
    key: list[Hashable] = [len(args)]
    values: Iterable[Any] = args
    if kwargs:
        given = tuple(kwargs)
        names = _SORTED_NAMES.get(given)
        if names is None:
            names = _SORTED_NAMES[given] = tuple(sorted(given))
        key.append(names)
        values = [*args, *map(kwargs.__getitem__, names)]
    try:
        for value in values:
            # The common kinds here, since a call to `_flatten` for each would cost 0.1 us.
            if type(value) is Tensor:
                tensors.append(value)
                rank = value.ndim
                plain = rank < 4 and value.is_contiguous()
                layout = value.layout if plain else layout_of(value)
                key += (value.dtype, rank, value.device, value.requires_grad, layout)
            elif value is None or value is True or value is False:
                key.append(value)
            else:
                _flatten(value, tensors, key)
    except _NotALeaf:
        raise _unsupported_input(args, kwargs) from None
    # Past NamedTuple's own __new__, which costs another 0.2 us.
    return tuple.__new__(FlatCall, (tensors, tuple(key), args, kwargs))


def bind_names(module: nn.Module, flat: FlatCall) -> list[str]:
    """Name each tensor of a call for the graph.

    Args:
        module: the module that is called; its ``forward`` names the positional arguments.
        flat: the call.

    Returns:
        One unique name per tensor of ``flat.tensors``, in their order: the parameter's name, with
        the way into nested values behind it (``input_ids``, ``past_key_values.0.1``); what falls
        to ``*inputs`` is ``inputs.0``.
    """
    positional = _positional_names(module, len(flat.args))
    names: list[str] = []
    for path, leaf in leaves_of_call(flat.args, flat.kwargs):
        if not isinstance(leaf, Tensor):
            continue
        source, first, *rest = path
        head = positional[first] if source == "args" and isinstance(first, int) else str(first)
        name = stem = ".".join([head, *map(str, rest)])
        serial = 0
        while name in names:
            serial += 1
            name = f"{stem}_{serial}"
        names.append(name)
    return names


class OutputStructure:
    """How the tensors that a graph returns make up the output that the module would return.

    Attributes:
        names: one name per tensor, in their order: ``output`` where it is the whole output, else
            the way to it (``loss``, ``hidden_states.0``).
        rebuild: takes the tensors in that order and returns a new object of the original types.
            An attribute rather than a method, which saves a call each step: a tensor costs 0.1 us,
            a `ModelOutput` with two tensors 1.2 us, a fifth of what its constructor would.
    """

    __slots__ = ("names", "rebuild")

    names: tuple[str, ...]
    rebuild: Builder

    def __init__(self, names: tuple[str, ...], rebuild: Builder) -> None:
        self.names = names
        self.rebuild = rebuild

    @classmethod
    def from_output(cls, output: object) -> tuple[list[Tensor], OutputStructure]:
        """Take an output apart.

        Args:
            output: what ``forward`` returned: tensors and constants in tuples, named tuples, lists,
                dicts, dataclasses and `ModelOutput`s, at any depth.

        Returns:
            Its tensors, depth first, an entry for each place where one stands, and the structure.
            Every leaf that is not a tensor comes back as the constant it is here.

        Raises:
            UnsupportedOutput: the output holds an object that is neither (a cache).
        """
        compiler = _Compiler()
        part = compiler.compile(output, ())
        rebuild: Builder = itemgetter(part) if isinstance(part, int) else part
        return compiler.tensors, cls(tuple(compiler.names), rebuild)


# --- inputs -------------------------------------------------------------------------------------

# Besides numbers and strings, what is compared by identity and cannot change.
_CONSTANT_TYPES = (
    type(None),
    int,
    str,
    bytes,
    Enum,
    type,
    FunctionType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class _NotALeaf(Exception):
    """A value is neither a container nor a tensor nor a constant; no user ever sees this."""


def _flatten(value: Any, tensors: list[Tensor], key: list[Hashable]) -> None:
    """Append the tensors of one argument, and what describes it.

    Each description starts with a dtype, ``None``, a bool or a pair that leads with a type, and
    tells its own length, so that two different arguments never yield the same sequence.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):
            key.append((type(value), Tensor))
        tensors.append(value)
        key += (value.dtype, value.ndim, value.device, value.requires_grad, layout_of(value))
    elif value is None or value is True or value is False:
        key.append(value)
    elif type(value) is int or type(value) is str:
        key.append((type(value), value))
    elif (opened := _open(value)) is not None:
        token, children = opened
        key.append((type(value), token))
        for child in children:
            _flatten(child, tensors, key)
    else:
        key.append((type(value), _constant(value)))


def _open(value: Any) -> tuple[Hashable, Iterable[Any]] | None:
    """The names of a container's children (their number for a sequence) and the children."""
    kind: Any = type(value)
    if isinstance(value, tuple | list | dict) and kind not in _PLAIN and not _is_walked(kind):
        return None
    if isinstance(value, tuple | list):
        return len(value), value
    if isinstance(value, dict):
        return tuple(value), value.values()
    if isinstance(value, UserDict):
        return user_dict.parts(value)
    names = attributes_of(value)
    return None if names is None else (names, [getattr(value, name) for name in names])


_PLAIN = {tuple, list, dict, OrderedDict, defaultdict, torch.Size}


@functools.cache
def _is_walked(kind: type) -> bool:
    """Whether loops over a container of a class meet what it holds, and its length tells how much.

    A class of a script's own may make something else of them, or raise.
    """
    base = next(each for each in (OrderedDict, dict, tuple, list) if issubclass(kind, each))
    names = ("__iter__", "__len__", "keys", "values", "items")
    return is_library(kind.__module__) or all(
        getattr(kind, name, None) is getattr(base, name, None) for name in names
    )


def _constant(value: Any) -> Hashable:
    """What stands for a constant in a key; two constants of a type are the same where it is equal.

    Raises:
        _NotALeaf: the value can change while it stays equal to itself, as an object without an
            ``__eq__`` of its own can.
    """
    if isinstance(value, float):
        return value.hex()  # tells -0.0 from 0.0, and a NaN equals itself
    if isinstance(value, complex):
        return repr(value)
    if isinstance(value, _CONSTANT_TYPES):
        return plain_scalar(value)
    kind: Any = type(value)
    if kind.__hash__ is None or kind.__eq__ is object.__eq__:
        raise _NotALeaf
    try:
        hash(value)
    except Exception:
        raise _NotALeaf from None
    return value


def leaves_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Every leaf of a call with the way to it, in the order of `flatten_call`."""
    for position, value in enumerate(args):
        yield from _leaves(value, ("args", position))
    for name in sorted(kwargs):
        yield from _leaves(kwargs[name], ("kwargs", name))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    opened = None if isinstance(value, Tensor) else _open(value)
    if opened is None:
        yield path, value
        return
    token, children = opened
    names = token if isinstance(token, tuple) else range(len(value))
    for name, child in zip(names, children, strict=True):
        yield from _leaves(child, (*path, name))


def _positional_names(module: nn.Module, count: int) -> list[str]:
    """What ``forward`` calls its first ``count`` positional arguments."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # some callables written in C do not tell
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = range(max(count - len(names), 0))
            return [*names, *(f"{parameter.name}.{index}" for index in rest)]
    return [*names, *(f"args.{index}" for index in range(len(names), count))]


def _unsupported_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnsupportedInput:
    """The error for the first leaf of a call that a graph cannot take."""
    for path, leaf in leaves_of_call(args, kwargs):
        if isinstance(leaf, Tensor):
            continue
        try:
            _constant(leaf)
        except _NotALeaf:
            where = str(path[0]) + "".join(f"[{part!r}]" for part in path[1:])
            return UnsupportedInput(
                f"{where} is of type {_name_of(type(leaf))}, which a graph cannot take",
                because="a graph takes tensors; what it froze of this object could change unseen",
                help=_remedy(leaf),
            )
    raise AssertionError("every leaf is supported")


def _remedy(leaf: Any) -> str:
    if type(leaf).__module__.partition(".")[0] == "numpy":
        return "pass torch.from_numpy(array)"
    if "Cache" in type(leaf).__name__:
        return "pass use_cache=False and leave the cache out, as training needs none"
    return (
        "pass tensors, numbers, strings or None, also nested in tuples, lists, dicts, dataclasses"
    )


def _name_of(kind: type) -> str:
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


# --- outputs ------------------------------------------------------------------------------------


class _Compiler:
    """Turns an output into closures that make it anew; collects its tensors on the way.

    A part of an output is the index of a tensor or the function that builds the part, so that a
    container of nothing but tensors is gathered by one `itemgetter`, which runs in C.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[str] = []

    def compile(self, value: Any, path: Path) -> int | Builder:
        """The part for ``value``, which stands at ``path`` of the output."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.names.append(".".join(map(str, path)) or "output")
            return len(self.tensors) - 1
        if isinstance(value, Count):
            index = self.compile(value.tensor, path)
            assert isinstance(index, int)
            return lambda tensors: int(tensors[index])
        kind = type(value)
        if isinstance(value, tuple):
            return self._tuple(value, path)
        if kind is list:
            gather = self._gather(list(enumerate(value)), path)
            return lambda tensors: list(gather(tensors))
        if isinstance(value, dict):
            return self._dict(value, path)
        if value is None:
            return _none
        if is_cache(value):
            return self._object(value, vars(value), path)
        if (names := attributes_of(value)) is not None:
            return self._object(value, names, path)
        try:
            _constant(value)
        except _NotALeaf:
            where = "".join(f"[{part!r}]" for part in path)
            raise UnsupportedOutput(
                f"output{where} is of type {_name_of(kind)}, which cannot be rebuilt",
                because="it has to come back new, and as the same type, at every step",
                help="return tensors and constants in tuples, lists, dicts or dataclasses; "
                "for a cache pass use_cache=False",
            ) from None
        return lambda tensors: value

    def _gather(
        self, items: Iterable[tuple[Hashable, Any]], path: Path
    ) -> Callable[[Sequence[Tensor]], tuple[Any, ...]]:
        """A function from the tensors to the tuple of the built children."""
        parts: list[Any] = [self.compile(child, (*path, name)) for name, child in items]
        if all(part is _none for part in parts):
            nothing = (None,) * len(parts)
            return lambda tensors: nothing
        indices = [part for part in parts if isinstance(part, int)]
        if len(indices) == len(parts) >= 2:
            return itemgetter(*indices)
        builders = [itemgetter(part) if isinstance(part, int) else part for part in parts]
        return lambda tensors: tuple([build(tensors) for build in builders])

    def _tuple(self, value: tuple[Any, ...], path: Path) -> Builder:
        kind: Any = type(value)
        fields = getattr(kind, "_fields", range(len(value)))
        gather = self._gather(zip(fields, value, strict=True), path)
        if kind is tuple:
            return gather
        if hasattr(kind, "_fields"):
            new = tuple.__new__  # past a __new__ that may take other arguments
            return lambda tensors: new(kind, gather(tensors))
        return lambda tensors: kind(gather(tensors))  # torch.return_types, torch.Size

    def _dict(self, value: dict[Hashable, Any], path: Path) -> Builder:
        kind: Any = type(value)
        keys = tuple(value)
        gather = self._gather(value.items(), path)
        if kind is dict or kind is OrderedDict:
            return lambda tensors: kind(zip(keys, gather(tensors), strict=False))
        if kind is defaultdict:
            factory = value.default_factory  # type: ignore[attr-defined]
            return lambda tensors: defaultdict(factory, zip(keys, gather(tensors), strict=False))

        return self._dict_with_attributes(value, keys, gather, path)

    def _dict_with_attributes(
        self,
        value: dict[Hashable, Any],
        keys: tuple[Hashable, ...],
        gather: Callable[[Sequence[Tensor]], tuple[Any, ...]],
        path: Path,
    ) -> Builder:
        """A dict of a class of its own, of which `ModelOutput` is the one that matters.

        There a field is an entry and an attribute, or None and an attribute alone. Built past the
        constructor, which checks the fields afresh: 6.4 us for one with two tensors.
        """
        kind: Any = type(value)
        set_item = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
        attributes = getattr(value, "__dict__", {})
        shared = [key for key in keys if attributes.get(key, _ABSENT) is value[key]]
        others = {name: child for name, child in attributes.items() if name not in shared}
        gather_others = self._gather(others.items(), path)
        # Entries that are no attributes do not occur in a ModelOutput, so they may cost.
        positions = None if len(shared) == len(keys) else [keys.index(key) for key in shared]
        names = (*shared, *others)

        def build(tensors: Sequence[Tensor]) -> Any:
            new = kind.__new__(kind)
            values = gather(tensors)
            for key, child in zip(keys, values, strict=False):
                set_item(new, key, child)
            if names:
                if positions is not None:
                    values = tuple([values[position] for position in positions])
                new.__dict__.update(zip(names, values + gather_others(tensors), strict=False))
            return new

        return build

    def _object(self, value: Any, names: Iterable[str], path: Path) -> Builder:
        """An object that is all in these attributes, made without its constructor."""
        kind, names = type(value), tuple(names)
        gather = self._gather([(name, getattr(value, name)) for name in names], path)
        set_attribute = object.__setattr__  # works for frozen and for slotted classes

        def build(tensors: Sequence[Tensor]) -> Any:
            made = new(kind)
            for name, child in zip(names, gather(tensors), strict=False):
                set_attribute(made, name, child)
            return made

        return build


def _none(tensors: Sequence[Tensor]) -> None:
    """Build the None that many fields of a `ModelOutput` hold."""


_ABSENT = object()
