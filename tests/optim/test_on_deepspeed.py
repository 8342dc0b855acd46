"""On DeepSpeed ZeRO itself, a training with the methods of `FP16_Optimizer` ends where it did."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import launch

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.slow,  # each launch loads torch and DeepSpeed in two processes
    pytest.mark.timeout(300),
]

PROCESS = Path(__file__).with_name("zero_process.py")
BF16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}
# The norms of the gradients are about 2.
CLIPPING = {"no clipping": 0.0, "clipping of longer ones": 1e3, "clipping": 0.5}
OVERFLOW = 2


def training(
    stage: int,
    optimizer: str = "FusedAdam",
    *,
    clip: float = 0.0,
    overflow: int | None = None,
    graph: bool = False,
    zero: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }
    return {"config": config, "optimizer": optimizer, "overflow": overflow, "graph": graph}


TRAININGS = {
    f"ZeRO {stage}, {optimizer}, {clip}{', overflow' if overflow else ''}": training(
        stage, optimizer, clip=CLIPPING[clip], overflow=overflow, **BF16
    )
    for stage, optimizer, clip, overflow in product(
        (1, 2), ("FusedAdam", "AdamW"), CLIPPING, (None, OVERFLOW)
    )
}
# fp16 is not among them: DeepSpeed refuses it on the CPU.
OTHERS = {
    f"ZeRO {stage}, {name}": training(stage, clip=0.5, **more)
    for stage, (name, more) in product(
        (1, 2),
        {
            "float32": {},
            "aligned parameters": {**BF16, "zero": {"parameter_alignment": True}},
            "aligned parameters in turn": {
                **BF16,
                "zero": {"parameter_alignment": True, "round_robin_gradients": True},
            },
            "accumulation": {**BF16, "gradient_accumulation_steps": 2},
            "autocast and a scaler": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        }.items(),
    )
} | {
    "ZeRO 2, gradients in float32": training(
        2, clip=0.5, data_types={"grad_accum_dtype": "fp32"}, **BF16
    )
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
UNREPLACED = {
    "offload": training(2, "AdamW", zero=OFFLOAD, **BF16),
    "no norm": training(
        2, zero={"compute_grad_norm": False}, bf16={"enabled": True, "check_grad_overflow": False}
    ),
    "ZeRO 3": training(3, "AdamW", **BF16),
    "ZeRO 0": training(0, "AdamW", bf16={"enabled": True}),
    "BF16_Optimizer": training(1, "AdamW", data_types={"grad_accum_dtype": "fp32"}, **BF16),
}
GRAPHS = {
    f"ZeRO {stage}, {optimizer}, graph": training(stage, optimizer, clip=0.5, graph=True)
    for stage, optimizer in product((1, 2), ("FusedAdam", "AdamW"))
}
NARROW_GRAPHS = {
    f"ZeRO {stage}, {name}, graph": training(stage, clip=0.5, graph=True, **more)
    for stage, (name, more) in product(
        (1, 2),
        {
            "bf16": BF16,
            "autocast and a scaler": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        }.items(),
    )
}
ALL = {**TRAININGS, **OTHERS, **UNREPLACED, **GRAPHS, **NARROW_GRAPHS}

# On each process, without and with the replaced methods.
Pairs = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pairs]:
    folder = tmp_path_factory.mktemp("zero") / "run"
    found = launch(PROCESS, folder, request.param, list(ALL.values()), timeout=280)
    return dict(zip(ALL, found, strict=True))


@pytest.mark.parametrize("name", [*TRAININGS, *OTHERS])
def test_it_ends_where_it_did(results: dict[str, Pairs], name: str) -> None:
    run = ALL[name]
    overflow = [step == run["overflow"] for step in range(6)]
    clips = run["config"]["gradient_clipping"] == 0.5
    for before, after in results[name]:
        assert not after["warned"]
        assert after["class"] == "DeepSpeedZeroOptimizer"
        assert after["skipped"] == before["skipped"] == overflow
        assert after["norms"] == pytest.approx(before["norms"], rel=3e-7)
        # What clips is a norm that may differ in its last bits, and so may all that it scales.
        rtol = 1e-6 if clips else 0.0
        for one, other in zip(before["masters"], after["masters"], strict=True):
            torch.testing.assert_close(other, one, rtol=rtol, atol=rtol / 10)
        if clips and "bf16" in run["config"]:  # then they may be rounded to the next bfloat16
            rtol = torch.finfo(torch.bfloat16).eps
        for key, weight in before["weights"].items():
            torch.testing.assert_close(
                after["weights"][key], weight, rtol=rtol, atol=min(rtol, 1e-6) / 10
            )
        assert after["scale"] == before["scale"]


@pytest.mark.parametrize("name", [*TRAININGS, *OTHERS])
def test_the_replaced_methods_are_those_that_are_called(
    results: dict[str, Pairs], name: str
) -> None:
    run = ALL[name]
    for before, after in results[name]:
        assert not before["calls"]
        assert after["calls"]["get_grad_norm_direct"] == 6 - (run["overflow"] is not None)
        checks = 6 if "bf16" in run["config"] else 0  # of others DeepSpeed looks at the norm alone
        assert after["calls"]["has_overflow_partitioned_grads_serial"] == checks


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_trains_as_the_plain_module_does(results: dict[str, Pairs], name: str) -> None:
    for plain, ours in results[name]:
        assert ours["graph_calls"] == 6
        assert ours["calls"]["get_grad_norm_direct"] == 6
        assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        assert ours["weights"].keys() == plain["weights"].keys()
        for key, weight in plain["weights"].items():
            torch.testing.assert_close(ours["weights"][key], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NARROW_GRAPHS)
def test_a_graph_in_16_bits_trains_about_as_the_plain_module_does(
    results: dict[str, Pairs], name: str
) -> None:
    for plain, ours in results[name]:
        assert ours["graph_calls"] == 6
        assert ours["skipped"] == plain["skipped"]
        assert ours["scale"] == plain["scale"]
        assert ours["losses"] == pytest.approx(plain["losses"], rel=2e-2)
        assert ours["norms"] == pytest.approx(plain["norms"], rel=0.1)


def test_the_trainings_tell_clipping_and_overflow_apart(results: dict[str, Pairs]) -> None:
    """Or the tests above would not notice a norm or an answer that is wrong."""
    name = "ZeRO 2, FusedAdam, {}"
    plain, longer, clipped, skipped = (
        results[name.format(each)][0][0]
        for each in (*CLIPPING, f"{next(iter(CLIPPING))}, overflow")
    )
    assert min(clipped["norms"]) > 0.5
    assert all(torch.equal(a, b) for a, b in zip(plain["masters"], longer["masters"], strict=True))
    for other in (clipped, skipped):
        pairs = zip(plain["masters"], other["masters"], strict=True)
        assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("offload", "with offload_optimizer DeepSpeed checks and measures each gradient on its"),
        ("no norm", "asks neither for overflows nor for the norm"),
        ("ZeRO 3", r"DeepSpeedZeroOptimizer_Stage3 is not an optimizer it knows"),
        ("ZeRO 0", r"FP16_UnfusedOptimizer is not an optimizer it knows"),
        ("BF16_Optimizer", r"BF16_Optimizer is not an optimizer it knows"),
    ],
)
def test_where_nothing_is_replaced_a_warning_says_why(
    results: dict[str, Pairs], name: str, reason: str
) -> None:
    for before, after in results[name]:
        assert [reason in message for message in after["warned"]] == [True]
        assert not after["calls"]
        assert after["losses"] == before["losses"]
