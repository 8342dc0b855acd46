"""Products and convolutions of float32 whose operands oneDNN rounds to bfloat16 on the way in.

Tensors stay float32, and so do the sums; of the operands eight bits are left. PyTorch has a setting
for it, ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"``, which is the process's; here it is
on while a program runs, and no longer. oneDNN has instructions for it on processors with AMX.
Elsewhere the setting changes which library multiplies, and no number: on an EPYC with AVX512-BF16 a
product of 512x768x768 took 7.1 ms in MKL and 6.2 ms in oneDNN, and a product with a vector, or
attention over 64 rows, three times as long as before. There it is left alone.
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import contextlib
import functools
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from ortrain.pytorch.precision import KNOWN, precision_of, set_precision

_OPERATORS = ("matmul", "conv", "rnn")
_asked: ContextVar[bool] = ContextVar("products in bfloat16", default=False)


@contextlib.contextmanager
def reduced_products_asked_for() -> Iterator[None]:
    """What is compiled inside, or made to compile, is to have such products."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def asked_for() -> bool:
    """Whether it is."""
    return _asked.get()


@functools.cache
def has_effect() -> bool:
    """Whether PyTorch multiplies so on this processor: found by a product that would lose a bit."""
    if not KNOWN:
        return False
    size = 256
    x, ones = torch.full((size, size), 1 + 2.0**-10), torch.ones(size, size)
    with torch.no_grad(), reduced_products():
        return bool((torch.mm(x, ones) == size).all())


class _Setting:
    """PyTorch's setting, which several threads may want at once: the last one puts it back."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        self.before: dict[str, str] = {}

    def enter(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                every = precision_of("mkldnn", "all")
                for operator in _OPERATORS:
                    own = precision_of("mkldnn", operator)
                    if own != "bf16":
                        # What equals the setting for all operators follows it, as far as one sees.
                        self.before[operator] = "none" if own == every else own
                        set_precision("mkldnn", operator, "bf16")

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                for operator, own in self.before.items():
                    set_precision("mkldnn", operator, own)
                self.before.clear()


_SETTING = _Setting()


@contextlib.contextmanager
def reduced_products() -> Iterator[None]:
    """Products and convolutions inside are of operands in bfloat16; 3 us."""
    _SETTING.enter()
    try:
        yield
    finally:
        _SETTING.leave()


class Products:
    """Products by whatever library the setting leads PyTorch to, not by the one measured before."""

    linear = staticmethod(torch.nn.functional.linear)
    mm = staticmethod(torch.mm)
    addmm = staticmethod(torch.addmm)
    matmul = staticmethod(torch.matmul)

    @staticmethod
    def adds(a: torch.Tensor, b: torch.Tensor) -> bool:
        """As of the one that measures: there is no other library here."""
        return True


__all__ = ["Products", "asked_for", "has_effect", "reduced_products", "reduced_products_asked_for"]
