"""Dropout off: for comparing a graph with the module on the same numbers.

::

    y = ortrain.Dropout<ratio=0.1, stream=3>(x, seed)
    →   y = ortrain.Dropout<ratio=0.0, stream=3>(x, seed)

and likewise the dropout inside ``ortrain::Attention``. The inputs stay what they are, the seed
among them. Changes what is computed, so it is in no pipeline.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.ops.base import DOMAIN
from ortrain.program import Program


def without_dropout(program: Program) -> bool:
    """Sets the ratio of every dropout to 0; tells whether one was above."""
    changed = False
    for node in program.graph.all_nodes():
        ratio = node.attributes.get("ratio") if node.domain == DOMAIN else None
        if ratio is not None and ratio.as_float() > 0:
            node.attributes["ratio"] = ir.AttrFloat32("ratio", 0.0)
            changed = True
    return changed
