"""Layers of ``torch.nn`` whose Python code asks for values, in a form that a trace can follow.

While a module is traced, they compute the same without asking:

- Batch normalization with ``momentum=None`` turns the number of batches into a Python number. Here
  a batch's share in the running statistics stays a tensor.
- A transformer compares its mask with a causal one, only to pick a faster kernel for it. Here it
  does not.
- An evaluated ``TransformerEncoder`` without gradients packs what a padding mask leaves over, which
  puts zeros at padded places. A trace would take the other way, so it is refused.
- DeepSpeed puts a custom function in the place of ``torch.nn.functional.linear``, for good and for
  all modules of the process. It computes the same, and saves what autograd keeps.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm

from ortrain.capture.origin import is_users
from ortrain.capture.trace.aside import is_aside
from ortrain.capture.trace.keeping import Keeper, keeper, kept_as
from ortrain.errors import CaptureError
from ortrain.exclusive import this_thread
from ortrain.kept.call import Site

_transformer: Any = transformer
_encoder: Any = transformer.TransformerEncoder
_batch_norm: Any = _BatchNorm


def _averaging(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Batch normalization whose running statistics are plain averages."""
    here = this_thread()

    def forward(self: Any, input: Tensor) -> Tensor:
        running = self.track_running_stats and self.num_batches_tracked is not None
        plain = self.momentum is not None or not self.training or not running
        if plain or not here():
            return own(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        output = functional.batch_norm(
            input, None, None, self.weight, self.bias, True, 0.0, self.eps
        )
        with torch.no_grad():
            axes = [axis for axis in range(input.ndim) if axis != 1]
            share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
            self.running_mean.lerp_(input.mean(axes), share)
            self.running_var.lerp_(input.var(axes), share)
        return output

    return forward


def _as_told(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
    """Whether a caller has said that a mask is causal; its values say so to a kernel alone."""
    return bool(is_causal)


def _unpacked(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An encoder that refuses to be traced where eager would pack its input."""
    here = this_thread()

    def forward(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if (
            here()
            and src_key_padding_mask is not None
            and mask is None
            and src.ndim == 3
            and getattr(self, "use_nested_tensor", False)
            and not self.layers[0].training
            and torch.backends.mha.get_fastpath_enabled()
            and not (torch.is_grad_enabled() and _requires_gradient(src, self))
        ):
            raise CaptureError(
                "an evaluated TransformerEncoder with a padding mask cannot be captured",
                because="without gradients PyTorch packs its input, which leaves zeros at padded "
                "places, or does not, by the mask's values",
                help="make it with enable_nested_tensor=False, or leave its evaluation to eager",
            )
        return own(self, src, mask, src_key_padding_mask, is_causal)

    return forward


def _own_linear(found: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """PyTorch's own in the place of DeepSpeed's."""
    own: Callable[..., Tensor] = torch._C._nn.linear
    return own if getattr(found, "__module__", "").startswith("deepspeed.") else found


def _kept_ctc(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The CTC loss, which stays PyTorch's; refused where it cannot, or where nothing else is left.

    A trace has no way into it: lengths are read from the memory of their tensors.
    """
    here = this_thread()

    def ctc_loss(*args: Any, **kwargs: Any) -> Tensor:
        known = keeper()
        if here() and not is_aside() and known is not None and _is_beside(known):
            given: Any = inspect.signature(_ctc_arguments).bind(*args, **kwargs)
            given.apply_defaults()
            site = Site("the CTC loss", _line(), "ONNX has no operator that sums over alignments")
            return kept_as(known, own, args, kwargs, site, _ctc_result(**given.arguments))
        if here() and not is_aside():
            raise CaptureError(
                "the CTC loss cannot be captured",
                because="ONNX has no operator that sums over alignments",
                help="return the log-probabilities and compute the loss outside of the module",
            )
        return own(*args, **kwargs)

    return ctc_loss


def _is_beside(known: Keeper) -> bool:
    """Whether operators stay PyTorch's and the module has more to it than the loss."""
    module = known.module
    return known.operators and module is not None and any(p.dim() > 1 for p in module.parameters())


def _line() -> str:
    """The line of the user's code that calls what PyTorch runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"({frame.f_code.co_filename}:{frame.f_lineno})"


def _ctc_arguments(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any,
    blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
) -> None:  # fmt: skip
    """As ``torch.ctc_loss`` takes them."""


def _ctc_result(log_probs: Tensor, reduction: int, **_: Any) -> Tensor:
    """A tensor like what the loss is: of each text of a batch where it is not reduced."""
    return log_probs.new_empty(() if reduction or log_probs.dim() < 3 else log_probs.shape[1:2])


def _requires_gradient(src: Tensor, encoder: Any) -> bool:
    return src.requires_grad or any(p.requires_grad for p in encoder.layers[0].parameters())


@contextlib.contextmanager
def traceable_layers() -> Iterator[None]:
    """Replaces these layers' code, before anything takes hold of a module's ``forward``."""
    owners = (
        (_batch_norm, "forward", _averaging(_batch_norm.forward)),
        (_encoder, "forward", _unpacked(_encoder.forward)),
        (_transformer, "_detect_is_causal_mask", _as_told),
        (torch, "ctc_loss", _kept_ctc(torch.ctc_loss)),
        (functional, "linear", _own_linear(functional.linear)),
    )
    own = [getattr(owner, name) for owner, name, _ in owners]
    for owner, name, other in owners:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for (owner, name, _), before in zip(owners, own, strict=True):
            setattr(owner, name, before)
