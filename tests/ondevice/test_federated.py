"""Federated averaging: clients train by themselves, and go on from the mean of their parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from onnxruntime import OrtValue
from torch.nn import functional as F  # noqa: N812

from ortrain.ondevice import (
    CheckpointState,
    LossType,
    Module,
    Optimizer,
    OptimType,
    generate_artifacts,
)
from tests.ondevice.making.test_artifacts import mlp

RATE, ROUNDS, STEPS = 0.1, 3, 4


def test_two_clients_end_where_the_mean_of_pytorchs_ends(tmp_path: Path) -> None:
    server = mlp()
    generate_artifacts(
        server,
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.SGD,
        example_inputs=(torch.randn(6, 10),),
        artifact_directory=tmp_path,
        nominal_checkpoint=True,
    )
    files = [tmp_path / f"{name}_model.onnx" for name in ("training", "eval", "optimizer")]
    clients = []
    for _ in range(2):
        state = CheckpointState.load_checkpoint(tmp_path / "nominal_checkpoint")
        module = Module(files[0], state, files[1])
        clients.append((module, Optimizer(files[2], module)))
        clients[-1][1].set_learning_rate(RATE)
    whole = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    common = Module(files[0], whole, files[1]).get_contiguous_parameters(trainable_only=True)
    data = torch.Generator().manual_seed(1)
    for _ in range(ROUNDS):
        buffers, expected = [], []
        for module, optimizer in clients:
            module.copy_buffer_to_parameters(common)
            twin = mlp()
            twin.load_state_dict(server.state_dict())
            for _ in range(STEPS):
                x = torch.randn(6, 10, generator=data)
                labels = torch.randint(0, 5, (6,), generator=data)
                module(x.numpy(), labels.numpy())
                optimizer.step()
                module.lazy_reset_grad()
                twin.zero_grad()
                F.cross_entropy(twin(x), labels).backward()
                torch.optim.SGD(twin.parameters(), lr=RATE).step()
            buffers.append(module.get_contiguous_parameters(trainable_only=True).numpy())
            expected.append(dict(twin.named_parameters()))
        common = OrtValue.ortvalue_from_numpy(np.mean(buffers, axis=0, dtype=np.float32))
        with torch.no_grad():
            for name, parameter in server.named_parameters():
                parameter.copy_(sum(each[name] for each in expected) / 2)
    flat = torch.cat([p.detach().reshape(-1) for p in server.parameters()])
    assert clients[0][0].get_parameters_size() == flat.numel()
    np.testing.assert_allclose(common.numpy(), flat, rtol=1e-5, atol=1e-6)
