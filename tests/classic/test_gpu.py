"""On a GPU: device, float16, and buffers that are where the model is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.classic import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ["AdamOptimizer", "LambOptimizer"])
def test_training_on_a_gpu_is_near_that_on_the_cpu(name: str, mixed: bool) -> None:
    model, plain = models.classifier(), models.classifier()
    data = list(models.batches(20))
    trainer = models.second(
        model,
        models.config_of(name, model),
        device={"id": "cuda"},
        mixed_precision={"enabled": mixed},
    )
    losses = [trainer.train_step(x, y)[0].item() for x, y in data]
    optimizer = models.plain_optimizer(name, plain)
    expected = models.train_plain(plain, optimizer, data, 1, lambda _: models.RATE)
    assert losses == pytest.approx(expected, abs=0.03 if mixed else 1e-3)
    assert all(p.is_cuda and p.dtype == torch.float32 for p in model.parameters())


def test_buffers_are_saved_and_loaded_where_the_model_is() -> None:
    description = {
        "inputs": [("input", ["rows", 6]), ("y", ["rows"])],
        "outputs": [("loss", [], True)],
    }
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        trainer = models.second(model, description=description, device={"id": "cuda"})
        for x, y in models.batches(2 + seed):
            trainer.train_step(x, y)
        states.append(trainer.state_dict())
        if seed:
            trainer.load_state_dict(states[0])
            expected = torch.from_numpy(states[0]["model"]["full_precision"]["1.running_mean"])
            torch.testing.assert_close(model[1].running_mean, expected.cuda())
