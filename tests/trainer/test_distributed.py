"""Two processes on the CPU: the parameters are those of Trainer under the same launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import Place, launch
from tests.trainer.process import trained

pytestmark = pytest.mark.slow  # each launch loads torch and transformers twice

PROCESS = Path(__file__).with_name("process.py")


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, rtol: float) -> None:
    for name, weight in expected.items():
        if "key.bias" not in name and "c_attn.bias" not in name:
            torch.testing.assert_close(found[name], weight, rtol=rtol, atol=rtol / 10, msg=name)


# Adam would turn roundings of zero gradients into steps.
WHOLE = {"trainer": "ort", "model": "gpt2", "kind": "copy", "max_steps": 3, "optim": "sgd"}
TRAININGS = {
    f"{trainer} {model}": {
        "trainer": trainer,
        "model": model,
        "kind": kind,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
    }
    for model, kind in (("bert", "classes"), ("gpt2", "copy"))
    for trainer in ("plain", "ort")
} | {"accumulated": {**WHOLE, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each training came to, all in the same two processes: to start those costs the most."""
    settings = [{"name": name, **each} for name, each in TRAININGS.items()]
    results = launch(PROCESS, tmp_path_factory.mktemp("trainings") / "two", 2, settings)
    return dict(zip(TRAININGS, results, strict=True))


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_two_processes_end_where_trainer_ends(found: dict[str, Any], model: str) -> None:
    plain, ours = found[f"plain {model}"], found[f"ort {model}"]
    assert plain["wrapped"] == ours["wrapped"] == "DistributedDataParallel"
    assert ours["calls"] == [4, 0]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert_same(ours["weights"], plain["weights"], rtol=1e-3)


def test_two_processes_with_accumulation_end_where_one_with_all_of_the_batch_does(
    found: dict[str, Any], tmp_path: Path
) -> None:
    """For a model that counts its items, as GPT-2's loss does."""
    two = found["accumulated"]
    one = trained(Place(0, 1, tmp_path, None), {**WHOLE, "per_device_train_batch_size": 16})
    assert two["calls"] == [6, 0]
    assert_same(two["weights"], one["weights"], rtol=1e-4)
