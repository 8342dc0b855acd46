"""``Session``: one ONNX file in onnxruntime, run on torch tensors without a copy of any."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from ortrain.deploy.unread import noted
from ortrain.errors import ExecutionError, InputError, UnsupportedInput, listing
from ortrain.kinds import shown
from ortrain.pytorch.sessions import OrtDevice, OrtValueVector, runner_of
from ortrain.runtime.onnxruntime.exchange import all_to_torch, to_ort

CPU = "CPUExecutionProvider"
# Of torch, for the providers whose tensors torch can hold where they are computed.
_DEVICES = {"CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "cuda"}

_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(int16)": torch.int16,
    "tensor(int8)": torch.int8,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}
_RUN = onnxruntime.RunOptions()
_RUN.log_severity_level = 4  # what fails is raised, and need not be printed as well


@dataclass(frozen=True)
class Value:
    """An input or an output of a file.

    Attributes:
        name: in the file.
        dtype: of its elements.
        shape: its sizes; a string or None is an open one.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...]

    def __str__(self) -> str:
        return f"{self.name}{[size if size is not None else '?' for size in self.shape]}"


class Session:
    """An ONNX file, loaded.

    On the CPU, tensors go in and come out by reference. On a GPU, inputs are bound where they lie
    and outputs are left there; ``binding=False`` copies both through the CPU instead.

    Args:
        path: of the file.
        provider: name of the execution provider.
        options: of the session.
        provider_options: of the provider.
        binding: whether tensors are handed over by reference.
        grows: whether the sizes of its tensors grow from call to call, as a cache does. An arena
            would keep memory for every size that it ever had; it is used where ``options`` say so.

    Attributes:
        inputs: name → value, in the file's order.
        outputs: likewise.
        device: where its tensors are.
        unread: names of what the model takes and the file does not, as the answer does not depend
            on it.

    Raises:
        InputError: the file is missing, damaged, or refused by onnxruntime.
        ValueError: the installed onnxruntime has no such provider.
    """

    def __init__(
        self,
        path: Path,
        *,
        provider: str = CPU,
        options: onnxruntime.SessionOptions | None = None,
        provider_options: Mapping[str, Any] | None = None,
        binding: bool = True,
        grows: bool = False,
    ) -> None:
        available = onnxruntime.get_available_providers()
        if provider not in available:
            raise ValueError(
                f"provider={provider!r}: the installed onnxruntime has {listing(available)}"
            )
        self.path, self.provider, self.binding = Path(path), provider, binding
        self._grows = grows
        self._options, self._provider_options = options, dict(provider_options or {})
        self._loaded = _loaded(
            self.path, provider, options or _options(grows), self._provider_options
        )
        self.inputs = {value.name: _value(value, self.path) for value in self._loaded.get_inputs()}
        self.outputs = {v.name: _value(v, self.path) for v in self._loaded.get_outputs()}
        self.device = _device(provider, self._provider_options)
        self.unread = noted(self._loaded.get_modelmeta().custom_metadata_map)
        self._names = [*self.inputs]
        self._fetches = [*self.outputs]
        here = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
        self._places = [here] * len(self._fetches)
        self._bools = [i for i, v in enumerate(self.outputs.values()) if v.dtype is torch.bool]

    def on(self, provider: str, provider_options: Mapping[str, Any]) -> Session:
        """The same file with another provider."""
        return Session(
            self.path,
            provider=provider,
            options=self._options,
            provider_options=provider_options,
            binding=self.binding,
            grows=self._grows,
        )

    @property
    def inference_session(self) -> onnxruntime.InferenceSession:
        """Onnxruntime's own."""
        return self._loaded

    @property
    def providers(self) -> list[str]:
        """The execution providers, in the order of preference."""
        return self._loaded.get_providers()

    def run(self, feeds: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Runs the file.

        Args:
            feeds: a tensor for each input, of its dtype, on the session's device.

        Returns:
            The outputs in the file's order.

        Raises:
            ExecutionError: onnxruntime refused the tensors, or failed.
        """
        try:
            if self.device.type == "cpu":
                return self._by_reference(feeds)
            return self._bound(feeds) if self.binding else self._copied(feeds)
        except Exception as error:
            given = listing([f"{name}{[*feeds[name].shape]}" for name in self._names], 12)
            raise ExecutionError(
                f"onnxruntime failed to run {self.path.name} on {given}",
                where=str(self.path),
                because=str(error).strip().splitlines()[0],
                help=f"the file takes {listing([str(v) for v in self.inputs.values()], 12)}",
            ) from error

    def _by_reference(self, feeds: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        vector, fetches = OrtValueVector(), OrtValueVector()
        push = vector.push_back
        for name in self._names:
            push(to_ort(feeds[name]))
        runner_of(self._loaded)(_RUN, self._names, vector, self._fetches, fetches, self._places)
        return all_to_torch(fetches, self._bools)

    def _bound(self, feeds: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Through an IOBinding, which lets a GPU read and write its own memory."""
        binding = self._loaded.io_binding()
        kind, index = self.device.type, self.device.index or 0
        held = [feeds[name].contiguous() for name in self._names]
        for name, tensor in zip(self._names, held, strict=True):
            element = _element(tensor.dtype)
            shape, pointer = tuple(tensor.shape), tensor.data_ptr()
            binding.bind_input(name, kind, index, element, shape, pointer)
        for name in self._fetches:
            binding.bind_output(name, kind, index)
        if kind == "cuda":  # what torch has yet to write must be there when the session reads
            torch.cuda.current_stream(self.device).synchronize()
        self._loaded.run_with_iobinding(binding, _RUN)
        binding.synchronize_outputs()
        return all_to_torch(binding.get_outputs_as_ortvaluevector(), self._bools)

    def _copied(self, feeds: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        arrays = {name: feeds[name].cpu().numpy() for name in self._names}
        found = self._loaded.run(self._fetches, arrays, _RUN)
        return [torch.from_numpy(array).to(self.device) for array in found]


def _options(grows: bool) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if grows:
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
    return options


def _loaded(
    path: Path,
    provider: str,
    options: onnxruntime.SessionOptions,
    provider_options: dict[str, Any],
) -> onnxruntime.InferenceSession:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        session = onnxruntime.InferenceSession(
            os.fspath(path), options, providers=[(provider, provider_options)], enable_fallback=0
        )
    except Exception as error:
        raise InputError(
            f"onnxruntime cannot load {path.name}",
            where=str(path),
            because=str(error).strip().splitlines()[0],
            help="an unfinished copy and weights missing beside the file look like this: copy or "
            "export it again",
        ) from error
    if provider not in session.get_providers():
        raise InputError(
            f"onnxruntime could not load its {provider} for {path.name}",
            help="install the libraries that this build of onnxruntime asks for, or take "
            f"provider={CPU!r}",
        )
    return session


def _value(value: Any, path: Path) -> Value:
    if value.type not in _DTYPES:
        raise InputError(
            f"{path.name} has {value.name!r} of type {value.type}, which no tensor of torch is",
            where=str(path),
        )
    return Value(value.name, _DTYPES[value.type], tuple(value.shape))


def _device(provider: str, options: Mapping[str, Any]) -> torch.device:
    kind = _DEVICES.get(provider)
    return (
        torch.device("cpu")
        if kind is None
        else torch.device(kind, int(options.get("device_id", 0)))
    )


_ELEMENTS: dict[torch.dtype, Any] = {}


def _element(dtype: torch.dtype) -> Any:
    """The number of an element type in ONNX."""
    if not _ELEMENTS:
        import onnx

        names = {
            torch.float32: "FLOAT",
            torch.float16: "FLOAT16",
            torch.bfloat16: "BFLOAT16",
            torch.float64: "DOUBLE",
            torch.int64: "INT64",
            torch.int32: "INT32",
            torch.int16: "INT16",
            torch.int8: "INT8",
            torch.uint8: "UINT8",
            torch.bool: "BOOL",
        }
        _ELEMENTS.update((d, getattr(onnx.TensorProto, name)) for d, name in names.items())
    return _ELEMENTS[dtype]


def converted(name: str, tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """A tensor as a file takes it: whole numbers and masks in its width, floats in its precision.

    Raises:
        UnsupportedInput: one is of floats and the other is not.
    """
    if tensor.dtype is value.dtype:
        return tensor
    if tensor.is_complex() or tensor.is_floating_point() is not value.dtype.is_floating_point:
        raise UnsupportedInput(
            f"{name} is of {tensor.dtype}", because=f"the file takes {value.dtype} there"
        )
    return tensor.to(value.dtype)


def described(sessions: Sequence[Session]) -> str:
    """What files take and give, for an error."""
    rows = []
    for session in sessions:
        taken, given = ", ".join(session.inputs), ", ".join(session.outputs)
        rows.append(f"{session.path.name} takes {taken} and gives {given}")
    return "; ".join(rows)


def expect_session_options(options: object) -> None:
    """Raises TypeError where these are no options of a session."""
    if options is not None and not isinstance(options, onnxruntime.SessionOptions):
        raise TypeError(f"session_options={shown(options)}: expected an onnxruntime.SessionOptions")
