from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import contestants
import lanes
import processor
import pytest
import step
import torch
from contestants import CONTESTANTS, Contestant, Training
from lanes import Lanes, with_bases
from torch import nn
from workloads import WORKLOADS, Workload

MLP = WORKLOADS["mlp"]


class Refused(Exception):
    pass


def refuse(*arguments: Any, **more: Any) -> Any:
    raise Refused("no such engine\nand more")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> str:
    """A contestant that raises an error."""
    monkeypatch.setitem(CONTESTANTS, "refused", Contestant(wrap=refuse))
    return "refused"


# Whether PyTorch computes products in bfloat16 is up to the processor; the setting is not.
def test_a_global_setting_holds_for_a_turn_and_no_longer() -> None:
    backend: Any = torch.backends.mkldnn
    before = [backend.matmul.fp32_precision, backend.conv.fp32_precision]
    training = Training("eager-bf16-products", MLP)
    seen = []
    step_of = training.step
    training.step = lambda: (  # type: ignore[method-assign]
        seen.append((backend.matmul.fp32_precision, backend.conv.fp32_precision)),
        step_of(),
    )[1]
    training.turn(1)
    assert seen == [("bf16", "bf16")] * 2
    assert [backend.matmul.fp32_precision, backend.conv.fp32_precision] == before


def test_autocast_is_of_the_forward_alone() -> None:
    dtypes = []

    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dtypes.append((x @ x.T).dtype)
            return x

    x = torch.randn(2, 2, requires_grad=True)
    for name in ("eager", "eager-bf16-products", "eager-bf16"):
        CONTESTANTS[name].loss(Seen(), {"x": x})
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16]


def test_those_that_others_are_compared_with_take_part() -> None:
    assert with_bases(["ort"]) == ["eager", "ort"]
    assert with_bases(["aten-bf16", "ort"]) == ["eager", "eager-bf16", "ort", "aten-bf16"]


def test_what_raises_an_error_is_left_out_with_its_reason(refusing: str) -> None:
    found = step.measure(MLP, ["eager", refusing], rounds=2, seconds=0.01)
    assert found["contestants"][refusing] == {"skipped": "Refused: no such engine"}
    row = found["contestants"]["eager"]
    assert row["ratio"] == row["ratio_same_precision"] == 1
    assert row["min_ms"] <= row["median_ms"] <= row["max_ms"]


def test_one_that_fails_in_its_turn_is_left_out_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lanes(MLP, ["eager", "ort"]) as both:
        assert both.ask("enter", "eager") > 0
        monkeypatch.setattr(Training, "turn", refuse)
        assert both.ask("turn", "eager", 1) is None
        assert both.ask("turn", "eager", 1) is None  # and is not asked again
    assert both.names == ["ort"]
    assert both.skipped == {"eager": "Refused: no such engine"}


def test_the_graph_takes_part_beside_eager() -> None:
    found = step.measure(MLP, ["eager", "ort"], rounds=1, seconds=0.01)["contestants"]
    assert found["ort"]["ran"] == "graph (onnxruntime CPUExecutionProvider)"
    assert found["eager"]["ran"] == ""


# --- processes of their own ---------------------------------------------------------------------


def test_a_process_of_its_own_has_an_environment_of_its_own_and_ends() -> None:
    apart = contestants.Apart(lambda folder: {"OMP_NUM_THREADS": "1", "A": str(folder)}, lambda: "")
    with ExitStack() as stack:
        lane = lanes.LaneApart(MLP, "cpu", apart, stack)
        assert lane.ask("enter", "eager") > 0  # before it answers it may be a copy of this process
        assert "A" not in os.environ
        variables = Path(f"/proc/{lane.process.pid}/environ").read_text().split("\0")
        assert any(each.startswith("A=/") for each in variables)
        assert lane.ask("turn", "eager", 2) > 0
        with pytest.raises(lanes.Failed, match="KeyError: 'ort'"):
            lane.ask("turn", "ort", 1)
    assert lane.process.exitcode == 0


def test_a_process_that_has_ended_is_told() -> None:
    with ExitStack() as stack:
        lane = lanes.LaneApart(MLP, "cpu", contestants.Apart(lambda folder: {}, lambda: ""), stack)
        lane.process.kill()
        with pytest.raises(lanes.Failed, match="its process has ended"):
            lane.ask("enter", "eager")


def test_what_a_contestant_cannot_have_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert CONTESTANTS["compile"].absent("cpu") == "there is no g++"
    assert CONTESTANTS["eager-bf16-products"].absent("cuda") == "only on cpu"
    assert CONTESTANTS["eager"].absent("cuda") == ""


@pytest.mark.parametrize(
    ("vendor", "compiler", "expected"),
    [
        ("GenuineIntel", "/usr/bin/gcc", "MKL is fast by itself: the processor is not AMD's"),
        ("AuthenticAMD", None, "there is no gcc"),
        ("AuthenticAMD", "/usr/bin/gcc", ""),
    ],
)
def test_mkls_fast_path_is_for_amd_alone(
    vendor: str,
    compiler: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n\n")
    monkeypatch.setattr("processor.CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    assert CONTESTANTS["eager-mkl-fast"].absent("cpu") == expected


def preloaded(library: str) -> str:
    """What MKL says of a product where a library is loaded before PyTorch."""
    code = "import torch; a = torch.ones(64, 64); a @ a"
    variables = {**os.environ, "MKL_VERBOSE": "1", "LD_PRELOAD": library}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_the_function_that_mkl_asks_is_replaced(tmp_path: Path) -> None:
    library = contestants.intel_claimed(tmp_path)["LD_PRELOAD"]
    assert ctypes.CDLL(library).mkl_serv_intel_cpu_true() == 1
    if processor.facts()["vendor"] != "GenuineIntel" or processor.facts()["mkl"] == "unknown":
        pytest.skip("what MKL says of itself is known on Intel's processors alone")
    # That it goes by the answer shows where the answer is no.
    denied = tmp_path / "denied.so"
    source = Path(library).with_suffix(".c")
    source.write_text(source.read_text().replace("return 1", "return 0"))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(denied), str(source)], check=True)
    assert "Streaming SIMD Extensions 2" in preloaded(str(denied))
    assert "Streaming SIMD Extensions 2" not in preloaded(library)


# --- workloads ----------------------------------------------------------------------------------


# The others differ in batches alone.
@pytest.mark.parametrize("name", ["minilm", "mlp", "gpt2", "masked-words", "resnet", "lstm"])
def test_a_workloads_call_has_a_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small: Workload = WORKLOADS[name]
    module, batches = small.make()
    batch = {key: value[:1] for key, value in batches[0].items()}
    if "images" in batch:
        batch["images"] = torch.randn(2, 3, 32, 32)  # batch norm needs more than one value
        batch["labels"] = torch.zeros(2, dtype=torch.long)
    loss = CONTESTANTS["eager"].loss(module, batch)
    assert loss.dim() == 0
    assert loss.requires_grad
    assert module.training


def test_workloads_are_the_same_every_time() -> None:
    (one, batches), (other, again) = MLP.make(), MLP.make()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(batches[0]["x"], again[0]["x"])
