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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm

from ortrain.errors import CaptureError
from ortrain.exclusive import this_thread

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


def _no_ctc(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    here = this_thread()

    def ctc_loss(*args: Any, **kwargs: Any) -> Tensor:
        if here():
            raise CaptureError(
                "the CTC loss cannot be captured",
                because="ONNX has no operator that sums over alignments",
                help="return the log-probabilities and compute the loss outside of the module",
            )
        return own(*args, **kwargs)

    return ctc_loss


def _requires_gradient(src: Tensor, encoder: Any) -> bool:
    return src.requires_grad or any(p.requires_grad for p in encoder.layers[0].parameters())


@contextlib.contextmanager
def traceable_layers() -> Iterator[None]:
    """Replaces these layers' code, before anything takes hold of a module's ``forward``."""
    owners = (
        (_batch_norm, "forward", _averaging(_batch_norm.forward)),
        (_encoder, "forward", _unpacked(_encoder.forward)),
        (_transformer, "_detect_is_causal_mask", _as_told),
        (torch, "ctc_loss", _no_ctc(torch.ctc_loss)),
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
