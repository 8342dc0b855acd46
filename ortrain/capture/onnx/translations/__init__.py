"""Our translations from ATen to ONNX.

Those where upstream has none, or one that is wrong for training; and the common operators, so that
most graphs need no other and stay small.
"""

from ortrain.capture.onnx.translations import (
    arithmetic,
    bends,
    conv,
    custom_gradient,
    embedding_bag,
    experts,
    index,
    loss,
    new,
    nn,
    norm,
    pool,
    random,
    recurrent,
    reduce,
    resize,
    shape,
)
from ortrain.capture.onnx.translations.base import TRANSLATIONS, recorded, translating

__all__ = ["TRANSLATIONS", "recorded", "translating"]
