"""Testing gradients: of ortrain's operators and rules, and of yours in the same way.

::

    from ortrain.testing import OpCase, check_gradients, normal

    check_gradients(OpCase("Softmax", {"input": normal(3, 5)}, {"axis": 0}))

Nothing here needs PyTorch unless a case brings a PyTorch function to compare with.
"""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.testing.cases import (
    OpCase,
    between,
    distinct,
    flags,
    integers,
    normal,
    positive,
)
from ortrain.testing.gradients import Variant, check_gradients, variants
from ortrain.testing.precision import TOLERANCES, Tolerance, in_float64

__all__ = [
    "TOLERANCES",
    "OpCase",
    "Tolerance",
    "Variant",
    "between",
    "check_gradients",
    "distinct",
    "flags",
    "in_float64",
    "integers",
    "normal",
    "positive",
    "variants",
]
