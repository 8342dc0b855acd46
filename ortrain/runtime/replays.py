"""What reports tell of programs that are recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Replays:
    """How often programs were recorded, replayed and run without that.

    Attributes:
        recorded: recordings that were made.
        replayed: runs that replayed one.
        plain: other runs, by what stood against a replay.
        refused: why a program is never recorded, by its name.
        took: hears of the seconds that each recording takes.
    """

    recorded: int = 0
    replayed: int = 0
    plain: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    took: Callable[[float], None] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        parts = [f"{self.recorded} recorded, {self.replayed} runs replayed"]
        parts += [f"{count} not: {reason}" for reason, count in self.plain.items()]
        parts += [f"{name} is never recorded: {reason}" for name, reason in self.refused.items()]
        return "; ".join(parts)


__all__ = ["Replays"]
