"""Gradient rules by family. Importing this package registers them all."""

from ortrain.autodiff.rules import (
    composite,
    elementwise,
    index,
    linear,
    loss,
    norm,
    reduce,
    shape,
)

__all__ = ["composite", "elementwise", "index", "linear", "loss", "norm", "reduce", "shape"]
