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
from ortrain.errors import CaptureError
from ortrain.ops.random import drawn

aten = torch.ops.aten


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
        if operator is aten.bernoulli_.float:
            tensor, p = args if len(args) == 2 else (args[0], kwargs.get("p", 0.5))
            mask = drawn("bernoulli", tensor.shape, seed=self.seed, stream=self._next(), chance=p)
            return tensor.copy_(torch.from_numpy(mask))
        before = torch.get_rng_state()
        result = operator(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            raise CaptureError(
                f"{operator} draws random numbers in another way than a graph",
                because="the module cannot be run again with the numbers of the graph",
                help="leave this module to eager",
            )
        return result

    def _next(self) -> int:
        stream, self.stream = self.stream, self.stream + 1
        return stream
