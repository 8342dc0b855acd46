"""Adapters on the device: apart from their model, merged into it, or as inputs of it."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from onnxruntime import AdapterFormat, OrtValue

from ortrain.errors import StateError
from ortrain.files.replacing import replace_file
from ortrain.kinds import expect, expect_path, expect_whole
from ortrain.ondevice.running.checkpoint import CheckpointState


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: ``scale * (x Aᵀ) Bᵀ`` is added to ``x W``.

    Attributes:
        weight: the name of W, [in, out].
        a: the name of A, [rank, in].
        b: the name of B, [out, rank].
        scale: factor of its output.
        transposed: W lies as [out, in], as PyTorch's.
    """

    weight: str
    a: str
    b: str
    scale: float
    transposed: bool

    def described(self) -> dict[str, object]:
        """As it stands in the checkpoint's metadata."""
        return asdict(self)


def adapters_of(state: CheckpointState) -> list[Adapter]:
    """The adapters of a state, in the model's order.

    Raises:
        StateError: it has none.
    """
    text = state.description.texts.get("adapters")
    if text is None:
        raise StateError(
            "the checkpoint has no adapters",
            help="make the artifacts with generate_artifacts(lora=LoRA(...))",
        )
    return [Adapter(**row) for row in json.loads(text)]


def export_adapter(
    state: CheckpointState,
    path: str | os.PathLike[str],
    adapter_version: int = 1,
    model_version: int = 1,
) -> None:
    """Writes the adapters alone, in onnxruntime's adapter format.

    ``onnxruntime.LoraAdapter`` loads the file, and ``RunOptions.add_active_adapter`` puts it into a
    run of what ``Module.export_model_for_inferencing(…, adapters="inputs")`` has written.

    Args:
        state: whose adapters.
        path: of the file, replaced once the new one is on the disk.
        adapter_version: noted in the file.
        model_version: noted in the file.

    Raises:
        StateError: the state has no adapters, or the checkpoint is nominal.
        SaveError: the file could not be written.
    """
    expect("state", state, CheckpointState, "a CheckpointState")
    expect_path("path", path, expected="the path of a file")
    expect_whole("adapter_version", adapter_version)
    expect_whole("model_version", model_version)
    names = [name for each in adapters_of(state) for name in (each.a, each.b)]
    state.require_values("export")
    adapter = AdapterFormat()
    adapter.set_adapter_version(adapter_version)
    adapter.set_model_version(model_version)
    values = {name: state.tensors[name].numpy() for name in names}
    adapter.set_parameters({n: OrtValue.ortvalue_from_numpy(v) for n, v in values.items()})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapter"
        adapter.export_adapter(os.fspath(file))
        replace_file(path, [file.read_bytes()], "adapter")


def merged(state: CheckpointState) -> dict[str, np.ndarray]:
    """The weights with their adapters added in, by name."""
    weights: dict[str, np.ndarray] = {}
    for each in adapters_of(state):
        a, b = (state.tensors[name].numpy().astype(np.float64) for name in (each.a, each.b))
        change = each.scale * (b @ a)
        weight = state.tensors[each.weight].numpy()
        weights[each.weight] = (weight + (change if each.transposed else change.T)).astype(
            weight.dtype
        )
    return weights


def without_rank(state: CheckpointState) -> dict[str, np.ndarray]:
    """Adapters of rank 0, which add nothing, by name."""
    empty: dict[str, np.ndarray] = {}
    for each in adapters_of(state):
        a, b = (state.tensors[name].numpy() for name in (each.a, each.b))
        empty[each.a], empty[each.b] = a[:0].copy(), b[:, :0].copy()
    return empty
