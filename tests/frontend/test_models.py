"""Models train through the backend as in PyTorch, at several sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ortrain.frontend.graph import Graph
from tests.breadth import sampled
from tests.frontend.compiling import compiled, expect_equal, left
from tests.models import MODELS

CASES = [f"{name} {engine}" for name in MODELS for engine in ("aten", "onnxruntime")]
SAMPLE = ("bert aten", "cnn onnxruntime", "resnet aten", "mlp onnxruntime")


def _loss(output: Any) -> Any:
    return output["loss"] if isinstance(output, dict) else output[0]


@pytest.mark.filterwarnings("ignore")
@torch._dynamo.config.patch(allow_rnn=True)
@pytest.mark.parametrize("case", sampled(CASES, SAMPLE))
def test_a_model_trains_as_in_pytorch(case: str) -> None:
    name, engine = case.split()
    model = MODELS[name]
    module = model.build(dropout=0.0)
    eager = copy.deepcopy(module)
    made: list[Any] = []
    call, _ = compiled(module, engine, into=made)
    for seed, (batch, length) in enumerate(((3, 7), (4, 9), (2, 8))):
        given = model.batch(batch, length if model.has_length else 7, seed)
        found = []
        for each, run in ((module, call), (eager, eager)):
            each.zero_grad()
            loss = _loss(run(**given))
            loss.backward()
            found.append(left(each, loss))
        expect_equal(*found)
    assert all(isinstance(each, Graph) for each in made)
    assert made
