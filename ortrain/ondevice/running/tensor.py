"""``Tensor``: memory that numpy and onnxruntime share, where the device allows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime

from ortrain.errors import ExecutionError
from ortrain.ondevice.running.checkpoint_file import Spec
from ortrain.ondevice.running.pickling import NotPickled


@dataclass(frozen=True)
class Device:
    """Where a session runs and its state lies.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        index: which of them.
    """

    kind: str = "cpu"
    index: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """The device of a name such as ``cpu``, ``cuda`` or ``cuda:1``.

        Raises:
            ValueError: no device has this name.
            ExecutionError: this onnxruntime has no execution provider for it, or there is none.
        """
        kind, _, index = text.partition(":")
        if kind not in _PROVIDERS or (index and not index.isdecimal()):
            raise ValueError(
                f"no device is called {text!r}; there are 'cpu' and 'cuda:0', 'cuda:1'…"
            )
        device = cls(kind, int(index or 0))
        available = onnxruntime.get_available_providers()
        if _PROVIDERS[kind] not in available:
            raise ExecutionError(
                f"cannot train on {text!r}",
                because=f"this onnxruntime has no {_PROVIDERS[kind]}, but {', '.join(available)}",
                help='install onnxruntime-gpu, or take device="cpu"',
            )
        if kind != "cpu":
            _check_usable(device)
        return device

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def providers(self) -> list[tuple[str, dict[str, str]]]:
        """What a session is given."""
        cpu = (_PROVIDERS["cpu"], dict[str, str]())
        # In TF32, onnxruntime's default, factors have 11 bits: after four steps of a small model a
        # running mean was off by 5e-5, against 1.5e-8. PyTorch's default is float32.
        own = (_PROVIDERS[self.kind], {"device_id": str(self.index), "use_tf32": "0"})
        return [cpu] if self.kind == "cpu" else [own, cpu]

    def check_runs(self, providers: Sequence[str]) -> None:
        """Raises where a session is not on this device: onnxruntime leaves out what it cannot load.

        Args:
            providers: of the session.

        Raises:
            ExecutionError: its provider is not among them.
        """
        if _PROVIDERS[self.kind] not in providers:
            raise ExecutionError(
                f"cannot train on '{self}'",
                because=f"onnxruntime could not load its {_PROVIDERS[self.kind]}",
                help=_LIBRARIES,
            )


def _check_usable(device: Device) -> None:
    """Raises where no memory can be had there, which takes the device and its libraries."""
    try:
        onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            [1], np.float32, device.kind, device.index
        )
    except Exception as error:  # onnxruntime has no common base of its errors
        # Its own words stand behind a line of C++.
        found = re.search(r"CUDA (failure|Provider)[^;\n]*", str(error))
        raise ExecutionError(
            f"cannot train on '{device}'",
            because=(found[0] if found else str(error)).strip().splitlines()[0],
            help="look at nvidia-smi and CUDA_VISIBLE_DEVICES for the devices that there are; "
            + _LIBRARIES,
        ) from error


_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_LIBRARIES = (
    "onnxruntime-gpu needs a CUDA and a cuDNN of its version, and onnxruntime.preload_dlls() loads "
    "those of PyTorch or of NVIDIA's wheels"
)
CPU = Device()


class Tensor(NotPickled):
    """The memory of one tensor, which sessions read and write in place.

    On the CPU it is a numpy array that ``value`` shares; elsewhere ``value`` alone is the memory.

    Args:
        spec: name, dtype and shape.
        array: of this dtype and shape, contiguous and writable; None makes zeros.
        device: where the memory lies.
    """

    def __init__(self, spec: Spec, array: np.ndarray | None = None, device: Device = CPU) -> None:
        self.spec = spec
        self.has_value = array is not None
        """Whether somebody has given it one: a nominal checkpoint has memory without content."""
        self._place(np.zeros(spec.shape, spec.dtype) if array is None else array, device)

    def _place(self, array: np.ndarray, device: Device) -> None:
        self.device = device
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy(array, device.kind, device.index)
        self._array = array if device.kind == "cpu" else None

    def to(self, device: Device) -> None:
        """Moves the memory; what shared it does so no longer."""
        if device != self.device:
            self._place(self.numpy(), device)

    def numpy(self) -> np.ndarray:
        """The memory itself on the CPU; a copy elsewhere."""
        return self.value.numpy() if self._array is None else self._array

    def assign(self, array: np.ndarray) -> None:
        """Copies an array into the memory.

        Raises:
            TypeError: it is no array, or of another dtype.
            ValueError: it is of another shape.
        """
        spec = self.spec
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{spec.name} takes a numpy array, and was given {_kind(array)}")
        if array.dtype != spec.dtype:
            raise TypeError(
                f"{spec.name} is {spec}, and was given {array.dtype} {list(array.shape)}; convert "
                f"it with array.astype({spec.dtype.name!r})"
            )
        if array.shape != spec.shape:
            raise ValueError(
                f"{spec.name} is {spec}, and was given {array.dtype} {list(array.shape)}"
            )
        self._fill(array)
        self.has_value = True

    def copy_from(self, other: Tensor) -> None:
        """Copies another's content, of the same dtype and shape."""
        self._fill(other.numpy())

    def _fill(self, array: np.ndarray) -> None:
        if self._array is None:
            self.value.update_inplace(np.ascontiguousarray(array))
        else:
            self._array[...] = array


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
