"""How far a survey goes: libraries, and objects that hold no state."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import operator
import sys
import threading
from collections import namedtuple
from collections.abc import Collection, Mapping
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ortrain.module_state.holder import slots_of
from ortrain.module_state.value import own_attributes

# Packages whose functions keep nothing in globals that a forward depends on.
_LIBRARIES = {
    *sys.stdlib_module_names, "accelerate", "deepspeed", "huggingface_hub", "lightning", "numpy",
    "onnx", "onnxruntime", "ortrain", "peft", "pytorch_lightning", "torch", "transformers",
    "typing_extensions",
}  # fmt: skip
# Those whose classes are not watched either.
_FOREIGN = {*sys.stdlib_module_names, "numpy", "torch", "typing_extensions"} - {"__main__"}
# Watched by identity only: they hold no configuration, or change with every step.
_OPAQUE = (BuiltinFunctionType, logging.Logger, Optimizer, Tensor)
_OPAQUE_PACKAGES = {
    "_abc", "_thread", "accelerate", "deepspeed", "lightning", "ortrain", "pytorch_lightning",
    "threading", "typing",
}  # fmt: skip
_TRAINER = "transformers.trainer"
# Nothing in them can change.
_CONSTANT = (
    type(NotImplemented),
    type(torch.finfo(torch.float32)),
    type(torch.iinfo(torch.int32)),
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    UnionType,
    WrapperDescriptorType,
    type(namedtuple("Example", "field").field),  # type: ignore[attr-defined]
    operator.attrgetter,
    operator.itemgetter,
    operator.methodcaller,
    np.ufunc,
)


def package(name: str) -> str:
    """The package that a module of Python is in."""
    return name.partition(".")[0]


def is_library(name: str) -> bool:
    """Whether a module of Python keeps nothing in globals that a forward depends on."""
    return package(name) in _LIBRARIES


def is_foreign(name: str) -> bool:
    """Whether the classes of a module of Python are not watched either."""
    return package(name) in _FOREIGN


def is_apart(file: Mapping[str, Any], own: Collection[str]) -> bool:
    """Whether a file is of an installed package that knows nothing of PyTorch.

    What its functions are given they work on; of what they keep for themselves only what they name
    right there is watched. einx stands on the whole of sympy: 13,000 functions, 5 s a survey.

    Args:
        file: the globals of a module of Python.
        own: packages that the watched module's own classes are in, which are never apart.
    """
    name = package(str(file.get("__name__")))
    if name in own or name not in _installed():
        return False
    return not any(map(_is_of_torch, list(file.values())))


@functools.cache
def _installed() -> frozenset[str]:
    """The packages of installed distributions: 0.3 s for a hundred, once a process."""
    return frozenset(importlib.metadata.packages_distributions()) | {"pkg_resources"}


def _is_of_torch(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return package(value.__name__) == "torch"
    kind = value if isinstance(value, type | FunctionType) else type(value)
    return package(str(kind.__module__)) == "torch"


def is_plain(value: Any) -> bool:
    """Whether an object may hold configuration in its attributes."""
    return not is_constant(value) and (
        own_attributes(value) is not None or bool(slots_of(type(value)))
    )


def is_constant(value: Any) -> bool:
    """Whether an object holds no state, or none that a forward depends on."""
    if isinstance(value, threading.local):
        return False  # which holds what each thread has put there
    if isinstance(value, (*_CONSTANT, *_OPAQUE)) or type(value) is object:
        return True
    if any(kind.__module__ == _TRAINER for kind in type(value).__mro__):
        return True  # the loop around the model, which a loss of its own is a method of
    source = type(value).__module__
    if package(source) == "torch":
        return not source.startswith("torch.distributions")
    return package(source) in _OPAQUE_PACKAGES
