"""Two processes on the CPU: the parameters are those of Trainer under the same launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # each launch loads torch and transformers twice

ROOT = Path(__file__).parents[2]


def launch(folder: Path, world: int, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains in so many processes; figures and weights of the first."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("process.py")),
                str(rank),
                str(world),
                str(folder),
                json.dumps(settings),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    result = torch.load(folder / "result.pt")
    return result["figures"], result["weights"]


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, rtol: float) -> None:
    for name, weight in expected.items():
        if "key.bias" not in name and "c_attn.bias" not in name:
            torch.testing.assert_close(found[name], weight, rtol=rtol, atol=rtol / 10, msg=name)


@pytest.mark.parametrize(("model", "kind"), [("bert", "classes"), ("gpt2", "copy")])
def test_two_processes_end_where_trainer_ends(tmp_path: Path, model: str, kind: str) -> None:
    settings = {"model": model, "kind": kind, "max_steps": 4, "per_device_train_batch_size": 4}
    plain, expected = launch(tmp_path / "plain", 2, trainer="plain", **settings)
    ours, weights = launch(tmp_path / "ort", 2, trainer="ort", **settings)
    assert plain["wrapped"] == ours["wrapped"] == "DistributedDataParallel"
    assert ours["calls"] == [4, 0]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert_same(weights, expected, rtol=1e-3)


def test_two_processes_with_accumulation_end_where_one_with_all_of_the_batch_does(
    tmp_path: Path,
) -> None:
    """For a model that counts its items, as GPT-2's loss does."""
    settings = {"model": "gpt2", "kind": "copy", "max_steps": 3, "trainer": "ort"}
    settings["optim"] = "sgd"  # Adam would turn roundings of zero gradients into steps
    two, found = launch(
        tmp_path / "two",
        2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        **settings,
    )
    _, expected = launch(tmp_path / "one", 1, per_device_train_batch_size=16, **settings)
    assert two["calls"] == [6, 0]
    assert_same(found, expected, rtol=1e-4)
