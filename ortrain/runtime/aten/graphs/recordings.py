"""The recordings of a function: one for each key of its inputs that comes again."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from ortrain.errors import ExecutionError
from ortrain.program import Role, role_of, target_of
from ortrain.runtime.aten.graphs.recorders import Recorder
from ortrain.runtime.aten.graphs.watch import Unrecordable
from ortrain.runtime.replays import Replays

if TYPE_CHECKING:
    from ortrain.runtime.aten.executor import AtenCompiled

# Recordings that a function keeps; the one that was used longest ago makes way, once it has rested
# for so many runs: a recording costs as much as a hundred runs, and its memory stays.
MOST, RESTED = 8, 64
# Keys of runs that are remembered until they come again.
MOST_SEEN = 512
# A parameter or a buffer that has lain at more addresses is copied like other inputs.
MOST_ADDRESSES = 3
# Elements of a tensor on the host that may be part of a key.
MOST_NUMBERS = 64

_STATE = frozenset({Role.PARAMETER, Role.BUFFER})

Values = Sequence[Tensor]


class Key(NamedTuple):
    """What a recording depends on.

    Attributes:
        forms: shape and strides of each input.
        addresses: of those that are held.
        numbers: in those on the host.
        settings: of PyTorch that its kernels go by.
    """

    forms: tuple[Any, ...]
    addresses: tuple[int, ...]
    numbers: tuple[Any, ...]
    settings: tuple[Any, ...]


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
        self.used = 0
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
        self._lent: list[weakref.ref[Tensor]] = []

    def is_read(self) -> bool:
        """Whether anybody still has what the last run has saved."""
        return any(ref() is not None for ref in self._lent)

    def run(self, values: list[Tensor], keys: dict[int, Tensor]) -> list[Tensor]:
        """The outputs of the function for these values, which are dropped."""
        with torch.no_grad():
            self._enter(values, keys)
            self._replay()
            results = [*self._outputs]
            for place in self._saved:
                results[place] = self._outputs[place].detach()
            self._lent = [weakref.ref(results[place]) for place in self._saved]
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
        # The addresses at which parameters and buffers have lain.
        self._known = {i: {0} for i, role in enumerate(roles) if role in _STATE}
        self._held = [*self._known, *self._read]
        rest = {*range(len(roles))} - {*self._held, *plain.streams}
        self._copied = sorted(rest)
        is_backward = self._read or any(role is Role.GRADIENT for role, _ in outputs)
        self.name = "the backward" if is_backward else "the forward"
        self._recordings: OrderedDict[Key, Recording] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()  # hashes of keys
        self._runs = 0
        self._refused = False

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
        if not self._refused and self.recorder.is_free():
            with self.recorder.lock, self.recorder.ordered():
                recording = self._ready(values)
                if recording is not None:
                    self.replays.replayed += 1
                    return self._replayed(recording, values)
        return self.plain.run_values(values)

    def _replayed(self, recording: Recording, values: list[Tensor]) -> list[Tensor]:
        try:
            return recording.run(values, self.plain.keys(values))
        except Exception as error:
            raise ExecutionError(
                "PyTorch failed to replay the graph",
                because=f"{type(error).__name__}: {error}",
                help="Options(cuda_graphs=False) runs it without recordings",
            ) from error

    def _ready(self, values: Values) -> Recording | None:
        """The recording for a run, made where it is time for one; None where there is none."""
        self._runs += 1
        self._release_movers(values)
        key = self._key(values)
        if isinstance(key, str):
            return self._without(key)
        recording = self._recordings.get(key)
        if recording is None:
            if hash(key) not in self._seen:
                self._seen[hash(key)] = None
                if len(self._seen) > MOST_SEEN:
                    self._seen.popitem(last=False)
                return self._without("its sizes, addresses or numbers are new")
            recording = self._record(key, values)
        elif recording.is_read():
            return self._without("another backward still reads what the last run has saved")
        if recording is not None:
            recording.used = self._runs
            self._recordings.move_to_end(key)
        return recording

    def _release_movers(self, values: Values) -> None:
        """Has inputs copied from now on that do not stay where they are."""
        for place, known in [*self._known.items()]:
            known.add(values[place].data_ptr())
            if len(known) > 1 + MOST_ADDRESSES:
                del self._known[place]
                self._held.remove(place)
                self._copied.append(place)
                self._recordings.clear()

    def _record(self, key: Key, values: Values) -> Recording | None:
        if len(self._recordings) >= MOST:
            oldest, rested = next(iter(self._recordings.items()))
            if self._runs - rested.used < RESTED:
                return self._without(f"{MOST} recordings of other sizes are in use")
            del self._recordings[oldest]
        copied = [i for i in self._copied if self._is_here(values[i])]
        keys = self.plain.keys(values)
        try:
            recording = Recording(self.recorder, self.plain, values, keys, copied, self._saved)
        except Exception as error:
            self._refused = True
            self._recordings.clear()
            self.replays.refused[self.name] = _reason(error)
            return None
        self.replays.recorded += 1
        self._recordings[key] = recording
        del self._seen[hash(key)]
        return recording

    def _key(self, values: Values) -> Key | str:
        """Of a run; why it can have none where it cannot."""
        hosts = [i for i in self._copied if not self._is_here(values[i])]
        if any(values[i].numel() > MOST_NUMBERS for i in hosts):
            return "an input is on another device"
        if any(not self._is_here(values[i]) for i in self._held):
            return "a parameter, or what is saved, is on another device"
        if any(values[i].data_ptr() not in self.recorder.lasting for i in self._read):
            return "what it reads was saved by a run that was no replay"
        return Key(
            tuple([(t.shape, t.stride()) for t in values]),
            tuple([values[i].data_ptr() for i in self._held]),
            # By their spelling: no number equals one that is none, and 0.0 equals -0.0.
            tuple([(i, repr(values[i].tolist())) for i in hosts]),
            _settings(),
        )

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device == self.recorder.device

    def _without(self, reason: str) -> Recording | None:
        """No recording; notes why the plain function runs."""
        self.replays.plain[reason] = self.replays.plain.get(reason, 0) + 1
        return None


def _settings() -> tuple[Any, ...]:
    """Those that PyTorch's kernels read at each call."""
    c = torch._C
    return (
        c._get_fp32_precision_getter("cuda", "matmul"),
        c._get_fp32_precision_getter("cuda", "conv"),
        c._get_fp32_precision_getter("cuda", "rnn"),
        c._get_cudnn_enabled(),
        c._get_cudnn_benchmark(),
        c._get_cudnn_deterministic(),
        c._get_deterministic_algorithms(),
        c._get_cublas_allow_fp16_reduced_precision_reduction(),
        c._get_cublas_allow_bf16_reduced_precision_reduction(),
        c._get_cublas_allow_fp16_accumulation(),
    )


def _reason(error: BaseException) -> str:
    """Of the first in a row of errors: those that follow are consequences."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    text = f"{error}".partition("\n")[0]
    return text if isinstance(error, Unrecordable) else f"{type(error).__name__}: {text}"
