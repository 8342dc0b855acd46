"""What libraries put around a module, whose own forward has to run at each call.

A graph has what the module inside computes. What such a forward does besides (copying the module to
other devices, counting for the exchange of gradients, gathering parameters) it has not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_COPIES = (
    "copies its module to its devices at each call; wrap the module itself, and put "
    "DistributedDataParallel around ORTModule"
)
_COUNTS = "counts its own forwards to know which gradients it exchanges; it goes around ORTModule"
_COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule")
# Classes of files that may not have been loaded: (file, class, what it does).
_RARE = (
    (
        "torch.distributed.fsdp",
        "FullyShardedDataParallel",
        "gathers its parameters for the time of its own forward",
    ),
    (
        *_COMPILED,
        "is what torch.compile has made, and runs as such; give ORTModule the module itself",
    ),
)


def needs_its_own_forward(module: nn.Module) -> str:
    """Why no graph can stand for the forward of a module or of one below it; empty where one can.

    Args:
        module: that is wrapped.
    """
    for name, each in module.named_modules():
        for kind, why in _kinds():
            if isinstance(each, kind) and not (name and _only_calls(each, kind)):
                return f"{name or 'it'} is a {kind.__name__}, which {why}"
    return ""


def _only_calls(module: object, kind: type) -> bool:
    """Whether a wrapper of a kind only calls its module, which a graph of one around it holds."""
    if isinstance(module, nn.DataParallel):
        return not module.device_ids
    return kind is _loaded(*_COMPILED)  # the graph is faster than what it compiles


def _kinds() -> Iterator[tuple[type, str]]:
    yield nn.DataParallel, _COPIES
    yield DistributedDataParallel, _COUNTS
    yield torch.jit.ScriptModule, "runs TorchScript; give ORTModule the module it was made of"
    for file, name, why in _RARE:
        kind = _loaded(file, name)
        if kind is not None:
            yield kind, why


def _loaded(file: str, name: str) -> type | None:
    """A class of a file; None where that has not been loaded."""
    kind = getattr(sys.modules.get(file), name, None)
    return kind if isinstance(kind, type) else None
