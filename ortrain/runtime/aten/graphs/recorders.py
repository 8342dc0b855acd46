"""Recording on a device: CUDA graphs that share memory."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ortrain.pytorch import kernels
from ortrain.runtime.aten.graphs.watch import Watch
from ortrain.uncollected import uncollected

Function = Callable[[list[Tensor]], list[Tensor]]


class NoRoom(Exception):
    """A recording would hold more of the device's memory than is left to it."""


class Readers:
    """Who still reads what recordings have left in the memory that all of them share.

    A recording takes for scratch what lies free when it is made. So a later one may have its
    results there, and a replay of the earlier one would write over them.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lent: dict[int, Sequence[weakref.ref[Tensor]]] = {}

    def number(self) -> int:
        """Of a recording that is made now."""
        return next(self._numbers)

    def lend(self, number: int, results: Sequence[Tensor]) -> None:
        """Notes what a replay has left for a backward."""
        if results:
            self._lent[number] = [weakref.ref(each) for each in results]

    def may_replay(self, number: int) -> bool:
        """Whether nobody reads anything of that recording any more, nor of a later one."""
        for other, results in [*self._lent.items()]:
            if other >= number:
                if any(ref() is not None for ref in results):
                    return False
                del self._lent[other]
        return True


class Recorder(Protocol):
    """Records on one device.

    Attributes:
        device: that it is.
        lock: of whoever replays or records.
        readers: of what its recordings have left.
        lasting: addresses of what recordings have saved, and 0, where nothing lies. Others do not
            come again often enough for a backward to be recorded on them.
    """

    device: torch.device
    lock: threading.RLock
    readers: Readers
    lasting: set[int]

    def is_free(self) -> bool:
        """Whether nobody else records on the current stream."""

    def ordered(self) -> AbstractContextManager[None]:
        """In which recordings run after those of other streams: they share memory."""

    def record(
        self, function: Function, inputs: list[Tensor]
    ) -> tuple[Callable[[], None], list[Tensor]]:
        """Runs a function once aside, and records it.

        Returns:
            What replays it on the current stream, and its outputs, which that writes.

        Raises:
            NoRoom: the device has too little memory for it.
            Exception: the function raises, or cannot be recorded. Nothing stays of it.
        """


class Place(NamedTuple):
    """Where is recorded.

    Attributes:
        side: a stream on which nothing else runs.
        pool: of memory, a handle.
    """

    side: torch.cuda.Stream
    pool: Any


class CudaRecorder:
    """CUDA graphs that share a pool of memory.

    They never run at the same time, so each may use for scratch what another one does. What is read
    after a replay is held by its recording, so that the pool gives its memory to no later one; of
    earlier ones :class:`Readers` knows.
    """

    def __init__(self, device: torch.device) -> None:
        # With its number, as tensors have it.
        self.device, self.lock = torch.empty(0, device=device).device, threading.RLock()
        self.lasting, self.readers = {0}, Readers()
        self._last: torch.cuda.Stream | None = None
        self._place: Place | None = None
        self._kept: list[Any] = []  # for as long as the process lasts

    def is_free(self) -> bool:
        """Whether nobody else records on the current stream."""
        return not torch.cuda.is_current_stream_capturing()

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """On the current stream, after what was replayed on another one."""
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        yield

    def record(
        self, function: Function, inputs: list[Tensor]
    ) -> tuple[Callable[[], None], list[Tensor]]:
        """Runs a function once aside, and records it; see :class:`Recorder`."""
        with torch.cuda.device(self.device):
            place = self._place or self._begin()
            current = torch.cuda.current_stream()
            place.side.wait_stream(current)
            try:
                with torch.cuda.stream(place.side), Watch(self.device):
                    needed = _bytes(function([*inputs]))
            finally:
                current.wait_stream(place.side)
            if needed > self._room():
                raise NoRoom
            return self._captured(place, lambda: function([*inputs]))

    def _room(self) -> int:
        """Bytes that a recording may hold: half of what is free, which eager steps want too."""
        free, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return (free + kept) // 2

    def _begin(self) -> Place:
        """A new place. A first graph of its own keeps the pool while there are no others."""
        place = Place(torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle())
        anchor = self._captured(place, lambda: [torch.zeros(1, device=self.device)])
        self._kept.append(anchor)
        self._place = place
        return place

    def _captured(
        self, place: Place, function: Callable[[], list[Tensor]]
    ) -> tuple[Callable[[], None], list[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        # Nothing is to be freed by the way: cudaFree waits, and is not allowed meanwhile.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # A search for cycles might destroy what belongs to the device.
        with torch.cuda.stream(place.side), uncollected(), _own_workspaces():
            graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")
            try:
                outputs = function()
            finally:
                try:
                    graph.capture_end()
                except Exception:
                    self._leave(place, graph)
                    raise
        return graph.replay, outputs

    def _leave(self, place: Place, graph: Any) -> None:
        """Records elsewhere after a capture that could not be ended.

        PyTorch then leaves its allocator referring to the graph, and allocating for it.
        """
        self._kept.append(graph)
        self._place = None
        with suppress(Exception):  # it may have come so far
            kernels.end_allocation(self.device.index, place.pool)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Of their memory, each once."""
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """CuBLAS takes its workspaces from the graph's pool, and keeps none of them afterwards.

    One from outside would be freed under the graph by whoever clears them, as torch.compile does.
    """
    kernels.clear_cublas_workspaces()
    try:
        yield
    finally:
        kernels.clear_cublas_workspaces()


@cache
def recorder(device: torch.device) -> Recorder | None:
    """That of a device; None where there are no such recordings."""
    return CudaRecorder(device) if device.type == "cuda" else None
