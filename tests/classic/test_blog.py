"""The four steps of the article of 2020, in two processes as mpirun starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

from ortrain.classic import supplement
from ortrain.errors import InputError
from tests.classic import blog_process as blog
from tests.classic import models
from tests.processes import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blog") / "two"


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    return launch(Path(blog.__file__), folder, 2, None)


def test_the_processes_know_who_they_are(results: Any) -> None:
    for rank, result in enumerate(results):
        found = {key: result["args"][key] for key in ("world_rank", "local_rank", "world_size")}
        assert found == {"world_rank": rank, "local_rank": rank, "world_size": 2}
        assert result["global_step"] == blog.STEPS // 2


def test_the_weights_are_those_of_plain_pytorch(results: Any) -> None:
    plain, args = blog.bert(), blog.arguments()
    decayed: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in plain.named_parameters():
        decayed[supplement.map_optimizer_attributes(name)["lambda"] > 0].append(parameter)
    optimizer = models.PlainLamb(
        [
            {"params": decayed[True], "weight_decay": 0.01},
            {"params": decayed[False], "weight_decay": 0.0},
        ],
        (0.9, 0.999),
        1e-6,
        corrects=False,
    )
    losses = []
    for i, batch in enumerate(blog.batches(2 * blog.ROWS)):
        loss = plain(*batch)
        (loss / 2).backward()
        losses.append(loss.item())
        if i % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            x = (i // 2) / args.max_steps
            share = x / 0.1 if x < 0.1 else (1 - x) ** 0.5
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * share
            optimizer.step()
            optimizer.zero_grad()
    both = [(a + b) / 2 for a, b in zip(*(r["losses"] for r in results), strict=True)]
    assert both == pytest.approx(losses, abs=1e-4)
    one, other = (result["weights"] for result in results)
    for name, parameter in plain.named_parameters():
        assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one[name], parameter.detach(), rtol=0, atol=2e-5, msg=name)


def test_the_exported_file_answers_as_the_trained_model(results: Any, folder: Path) -> None:
    path, result = folder / "bert-1.onnx", results[1]
    model = onnx.load(path)
    shapes = {
        value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    assert shapes["input_ids"] == [blog.ROWS, blog.LENGTH]
    assert {tensor.name for tensor in model.graph.initializer} & set(result["weights"])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [*shapes]
    order = ["input_ids", "segment_ids", "input_mask", "masked_lm_labels", "next_sentence_labels"]
    given = dict(zip(order, result["batch"], strict=True))
    (loss,) = session.run(["loss"], {name: given[name].numpy() for name in names})
    assert float(loss) == pytest.approx(result["evaluated"], abs=1e-4)


@pytest.mark.parametrize("name", supplement.SCHEDULES)
def test_schedules_warm_up_and_end(name: str) -> None:
    args = blog.arguments()
    args.max_steps, args.warmup_proportion = 100, 0.1
    rates = [supplement.get_lr(args, t, name) for t in range(101)]
    assert rates[:3] == pytest.approx([0.0, 0.002, 0.004])
    assert max(rates) == pytest.approx(0.02, rel=0.06)
    assert rates[-1] == pytest.approx(0.02 if name == "warmup_constant" else 0.0, abs=1e-9)
    args.max_steps = -1
    assert supplement.get_lr(args, 7, name) == 0.02


def test_an_unknown_schedule_is_told_with_near_ones() -> None:
    with pytest.raises(InputError, match=r"warmup_pol'[\s\S]*'warmup_poly'"):
        supplement.get_lr(blog.arguments(), 1, "warmup_pol")


def test_mixed_precision_of_the_example_scales_the_loss() -> None:
    args = blog.arguments()
    args.fp16, args.gradient_accumulation_steps, args.ortrain = True, 1, models.GRAPH
    device = supplement.setup_onnxruntime_with_mpi(args)
    trainer = supplement.create_ort_trainer(args, device, blog.bert())
    step, losses = 0, []
    for i, batch in enumerate(blog.batches(blog.ROWS), 1):
        loss, step = supplement.run_ort_training_step(args, step, i, trainer, batch)
        losses.append(loss.item())
    assert step == blog.STEPS
    assert args.ort_loss_scale.loss_scale_ == 65536
    assert all(torch.isfinite(torch.tensor(losses)))
