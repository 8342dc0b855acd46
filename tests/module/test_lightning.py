"""ORTModule in a LightningModule: everything is as with the plain module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import launch

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.slow,  # each launch loads torch and Lightning
    pytest.mark.timeout(240),
]

PROCESS = Path(__file__).with_name("lightning_process.py")
EPOCHS, BATCHES, VALIDATION = 2, 6, 2


def training(
    ours: bool, *, epochs: int = EPOCHS, precision: str = "32-true", resume: str | None = None
) -> dict[str, Any]:
    return {"ours": ours, "epochs": epochs, "precision": precision, "resume": resume}


TRAININGS = {
    "eager": training(False),
    "graph": training(True),
    "one epoch": training(True, epochs=1),
    "resumed": training(True, resume="one epoch"),
    "resumed by eager": training(False, resume="one epoch"),
    "mixed, eager": training(False, precision="bf16-mixed"),
    "mixed, ours": training(True, precision="bf16-mixed"),
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lightning") / "run"
    settings = [{"name": name, **each} for name, each in TRAININGS.items()]
    found = launch(PROCESS, folder, request.param, settings, timeout=220)
    return {"world": request.param, **dict(zip(TRAININGS, found, strict=True))}


def forwards(found: dict[str, Any]) -> int:
    """Of training, and of validation, which Lightning tries out before."""
    return len(found["losses"]) + len(found["validated"])


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["validated"] == pytest.approx(expected["validated"], rel=1e-6)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=1e-6)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    count = len(found["losses"])
    assert count
    assert found["losses"] == expected["losses"][-count:]
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


def test_losses_weights_and_validation_are_those_of_eager(results: dict[str, Any]) -> None:
    eager, ours, world = results["eager"], results["graph"], results["world"]
    assert eager["around"] == ours["around"]
    assert ours["around"] == ("Classifier" if world == 1 else "DistributedDataParallel")
    assert len(ours["losses"]) == EPOCHS * BATCHES // world
    assert len(ours["validated"]) > EPOCHS * VALIDATION // world
    assert ours["calls"] == [forwards(ours), 0]
    assert not ours["warned"]
    assert_close(ours, eager)


def test_a_checkpoint_resumes_to_the_same_bits(results: dict[str, Any]) -> None:
    assert_equal(results["resumed"], results["graph"])
    assert results["resumed"]["calls"] == [forwards(results["resumed"]), 0]


def test_the_plain_module_resumes_from_its_checkpoint(results: dict[str, Any]) -> None:
    found, expected = results["resumed by eager"], dict(results["graph"])
    for name in ("losses", "validated"):
        expected[name] = expected[name][-len(found[name]) :]
    assert_close(found, expected)


def test_mixed_precision_runs_in_pytorch_and_says_so(results: dict[str, Any]) -> None:
    ours = results["mixed, ours"]
    assert ours["calls"] == [0, forwards(ours)]
    assert ["serves reduced precision" in message for message in ours["warned"]] == [True]
    assert_equal(ours, results["mixed, eager"])
