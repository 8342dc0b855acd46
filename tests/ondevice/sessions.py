"""Runs artifacts as any language would: sessions, names, and what the contract says of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from torch import nn

Arrays = dict[str, np.ndarray]
BUFFER, OUT = "_grad.accumulation.buffer", "_grad.accumulation.out"


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def tensors_of(module: nn.Module) -> Arrays:
    """Copies of what a module holds, by name."""
    held = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().numpy().copy() for name, tensor in held}


def run(model: Any, values: Mapping[str, Any]) -> Arrays:
    """One run of a session; it takes of the values what it asks for."""
    feeds = {each.name: values[each.name] for each in model.get_inputs()}
    names = [each.name for each in model.get_outputs()]
    return dict(zip(names, model.run(names, feeds), strict=True))


def gradients(model: Any, values: Mapping[str, Any], buffers: Arrays | None = None) -> Arrays:
    """Loss, results and gradients of one run of a training model; the gradients by parameter.

    Args:
        model: a session.
        values: inputs and tensors.
        buffers: gradients so far; without them the run begins anew, whatever the buffers hold.
    """
    trained = [o.name.removesuffix(OUT) for o in model.get_outputs() if o.name.endswith(OUT)]
    feeds = {**values, "lazy_reset_grad": np.array([buffers is None])}
    for name in trained:
        old = np.full_like(values[name], np.nan) if buffers is None else buffers[name]
        feeds[f"{name}{BUFFER}"] = old
    outputs = run(model, feeds)
    return {name.removesuffix(OUT): value for name, value in outputs.items()}
