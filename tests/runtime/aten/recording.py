"""A stand-in for a card on the CPU: streams, events, and CUDA graphs as strict as real ones.

A capture runs nothing: what it gives is garbage until the first replay, and what it writes to from
outside holds what it held. A replay runs the kernels of the capture once more, on the addresses of
the capture: memory that was freed since fails it. All graphs share one pool: each replay writes
over what graphs that were captured later have left, since their memory may have been its scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.pytorch import kernels
from ortrain.runtime import engines
from ortrain.runtime.aten import hash
from ortrain.runtime.aten.graphs import recorders
from ortrain.runtime.aten.graphs.recorders import CudaRecorder
from ortrain.step import marks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Address:
    """Where a tensor lies; it keeps no memory alive."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Stream:
    """A row of work."""

    def __init__(self, card: Card, name: str) -> None:
        self.card, self.name = card, name

    def wait_stream(self, other: Stream) -> None:
        """Waits for another one, on the card."""
        self.card.calls.append(f"{self.name} waits for {other.name}")


class Event:
    """A point among the work, which the card reaches when it is asked for the second time."""

    card: ClassVar[Card]

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.asked = 0

    def record(self) -> None:
        """Now."""
        self.time = marks.clock()

    def query(self) -> bool:
        """Whether it is reached."""
        self.asked += 1
        return self.asked > 1

    def synchronize(self) -> None:
        """Waits for the card."""
        self.card.calls.append("event synchronize")

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return (end.time - self.time) * 1e3


class Graph:
    """Kernels that were captured."""

    def __init__(self, card: Card) -> None:
        self.card, self.capture = card, Capture(card)
        self.kept: list[UntypedStorage] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        """Begins, on a stream aside."""
        card = self.card
        assert card.current.name == "side"
        assert capture_error_mode == "thread_local"
        card.calls.append("begin")
        card.capturing = True
        self.pool = pool
        self.capture.__enter__()

    def capture_end(self) -> None:
        """Ends, or fails as CUDA does once something was not allowed."""
        self.capture.__exit__(None, None, None)
        self.card.capturing = False
        self.card.calls.append("end")
        self.kept = self.capture.end()
        if self.card.fails or self.capture.is_broken:
            raise RuntimeError(self.card.fails or "operation failed due to a previous error")
        self.card.graphs.append(self)

    def replay(self) -> None:
        """Runs the kernels again."""
        self.card.healthy -= 1
        if self.card.healthy == 0:
            raise RuntimeError("an illegal memory access was encountered")
        self.card.replayed += 1
        later = self.card.graphs[self.card.graphs.index(self) + 1 :]
        for storage in [each for graph in later for each in graph.kept]:
            storage.fill_(0xFF)  # no number, in each dtype of floating point
        self.capture.run()


class Capture(TorchDispatchMode):
    """Notes kernels with the addresses of what they read and write."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card, self.is_broken = card, False
        self.kernels: list[tuple[Any, Any, Any, Any]] = []
        self.own: dict[int, UntypedStorage] = {}
        self.outside: dict[int, UntypedStorage] = {}
        self.before: dict[int, UntypedStorage] = {}
        self.constants: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs a kernel, whose result nobody will see."""
        if torch.Tag.data_dependent_output in function.tags:
            self.is_broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        if function is torch.ops.aten.lift_fresh.default:  # a size, which is on the host on a card
            self.constants.append(args[0])
        given = pytree.tree_map_only(Tensor, self._read, (args, kwargs))
        if function._schema.is_mutable:
            for storage in self.outside.values():
                if storage.data_ptr() not in self.before:
                    self.before[storage.data_ptr()] = storage.clone()
        result = function(*args, **kwargs)
        self.kernels.append((function, *given, pytree.tree_map_only(Tensor, self._made, result)))
        return result

    def _read(self, tensor: Tensor) -> Address:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.outside[storage.data_ptr()] = storage
        return _address(tensor)

    def _made(self, tensor: Tensor) -> Address:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.outside:
            self.own[storage.data_ptr()] = storage
        return _address(tensor)

    def end(self) -> list[UntypedStorage]:
        """Undoes what was computed; the memory that somebody else still has."""
        for pointer, storage in self.before.items():
            self.outside[pointer].copy_(storage)
        self.before.clear()
        for storage in self.own.values():
            storage.fill_(0xFF)
        return [storage for storage in self.own.values() if _count(storage) > 1]

    def run(self) -> None:
        """The kernels again, on the same addresses."""
        for function, args, kwargs, result in self.kernels:
            given = pytree.tree_map_only(Address, self._tensor, (args, kwargs))
            found = function(*given[0], **given[1])
            places, tensors = pytree.tree_leaves(result), pytree.tree_leaves(found)
            for place, tensor in zip(places, tensors, strict=True):
                if isinstance(tensor, Tensor) and place.storage != _address(tensor).storage:
                    self._tensor(place).copy_(tensor)

    def _tensor(self, address: Address) -> Tensor:
        storage = self.own.get(address.storage)
        if storage is None:
            storage = self.outside[address.storage]
            # Held by captures alone, where a card would read what anybody has put there since.
            assert _count(storage) > 1 or not storage.nbytes(), "a replay reads freed memory"
        tensor = torch.empty(0, dtype=address.dtype)
        return tensor.set_(storage, address.offset, address.size, address.stride)


def _address(tensor: Tensor) -> Address:
    storage = tensor.untyped_storage().data_ptr()
    offset = tensor.storage_offset()
    return Address(storage, tensor.dtype, tensor.shape, tensor.stride(), offset)


def _count(storage: UntypedStorage) -> int:
    """How many tensors have it, and one for those that hold it as such."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,no-any-return]


class Card:
    """What CUDA is asked for, on a machine without it.

    Attributes:
        calls: that were made, in order.
        current: the stream.
        graphs: that were captured, in order.
        replayed: how often one was.
        fails: said by captures that end.
        healthy: the number of the replay that fails, from the next one on; 0 for none.
        free: bytes of memory.
        capturing: whether a capture is under way, or is made to look so.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = Stream(self, "main")
        self.graphs: list[Graph] = []
        self.replayed = 0
        self.fails, self.healthy = "", 0
        self.free, self.capturing = 1 << 40, False
        Event.card = self
        self.Event = Event

    @property
    def recorded(self) -> int:
        """Recordings that were made, without the one that keeps the pool."""
        return max(len(self.graphs) - 1, 0)

    def waits(self) -> list[str]:
        """Calls for which the host waits for the card."""
        names = ("synchronize", "event synchronize", "empty_cache", "read")
        return [call for call in self.calls if call in names]

    # -- torch.cuda ------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits for the card."""
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        """Waits for the card."""
        self.calls.append("empty_cache")

    def device(self, device: object) -> Any:
        """There is one."""
        return nullcontext()

    def current_stream(self, device: object = None) -> Stream:
        """That of this thread."""
        return self.current

    def Stream(self, device: object) -> Stream:  # noqa: N802
        """A further one."""
        return Stream(self, "side")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """The stream is the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> object:
        """Of a new pool."""
        return object()

    def CUDAGraph(self) -> Graph:  # noqa: N802
        """An empty one."""
        return Graph(self)

    def is_current_stream_capturing(self) -> bool:
        """Whether somebody captures."""
        return self.capturing

    def mem_get_info(self, device: object) -> tuple[int, int]:
        """Free bytes, and all."""
        return self.free, 1 << 40

    def memory_reserved(self, device: object) -> int:
        """Bytes."""
        return 0

    memory_allocated = memory_reserved


class _Torch:
    """PyTorch with another ``torch.cuda``."""

    def __init__(self, card: Card) -> None:
        self.cuda = card

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Has the CPU be a card for all that is recorded."""
    card = Card()
    torch_of_card = _Torch(card)
    monkeypatch.setattr(recorders, "torch", torch_of_card)
    monkeypatch.setattr(kernels, "clear_cublas_workspaces", lambda: card.calls.append("clear"))
    monkeypatch.setattr(kernels, "end_allocation", lambda device, pool: None)
    recorder = CudaRecorder(CPU)
    monkeypatch.setattr(recorders, "recorder", lambda device: recorder)
    monkeypatch.setattr(engines, "records", lambda device: True)
    monkeypatch.setattr(hash, "on_device", lambda device: True)
    monkeypatch.setattr(marks, "torch", torch_of_card)
    monkeypatch.setattr(marks, "now", lambda device: marks.Event())
    return card
