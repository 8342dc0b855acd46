"""``Traced``: a graph of ATen operators, and what its inputs and outputs are.

Whoever has traced a module makes one. Clean-up and translation ask for nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, OutputSpec


@dataclass
class Traced:
    """A graph of ATen operators.

    Attributes:
        module: the graph, which passes change in place, with the graphs nested in it.
        inputs: one for each placeholder, in order.
        outputs: one for each leaf of the output, in order.
        constants: tensors of the trace that are inputs of the graph, by name.
        held: parameters and buffers by name.
    """

    module: fx.GraphModule
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    constants: dict[str, Any]
    held: dict[str, torch.Tensor]

    @property
    def graph(self) -> fx.Graph:
        """Of the module."""
        return self.module.graph

    def names(self, kind: InputKind) -> list[str]:
        """Names of the placeholders of a kind."""
        return [each.arg.name for each in self.inputs if each.kind is kind]
