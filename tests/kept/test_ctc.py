"""The CTC loss inside of a module stays PyTorch's, and the module around it is a graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortrain import Options, ORTModule
from ortrain.errors import CaptureError
from tests.module.agreement import SAME


class Recognizer(nn.Module):
    """A layer of letters over frames, and the loss of a text as a layer or as a function."""

    def __init__(self, reduction: str, layer: bool) -> None:
        super().__init__()
        self.letters, self.reduction = nn.Linear(4, 6), reduction
        self.loss = nn.CTCLoss(reduction=reduction, zero_infinity=True) if layer else None

    def forward(self, x: Tensor, texts: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        scores = self.letters(x).log_softmax(-1)
        if self.loss is not None:
            return torch.as_tensor(self.loss(scores, texts, frames, lengths)).mean()
        whole = torch.full((x.shape[1],), x.shape[0])
        return F.ctc_loss(scores, texts, whole, lengths, reduction=self.reduction)


def batch(length: int, count: int) -> tuple[Tensor, ...]:
    """Frames, texts, and the lengths of both."""
    return (
        torch.randn(length, count, 4),
        torch.randint(1, 6, (count, 4)),
        torch.randint(8, length, (count,)),
        torch.randint(1, 5, (count,)),
    )


def gradients(module: nn.Module, inner: nn.Module, inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss of one step, and what it gives the weights."""
    inner.zero_grad()
    loss = module(*inputs)
    loss.backward()
    return loss.detach(), [p.grad for p in inner.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("reduction", "layer", "engine"),
    [
        ("mean", True, "aten"),
        ("mean", True, "onnxruntime"),
        ("none", True, "aten"),
        ("sum", False, "aten"),
    ],
)
def test_one_graph_serves_other_frames_texts_and_lengths(
    reduction: str, layer: bool, engine: str
) -> None:
    eager = Recognizer(reduction, layer)
    module = copy.deepcopy(eager)
    graph = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    for length, count in ((12, 3), (10, 2), (12, 3)):
        inputs = batch(length, count)
        loss, found = gradients(graph, module, inputs)
        its, expected = gradients(eager, eager, inputs)
        torch.testing.assert_close(loss, its, rtol=SAME, atol=SAME)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=SAME, atol=SAME)
    assert (graph.report.mode, graph.report.captures) == ("graph", 1)


def test_of_a_module_that_is_the_loss_alone_nothing_is_left_to_a_graph() -> None:
    graph = ORTModule(nn.CTCLoss(), options=Options(engine="aten", fallback="raise"))
    scores = torch.randn(12, 3, 6).log_softmax(-1).requires_grad_()
    with pytest.raises(CaptureError, match="alignments"):
        graph(scores, torch.randint(1, 6, (3, 4)), torch.full((3,), 12), torch.full((3,), 4))
