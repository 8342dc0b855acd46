"""Batch normalization in a trace, where its running statistics are plain averages.

With ``momentum=None`` a batch's share in the running statistics is ``1 / num_batches_tracked``, for
which the module turns that buffer into a Python number. While a module is traced, the share stays a
tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ortrain.exclusive import this_thread


def _averaging(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    here = this_thread()

    def forward(self: Any, input: Tensor) -> Tensor:
        running = self.track_running_stats and self.num_batches_tracked is not None
        if self.momentum is not None or not self.training or not running or not here():
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


@contextlib.contextmanager
def averaged_statistics() -> Iterator[None]:
    """Traces batch normalization without momentum in tensors alone."""
    own = _BatchNorm.forward
    _BatchNorm.forward = _averaging(own)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = own  # type: ignore[method-assign]
