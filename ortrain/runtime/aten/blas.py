"""Which library computes a product of float32 on the CPU: measured once a shape, and remembered.

PyTorch sends such products to the BLAS that it was built with, MKL, whose fast kernels are for
Intel's processors. oneDNN, which it has as well, is twice as fast on an AMD Zen 5 and level on an
Intel Xeon with AMX; which one wins changes with the shape. Both round alike but for the order of
sums.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ortrain.config import user_cache
from ortrain.cpuinfo import processor
from ortrain.errors import SaveError
from ortrain.files.replacing import replace_file
from ortrain.pytorch.kernels import in_linear_pointwise

Product = Callable[[], torch.Tensor]

# Below this many multiplications the call is most of the time.
SMALL = 1 << 24
# Bytes of an operand that oneDNN may copy at a time. Of the gradient of 1024 x 50257 logits a copy
# is 196 MiB; in blocks of 16 MiB the product takes as long.
COPIED = 16 << 20
# oneDNN has to be faster by more than the scatter.
MARGIN = 0.95
# One that takes so many times as long, in its best of two runs, is not tried again: what else uses
# the machine can make a run slow, but none fast.
SURE = 1.5

_linear = torch.nn.functional.linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x weightᵀ + bias``: [..., K], [N, K] and [N] → [..., N]."""
    columns, inner = weight.shape
    if _CHOICE.prefers_onednn("linear", x.numel() // max(inner, 1), columns, inner, x, weight):
        if bias is not None:  # of which it reads no strides
            bias = bias.contiguous()
        return _by_onednn(x, weight, bias)
    return _linear(x, weight, bias)


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a b``: [M, K] and [K, N] → [M, N]."""
    if _CHOICE.prefers_onednn(_form(a, b), a.shape[0], b.shape[1], b.shape[0], a, b.t()):
        if a.stride(-1) != 1 and a.nbytes > 2 * COPIED:
            return _by_blocks(a, b)
        return _by_onednn(a, b.t())
    return torch.mm(a, b)


def addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a b + c``: [M, K], [K, N], and [N] or what spreads to [M, N] → [M, N]."""
    columns = b.shape[1]
    if _CHOICE.prefers_onednn(_form(a, b), a.shape[0], columns, b.shape[0], a, b.t()):
        if c.shape == (columns,):
            return _by_onednn(a, b.t(), c.contiguous())
        return mm(a, b).add_(c)
    return torch.addmm(c, a, b)


def _by_onednn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x weightᵀ + bias``; by PyTorch's BLAS what oneDNN has no form for.

    A ``weight`` whose rows share memory, as windows that overlap, is of that kind.
    """
    try:
        product: torch.Tensor = in_linear_pointwise(x, weight, bias, "none", [], "")
    except RuntimeError:
        product = _linear(x, weight, bias)
    return product


def _by_blocks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a b`` by rows of ``a``, which oneDNN copies where it lies transposed; the same numbers."""
    result = a.new_empty(a.shape[0], b.shape[1])
    rows = max(COPIED // (a.shape[1] * a.itemsize), 1)
    for block, part in zip(result.split(rows), a.split(rows), strict=True):
        block.copy_(_by_onednn(part, b.t()))
    return result


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a b``: [..., K] and [K, N] → [..., N]."""
    rows = a.numel() // max(a.shape[-1], 1)
    if _CHOICE.prefers_onednn(_form(a, b), rows, b.shape[1], b.shape[0], a, b.t()):
        return _by_onednn(a, b.t())
    return torch.matmul(a, b)


def adds(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether sums of products grow faster by PyTorch's BLAS, which adds as it multiplies."""
    form = f"{_form(a, b)} added"
    return not _CHOICE.prefers_onednn(form, a.shape[0], b.shape[1], b.shape[0], a, b.t())


def _form(a: torch.Tensor, b: torch.Tensor) -> str:
    """Which operands lie transposed."""
    return f"mm{'n' if a.stride(-1) == 1 else 't'}{'n' if b.stride(-1) == 1 else 't'}"


class Choice:
    """What was measured on this host.

    Args:
        path: of the file that remembers it; None forgets.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[tuple[str, int, int, int], bool] = {}
        self.seconds = 0.0
        self._read: dict[str, bool] | None = None

    def prefers_onednn(
        self, form: str, rows: int, columns: int, inner: int, x: torch.Tensor, weight: torch.Tensor
    ) -> bool:
        """Whether oneDNN computes ``x weightᵀ`` faster than PyTorch's BLAS.

        Args:
            form: of the product.
            rows: of the result. Shapes with as many binary digits of it are alike.
            columns: of the result.
            inner: size of what is summed over; with a transposed left operand, as of a weight's
                gradient, these are rows of the batch, and alike likewise.
            x: first operand.
            weight: second operand, transposed.
        """
        if x.dtype is not torch.float32 or not x.is_cpu:
            return False
        summed = inner.bit_length() if form.startswith("mmt") else inner
        key = (form, rows.bit_length(), columns, summed)
        found = self.known.get(key)
        if found is not None:
            return found
        return self._find(key, rows * columns * inner, x, weight)

    def _find(
        self, key: tuple[str, int, int, int], cost: int, x: torch.Tensor, weight: torch.Tensor
    ) -> bool:
        if cost < SMALL or in_linear_pointwise is None:
            result = False
        else:
            remembered = self._remembered()
            name = f"{' '.join(map(str, key))} {torch.get_num_threads()}"
            if name not in remembered:
                added = key[0].endswith("added")
                remembered[name] = self._measured(x.detach(), weight.detach(), added)
                self._write()
            result = remembered[name]
        self.known[key] = result
        return result

    def _measured(self, x: torch.Tensor, weight: torch.Tensor, added: bool) -> bool:
        assert in_linear_pointwise is not None
        start = time.perf_counter()
        with torch.no_grad():
            if added:
                total = x.new_zeros(x.shape[0], weight.shape[0])
                is_faster = _is_faster(
                    lambda: total.add_(_by_onednn(x, weight)),
                    lambda: torch.addmm(total, x, weight.t(), out=total),
                )
            else:
                is_faster = _is_faster(
                    lambda: _by_onednn(x, weight),
                    lambda: _linear(x, weight, None),
                )
        self.seconds += time.perf_counter() - start
        return is_faster

    def _remembered(self) -> dict[str, bool]:
        if self._read is None:
            self._read = {}
            if self.path is not None:
                try:
                    found = json.loads(self.path.read_text())
                    self._read = {str(k): bool(v) for k, v in found.items()}
                except (OSError, ValueError, AttributeError):
                    pass  # nothing was measured before, or it is measured again
        return self._read

    def _write(self) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._remembered(), indent=1).encode()
            replace_file(self.path, [text], "measured products")
        except (OSError, SaveError):
            self.path = None  # a folder that cannot be written into is no reason to fail


def _is_faster(product: Product, than: Product, rounds: int = 4) -> bool:
    """Whether a product takes less time than another way to compute it, each in its best run.

    They take turns, until one is clearly slower or the rounds are over.
    """
    best = {product: math.inf, than: math.inf}
    for turn in range(rounds):
        for runs, waits in ((than, product), (product, than)):
            best[runs] = min(best[runs], _timed(runs))
            # The first run has kernels to make and caches to fill.
            if turn and best[runs] > SURE * best[waits]:
                return runs is than
    return best[product] < MARGIN * best[than]


def _timed(product: Product) -> float:
    """The seconds of a run."""
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


def _host() -> str:
    """Names what the measurements hold for: processor, PyTorch and its BLAS."""
    return f"{processor()}-torch{torch.__version__}"


_CHOICE = Choice(user_cache() / f"products-{_host()}.json")
