"""The rows of the sweep: PyTorch's own tables of operators and modules, with their samples.

``torch.testing._internal`` holds what PyTorch tests itself with: each operator and each module with
sample arguments that cover its forms. A row becomes up to three samples, each a module and the
arguments of one call; a wider sweep takes more of them, or those of another dtype.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils import _pytree as pytree

SAMPLES = 3
# The first that an operator takes on the CPU: some work on integers or complex numbers alone.
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
# What these return is whatever the memory held.
UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
     "resize_", "resize_as_", "torch.ops.aten._efficient_attention_forward"}
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One call of one module.

    Attributes:
        module: makes the module, each time with the same parameters.
        args: of the call; those tensors that require a gradient receive one.
        kwargs: likewise.
    """

    module: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """An operator or a module of PyTorch's tables.

    Attributes:
        kind: ``"operator"`` or ``"module"``.
        name: in PyTorch's table; a variant of an operator follows a dot.
        samples: makes the samples, the same at each call: at most so many, of the dtype that is
            named, or else of the first that the row takes.
    """

    kind: str
    name: str
    samples: Callable[[int, torch.dtype | None], Iterator[Sample]]

    @property
    def key(self) -> str:
        """What selects the row: ``operator nn.functional.gelu``."""
        return f"{self.kind} {self.name}"


@functools.cache
def all_rows() -> dict[str, Row]:
    """Every row by its key, operators first."""
    with warnings.catch_warnings():  # of packages that the tables can do without
        warnings.simplefilter("ignore")
        return {row.key: row for row in (*_operators(), *_modules())}


class Operator(nn.Module):
    """A module that calls an operator on tensors; all its other arguments are fixed.

    Args:
        operator: the function.
        arguments: ``(args, kwargs)`` of the call.
    """

    def __init__(self, operator: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        leaves, self.structure = pytree.tree_flatten(arguments)
        self.operator = operator
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.operator(*args, **kwargs)


def _operators() -> Iterator[Row]:
    from torch.testing._internal import common_methods_invocations as invocations

    # The table seeds its random operators inside of the call; here it must show that they draw.
    invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
    for info in invocations.op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        yield Row("operator", name, functools.partial(_operator_samples, info))


def _operator_samples(info: Any, most: int, dtype: torch.dtype | None) -> Iterator[Sample]:
    if dtype is None:
        dtype = next(d for d in DTYPES if info.supports_dtype(d, "cpu"))
    elif not info.supports_dtype(dtype, "cpu"):
        return
    differentiable = dtype in info.supported_backward_dtypes("cpu") and info.supports_autograd
    torch.manual_seed(20)
    found = info.sample_inputs("cpu", dtype, requires_grad=differentiable)
    for sample in itertools.islice(found, most):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        leaves = pytree.tree_leaves(arguments)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        yield Sample(functools.partial(Operator, info.op, arguments), tensors, {})


def _modules() -> Iterator[Row]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        yield Row("module", info.name, functools.partial(_module_samples, info))


def _module_samples(info: Any, most: int, dtype: torch.dtype | None) -> Iterator[Sample]:
    dtype = dtype or torch.float32
    if not dtype.is_floating_point:
        return
    torch.manual_seed(20)
    found = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=True
    )
    for sample in itertools.islice(found, most):
        call, constructor = sample.forward_input, sample.constructor_input
        more = {"device": "cpu", "dtype": dtype, **constructor.kwargs}
        make = functools.partial(
            _module, info.module_cls, constructor.args, constructor.kwargs, more
        )
        if issubclass(info.module_cls, LazyModuleMixin):
            make = functools.partial(_initialised, make, call)
        yield Sample(make, tuple(call.args), dict(call.kwargs))


def _initialised(make: Callable[[], nn.Module], call: Any) -> nn.Module:
    """A lazy module after the call that gives its parameters their sizes and draws them."""
    module = make()
    with torch.no_grad():
        module(*call.args, **call.kwargs)
    return module


def _module(
    cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], more: dict[str, Any]
) -> nn.Module:
    """The module; where its class takes them, with more arguments."""
    torch.manual_seed(21)
    with contextlib.suppress(TypeError):
        return cls(*args, **more).train()
    return cls(*args, **kwargs).train()
