"""PyTorch's own ways to answer a classifier's questions, beside files in onnxruntime."""

from __future__ import annotations

import copy
import importlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Feeds = dict[str, np.ndarray]


class Eager:
    """A model in eager PyTorch, called with arrays as a session is.

    Args:
        model: in evaluation mode; takes the feeds by name, and returns an object with logits.
        autocast: whether products are in bfloat16, of weights that stay float32.
    """

    kernels: dict[str, int] = {}  # noqa: RUF012 - PyTorch chooses them at each call

    def __init__(self, model: nn.Module, *, autocast: bool = False) -> None:
        self._model, self._autocast = model, autocast

    def __call__(self, feeds: Feeds) -> np.ndarray:
        given = {name: torch.from_numpy(array) for name, array in feeds.items()}
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            logits: np.ndarray = self._model(**given).logits.float().numpy()
        return logits

    @property
    def size(self) -> int:
        """Bytes of its state in a file."""
        file = io.BytesIO()
        torch.save(self._model.state_dict(), file)
        return file.tell()


def plain(model: nn.Module) -> Eager:
    return Eager(model)


def bf16_weights(model: nn.Module) -> Eager:
    """All of it in bfloat16."""
    return Eager(copy.deepcopy(model).to(torch.bfloat16))


def bf16_autocast(model: nn.Module) -> Eager:
    return Eager(model, autocast=True)


def int8(engine: str) -> Callable[[nn.Module], Eager]:
    """Linear layers in PyTorch's own dynamic quantization, packed for one of its engines."""

    def make(model: nn.Module) -> Eager:
        if engine not in torch.backends.quantized.supported_engines:
            raise RuntimeError(f"this PyTorch has no engine {engine}")
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine
        try:
            with warnings.catch_warnings():  # it is deprecated, and what users have
                warnings.simplefilter("ignore")
                made = torch.ao.quantization.quantize_dynamic(
                    copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8
                )
        finally:
            torch.backends.quantized.engine = before
        return Eager(made)

    return make


def torchao(model: nn.Module) -> Eager:
    """The same by torchao, without torch.compile, which slows down the others of the process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantization: Any = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise RuntimeError("torchao is not installed") from error
    made = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(made, quantization.Int8DynamicActivationInt8WeightConfig())
    return Eager(made)


EAGER: dict[str, Callable[[nn.Module], Eager]] = {
    "eager": plain,
    "eager-bf16-weights": bf16_weights,
    "eager-bf16-autocast": bf16_autocast,
    "torch-int8-x86": int8("x86"),
    "torch-int8-onednn": int8("onednn"),
    "torchao-int8": torchao,
}
