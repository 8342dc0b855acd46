"""Eager with the graph's random numbers: its dropouts keep the elements that the graph keeps.

A graph draws by a hash of the step's seed and of a number that each draw has, its stream
(`ortrain/ops/hash.py`); the streams count the draws of the module's forward in their order. So
eager, told the seed, can draw the same: each operator that would take numbers from torch's
generator gets those of the next stream. With them graph and eager can be compared with dropout on,
and a step that the graph cannot finish is finished by eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.capture.checkpointing import without_checkpoints
from ortrain.capture.replay import replay
from ortrain.errors import CaptureError


@contextlib.contextmanager
def replayed_draws(seed: int) -> Iterator[None]:
    """Eager calls inside draw what a graph draws whose seed input is this.

    Nothing is computed twice inside: a checkpoint would draw anew when it is run again.
    """
    with without_checkpoints(), _Replay(seed):
        yield


class _Replay(TorchDispatchMode):
    """Gives each random draw the numbers of the next stream."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.stream = seed, 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in operator.tags:
            return operator(*args, **kwargs)
        result = replay(operator, args, kwargs, seed=self.seed, stream=self.stream)
        if result is not NotImplemented:
            self.stream += 1
            return result
        before = torch.get_rng_state()
        result = operator(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            raise CaptureError(
                f"{operator} draws random numbers in another way than a graph",
                because="the module cannot be run again with the numbers of the graph",
                help="leave this module to eager",
            )
        return result
