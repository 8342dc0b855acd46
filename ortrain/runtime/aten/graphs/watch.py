"""What cannot be recorded: an operator that depends on values, or copies from device to host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ortrain.pytorch.modes import TorchDispatchMode
from ortrain.pytorch.operators import schema_of


class Unrecordable(Exception):
    """A function does what a recording cannot."""


class Watch(TorchDispatchMode):
    """Refuses what depends on values of tensors on a device, or copies between it and the host.

    Operators are known by PyTorch's own tags. A tensor on the host with no axes may stand beside
    others: it is a number.

    Args:
        device: that is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.type = device.type

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator.

        Raises:
            Unrecordable: it is none for a recording.
        """
        operands = [*_tensors((args, kwargs or {}))]
        here = [t for t in operands if t.device.type == self.type]
        if here:
            tags = set(function.tags)
            if torch.Tag.data_dependent_output in tags:
                raise Unrecordable(f"{function} reads a value on the host")
            if torch.Tag.nondeterministic_seeded in tags and _chance(function, args, kwargs):
                raise Unrecordable(f"{function} draws from a generator of PyTorch's")
            if _indexes(function):
                if any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1])):
                    raise Unrecordable(f"{function} selects by a mask, whose count is a size")
            elif torch.Tag.dynamic_output_shape in tags:
                raise Unrecordable(f"{function} gives sizes that depend on values")
        result = function(*args, **(kwargs or {}))
        if operands:
            gone = [t for t in _tensors(result) if t.device.type != self.type]
            hosts = [t for t in operands if t.device.type != self.type and t.dim() > 0]
            copies = function in _COPIES and len(here) != len(operands)
            if (here and (gone or hosts)) or copies or (not here and len(gone) != _count(result)):
                raise Unrecordable(f"{function} copies between host and device")
        return result


def _chance(function: Any, args: Any, kwargs: Any) -> Any:
    """Of an attention's dropout, which may be none; else that of any draw."""
    names = [argument.name for argument in schema_of(function).arguments]
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    return given.get("dropout_p", 0.0) if "dropout_p" in names else 1.0


_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten.copy.default}


def _indexes(function: Any) -> bool:
    return str(function.overloadpacket).rpartition(".")[2].strip("_") in _INDEXING


_INDEXING = {"index", "index_put", "index_put_impl", "unsafe_index", "unsafe_index_put"}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def _count(value: Any) -> int:
    return sum(1 for _ in _tensors(value))
