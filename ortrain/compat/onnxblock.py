"""Names of ``onnxblock`` in ONNX Runtime 1.13 and 1.14, in whose place others came."""

from __future__ import annotations

from ortrain.extras import require

require("onnx", __name__)

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
from onnx import TensorProto

from ortrain.ondevice.making.base import Accessor, base, current, empty_base
from ortrain.ondevice.onnxblock import TrainingBlock

__all__ = ["TrainingModel", "onnx_model"]

_TRAINED = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


class TrainingModel(TrainingBlock):
    """A :class:`TrainingBlock` that trains every parameter which is not named otherwise.

    As then, those are all initializers of floating dtypes; the running statistics of batch
    normalization are not among them.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As :class:`TrainingBlock`."""
        graph = current().model.graph
        running = {
            name
            for node in graph.node
            if node.op_type == "BatchNormalization"
            for name in node.input[3:5]
        }
        for initializer in graph.initializer:
            if initializer.data_type in _TRAINED and initializer.name not in running:
                self._trained.setdefault(initializer.name, True)
        return super().__call__(*args, **kwargs)


@contextmanager
def onnx_model(model: onnx.ModelProto | None = None) -> Iterator[Accessor]:
    """Blocks called inside are stacked on the model itself, which is changed; or on an empty one.

    Args:
        model: changed when the ``with`` statement ends without an error.

    Yields:
        The accessor, with ``model`` and, once a training model was called, ``eval_model``.

    Raises:
        StateError: there is a base around this one.
        TypeError: it is no model.
    """
    if model is None:
        with empty_base() as accessor:
            yield accessor
        return
    with base(model) as accessor:
        yield accessor
    model.CopyFrom(accessor.model)
