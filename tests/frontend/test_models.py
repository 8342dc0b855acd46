"""Models train through the backend as in PyTorch, at several sizes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from ortrain.frontend.export import export
from ortrain.frontend.graph import Graph
from ortrain.passes.tokens.obstacles import leaves_out
from tests.breadth import sampled
from tests.frontend.compiling import compiled, expect_equal_steps
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
        expect_equal_steps(module, call, eager, lambda run, given=given: _loss(run(**given)))
    assert all(isinstance(each, Graph) for each in made)
    assert made


PADDED = ["bert", "distilbert", "llama", "bart", "t5", "gpt2"]
METHODS = ("debug", "info", "warning", "warning_once", "warning_advice", "error")
MASKS = {"Expand", "GreaterOrEqual", "LessOrEqual", "Reshape", "Unsqueeze"}
LOGGING = {getattr(logging.Logger, each, None) for each in METHODS} - {None}


@pytest.mark.filterwarnings("ignore")
@torch._dynamo.config.patch(allow_rnn=True, ignore_logging_functions=LOGGING)
@pytest.mark.parametrize("name", sampled([*PADDED, "vit", "resnet", "recurrent"], ("bert", "vit")))
def test_its_program_is_that_of_an_export(name: str) -> None:
    """But for comparisons that each of the two finds out by another way."""
    model = MODELS[name]
    module = model.build(dropout=0.1).train()
    given = model.batch(3, 8 if model.has_length else 7, 0)
    for value in given.values():
        for axis in range(min(value.dim(), 2)):
            torch._dynamo.maybe_mark_dynamic(value, axis)
    made: list[Any] = []
    call, _ = compiled(module, into=made)
    call(**given)
    (graph,) = made
    exported = export(module, (), given).program
    ours, theirs = graph.program.operators(), exported.operators()
    other = {kind for kind in ours | theirs if ours[kind] != theirs[kind]}
    assert other <= (MASKS if name in ("bart", "t5") else set())
    assert leaves_out(graph.program, "loss") == leaves_out(exported, "loss")
    assert leaves_out(exported, "loss") or name not in PADDED
