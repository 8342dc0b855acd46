"""Recurrent layers in a trace: one operator for all steps.

To learn the shapes of what ``aten.lstm`` and its kin return, PyTorch runs their steps one by one,
which fixes the length of the sequence. While a module is traced, these functions say the shapes.

A packed sequence is refused: its sizes are the values of a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.nn.utils.rnn import PackedSequence

from ortrain.errors import CaptureError
from ortrain.exclusive import this_thread

aten = torch.ops.aten

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def _layers(
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
    width = states[0].shape[2] * (2 if bidirectional else 1)
    first, second = input.shape[1::-1] if batch_first else input.shape[:2]
    output = input.new_empty((first, second, width)) + zero  # in memory by steps, in any case
    return output.transpose(0, 1) if batch_first else output, *(
        state.new_empty(state.shape) + zero for state in states
    )


def _layers_of_one_state(input: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    params, *options = rest
    return _layers(input, [state], params, *options)


_SHAPES: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    aten.lstm.input: _layers,
    aten.gru.input: _layers_of_one_state,
    aten.rnn_tanh.input: _layers_of_one_state,
    aten.rnn_relu.input: _layers_of_one_state,
}


@contextlib.contextmanager
def whole_recurrences() -> Iterator[None]:
    """Keeps the sequence's length symbolic in recurrent layers that a trace meets.

    Private of torch are an operator's ``py_kernels``, its Python implementations, and the
    ``_dispatch_cache`` in front of them.
    """
    own = {operator: dict(operator.py_kernels) for operator in _SHAPES}
    for operator, shapes in _SHAPES.items():
        operator.py_kernels.update(dict.fromkeys(_KEYS, shapes))
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in own.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


@contextlib.contextmanager
def no_packed_sequences() -> Iterator[None]:
    """Refuses packed sequences, whether they are arguments or packed on the way.

    Raises:
        CaptureError: a ``PackedSequence`` is made inside.
    """
    own, here = PackedSequence.__new__, this_thread()

    def refused(cls: type[PackedSequence], *args: Any, **kwargs: Any) -> PackedSequence:
        return _refused() if here() else own(cls, *args, **kwargs)

    PackedSequence.__new__ = refused  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PackedSequence.__new__ = own  # type: ignore[method-assign]


def _refused() -> NoReturn:
    raise CaptureError(
        "a packed sequence cannot be captured",
        because="its sizes follow from the values of a tensor, the lengths",
        help="leave the sequences padded and mask what is past their end, or leave this to eager",
    )
