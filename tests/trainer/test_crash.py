"""A crash loses nothing since the last checkpoint, wherever it comes."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerState, modeling_utils
from transformers.trainer_utils import get_last_checkpoint

from ortrain import OrtrainWarning, ORTTrainer
from ortrain.errors import InputError
from ortrain.step.autograd import Step
from tests.trainer.models import arguments, bert, collate, texts

STEPS, EVERY, CRASH = 8, 2, 6  # the step that is not finished; checkpoint 4 is before it


class Crash(BaseException):
    """What a test injects."""


def trainer(folder: Path, engine: str = "onnxruntime", **more: Any) -> Any:
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": EVERY}
    args = arguments(folder, ort_engine=engine, **settings)
    given = {"model": bert(0.1), "train_dataset": texts(), "data_collator": collate}
    return ORTTrainer(args=args, **{**given, **more})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights and optimizer after a training without a crash, by engine."""
    finished = {}
    for engine in ("onnxruntime", "torch"):
        run = trainer(tmp_path_factory.mktemp(engine), engine)
        run.train()
        finished[engine] = state(run)
    return finished


def state(run: Any) -> dict[str, torch.Tensor]:
    """All tensors of the model and the optimizer."""
    moments = {
        f"{index}.{name}": value
        for index, values in run.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    return {k: v.clone() for k, v in {**run.model.state_dict(), **moments}.items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


# --- a crash in a step --------------------------------------------------------------------------


class Once:
    """Raises at one call of a function, and lets the others through."""

    def __init__(self, function: Callable[..., Any], call: int) -> None:
        self.function, self.call, self.calls = function, call, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.call:
            raise Crash("injected")
        return self.function(*args, **kwargs)


class CrashesAtStep(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == CRASH:
            raise Crash("injected")


def in_the_graph(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    once = Once(Step.train, CRASH)
    patch.setattr(Step, "train", lambda *args: once(*args))
    return {}


def in_the_forward(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    model = bert(0.1)
    model.classifier.forward = Once(model.classifier.forward, CRASH)
    return {"model": model, "engine": "torch"}


def in_the_loader(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"data_collator": Once(collate, CRASH)}


def in_a_callback(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"callbacks": [CrashesAtStep()], "engine": "torch"}


@pytest.mark.parametrize("where", [in_the_graph, in_the_forward, in_the_loader, in_a_callback])
def test_after_a_crash_in_a_step_training_goes_on_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any], where: Any
) -> None:
    with monkeypatch.context() as patch:
        settings = where(patch)
        engine = settings.get("engine", "onnxruntime")
        crashed = trainer(tmp_path, **settings)
        with pytest.raises(Crash, match="injected"):
            crashed.train()
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    again = trainer(tmp_path, engine)
    again.train(resume_from_checkpoint=True)
    graph = again.ort_report.graph_calls
    assert graph == (STEPS - 4 if engine == "onnxruntime" else 0)
    assert_same_bits(state(again), whole[engine])


def test_the_trainer_that_crashed_can_go_on_itself(tmp_path: Path, whole: dict[str, Any]) -> None:
    crashed = trainer(tmp_path, data_collator=Once(collate, CRASH))
    with pytest.raises(Crash):
        crashed.train()
    crashed.train(resume_from_checkpoint=True)
    assert_same_bits(state(crashed), whole["onnxruntime"])


# --- a crash in the write of a checkpoint -------------------------------------------------------


def cut_off(path: Path) -> None:
    """Leaves what a write that failed half-way leaves."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    raise OSError(28, "No space left on device")


def fails_at(patch: pytest.MonkeyPatch, name: str, step: int) -> None:
    """Makes the write of one file of one checkpoint fail half-way."""

    def failing(write: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = write(*args, **kwargs)
            path = Path(args[place] if place < len(args) else kwargs["filename"])
            if path.name == name and path.parent.name == f"checkpoint-{step}":
                cut_off(path)
            return result

        return call

    patch.setattr(torch, "save", failing(torch.save, 1))
    patch.setattr(modeling_utils, "safe_save_file", failing(modeling_utils.safe_save_file, 1))
    patch.setattr(TrainerState, "save_to_json", failing(TrainerState.save_to_json, 1))


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_whose_write_failed_is_not_continued_but_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any], name: str
) -> None:
    with monkeypatch.context() as patch:
        fails_at(patch, name, 6)
        with pytest.raises(OSError, match="No space left"):
            trainer(tmp_path, "torch").train()
    # The choice by number alone would take it.
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")

    again = trainer(tmp_path, "torch")
    match = rf"goes on from checkpoint-4: in checkpoint-6 .*{re.escape(name)}"
    if name != "trainer_state.json":
        match = r"goes on from checkpoint-4: in checkpoint-6 .*trainer_state.json.* missing"
    with pytest.warns(OrtrainWarning, match=match) as caught:
        again.train(resume_from_checkpoint=True)
    assert [warning.filename for warning in caught] == [__file__]
    assert_same_bits(state(again), whole["torch"])
    # It was written again, and is complete now.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shutil.rmtree(tmp_path / "checkpoint-8")
        last = trainer(tmp_path, "torch")
        last.train(resume_from_checkpoint=True)
    assert_same_bits(state(last), whole["torch"])


def test_a_checkpoint_that_was_complete_counts_as_broken_while_it_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any]
) -> None:
    trainer(tmp_path, "torch").train()
    shutil.rmtree(tmp_path / "checkpoint-8")
    other = trainer(tmp_path, "torch", train_dataset=texts()[::-1])
    with monkeypatch.context() as patch:
        fails_at(patch, "optimizer.pt", 6)
        with pytest.raises(OSError, match="No space left"):
            other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    # Weights of this run beside an optimizer and a state of the run before would be a mixture.
    assert not (tmp_path / "checkpoint-6" / "trainer_state.json").exists()
    again = trainer(tmp_path, "torch")
    with pytest.warns(OrtrainWarning, match="goes on from checkpoint-4"):
        again.train(resume_from_checkpoint=True)
    assert_same_bits(state(again), whole["torch"])


def test_where_no_checkpoint_is_complete_each_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fails_at(patch, "optimizer.pt", 2)
        with pytest.raises(OSError, match="No space left"):
            trainer(tmp_path, "torch").train()
    with pytest.raises(InputError, match=r"(?s)is complete.*in checkpoint-2 .*are missing"):
        trainer(tmp_path, "torch").train(resume_from_checkpoint=True)


def test_where_there_is_no_checkpoint_transformers_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer(tmp_path, "torch").train(resume_from_checkpoint=True)


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    trainer(tmp_path, "torch").train()
    (tmp_path / "checkpoint-99-of-mine").mkdir()
    (tmp_path / "checkpoint-100").write_text("a file")
    again = trainer(tmp_path, "torch")
    shutil.rmtree(tmp_path / "checkpoint-8")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == STEPS
