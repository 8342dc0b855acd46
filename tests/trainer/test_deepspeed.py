"""ORTTrainer on DeepSpeed ends where Trainer does under the same launch and configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import deepspeed as integration

from ortrain import ORTTrainingArguments
from tests.processes import launch

on_deepspeed = pytest.mark.deepspeed
slow = pytest.mark.slow  # each launch loads torch, transformers and DeepSpeed
PROCESS = Path(__file__).with_name("process.py")
Results = dict[str, dict[str, Any]]


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    """Of a client optimizer that DeepSpeed need not compile."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        **more,
    }


BERT = {"model": "bert", "kind": "classes", "max_steps": 4}
GPT2 = {"model": "gpt2", "kind": "copy", "max_steps": 4, "gradient_accumulation_steps": 2}
EAGER = {"trainer": "ort", "ort_fallback": "torch"}
SAVES = {"save_strategy": "steps", "save_steps": 2}
TRAININGS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {**BERT, "deepspeed": configuration(0)},
    "ZeRO 1": {**BERT, "deepspeed": configuration(1)},
    "ZeRO 2": {**GPT2, **SAVES, "deepspeed": configuration(2)},
    "ZeRO 3": {**BERT, "deepspeed": configuration(3)},
    "bf16": {**BERT, "bf16": True, "deepspeed": configuration(2, bf16={"enabled": "auto"})},
}
OURS: dict[str, dict[str, Any]] = {"ZeRO 3": EAGER, "bf16": EAGER}
BY_ATEN = {"trainer": "ort", "ort_engine": "aten"}
RUNS: dict[str, dict[str, Any]] = {
    **{f"{name}, plain": {"trainer": "plain", **run} for name, run in TRAININGS.items()},
    **{
        f"{name}, ort": {"trainer": "ort", **run, **OURS.get(name, {})}
        for name, run in TRAININGS.items()
    },
    "ZeRO 2, resumed": {
        "trainer": "ort",
        **TRAININGS["ZeRO 2"],
        "resume": "ZeRO 2, ort/checkpoint-2",
    },
    "ZeRO 2, replaced": {"trainer": "ort", **TRAININGS["ZeRO 2"], "replaces": True},
    "bf16, graph": {**TRAININGS["bf16"], **BY_ATEN},
    "ZeRO 3, raises": {"trainer": "ort", **TRAININGS["ZeRO 3"], "fails": True},
}


def run(folder: Path, world: int, runs: dict[str, dict[str, Any]]) -> Results:
    settings = [{"name": name, **each} for name, each in runs.items()]
    results = launch(PROCESS, folder, world, settings, timeout=500)
    return dict(zip(runs, results, strict=True))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All trainings in two processes."""
    return run(tmp_path_factory.mktemp("two") / "runs", 2, RUNS)


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, rtol: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=rtol / 100)
    assert found["norms"] == pytest.approx(expected["norms"], rel=rtol / 100)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=rtol / 100)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        # Gradients of the keys' biases are roundings of 0, of which Adam makes steps.
        if rtol == 0.0 or ("key.bias" not in name and "c_attn.bias" not in name):
            torch.testing.assert_close(
                found["weights"][name], weight, rtol=rtol, atol=rtol / 10, msg=name
            )


@on_deepspeed
@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "optimizer", "calls"),
    [
        ("ZeRO 0", "AdamW", 4),
        ("ZeRO 1", "DeepSpeedZeroOptimizer", 4),
        ("ZeRO 2", "DeepSpeedZeroOptimizer", 6),
    ],
)
def test_two_processes_end_where_trainer_ends_and_every_forward_is_a_graph(
    two: Results, name: str, optimizer: str, calls: int
) -> None:
    plain, ours = two[f"{name}, plain"], two[f"{name}, ort"]
    assert plain["wrapped"] == ours["wrapped"] == "DeepSpeedEngine"
    assert plain["optimizer"] == ours["optimizer"] == optimizer
    assert ours["calls"] == [calls, 0]
    assert len(ours["losses"]) == 4
    assert_same(ours, plain, rtol=1e-3)


@on_deepspeed
@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "reason"),
    [("ZeRO 3", "partitioned by DeepSpeed ZeRO stage 3"), ("bf16", "reduced precision")],
)
def test_what_a_graph_does_not_serve_is_trainers_to_the_bit(
    two: Results, name: str, reason: str
) -> None:
    plain, ours = two[f"{name}, plain"], two[f"{name}, ort"]
    assert ours["calls"] == [0, 4]
    assert [reason in message for message in ours["warned"]] == [True]
    assert_same(ours, plain, rtol=0.0)


@on_deepspeed
@slow
@pytest.mark.timeout(600)
def test_bf16_is_a_graph_in_pytorchs_operators(two: Results) -> None:
    plain, ours = two["bf16, plain"], two["bf16, graph"]
    assert ours["calls"] == [4, 0]
    assert ours["optimizer"] == plain["optimizer"]
    # The loss is in bfloat16, whose steps are 2^-8 of it.
    for name in ("losses", "eval_loss"):
        assert ours[name] == pytest.approx(plain[name], rel=2e-2)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=0.1)


@on_deepspeed
@slow
@pytest.mark.timeout(600)
def test_zero_3_is_an_error_before_the_first_step_where_there_is_no_fallback(two: Results) -> None:
    failed = two["ZeRO 3, raises"]
    assert "NotServed" in failed["kinds"]
    assert "partitioned by DeepSpeed ZeRO stage 3" in failed["error"]
    assert "stages 1 and 2 leave parameters whole" in failed["error"]


@on_deepspeed
@slow
@pytest.mark.timeout(600)
def test_a_resumed_training_ends_with_the_same_bits_and_files(two: Results) -> None:
    plain, whole, resumed = (two[f"ZeRO 2, {each}"] for each in ("plain", "ort", "resumed"))
    assert resumed["calls"] == [3, 0]
    assert whole["files"] == plain["files"]
    assert any(file.startswith("checkpoint-2/global_step2/") for file in whole["files"])
    assert resumed["losses"] == whole["losses"]
    for name, weight in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name


@on_deepspeed
@slow
@pytest.mark.timeout(600)
def test_a_callback_replaces_the_methods_of_the_optimizer_inside(two: Results) -> None:
    replaced, ours = two["ZeRO 2, replaced"], two["ZeRO 2, ort"]
    assert replaced["replaced"]
    assert not ours["replaced"]
    assert not replaced["warned"]
    assert_same(replaced, ours, rtol=1e-4)


@on_deepspeed
@slow
@pytest.mark.timeout(600)
def test_one_process_ends_where_trainer_ends(tmp_path: Path) -> None:
    names = ("ZeRO 1, plain", "ZeRO 1, ort")
    plain, ours = run(tmp_path / "one", 1, {name: RUNS[name] for name in names}).values()
    assert ours["calls"] == [4, 0]
    assert_same(ours, plain, rtol=1e-3)


# --- configurations that do not work ------------------------------------------------------------


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "dict"])
def test_without_deepspeed_the_error_says_how_to_install_it(
    tmp_path: Path, as_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = configuration(2)
    if as_file:
        path = tmp_path / "zero.json"
        path.write_text(json.dumps(config))
        config = str(path)
    monkeypatch.setattr(integration, "is_deepspeed_available", lambda: False)
    with pytest.raises(ImportError, match=r"not installed: pip install 'ortrain\[deepspeed\]'"):
        ORTTrainingArguments(str(tmp_path), deepspeed=config)


BAD: dict[str, tuple[Any, str]] = {
    "no file": ("/no/such/file.json", "/no/such/file.json"),
    "no such stage": (configuration(7), "stage"),
    "a misspelt key": (
        configuration(2, zero_optimization={"stage": 2, "overlap_com": True}),
        "overlap_com",
    ),
    "another batch": (
        configuration(2, train_micro_batch_size_per_gpu=3),
        "train_micro_batch_size_per_gpu=3 vs hf per_device_train_batch_size=8",
    ),
}


@on_deepspeed
@slow
@pytest.mark.timeout(300)
def test_a_bad_configuration_is_an_error_that_names_what_is_bad(tmp_path: Path) -> None:
    runs = {
        name: {"trainer": "ort", **BERT, "deepspeed": config, "fails": True}
        for name, (config, _) in BAD.items()
    }
    failed = run(tmp_path / "bad", 1, runs)
    for name, (_, message) in BAD.items():
        assert "ValueError" in failed[name]["kinds"], name
        assert message in failed[name]["error"], name
