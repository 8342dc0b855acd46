"""Images of all sizes have one graph."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ortrain import ORTModule
from tests.module.agreement import GRAPH, SAME


def test_the_graph_of_the_first_images_serves_those_of_all_sizes() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    model, eager = ORTModule(copy.deepcopy(body), options=GRAPH), body
    for batch, height, width in ((2, 16, 16), (5, 16, 16), (3, 20, 12), (2, 24, 18), (2, 16, 16)):
        images = torch.randn(batch, 3, height, width)
        torch.testing.assert_close(model(images), eager(images), rtol=SAME, atol=SAME)
        assert (model.report.mode, model.report.captures) == ("graph", 1)
