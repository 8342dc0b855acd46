"""What runs a module that is on a GPU, by its settings; the tensors are PyTorch's fake ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from ortrain import Options
from ortrain.guards.guard import Ambient, ambient
from ortrain.guards.structure import flatten_call
from ortrain.step.eligibility import not_served, tried
from ortrain.step.forms import ModuleState

NOWHERE = "for which there is no execution provider"


@pytest.mark.parametrize(
    ("options", "reason", "engines"),
    [
        ({}, NOWHERE, ()),
        ({"engine": "onnxruntime"}, NOWHERE, ()),
        ({"engine": "onnxruntime", "cuda_graphs": True}, NOWHERE, ("aten",)),
        ({"engine": "aten"}, "", ()),
        ({"engine": "aten", "cuda_graphs": True}, "", ("aten",)),
        ({"cuda_graphs": True}, "", ("aten",)),
        ({"cuda_graphs": True, "inference": "onnxruntime"}, "", ("aten",)),
        ({"engine": "onnxruntime", "inference": "auto", "cuda_graphs": True}, NOWHERE, ("aten",)),
        ({"cuda_graphs": True, "provider": "CUDAExecutionProvider"}, "take tensors of the CPU", ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_contest_is_about_what_is_recorded(
    options: dict[str, Any], reason: str, engines: tuple[str, ...], dtype: torch.dtype
) -> None:
    """Where nothing is, PyTorch's functions are slower than eager, and have to be asked for."""
    chosen = Options(**options)
    with FakeTensorMode():
        x = torch.empty(3, 4, device="cuda", dtype=dtype)
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(4, 4, device="cuda", dtype=dtype))
    state, flat, modes = ModuleState.of(module), flatten_call((x,), {}), Ambient(*ambient())
    assert modes.grad
    told = not_served(module, chosen, state, modes, flat)
    assert reason in told if reason else not told
    assert tried(chosen, x.device, {dtype}) == engines
