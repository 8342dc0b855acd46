"""Fake tensors, symbols, and a trace of a function of them into a graph of ATen operators.

Private: ``constant`` and ``item_memo`` of a fake tensor, and the memo of its mode's converter;
``torch._guards.detect_fake_mode`` and ``tracing``, ``enable_python_dispatcher`` of
``torch._dispatch.python``; ``make_fx(pre_dispatch=True)`` with ``get_proxy_mode``, ``track_tensor``
and ``extract_val``; ``torch._C.DisableTorchFunction``.
``torch.export`` traces in the same way. Without them no graph is made, and PyTorch runs the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._guards import detect_fake_mode, tracing
from torch._subclasses import FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import extract_val, get_proxy_mode, make_fx, track_tensor

from ortrain.pytorch.transforms import left_behind


def fake_mode_of(values: Any) -> Any:
    """The mode of the fake tensors in a list, or in lists of a list; None where there are none."""
    with apart():
        return detect_fake_mode(values)


def known_fake(mode: Any, tensor: Tensor) -> Any:
    """The fake that a mode has made of a tensor; None where it has made none."""
    asked = getattr(getattr(mode, "fake_tensor_converter", None), "_get_memo", None)
    return None if asked is None else asked(tensor)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Work on the fakes of a trace that is under way, which hears of conditions on sizes alone."""
    with tracing(None):
        yield


def traced(
    function: Callable[..., Any], fakes: Sequence[Any], *, below: bool = False
) -> fx.GraphModule:
    """The operators that a function calls, above autograd, with ``meta["val"]`` of each.

    Args:
        function: called with proxies of the fakes; ``meta`` of FX nodes that it interprets is
            handed on to the operators that come of them.
        fakes: tensors and symbolic numbers, of one mode.
        below: below autograd instead, and below transforms such as ``torch.vmap``.
    """
    mode = fake_mode_of(fakes)
    entered: Any = contextlib.nullcontext() if mode is None else mode
    trace = make_fx(
        function, tracing_mode="real", pre_dispatch=not below, _allow_non_fake_inputs=True
    )
    with contextlib.ExitStack() as stack:
        for each in (
            torch.set_grad_enabled(torch.is_grad_enabled()),  # which a trace that fails has changed
            left_behind(), apart(), entered, enable_python_dispatcher(),
            traceback.preserve_node_meta(),
        ):  # fmt: skip
            stack.enter_context(each)
        return trace(*fakes)


def number_in(tensor: Tensor) -> Any:
    """The number that a fake tensor holds, one that Dynamo has made of a float; None without."""
    return getattr(tensor, "item_memo", None)


def with_number(value: Any, known: Any) -> Any:
    """A fake tensor that holds the number of another: one that Dynamo has made of a float."""
    number = number_in(known)
    if number is not None:
        value.item_memo = number
    return value


def values_of(tensor: Tensor) -> Tensor | None:
    """A tensor with the values of one that a trace has made; None where it has none."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    constant: Tensor | None = tensor.constant
    return constant


def has_values(tensor: Tensor) -> bool:
    """Whether a fake tensor knows its values, or holds a number."""
    return any(getattr(tensor, name, None) is not None for name in ("constant", "item_memo"))


def as_plain_tensors() -> contextlib.AbstractContextManager[None]:
    """What is read of tensors inside is not heard of by the trace that is under way."""
    return torch._C.DisableTorchFunction()


def last_node() -> fx.Node:
    """The last node of the trace that is under way."""
    return next(iter(reversed(_tracer().graph.nodes)))


def node_of(value: Any) -> fx.Node | None:
    """The node of a tensor or a symbolic number in the trace that is under way."""
    proxy = _tracer().unwrap_proxy(value)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


def write(operator: Any, args: Any, kwargs: Any, result: Tensor) -> None:
    """Writes a call of an operator into the trace that is under way.

    Args:
        operator: an overload of an operator.
        args: its arguments, nodes among them.
        kwargs: those by name.
        result: its result.
    """
    tracer = _tracer()
    proxies: Any = lambda node: fx.Proxy(node, tracer)  # noqa: E731
    args, kwargs = fx.map_arg((args, kwargs), proxies)
    name = operator.overloadpacket.__name__
    proxy = tracer.create_proxy("call_function", operator, args, kwargs, name=name)
    proxy.node.meta["val"] = extract_val(result)
    track_tensor(result, proxy, constant=None, tracer=tracer)


def _tracer() -> Any:
    """Of the trace that is under way."""
    mode: Any = get_proxy_mode()
    return mode.tracer
