"""Two processes on the CPU: the parameters are those of Trainer under the same launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import launch

pytestmark = pytest.mark.slow  # each launch loads torch and transformers twice

PROCESS = Path(__file__).with_name("process.py")


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, rtol: float) -> None:
    for name, weight in expected.items():
        if "key.bias" not in name and "c_attn.bias" not in name:
            torch.testing.assert_close(found[name], weight, rtol=rtol, atol=rtol / 10, msg=name)


@pytest.mark.parametrize(("model", "kind"), [("bert", "classes"), ("gpt2", "copy")])
def test_two_processes_end_where_trainer_ends(tmp_path: Path, model: str, kind: str) -> None:
    settings = {"model": model, "kind": kind, "max_steps": 4, "per_device_train_batch_size": 4}
    plain, ours = launch(
        PROCESS,
        tmp_path / "both",
        2,
        [{"trainer": "plain", **settings}, {"trainer": "ort", **settings}],
    )
    assert plain["wrapped"] == ours["wrapped"] == "DistributedDataParallel"
    assert ours["calls"] == [4, 0]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert_same(ours["weights"], plain["weights"], rtol=1e-3)


def test_two_processes_with_accumulation_end_where_one_with_all_of_the_batch_does(
    tmp_path: Path,
) -> None:
    """For a model that counts its items, as GPT-2's loss does."""
    settings = {"model": "gpt2", "kind": "copy", "max_steps": 3, "trainer": "ort"}
    settings["optim"] = "sgd"  # Adam would turn roundings of zero gradients into steps
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    [two] = launch(PROCESS, tmp_path / "two", 2, [{**settings, **batches}])
    whole = {**settings, "per_device_train_batch_size": 16}
    [one] = launch(PROCESS, tmp_path / "one", 1, [whole])
    assert two["calls"] == [6, 0]
    assert_same(two["weights"], one["weights"], rtol=1e-4)
