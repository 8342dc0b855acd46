"""Gradient rules by family. Importing this package registers them all."""

from ortrain.autodiff.rules import (
    activation,
    composite,
    conv,
    custom,
    elementwise,
    index,
    linear,
    loss,
    norm,
    pool,
    recurrent,
    reduce,
    shape,
)

__all__ = [
    "activation",
    "composite",
    "conv",
    "custom",
    "elementwise",
    "index",
    "linear",
    "loss",
    "norm",
    "pool",
    "recurrent",
    "reduce",
    "shape",
]
