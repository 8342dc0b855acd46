"""Dimensions that a squeeze takes away though their size is a symbol.

``if x.size(1) != 1: raise …`` makes it a condition that the size is 1, and leaves the symbol where
it is: of the operators behind it, each has to be told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import Emitter, arguments_of

aten = torch.ops.aten
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def select_symbols_of_one(module: fx.GraphModule) -> None:
    """Takes the one element of such a dimension, which is the same."""
    for node in list(module.graph.nodes):
        if node.target not in _SQUEEZES:
            continue
        given: Any = node.args[0]
        before, after = given.meta["val"].shape, node.meta["val"].shape
        wanted: Any = arguments_of(node).get("dim")
        if wanted is None:
            wanted = range(len(before))
        elif isinstance(wanted, int):
            wanted = [wanted]
        places = sorted({dim % len(before) for dim in wanted}) if len(before) else []
        plain = [dim for dim in places if isinstance(before[dim], int) and before[dim] == 1]
        symbols = [dim for dim in places if not isinstance(before[dim], int)]
        if len(before) - len(after) != len(plain) + len(symbols) or not symbols:
            continue
        with module.graph.inserting_before(node):
            emit, result = Emitter(module.graph, node), given
            for dim in sorted(plain + symbols, reverse=True):
                result = emit(aten.select.int, result, dim, 0)
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
