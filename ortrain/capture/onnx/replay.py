"""What a graph draws, put in the place of what an ATen operator would draw.

The twin of ``ortrain/capture/onnx/translations/random.py``: the same formulas on tensors, over
:func:`ortrain.ops.random.drawn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ortrain.ops.random import drawn

aten = torch.ops.aten

Numbers = Callable[..., torch.Tensor]
"""Draws ``(kind, shape, dtype=, chance=)`` from the seed and stream of an operator."""

_REPLAYED: dict[Any, Callable[..., Any]] = {}


def replay(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any], *, seed: int, stream: int
) -> Any:
    """What an operator that draws random numbers returns with those of a graph.

    In-place operators write into their tensor and return it. None of the formulas is
    differentiable: this is for below autograd, where a ``TorchDispatchMode`` stands.

    Args:
        operator: an ATen overload with the tag ``nondeterministic_seeded``, as PyTorch dispatches
            it: of a dropout its ``aten.bernoulli_.float``.
        args: of the call.
        kwargs: of the call.
        seed: of the step.
        stream: how many draws came before it in the forward.

    Returns:
        What the operator returns; NotImplemented where it draws nothing, or no graph has it.
    """
    function = _REPLAYED.get(operator)
    if function is None or kwargs.get("generator") is not None:
        return NotImplemented

    def numbers(
        kind: str, shape: Sequence[int], dtype: torch.dtype | None = None, chance: float = 1.0
    ) -> torch.Tensor:
        digits = 24
        if kind == "uniform" and dtype is not None:
            digits = min(digits, 1 - round(math.log2(torch.finfo(dtype).eps)))
        array = drawn(kind, tuple(shape), seed=seed, stream=stream, chance=chance, digits=digits)
        return torch.from_numpy(np.asarray(array)).to(device, dtype)

    tensors = (a for a in args if isinstance(a, torch.Tensor))
    device = kwargs.get("device") or next((t.device for t in tensors), torch.device("cpu"))
    return function(numbers, *args, **kwargs)


def is_replayed(operator: Any) -> bool:
    """Whether :func:`replay` knows an operator."""
    return operator in _REPLAYED


def _replays(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        _REPLAYED.update(dict.fromkeys(operators, function))
        return function

    return enter


# -- real numbers --------------------------------------------------------------------------------


def _of_size(kind: str) -> Callable[..., torch.Tensor]:
    def draw(numbers: Numbers, size: Sequence[int], *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return numbers(kind, size, dtype or torch.get_default_dtype())

    return draw


def _like(kind: str) -> Callable[..., torch.Tensor]:
    def draw(numbers: Numbers, like: torch.Tensor, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return numbers(kind, like.shape, dtype or like.dtype)

    return draw


_REPLAYED.update(
    {
        aten.rand.default: _of_size("uniform"),
        aten.randn.default: _of_size("normal"),
        aten.rand_like.default: _like("uniform"),
        aten.randn_like.default: _like("normal"),
    }
)


def _moved(numbers: torch.Tensor, offset: float, scale: float) -> torch.Tensor:
    numbers = numbers if scale == 1 else numbers * scale
    return numbers if offset == 0 else numbers + offset


@_replays(aten.uniform_.default)
def _uniform(
    numbers: Numbers, tensor: torch.Tensor, low: float = 0.0, high: float = 1.0, **kw: Any
) -> torch.Tensor:
    low, high = kw.get("from", low), kw.get("to", high)
    return tensor.copy_(_moved(numbers("uniform", tensor.shape, tensor.dtype), low, high - low))


@_replays(aten.normal_.default)
def _normal(
    numbers: Numbers, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> torch.Tensor:
    return tensor.copy_(_moved(numbers("normal", tensor.shape, tensor.dtype), mean, std))


@_replays(aten.log_normal_.default)
def _log_normal(
    numbers: Numbers, tensor: torch.Tensor, mean: float = 1.0, std: float = 2.0, **_: Any
) -> torch.Tensor:
    return tensor.copy_(_moved(numbers("normal", tensor.shape, tensor.dtype), mean, std).exp())


@_replays(aten.exponential_.default)
def _exponential(
    numbers: Numbers, tensor: torch.Tensor, lambd: float = 1.0, **_: Any
) -> torch.Tensor:
    drawn = numbers("exponential", tensor.shape, tensor.dtype)
    return tensor.copy_(drawn if lambd == 1 else drawn / lambd)


@_replays(aten.cauchy_.default)
def _cauchy(
    numbers: Numbers, tensor: torch.Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any
) -> torch.Tensor:
    angle = (numbers("uniform", tensor.shape, tensor.dtype) - 0.5) * math.pi
    return tensor.copy_(_moved(angle.tan(), median, sigma))


@_replays(aten.geometric_.default)
def _geometric(numbers: Numbers, tensor: torch.Tensor, p: float, **_: Any) -> torch.Tensor:
    drawn = numbers("exponential", tensor.shape, tensor.dtype)
    return tensor.copy_((drawn / -math.log1p(-p)).ceil())


@_replays(aten.normal.float_float)
def _normal_of_numbers(
    numbers: Numbers, mean: float, std: float, size: Sequence[int], *, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _moved(numbers("normal", size, dtype or torch.get_default_dtype()), mean, std)


@_replays(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def _normal_of_tensors(numbers: Numbers, mean: Any, std: Any = 1.0, **_: Any) -> torch.Tensor:
    like = mean if isinstance(mean, torch.Tensor) else std
    shape = torch.broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, torch.Tensor)))
    if like is not std and isinstance(std, torch.Tensor):
        std = std.to(like.dtype)
    drawn = numbers("normal", shape, like.dtype)
    drawn = drawn if isinstance(std, float) and std == 1 else drawn * std
    return drawn if isinstance(mean, float) and mean == 0 else drawn + mean


@_replays(aten.rrelu_with_noise.default)
def _rrelu(
    numbers: Numbers,
    input: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    **_: Any,
) -> torch.Tensor:
    """``noise``, which the backward reads, is the slope."""
    if not training:
        return NotImplemented
    drawn = _moved(numbers("uniform", input.shape, input.dtype), lower, upper - lower)
    noise.copy_(torch.where(input <= 0, drawn, 1.0))
    return (input * noise).contiguous()  # as the kernel leaves it


# -- masks ---------------------------------------------------------------------------------------


@_replays(aten.bernoulli_.float)
def _bernoulli_(numbers: Numbers, tensor: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    return tensor.copy_(numbers("bernoulli", tensor.shape, chance=p))


@_replays(aten.bernoulli.p)
def _bernoulli_p(numbers: Numbers, like: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    return numbers("bernoulli", like.shape, chance=p).to(like.dtype)


@_replays(aten.bernoulli.default)
def _bernoulli(numbers: Numbers, chance: torch.Tensor, **_: Any) -> torch.Tensor:
    return _below(numbers, chance.shape, chance).to(chance.dtype)


@_replays(aten.bernoulli_.Tensor)
def _bernoulli_of_tensor(
    numbers: Numbers, tensor: torch.Tensor, chance: torch.Tensor, **_: Any
) -> torch.Tensor:
    return tensor.copy_(_below(numbers, tensor.shape, chance))


def _below(numbers: Numbers, shape: Sequence[int], chance: torch.Tensor) -> torch.Tensor:
    return numbers("bits", shape).double() < chance.double() * 2.0**32


@_replays(aten.native_dropout.default)
def _native_dropout(
    numbers: Numbers, input: torch.Tensor, p: float, train: bool | None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return NotImplemented
    mask = numbers("bernoulli", input.shape, chance=1 - p)
    return input * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


# -- whole numbers -------------------------------------------------------------------------------


def _whole(
    numbers: Numbers, low: int, high: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return (numbers("bits", shape) * (high - low) // 2**32 + low).to(dtype)


@_replays(aten.randint.default)
def _randint(
    numbers: Numbers, high: int, size: Sequence[int], *, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _whole(numbers, 0, high, size, dtype or torch.int64)


@_replays(aten.randint.low)
def _randint_low(
    numbers: Numbers, low: int, high: int, size: Sequence[int], *, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _whole(numbers, low, high, size, dtype or torch.int64)


@_replays(aten.randint_like.default)
def _randint_like(
    numbers: Numbers, like: torch.Tensor, high: int, *, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _whole(numbers, 0, high, like.shape, dtype or like.dtype)


@_replays(aten.randint_like.low_dtype)
def _randint_like_low(
    numbers: Numbers, like: torch.Tensor, low: int, high: int, *, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _whole(numbers, low, high, like.shape, dtype or like.dtype)


@_replays(aten.random_.to)
def _random_to(numbers: Numbers, tensor: torch.Tensor, to: int, **_: Any) -> torch.Tensor:
    return tensor.copy_(_whole(numbers, 0, to, tensor.shape, tensor.dtype))


@_replays(getattr(aten.random_, "from"))
def _random_from(
    numbers: Numbers, tensor: torch.Tensor, low: int, to: int, **_: Any
) -> torch.Tensor:
    return tensor.copy_(_whole(numbers, low, to, tensor.shape, tensor.dtype))


@_replays(aten.randperm.default)
def _randperm(numbers: Numbers, n: int, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return numbers("bits", (n,)).argsort(descending=True).to(dtype or torch.int64)


@_replays(aten.multinomial.default)
def _multinomial(
    numbers: Numbers, chances: torch.Tensor, count: int, replacement: bool = False, **_: Any
) -> torch.Tensor:
    if count == 1 or not replacement:
        rated = chances / numbers("exponential", chances.shape, chances.dtype)
        return rated.topk(count).indices
    sums = chances.cumsum(-1)
    drawn = numbers("uniform", (*chances.shape[:-1], count), chances.dtype) * sums[..., -1:]
    return (drawn[..., None] >= sums[..., None, :]).sum(-1)
