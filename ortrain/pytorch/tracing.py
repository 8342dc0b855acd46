"""Fake tensors, symbols, and a trace of a function of them into a graph of ATen operators.

Private: ``constant`` and ``item_memo`` of a fake tensor; ``torch._guards.detect_fake_mode`` and
``tracing``, ``torch._dispatch.python.enable_python_dispatcher``, ``make_fx(pre_dispatch=True)``.
``torch.export`` traces in the same way. Without them no graph is made, and PyTorch runs the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode, tracing
from torch._subclasses import FakeTensor
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The mode of fake tensors; None where there are none."""
    with apart():
        return detect_fake_mode([value for value in values if isinstance(value, Tensor)])


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Work on the fakes of a trace that is under way, which hears of conditions on sizes alone."""
    with tracing(None):
        yield


def traced(function: Callable[..., Any], fakes: Sequence[Any]) -> fx.GraphModule:
    """The operators that a function calls, above autograd, with ``meta["val"]`` of each.

    Args:
        function: called with proxies of the fakes; ``meta`` of FX nodes that it interprets is
            handed on to the operators that come of them.
        fakes: tensors and symbolic numbers, of one mode.
    """
    mode = fake_mode_of(fakes)
    entered: Any = contextlib.nullcontext() if mode is None else mode
    with apart(), entered, enable_python_dispatcher(), traceback.preserve_node_meta():
        return make_fx(
            function, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True
        )(*fakes)


def with_number(value: Any, known: Any) -> Any:
    """A fake tensor that holds the number of another: one that Dynamo has made of a float."""
    number = getattr(known, "item_memo", None)
    if number is not None:
        value.item_memo = number
    return value


def values_of(tensor: Tensor) -> Tensor | None:
    """A tensor with the values of one that a trace has made; None where it has none."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    constant: Tensor | None = tensor.constant
    return constant
