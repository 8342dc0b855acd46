"""Architectures train through the backend as in PyTorch, at three sizes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.frontend.backend import InPyTorch
from tests.architectures import ARCHITECTURES
from tests.breadth import sampled
from tests.frontend.compiling import compiled, expect_equal_steps
from tests.hunt.fronts import SETTINGS

SAMPLE = ("mamba", "mixtral")
METHODS = ("debug", "info", "warning", "warning_once", "warning_advice", "error")
LOGGING = {getattr(logging.Logger, each, None) for each in METHODS} - {None}


@pytest.mark.filterwarnings("ignore")
@torch._dynamo.config.patch(**SETTINGS, ignore_logging_functions=LOGGING)
@pytest.mark.parametrize("name", sampled([*ARCHITECTURES], SAMPLE))
def test_an_architecture_trains_as_in_pytorch(name: str) -> None:
    model = ARCHITECTURES[name]
    module = model.build(dropout=0.0)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    eager, made = copy.deepcopy(module), list[Any]()
    call, _ = compiled(module, into=made)
    for seed, (batch, length) in enumerate(((3, 8), (4, 12), (2, 16))):
        given = model.batch(batch, length if model.has_length else 8, seed)

        def loss_of(run: Any, seed: int = seed, given: Any = given) -> Tensor:
            torch.manual_seed(seed)
            output = run(**given)
            loss: Tensor = output["loss"] if isinstance(output, dict) else output[0]
            return loss

        expect_equal_steps(module, call, eager, loss_of)
    assert any(not isinstance(each, InPyTorch) for each in made)
