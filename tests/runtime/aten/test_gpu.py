"""Every case on a GPU: the same code, with other kernels behind PyTorch's operators."""

from __future__ import annotations

import pytest
import torch

from ortrain.runtime.aten import AtenExecutor
from ortrain.testing import check_gradients
from tests.runtime.test_cases import rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def in_float32(monkeypatch):
    """cuDNN's convolutions and recurrent layers round to TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize(("case", "variant"), list(rows()))
def test_a_case_agrees_with_the_reference(case, variant):
    check_gradients(case, only=[variant], executor=AtenExecutor("cuda"))
