"""Images are captured at their size; once there is another, at any."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ortrain import ORTModule
from tests.module.agreement import GRAPH, SAME


def test_a_second_size_of_images_is_captured_for_all_sizes() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    model, eager = ORTModule(copy.deepcopy(body), options=GRAPH), body
    captures = []
    for batch, height, width in ((2, 16, 16), (5, 16, 16), (3, 20, 12), (2, 24, 18), (2, 16, 16)):
        images = torch.randn(batch, 3, height, width)
        torch.testing.assert_close(model(images), eager(images), rtol=SAME, atol=SAME)
        captures.append(model.report.captures)
    assert captures == [1, 1, 2, 2, 2]
    assert model.report.mode == "graph"
