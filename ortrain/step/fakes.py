"""Fake tensors, which have sizes and no numbers: none of a trace leaves a call."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ortrain.errors import StateError
from ortrain.module_state.value import SEQUENCES


def holds_fakes(value: Any) -> bool:
    """Whether a tensor is fake, or one in the containers that it is; 0.2 us for a tensor."""
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor)
    if isinstance(value, dict):
        return any(map(holds_fakes, value.values()))
    return isinstance(value, SEQUENCES) and any(map(holds_fakes, value))


def expect_own_fakes(module: nn.Module, given: Any) -> None:
    """Raises where a module that has no fake tensors, and is given none, has returned one.

    Raises:
        StateError: a trace has left it in a place that nothing watches.
    """
    own = chain(module.parameters(), module.buffers(), pytree.tree_leaves(given))
    if not any(map(holds_fakes, own)):
        raise StateError(
            f"{type(module).__name__} returns a tensor without numbers, which a trace has made",
            because="the forward keeps results in a place that cannot be watched, such as a "
            "global whose name it makes up at run time, and a trace has filled it",
            help='empty that place, and run the module with Options(engine="torch"), or keep the '
            "results in an attribute of the module",
        )
