"""A custom ``torch.autograd.Function`` has a backward that a trace of its forward does not know.

A trace records the operators of the forward and drops the backward that was written for them. That
is right only where the two say the same, as in BLOOM's GELU: so each function that a trace meets is
tried out afterwards, on random inputs and upstream gradients of several magnitudes in float64, and
refused where its own backward is not the derivative of its forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ortrain.errors import CaptureError

_MAGNITUDES = (1e-2, 1.0, 30.0)
_TOLERANCE = 1e-6
_MOST_ELEMENTS = 4096


@dataclass(frozen=True)
class Call:
    """A function as a trace called it; tensors as (shape, dtype)."""

    function: type[torch.autograd.Function]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype


@contextlib.contextmanager
def checked_custom_functions() -> Iterator[None]:
    """Notes every ``Function.apply`` during a trace, and tries each out behind it.

    Raises:
        CaptureError: a function's backward is not the derivative of its forward, reentrant
            checkpointing included.
    """
    seen: list[Call] = []
    own = torch.autograd.Function.__dict__["apply"]

    def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):  # ours to wrap: checkpointing, Dynamo's own
            raise _refusal(cls, "it runs code that only eager PyTorch can run again")
        seen.append(Call(cls, tuple(map(_described, args)), kwargs))
        return own.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(noted)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
    for call in seen:
        _try_out(call)


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes: list[Any] = list(value.shape)
    hints = [d if isinstance(d, int) else d.node.hint or 2 for d in sizes]
    return _Tensor(tuple(hints), value.dtype)


def _try_out(call: Call) -> None:
    """Compares the function's backward with the derivative of its forward."""
    if any(isinstance(a, _Tensor) and not a.dtype.is_floating_point for a in call.args):
        raise _refusal(call.function, "it takes integers, of which none can be made up to try it")
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        for magnitude in _MAGNITUDES:
            args = [_drawn(a, magnitude, generator) for a in call.args]
            try:
                own = _gradients(call.function.apply(*args, **call.kwargs), args, magnitude)
                true = _gradients(_forward(call.function, args, call.kwargs), args, magnitude)
            except Exception as error:
                raise _refusal(call.function, f"trying it failed: {error}") from error
            for a, b in zip(own, true, strict=True):
                if (a is None) != (b is None) or (
                    a is not None and b is not None and not _close(a, b)
                ):
                    raise _refusal(
                        call.function, "its backward is not the derivative of its forward"
                    )


def _drawn(value: Any, magnitude: float, generator: torch.Generator) -> Any:
    if not isinstance(value, _Tensor):
        return value
    shape = value.shape
    while torch.Size(shape).numel() > _MOST_ELEMENTS:  # a large batch tells no more than a few rows
        shape = (max(1, shape[0] // 2), *shape[1:])
        if shape[0] == 1:
            break
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * magnitude
    return drawn.requires_grad_()


def _forward(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The forward's own operators under autograd."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*args, **kwargs)
    return function.forward(_Context(args), *args, **kwargs)


def _gradients(output: Any, args: list[Any], magnitude: float) -> list[torch.Tensor | None]:
    outputs = [t for t in (output if isinstance(output, tuple) else (output,)) if t.requires_grad]
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    if not outputs:
        return [None] * len(inputs)
    upstream = [torch.cos(torch.arange(t.numel()).double()).view_as(t) * magnitude for t in outputs]
    return list(torch.autograd.grad(outputs, inputs, upstream, allow_unused=True))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and bool(((a - b).abs() <= _TOLERANCE * (scale or 1.0)).all())


@dataclass
class _Context:
    """Stands in for the context of a function whose backward is not called."""

    args: list[Any]
    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = field(default=())

    def __post_init__(self) -> None:
        self.needs_input_grad = tuple(isinstance(a, torch.Tensor) for a in self.args)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_dirty(self, *tensors: Any) -> None:
        raise CaptureError("the function changes its input in place")

    def mark_non_differentiable(self, *tensors: Any) -> None:
        raise CaptureError("the function declares an output not differentiable")

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _refusal(function: type, because: str) -> CaptureError:
    return CaptureError(
        f"the module calls the custom autograd function "
        f"{function.__module__}.{function.__qualname__}",
        because=f"{because}, and a captured graph would not call it",
        help="wrap the parts of the model beside it, or, for checkpointing, pass "
        "use_reentrant=False",
    )
