"""The states that a module has been in, and which of them it is in now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from torch import nn

from ortrain.guards.attributes import Attribute
from ortrain.step.forms import ModuleState

# Values of a number that the module holds which have graphs of their own; then it is an input.
MOST_CONSTANTS = 2
# Module states whose captures are kept: training and evaluation, adapters on and off, …
MOST_STATES = 8
# So many new states of the module within so many calls, and captures will never pay.
RESTLESS_STATES, RESTLESS_CALLS = 8, 16


class States:
    """The states of a module that are known, the one that it was in last behind the others.

    Args:
        module: the module.
        live: tells the sub-modules that stay PyTorch's in its graphs.

    Attributes:
        current: the state that it was in at the last call; None where that is not known.
    """

    def __init__(
        self, module: nn.Module, live: Callable[[], tuple[nn.Module, ...]] = tuple
    ) -> None:
        self.module, self.live = module, live
        self.current: ModuleState | None = None
        self._known: list[ModuleState] = []
        # Numbers that the module holds and that cannot be inputs of its graph.
        self._fixed: frozenset[Attribute] = frozenset()
        # Attributes that have made a new state, and of these those that a capture has read.
        self._suspects: set[Attribute] = set()
        self._read: set[Attribute] = set()
        self._arrivals: deque[int] = deque(maxlen=RESTLESS_STATES)

    def __iter__(self) -> Iterator[ModuleState]:
        return iter(self._known)

    def find(self) -> str | None:
        """Makes the known state current that the module is in.

        Returns:
            None where there is one; else what has changed since the last call, in words.
        """
        change: str | None = ""
        if self.current is not None:
            change = self.current.guard.changed()
            if change is None:  # another thread has found it meanwhile
                return None
        for state in reversed(self._known):
            if state is not self.current and state.guard.changed() is None:
                self._known.remove(state)
                self._enter(state)
                return None
        return change

    def is_restless(self, call: int) -> bool:
        """Notes that a call has met a new state; whether there are too many of these to pay.

        Args:
            call: its number.
        """
        arrivals = self._arrivals
        arrivals.append(call)
        if len(arrivals) < RESTLESS_STATES or call - arrivals[0] >= RESTLESS_CALLS:
            return False
        arrivals.clear()
        return True

    def add(self) -> ModuleState:
        """The state that the module is in now, which is a new one."""
        for known in self._known:
            self._read |= known.read
            self._suspects |= known.guard.attributes_changed() or set()
        unread = frozenset(self._suspects - self._read)
        state = ModuleState.of(self.module, self._moving_attributes(), self.live(), unread)
        self._enter(state)
        return state

    def _enter(self, state: ModuleState) -> None:
        self._known.append(state)
        del self._known[:-MOST_STATES]
        self.current = state

    def fix_attributes(self, state: ModuleState) -> None:
        """Drops a state whose attributes cannot be inputs: each value is a state from now on."""
        self._fixed |= state.attributes
        if state in self._known:  # another thread may have come here before
            state.retire()
            self._known.remove(state)
        self.current = None

    def clear(self) -> None:
        """Forgets all of them."""
        self._known.clear()
        self.current = None

    def _moving_attributes(self) -> frozenset[Attribute]:
        """The numbers that the module holds and that make up the difference to two states or more.

        They become inputs, and those states are dropped.
        """
        different = [(state, state.guard.numbers_changed()) for state in self._known]
        near = [(s, found) for s, found in different if found and not found & self._fixed]
        moving = frozenset().union(*(s.attributes for s, _ in near))
        if len(near) >= MOST_CONSTANTS:
            moving = moving.union(*(found for _, found in near))
            for state, _ in near:
                state.retire()
                self._known.remove(state)
        return moving - self._fixed
