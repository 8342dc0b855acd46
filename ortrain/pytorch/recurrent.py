"""Recurrent layers in a trace: one operator for all steps.

To learn the shapes of what ``aten.lstm`` and its kin return, PyTorch runs their steps one by one,
which fixes the length of the sequence. While a module is traced, these functions say the shapes.

Private of torch are an operator's ``py_kernels``, its Python implementations, and the
``_dispatch_cache`` in front of them; ``_DisablePythonDispatcher``, ``unset_fake_temporarily`` and
``disable_proxy_modes_tracing``. Without them there is a graph for each length of a sequence.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, _DisablePythonDispatcher, _is_any_autocast_enabled
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

aten = torch.ops.aten

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


@dataclass(frozen=True)
class _Layer:
    """An operator for recurrent layers.

    Attributes:
        operator: of torch.
        onednn: whether PyTorch may choose oneDNN's kernels, which torch.export turns off.
    """

    operator: Any
    onednn: bool

    def dtype_under_autocast(
        self, input: Tensor, states: Sequence[Tensor], params: Sequence[Tensor]
    ) -> torch.dtype:
        """The dtype of what the operator returns under autocast, which casts parts of it.

        Found by one step of a layer of width 2, which has contents, on the tensors' device.
        """

        def zeros(tensor: Tensor, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)

        rows = 2 * params[0].shape[0] // params[1].shape[1]
        with (
            unset_fake_temporarily(),
            disable_proxy_modes_tracing(),
            _DisablePythonDispatcher(),
            torch.backends.mkldnn.flags(enabled=self.onednn),
        ):
            held = [zeros(state, 1, 1, 2) for state in states]
            weights = [zeros(p, rows, 2) for p in params[:2]]
            weights += [zeros(p, rows) for p in params[:2]]
            options = (True, 1, 0.0, False, False, False)
            state = held if self.operator is aten.lstm.input else held[0]
            result: Tensor = self.operator(zeros(input, 1, 1, 2), state, weights, *options)[0]
        return result.dtype


def _layers(
    layer: _Layer,
    input: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The output of every step, then the last states, all of unknown values."""
    # A term of each, so that the results require a gradient where torch's do.
    terms = [value.sum() for value in (input, *states, *params)]
    zero = torch.stack(terms).sum() * 0
    if _is_any_autocast_enabled():
        dtype = layer.dtype_under_autocast(input, states, params)
        input, states, zero = input.to(dtype), [s.to(dtype) for s in states], zero.to(dtype)
    width = states[0].shape[2] * (2 if bidirectional else 1)
    first, second = input.shape[1::-1] if batch_first else input.shape[:2]
    output = input.new_empty((first, second, width)) + zero  # in memory by steps, in any case
    return output.transpose(0, 1) if batch_first else output, *(
        state.new_empty(state.shape) + zero for state in states
    )


def _layers_of_one_state(
    layer: _Layer, input: Tensor, state: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    params, *options = rest
    return _layers(layer, input, [state], params, *options)


_SHAPES: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    aten.lstm.input: _layers,
    aten.gru.input: _layers_of_one_state,
    aten.rnn_tanh.input: _layers_of_one_state,
    aten.rnn_relu.input: _layers_of_one_state,
}


@contextlib.contextmanager
def whole_recurrences() -> Iterator[None]:
    """Keeps the sequence's length symbolic in recurrent layers that a trace meets."""
    own = {operator: dict(operator.py_kernels) for operator in _SHAPES}
    onednn: bool = torch._C._get_mkldnn_enabled()
    for operator, shapes in _SHAPES.items():
        kernel = functools.partial(shapes, _Layer(operator, onednn))
        operator.py_kernels.update(dict.fromkeys(_KEYS, kernel))
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in own.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
