"""Numbers that are attributes of a module: constants of a graph, or inputs where they change.

Each value of a weight that is annealed, ``model.temperature``, is another state of the module, and
would need a graph of its own. So from the third value on the number is an input, as numbers among
the arguments are (`numbers`): where the module's code reads ``0.25``, the graph reads a tensor of
no dimensions. For the trace, the attribute makes way for a buffer of its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

from ortrain.errors import CaptureError, listing
from ortrain.guards.numbers import is_number, number
from ortrain.guards.structure import FlatCall
from ortrain.program import Program, Role, set_role, target_of


@dataclass(frozen=True)
class Attribute:
    """A number that a module holds, or any other attribute of its own.

    Attributes:
        owner: the module.
        path: of the owner, within the module that is captured.
        name: of the attribute.
    """

    owner: nn.Module
    path: str
    name: str

    @property
    def qualified(self) -> str:
        """Its name within the module that is captured."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def value(self) -> Any:
        """What it is now."""
        return self.owner.__dict__[self.name]

    @property
    def movable(self) -> bool:
        """Whether a buffer can stand in its place: the class has nothing of that name."""
        return is_number(self.value) and not hasattr(type(self.owner), self.name)


def by_owner(attributes: Collection[Attribute]) -> dict[int, set[str]]:
    """The names of some attributes, by the ids of their modules."""
    found: dict[int, set[str]] = {}
    for each in attributes:
        found.setdefault(id(each.owner), set()).add(each.name)
    return found


class Moving:
    """The attributes that are inputs in one state of a module.

    Args:
        attributes: any number of them, none among them.
        wide: whether floats are float64.
    """

    def __init__(self, attributes: Collection[Attribute], wide: bool) -> None:
        self.attributes, self.wide = tuple(attributes), wide
        self._values: list[Any] = []
        self._tensors: list[Tensor] = []

    def added_to(self, flat: FlatCall) -> WithAttributes:
        """A call with the attributes as they are now: new tensors wherever values are new."""
        values = [each.owner.__dict__[each.name] for each in self.attributes]
        if len(self._values) != len(values) or not all(map(is_, values, self._values)):
            self._values, self._tensors = values, [number(v, self.wide) for v in values]
        return _with_attributes(flat, self, values, self._tensors)

    @contextlib.contextmanager
    def as_buffers(self) -> Iterator[None]:
        """Buffers stand in the place of the attributes."""
        values = [each.value for each in self.attributes]
        for each, value in zip(self.attributes, values, strict=True):
            del each.owner.__dict__[each.name]
            each.owner._buffers[each.name] = number(value, self.wide)
        try:
            yield
        finally:
            for each, value in zip(self.attributes, values, strict=True):
                del each.owner._buffers[each.name]
                each.owner.__dict__[each.name] = value

    def stand_ins(self) -> list[Any]:
        """What the module's code reads in the place of the attributes, inside of a trace."""
        return [each.owner._buffers.get(each.name) for each in self.attributes]

    @contextlib.contextmanager
    def at(self, values: Sequence[Any]) -> Iterator[None]:
        """The attributes have the values that they had in an earlier call."""
        now = [each.value for each in self.attributes]
        self._set(values)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, values: Sequence[Any]) -> None:
        for each, value in zip(self.attributes, values, strict=True):
            each.owner.__dict__[each.name] = value

    def enter(self, program: Program) -> list[int]:
        """Makes the buffers inputs of a program, behind its other tensors of the call.

        Returns:
            Which of the attributes these are, in order; the program does not depend on the others.

        Raises:
            CaptureError: the forward writes to one of them.
        """
        graph, names = program.graph, {each.qualified for each in self.attributes}
        written = {target_of(value) for value in program.outputs(Role.UPDATED_BUFFER)} & names
        if written:
            raise CaptureError(f"the forward assigns {listing(sorted(written))}")
        held = {v.name: v for v in program.inputs(Role.BUFFER)}
        place = len(program.inputs(Role.USER_INPUT))
        found: list[int] = []
        for i, each in enumerate(self.attributes):
            if value := held.get(each.qualified):
                graph.inputs.remove(value)
                graph.inputs.insert(place + len(found), set_role(value, Role.USER_INPUT))
                found.append(i)
        return found


class WithAttributes(FlatCall):
    """A call with some attributes of the module behind its tensors.

    Attributes:
        plain: the call.
        moving: the attributes.
        values: that they had.
        added: their tensors.
    """

    plain: FlatCall
    moving: Moving
    values: list[Any]
    added: list[Tensor]

    @property
    def traced(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that a capture traces."""
        return self.plain.traced

    def rebuilt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Another call with the same attributes."""
        plain = self.plain.rebuilt(args, kwargs)
        return _with_attributes(plain, self.moving, self.values, self.added)

    def as_it_was(self) -> contextlib.AbstractContextManager[None]:
        """The module's attributes are as they were in the call."""
        return self.moving.at(self.values)


def _with_attributes(
    plain: FlatCall, moving: Moving, values: list[Any], added: list[Tensor]
) -> WithAttributes:
    tensors = [*plain.tensors, *added]
    call = tuple.__new__(WithAttributes, (tensors, plain.key, plain.args, plain.kwargs))
    call.plain, call.moving, call.values, call.added = plain, moving, values, added
    return call
