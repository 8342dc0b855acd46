"""Dropout is turned off in a graph, for comparing it with the module."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ortrain.capture.export import capture
from ortrain.passes.without_dropout import without_dropout
from ortrain.program import Role
from ortrain.runtime.reference import ReferenceExecutor


class Attends(nn.Module):
    """Dropout as a layer, as a function and inside of attention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, value: Tensor) -> Tensor:
        value = self.drop(value)
        value = nn.functional.scaled_dot_product_attention(
            value, value, value, dropout_p=self.dropout
        )
        return nn.functional.dropout(value, self.dropout, self.training)


VALUE = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))


def test_the_graph_computes_what_the_module_does_in_evaluation() -> None:
    program = capture(Attends(0.5), (VALUE,)).program
    signature = [v.name for v in (*program.graph.inputs, *program.graph.outputs)]
    assert without_dropout(program)
    assert [v.name for v in (*program.graph.inputs, *program.graph.outputs)] == signature
    executor = ReferenceExecutor()
    compiled = executor.compile(executor.lower(program))
    feeds = [
        np.array(7, np.int64) if v in program.inputs(Role.SEED) else VALUE.numpy()
        for v in program.graph.inputs
    ]
    (result,) = compiled.run(feeds)
    np.testing.assert_allclose(result, Attends(0.0)(VALUE).numpy(), rtol=1e-5, atol=1e-6)


def test_a_graph_whose_dropout_is_off_stays_as_it_is() -> None:
    program = capture(Attends(0.5), (VALUE,)).program
    without_dropout(program)
    text = program.text()
    assert not without_dropout(program)
    assert program.text() == text
