"""A stand-in for CUDA graphs on the CPU: a replay writes where the recording's outputs lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ortrain.runtime.aten.graphs.recorders import Function
from ortrain.runtime.aten.graphs.watch import Watch


class OnTheCpu:
    """Records by keeping the function, and replays by running it into the same memory.

    Attributes:
        fails: raised by the next recordings, once the function has run in them.
        free: whether nobody else records.
    """

    def __init__(self) -> None:
        self.device, self.lock = torch.device("cpu"), threading.RLock()
        self.lasting = {0}
        self.fails: Exception | None = None
        self.free, self.recorded = True, 0

    def is_free(self) -> bool:
        """Whether nobody else records."""
        return self.free

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """There is one stream."""
        yield

    def record(
        self, function: Function, inputs: list[Tensor]
    ) -> tuple[Callable[[], None], list[Tensor]]:
        """The function's outputs, which do not hold its results until it is replayed."""
        with Watch(self.device):
            function([*inputs])
        inputs = [t.detach() for t in inputs]  # the memory, and not whoever keeps it
        outputs = function([*inputs])
        if self.fails is not None:
            raise self.fails
        self.recorded += 1
        for output in outputs:
            output.untyped_storage().fill_(0)

        def replay() -> None:
            """Whole memories, of which outputs may be views."""
            for output, made in zip(outputs, function([*inputs]), strict=True):
                output.untyped_storage().copy_(made.untyped_storage())

        return replay, outputs
