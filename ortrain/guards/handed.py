"""What a forward changes in the lists, dicts and dataclasses that it is given.

``features["embedding"] = …``, ``batch.pop("labels")``, ``states.append(…)``: the caller finds it in
the objects that it has handed over. A trace has copies of these. So where the traced forward ends,
its output and all that is new in them become one output of the graph (:class:`Handed`), and behind
each run of the graph the caller's own are changed likewise.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain.errors import CaptureError
from ortrain.guards.record import attributes_of
from ortrain.guards.structure import Path

_PLAIN = (list, dict, OrderedDict, defaultdict)


class _Entry(NamedTuple):
    """An entry of a container after a call: an earlier one, or one of the values that are new."""

    name: Hashable
    earlier: Hashable = None
    new: int | None = None


class _Change(NamedTuple):
    """A container that a call has changed: where it is in the call, and what it has then."""

    path: Path
    entries: tuple[_Entry, ...]


class Changes:
    """What a call has changed in the containers that it was given.

    Args:
        changes: of each container.
        returned: which container the call returns; None where its output is none of them.
    """

    def __init__(self, changes: tuple[_Change, ...], returned: Path | None) -> None:
        self._changes, self._returned = changes, returned

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Changes) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._changes, self._returned))

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether they can be made in a call: no container stands in it twice."""
        ids = [id(container) for _, container in _containers(args, kwargs)]
        return len({*ids}) == len(ids)

    def made(
        self, output: Any, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Makes them in the containers of a call.

        Args:
            output: of the graph.
            values: that are new.
            args: positional arguments as they came.
            kwargs: keyword arguments as they came.

        Returns:
            What the call returns.
        """
        there = dict(_containers(args, kwargs))
        for path, entries in self._changes:
            container = there[path]
            earlier = dict(_entries(container))
            _fill(
                container,
                [(e.name, earlier[e.earlier] if e.new is None else values[e.new]) for e in entries],
            )
        return output if self._returned is None else there[self._returned]


@dataclass
class Handed:
    """The output of a call that has changed what it was given.

    Attributes:
        output: what it returned; None where that is one of the containers.
        values: that are new in these.
        changes: where they are.
    """

    output: Any
    values: list[Any]
    changes: Changes

    def over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hands it over to the caller: the containers of a call are changed, the rest returned."""
        return self.changes.made(self.output, self.values, args, kwargs)


pytree.register_pytree_node(
    Handed,
    lambda handed: ([handed.output, handed.values], handed.changes),
    lambda parts, changes: Handed(*parts, changes),  # type: ignore[call-arg]
    serialized_type_name=f"{__name__}.Handed",
    flatten_with_keys_fn=lambda handed: (
        [
            (pytree.GetAttrKey("output"), handed.output),
            (pytree.GetAttrKey("values"), handed.values),
        ],
        handed.changes,
    ),
)


class Containers:
    """The containers of a call, with what is in them before it.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._there = [(p, c, list(_entries(c))) for p, c in _containers(args, kwargs)]

    def handed(self, output: Any) -> Any:
        """The output of the call, a `Handed` where it has changed a container.

        Raises:
            CaptureError: no graph can change it so.
        """
        changed = [
            (path, container, before)
            for path, container, before in self._there
            if not _same(before, list(_entries(container)))
        ]
        if not changed:
            return output
        paths = {id(container): path for path, container, _ in self._there}
        values: list[Any] = []
        changes: list[_Change] = []
        for path, container, before in changed:
            if isinstance(container, dict | list) and type(container) not in _PLAIN:
                raise _unserved(path, f"is a {type(container).__qualname__}")
            names = {id(value): name for name, value in reversed(before)}
            entries = []
            for name, value in _entries(container):
                if id(value) in names:
                    entries.append(_Entry(name, earlier=names[id(value)]))
                    continue
                entries.append(_Entry(name, new=len(values)))
                values.append(value)
            changes.append(_Change(path, tuple(entries)))
        returned = paths.get(id(output))
        made = [*values, output] if returned is None else values
        if any(id(each) in paths for value in made for each in _within(value)):
            raise _unserved(changed[0][0], "is in another one, or in the output")
        output = None if returned is not None else output
        return Handed(output, values, Changes(tuple(changes), returned))


@contextmanager
def handed_over(module: nn.Module) -> Iterator[None]:
    """A forward that is traced inside returns what it changes in what it is given."""
    before: list[Containers] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before.append(Containers(args, kwargs))

    def hand(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return before.pop().handed(output)

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True),
        module.register_forward_hook(hand, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with containers of its own, of the same contents."""
    return _copied(args), _copied(kwargs)


def _copied(value: Any) -> Any:
    if isinstance(value, (Tensor, type)):
        return value
    if type(value) is tuple:
        return tuple([_copied(child) for child in value])
    if not _is_container(value):
        return value
    copied = copy.copy(value)
    for name, child in [*_entries(value)]:
        if isinstance(value, list):
            copied[name] = _copied(child)
        elif isinstance(value, dict):  # past the checks of its class
            dict.__setitem__(copied, name, _copied(child))
        elif isinstance(value, UserDict):
            copied.data[name] = _copied(child)
        else:
            object.__setattr__(copied, str(name), _copied(child))
    return copied


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | UserDict) or attributes_of(value) is not None


def _containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """What of a call can be changed, with the way to it, the outer ones first."""
    for position, value in enumerate(args):
        yield from _below(value, ("args", position))
    for name in sorted(kwargs):
        yield from _below(kwargs[name], ("kwargs", name))


def _below(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (Tensor, type)):
        return
    changes = _is_container(value)
    if changes:
        yield path, value
    if changes or isinstance(value, tuple):
        for name, child in _entries(value):
            yield from _below(child, (*path, name))


def _entries(container: Any) -> Iterable[tuple[Hashable, Any]]:
    """What is in a container, by its places: indices, keys or names of attributes."""
    if isinstance(container, list | tuple):
        return enumerate(container)
    if isinstance(container, dict):
        return container.items()
    if isinstance(container, UserDict):
        return cast(Any, container.data).items()
    if hasattr(container, "__dict__"):
        return vars(container).items()
    return [(name, getattr(container, name)) for name in attributes_of(container) or ()]


def _same(before: list[tuple[Hashable, Any]], now: list[tuple[Hashable, Any]]) -> bool:
    return [name for name, _ in before] == [name for name, _ in now] and all(
        map(is_, (value for _, value in before), (value for _, value in now))
    )


def _fill(container: Any, entries: list[tuple[Any, Any]]) -> None:
    """Gives a container these entries, and no others."""
    if isinstance(container, list):
        container[:] = [value for _, value in entries]
    elif isinstance(container, dict | UserDict):
        held = container if isinstance(container, dict) else container.data
        held.clear()
        held.update(entries)
    else:
        kept = dict(entries)
        for name, _ in [*_entries(container)]:
            if name not in kept:
                object.__delattr__(container, str(name))
        for name, value in entries:
            object.__setattr__(container, name, value)


def _within(value: Any) -> Iterator[Any]:
    """A value, and all that stands in it."""
    yield value
    if isinstance(value, (Tensor, type)):
        return
    if _is_container(value) or isinstance(value, tuple):
        for _, child in _entries(value):
            yield from _within(child)


def unhanded() -> CaptureError:
    """The error of a trace that does not run the code, and so cannot see what it changes."""
    return CaptureError(
        "the forward changes what it is given",
        because="this trace does not see what becomes of it",
        help="return what is new",
    )


def _unserved(path: Path, because: str) -> CaptureError:
    where = str(path[0]) + "".join(f"[{part!r}]" for part in path[1:])
    return CaptureError(
        f"the forward changes {where}, which it is given",
        because=f"no graph can do that where it {because}",
        help="return what is new",
    )
