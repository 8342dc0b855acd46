"""The trained classifier as an ONNX file, proven to answer as PyTorch does before it is kept."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from ortrain.cli.text_classification.batches import Batch
from ortrain.cli.text_classification.classifier import Classifier

TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit or to 1. Float32 summed in another
order differs by about 1e-6; a wrong graph, by far more than this."""

_LARGEST_PROTO = 1_500_000_000
"""Bytes of weights beyond which they go beside the file: a protobuf holds at most 2 GiB."""


class WrongExportError(Exception):
    """The ONNX file does not answer as the PyTorch model does."""


class _Logits(torch.nn.Module):
    """Takes tensors by position and returns a tensor: a signature that every runtime has."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self.names, tensors, strict=True))).logits
        return logits


def write_onnx(classifier: Classifier, path: Path, samples: Sequence[Batch]) -> float:
    """Write the classifier in evaluation mode and compare it with PyTorch.

    Args:
        classifier: The trained model; it is left in evaluation mode.
        path: The file to write; large weights go to ``path`` + ``.data``.
        samples: Batches of different sizes to compare the answers on, at least one.

    Returns:
        The largest difference of a logit, relative to the largest logit or to 1.

    Raises:
        WrongExportError: The difference is above ``TOLERANCE``.
    """
    classifier.model.eval()
    names = [name for name in samples[0] if name != "labels"]
    module = _Logits(classifier.model, names).eval()
    size = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    # Any sizes but 0 and 1, which the exporter would take for constants.
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
    dynamic: Any = (tuple({0: "batch", 1: "sequence"} for _ in names),)
    with _without_warnings():
        torch.onnx.export(
            module,
            example,
            path,
            dynamo=True,
            verbose=False,
            input_names=names,
            output_names=["logits"],
            dynamic_shapes=dynamic,
            external_data=size > _LARGEST_PROTO,
        )
    difference = _difference(module, names, path, samples)
    if not difference <= TOLERANCE:
        raise WrongExportError(
            f"{path.name} differs from PyTorch by {difference:.1e}, more than {TOLERANCE:.0e}"
        )
    return difference


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the exporter on its own insides; what matters is compared afterwards."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _difference(
    module: torch.nn.Module, names: Sequence[str], path: Path, samples: Sequence[Batch]
) -> float:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    taken = {value.name for value in session.get_inputs()}
    largest = 0.0
    for batch in samples:
        with torch.no_grad():
            expected = module(*(batch[name] for name in names)).numpy()
        # An input that cannot change the answer is not an input of the file.
        feeds = {name: batch[name].numpy() for name in names if name in taken}
        (actual,) = session.run(["logits"], feeds)
        scale = max(1.0, float(np.abs(expected).max()))
        largest = max(largest, float(np.abs(actual - expected).max()) / scale)
    return largest
