"""What a forward asks of autograd while it is traced.

A trace records operators. A hook on a tensor, a ``backward()`` or a flag set on an argument are
none: the graph would be made without them, and its gradients would be others than PyTorch's. Here
they are refused where the forward comes to them. So is ``torch.autograd.grad``: its operators could
be recorded, but not what autograd has saved for them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from ortrain.capture.origin import TORCH
from ortrain.capture.trace.aside import is_aside
from ortrain.capture.trace.custom_function import checked_custom_functions
from ortrain.capture.trace.keeping import keeper, kept_modules
from ortrain.capture.trace.patched import replaced
from ortrain.capture.trace.refusal import transforming
from ortrain.errors import CaptureError
from ortrain.exclusive import this_thread
from ortrain.module_state.untouched import call_without_contents

_HOOKS = "a hook may return another gradient, and a graph does not call it"
_STATE = "a graph computes outputs and updates buffers, and nothing else"
_NUMPY = "what numpy computes is no part of a graph"
_VALUE = "the graph would keep what it finds there now"

_class: Any = Tensor  # its properties as descriptors, of which mypy knows the values alone
_autograd: Any = torch.autograd  # with what is private in it

# What is refused, with what is said of it.
_REFUSED: dict[Any, tuple[str, str]] = {
    Tensor.register_hook: ("registers a hook on a tensor", _HOOKS),
    Tensor.register_post_accumulate_grad_hook: ("registers a hook on a tensor", _HOOKS),
    _class.grad_fn.__get__: ("reads the grad_fn of a tensor", _HOOKS),
    Tensor.retain_grad: ("calls retain_grad() on a tensor", _STATE),
    _class.grad.__get__: ("reads the .grad of a tensor", _VALUE),
    _class.grad.__set__: ("sets the .grad of a tensor", _STATE),
    _class.grad.__delete__: ("deletes the .grad of a tensor", _STATE),
    _class.data.__set__: ("sets the .data of a tensor", _STATE),
    Tensor.numpy: ("turns a tensor into a numpy array", _NUMPY),
    Tensor.__array__: ("turns a tensor into a numpy array", _NUMPY),
}
_FLAGS = {Tensor.requires_grad_, _class.requires_grad.__set__}
_GRAD_FN = _class.grad_fn.__get__
_MAKES_PARAMETER = nn.Module.register_parameter.__code__  # which reads the grad_fn
_DATA = _class.data.__get__
# Hooks on saved tensors that give back what they were given.
_HARMLESS = (checkpoint._checkpoint_hook, checkpoint._recomputation_hook, graph.save_on_cpu)


@contextlib.contextmanager
def checked_autograd_calls(module: nn.Module) -> Iterator[None]:
    """Watches the forward of a module that is traced inside.

    Raises:
        CaptureError: a custom autograd function is called whose backward a trace does not know.
    """
    forward, own = module.forward, module.__dict__.get("forward")

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if (known := keeper()) is not None:
            known.given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = [*pytree.tree_leaves((args, kwargs)), *module.parameters(), *module.buffers()]
        with _Refusing(given), _no_backward(), _saving_watched():
            return forward(*args, **kwargs)

    module.forward = watched
    try:
        with checked_custom_functions(), kept_modules(module):
            yield
    finally:
        if own is None:
            del module.forward  # the class's again
        else:
            module.forward = own


def check_autograd_calls(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a forward on tensors without contents, only to look at what it asks of autograd.

    For a trace that does not run the Python code itself.

    Raises:
        CaptureError: it asks for what no graph has.
    """
    call_without_contents(module, args, kwargs, checked_autograd_calls(module))


class _Refusing(TorchFunctionMode):
    """Looks at each call into torch.

    Args:
        given: arguments and state of the module: tensors that outlive the forward.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__()
        self.given = [value for value in given if isinstance(value, Tensor)]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _GRAD_FN and sys._getframe(1).f_code is _MAKES_PARAMETER:
            raise CaptureError(
                "the forward makes a parameter or a sub-module",
                because="a graph's parameters are those that the module has before the call",
                help="make sub-modules and parameters in __init__",
            )
        if func in _REFUSED and not _stands_in(sys._getframe(1)):
            raise _refusal(*_REFUSED[func])
        if func in _FLAGS:
            tensor, wanted = args[0], (*args[1:], *kwargs.values(), True)[0]
            if tensor.requires_grad != wanted and any(tensor is each for each in self.given):
                raise _refusal("sets requires_grad of an argument or a parameter", _STATE)
        if func == _DATA:  # a trace takes it for a constant
            return args[0].detach()
        return func(*args, **kwargs)


def _stands_in(frame: FrameType) -> bool:
    """Whether PyTorch makes a stand-in of a tensor there, for which it looks at all of it."""
    return frame.f_code.co_filename.startswith(f"{TORCH}_subclasses/")


@contextlib.contextmanager
def _no_backward() -> Iterator[None]:
    """Everything that runs a backward goes through one private function of torch.autograd."""
    own, here = _autograd._engine_run_backward, this_thread()

    def refused(*args: Any, **kwargs: Any) -> Any:
        if not here() or is_aside():
            return own(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise transforming()
        raise _refusal(
            "computes gradients", "of what autograd saves for a backward, a trace knows nothing"
        )

    with replaced(_autograd, "_engine_run_backward", refused):
        yield


@contextlib.contextmanager
def _saving_watched() -> Iterator[None]:
    """Hooks on what autograd saves may save something else."""
    own, here = graph.saved_tensors_hooks.__enter__, this_thread()

    def watched(hooks: graph.saved_tensors_hooks) -> None:
        if here() and not is_aside() and not isinstance(hooks, _HARMLESS):
            raise _refusal("sets hooks on the tensors that autograd saves", _HOOKS)
        own(hooks)

    with replaced(graph.saved_tensors_hooks, "__enter__", watched):
        yield


def _refusal(what: str, because: str) -> CaptureError:
    return CaptureError(
        f"the forward {what}",
        because=because,
        help="do it outside of forward, or leave this module to eager",
    )
