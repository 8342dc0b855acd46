"""The recordings of a function: one for each key of its inputs that comes again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from ortrain.errors import ExecutionError
from ortrain.program import Role, role_of, target_of
from ortrain.pytorch.precision import settings_of_kernels
from ortrain.runtime.aten.graphs.recorders import NoRoom, Recorder
from ortrain.runtime.aten.graphs.watch import Unrecordable
from ortrain.runtime.replays import Replays

if TYPE_CHECKING:
    from ortrain.runtime.aten.executor import AtenCompiled

# Sizes of inputs that a function keeps recordings of. That which was used longest ago makes way,
# once the others were replayed so many times since: a recording costs as much as a hundred runs.
MOST, RESTED = 8, 64
# Recordings for one size: of each set of weights, such as those of the equal layers of a model, and
# for so many calls of one set whose backwards are still to come.
MOST_EACH, MOST_AT_ONCE = 64, 4
# Keys of runs that are remembered until they come again.
MOST_SEEN = 512
# A parameter or a buffer that lies at another address so many times in a row is copied like other
# inputs. Of a model of as many equal layers each has its own.
MOST_ADDRESSES = 64
# Elements of a tensor on the host that may be part of a key.
MOST_NUMBERS = 64

_STATE = frozenset({Role.PARAMETER, Role.BUFFER})

Values = Sequence[Tensor]


class NotRecorded(Exception):
    """There is no recording for a run, of which nothing has been done; see :func:`waiting`."""


class _Here(threading.local):
    off = waits = False
    may_record = True


_here = _Here()


@contextmanager
def waiting(*, may_record: bool) -> Iterator[None]:
    """Runs of this thread inside raise :class:`NotRecorded` where there is nothing to replay.

    Called one by one, PyTorch's operators are slower than eager: whoever can run that does.

    Args:
        may_record: whether there may be further recordings.
    """
    before = _here.waits, _here.may_record
    _here.waits, _here.may_record = True, may_record
    try:
        yield
    finally:
        _here.waits, _here.may_record = before


@contextmanager
def unrecorded() -> Iterator[None]:
    """Runs of this thread inside are neither replayed nor recorded, nor counted."""
    before, _here.off = _here.off, True
    try:
        yield
    finally:
        _here.off = before


class Size(NamedTuple):
    """What a recording depends on, beside addresses.

    Attributes:
        forms: shape and strides of each input.
        numbers: in those on the host.
        settings: of PyTorch that its kernels go by.
    """

    forms: tuple[Any, ...]
    numbers: tuple[Any, ...]
    settings: tuple[Any, ...]


Addresses = tuple[int, ...]
"""Of the inputs that are held."""


class Recording:
    """A function that was recorded for one key.

    Args:
        recorder: of the device.
        plain: the function.
        values: of the first run; those that are held are read where they lie.
        keys: CPU tensors in the places of seeds.
        copied: places of the inputs that are copied.
        saved: places of the outputs that stay where they are.
    """

    def __init__(
        self,
        recorder: Recorder,
        plain: AtenCompiled,
        values: Values,
        keys: dict[int, Tensor],
        copied: Sequence[int],
        saved: Sequence[int],
    ) -> None:
        self.number, self._readers = recorder.readers.number(), recorder.readers
        with torch.inference_mode(False), torch.no_grad():
            inputs = [*values]
            for place, key in keys.items():
                inputs[place] = key.to(recorder.device)
            for place in copied:
                inputs[place] = torch.empty_like(values[place], requires_grad=False)
            self._keys = {place: inputs[place] for place in keys}
            self._inputs = {place: inputs[place] for place in copied}
            self._enter(values, keys)
            self._replay, self._outputs = recorder.record(plain.call, inputs)
        self._saved = [*saved]
        taken = {*saved}
        recorder.lasting.update([self._outputs[place].data_ptr() for place in saved])
        self._given = [i for i in range(len(self._outputs)) if i not in taken]

    def may_run(self) -> bool:
        """Whether a run would write over nothing that anybody still reads."""
        return self._readers.may_replay(self.number)

    def run(self, values: list[Tensor], keys: dict[int, Tensor]) -> list[Tensor]:
        """The outputs of the function for these values, which are dropped."""
        with torch.no_grad():
            self._enter(values, keys)
            self._replay()
            results = [*self._outputs]
            for place in self._saved:
                results[place] = self._outputs[place].detach()
            self._readers.lend(self.number, [results[place] for place in self._saved])
            given = [torch.empty_like(self._outputs[place]) for place in self._given]
            _copy(given, [self._outputs[place] for place in self._given])
        for place, tensor in zip(self._given, given, strict=True):
            results[place] = tensor
        values.clear()
        return results

    def _enter(self, values: Values, keys: dict[int, Tensor]) -> None:
        """Copies what is not read where it lies."""
        for place, key in keys.items():
            # From memory that is not pinned: it may be written again as soon as this returns.
            self._keys[place].copy_(key, non_blocking=True)
        _copy([*self._inputs.values()], [values[place] for place in self._inputs])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors to others of their dtypes and shapes: one launch for many of a dtype."""
    dtypes: dict[torch.dtype, list[int]] = {}
    for i, target in enumerate(targets):
        dtypes.setdefault(target.dtype, []).append(i)
    for places in dtypes.values():
        if len(places) == 1:
            targets[places[0]].copy_(sources[places[0]])
        else:
            torch._foreach_copy_([targets[i] for i in places], [sources[i] for i in places])


class Recorded:
    """A compiled program that is recorded for each key that comes again, and then replayed.

    Args:
        plain: the program as a function.
        graph: of the program.
        recorder: of its device.
        replays: is told how it runs.
    """

    def __init__(
        self, plain: AtenCompiled, graph: ir.Graph, recorder: Recorder, replays: Replays
    ) -> None:
        self.plain, self.recorder, self.replays = plain, recorder, replays
        outputs = [(role_of(v), target_of(v)) for v in graph.outputs]
        # Of a buffer that it updates it may be given a copy, which lies elsewhere at each run.
        updated = {name for role, name in outputs if role is Role.UPDATED_BUFFER}
        roles = [None if v.name in updated else role_of(v) for v in graph.inputs]
        self._saved = [i for i, (role, _) in enumerate(outputs) if role is Role.SAVED]
        self._read = [i for i, role in enumerate(roles) if role is Role.SAVED]
        # The addresses at which parameters and buffers have lain, and how often in a row at others.
        self._known = {i: {0} for i, role in enumerate(roles) if role in _STATE}
        self._moved = dict.fromkeys(self._known, 0)
        self._held = [*self._known, *self._read]
        rest = {*range(len(roles))} - {*self._held, *plain.streams}
        self._copied = sorted(rest)
        is_backward = self._read or any(role is Role.GRADIENT for role, _ in outputs)
        self.name = "the backward" if is_backward else "the forward"
        self._sizes: OrderedDict[Size, dict[Addresses, list[Recording]]] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()  # hashes of keys
        self._since = 0  # replays since the last recording
        self._refused = self._is_full = False

    @property
    def source(self) -> str:
        """Of the function."""
        return self.plain.source

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs on numpy arrays in input order, never as a recording."""
        return self.plain.run(inputs)

    def run_values(self, values: list[Tensor]) -> list[Tensor]:
        """Runs on tensors in input order, and returns those in output order.

        Args:
            values: emptied.

        Raises:
            ExecutionError: PyTorch refused or failed.
        """
        if self._refused or _here.off or not self.recorder.is_free():
            return self.plain.run_values(values)
        with self.recorder.lock, self.recorder.ordered():
            found = self._ready(values)
            if isinstance(found, Recording):
                return self._replayed(found, values)
        if not self._refused:
            self.replays.plain[found] = self.replays.plain.get(found, 0) + 1
            if _here.waits:
                raise NotRecorded(found)
        return self.plain.run_values(values)

    def _replayed(self, recording: Recording, values: list[Tensor]) -> list[Tensor]:
        self.replays.replayed += 1
        self._since += 1
        try:
            return recording.run(values, self.plain.keys(values))
        except Exception as error:
            self._refuse(error)
            raise ExecutionError(
                "PyTorch failed to replay the graph",
                because=f"{type(error).__name__}: {error}",
                help="Options(cuda_graphs=False) runs it without recordings",
            ) from error

    def _ready(self, values: Values) -> Recording | str:
        """The recording for a run, made where it is time for one; why there is none."""
        self._release_movers(values)
        size = self._size(values)
        if isinstance(size, str):
            return size
        held = [values[i] for i in self._held]
        addresses = tuple([each.data_ptr() for each in held if self._is_here(each)])
        group = self._sizes.get(size, {})
        made = group.get(addresses, [])
        for recording in made:
            if recording.may_run():
                self._sizes.move_to_end(size)
                return recording
        if len(made) >= MOST_AT_ONCE or sum(map(len, group.values())) >= MOST_EACH:
            return "backwards of as many calls are still to come as there are recordings"
        key = hash((size, addresses, len(made)))
        # What reads a recording's results comes as often as that is replayed, if weights stay.
        comes_again = self._read and max(self._moved.values(), default=0) <= 1
        if not comes_again and key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
            if made:
                return "another backward still reads what the last run has saved"
            return "its sizes, addresses or numbers are new"
        if (why := self._against_another(size)) is not None:
            return why
        return self._recorded(size, addresses, key, values)

    def _against_another(self, size: Size) -> str | None:
        """Why nothing is recorded for a key that has come again; makes room where it may."""
        if self._is_full:
            return "there is too little memory for further recordings"
        if not (_here.may_record or self._read):
            return "further recordings would take too much of the run"
        if size not in self._sizes and len(self._sizes) >= MOST:
            if self._since < RESTED:
                return f"{MOST} recordings of other sizes are in use"
            self._sizes.popitem(last=False)
        return None

    def _release_movers(self, values: Values) -> None:
        """Has inputs copied from now on that do not stay where they are."""
        for place, known in [*self._known.items()]:
            address = values[place].data_ptr()
            if address in known:
                self._moved[place] = 0
                continue
            known.add(address)
            self._moved[place] += 1
            if self._moved[place] >= MOST_ADDRESSES:
                del self._known[place]
                self._held.remove(place)
                self._copied.append(place)
                self._sizes.clear()

    def _recorded(
        self, size: Size, addresses: Addresses, key: int, values: Values
    ) -> Recording | str:
        copied = [i for i in self._copied if self._is_here(values[i])]
        keys, start = self.plain.keys(values), time.perf_counter()
        try:
            recording = Recording(self.recorder, self.plain, values, keys, copied, self._saved)
        except (NoRoom, torch.OutOfMemoryError):
            self._is_full = True
            return "there is too little memory for a recording"
        except Exception as error:
            self._refuse(error)
            return ""
        finally:
            if self.replays.took is not None:
                self.replays.took(time.perf_counter() - start)
        self.replays.recorded += 1
        self._since = 0
        self._seen.pop(key, None)
        self._sizes.setdefault(size, {}).setdefault(addresses, []).append(recording)
        return recording

    def _refuse(self, error: Exception) -> None:
        """Runs the plain function from now on."""
        self._refused = True
        self._sizes.clear()
        self.replays.refused[self.name] = _reason(error)

    def _size(self, values: Values) -> Size | str:
        """Of a run; why it can have none where it cannot."""
        hosts = [i for i in (*self._copied, *self._read) if not self._is_here(values[i])]
        if any(values[i].numel() > MOST_NUMBERS for i in hosts):
            return "an input is on another device"
        if any(not self._is_here(values[i]) for i in self._known):
            return "a parameter is on another device"
        read = [values[i].data_ptr() for i in self._read if i not in hosts]
        if any(address not in self.recorder.lasting for address in read):
            return "what it reads was saved by a run that was no replay"
        return Size(
            tuple([(t.shape, t.stride()) for t in values]),
            # By their spelling: no number equals one that is none, and 0.0 equals -0.0.
            tuple([(i, repr(values[i].tolist())) for i in hosts]),
            settings_of_kernels(),
        )

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device == self.recorder.device


def _reason(error: BaseException) -> str:
    """Of the first in a row of errors: those that follow are consequences."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    text = f"{error}".partition("\n")[0]
    return text if isinstance(error, Unrecordable) else f"{type(error).__name__}: {text}"
