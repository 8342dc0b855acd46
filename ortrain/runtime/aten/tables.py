"""Gradients of tables that a model reads otherwise, too, such as an embedding that is also a head.

::

    e = EmbeddingGradient(dy, weight, indices)    →    d = aten.AddRows(other, dy, indices)
    d = Add(e, other)

The rows are added where the other gradient lies: nothing of the size of the table is zeroed, added
or held beside it. In 16 bits each row would be rounded against the whole sum, which then stays.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.walk import only_reader
from ortrain.program import Program
from ortrain.runtime.aten.products import replace_with

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def add_rows(program: Program) -> int:
    """Has the rows of such a table be added to its other gradient; returns how many times."""
    changed = 0
    for node in list(program.graph):
        if (node.domain, node.op_type) != ("ortrain", "EmbeddingGradient"):
            continue
        made, reader = node.outputs[0], only_reader(node.outputs[0])
        if reader is None or (reader.domain, reader.op_type) != ("", "Add"):
            continue
        other = next((value for value in reader.inputs if value is not made), None)
        dy, table, indices = node.inputs[:3]
        if other is None or dy is None or table is None or indices is None:
            continue
        if shapes.rank(table) != 2 or shapes.dims(other) != shapes.dims(table):
            continue
        if any(v.dtype not in _WIDE or v.dtype != other.dtype for v in (dy, made)):
            continue
        padding = node.attributes.get("padding_idx")
        place = -1 if padding is None else padding.as_int()
        replace_with(program, reader, "AddRows", [other, dy, indices], padding_idx=place)
        program.graph.remove(node, safe=True)
        changed += 1
    return changed
