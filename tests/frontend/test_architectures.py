"""Architectures train through the backend as in PyTorch, at three sizes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from ortrain.frontend.backend import InPyTorch
from tests.architectures import ARCHITECTURES
from tests.breadth import sampled
from tests.frontend.compiling import compiled, expect_equal, left
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
        found = []
        for each, run in ((module, call), (eager, eager)):
            each.zero_grad()
            torch.manual_seed(seed)
            output = run(**given)
            loss = output["loss"] if isinstance(output, dict) else output[0]
            loss.backward()
            found.append(left(each, loss))
        expect_equal(*found)
    assert any(not isinstance(each, InPyTorch) for each in made)
