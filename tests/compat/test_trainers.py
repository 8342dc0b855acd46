"""Scripts' subclasses of Optimum's trainers run as they were written for transformers 4."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

import ortrain
from ortrain.compat.overrides import ADDED
from ortrain.compat.trainers import ORTSeq2SeqTrainer, ORTTrainer, ORTTrainingArguments
from tests.trainer.models import arguments, bert, collate, gpt2, texts, train

OLD_SPELLING = "ignore:tokenizer= is an old spelling:FutureWarning"


class InOrder(ORTTrainer):
    """Takes its batches in the order of the data."""

    def _get_train_sampler(self) -> Any:  # type: ignore[override]
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class OwnLoss(InOrder):
    """A loss as examples of 2021 had it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        labels = inputs.pop("labels")
        outputs = model(**inputs, labels=labels)
        loss = 2 * outputs.loss
        return (loss, outputs) if return_outputs else loss


class Inherited(InOrder):
    """Passes the loss on."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class OwnStep(InOrder):
    """A step as Trainer's own was in 4.45."""

    def training_step(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = 2 * self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach() / self.args.gradient_accumulation_steps


class StepAround(OwnLoss):
    """A step around Trainer's, and a loss of then."""

    def training_step(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
        return super().training_step(model, inputs)


class Mixin:
    """Beside the trainer, as some projects have it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class Mixed(Mixin, InOrder):  # type: ignore[misc]
    pass


class StillMixed(Mixed):
    pass


def expected(model: Any, rows: list[dict[str, Any]], size: int, count: int) -> tuple[float, float]:
    """Loss and norm of the gradients of a first update: of means over batches, in PyTorch."""
    losses = []
    for batch in range(count):
        loss = 2 * model(**collate(rows[batch * size : (batch + 1) * size])).loss / count
        loss.backward()
        losses.append(loss.item())
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    return sum(losses), norms.norm().item()


@pytest.mark.parametrize(
    ("kind", "with_loss"),
    [
        (OwnLoss, False),
        (OwnLoss, True),
        (Inherited, True),
        (StepAround, False),
        (StillMixed, False),
        (OwnStep, False),
        (OwnStep, True),
    ],
)
def test_an_old_override_accumulates_means_as_it_did(
    kind: type, with_loss: bool, tmp_path: Path
) -> None:
    rows = texts(kind="copy")
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 1}
    settings |= {"ort_engine": "aten", "max_grad_norm": 1e9}
    settings |= {"per_device_train_batch_size": 4, "use_module_with_loss": with_loss}
    run = train(kind, arguments(tmp_path, ORTTrainingArguments, **settings), gpt2(), rows)
    loss, norm = expected(gpt2(), rows, 4, 2)
    assert run.losses[0] == pytest.approx(loss, rel=1e-4)
    assert run.norms[0] == pytest.approx(norm, rel=1e-4)
    assert run.trainer.ort_report.graph_calls == 2
    assert run.trainer.accelerator.gradient_accumulation_steps == 1


def test_a_loss_of_today_counts_as_today_also_above_an_old_one(tmp_path: Path) -> None:
    class Today(OwnLoss):
        def compute_loss(  # type: ignore[override]
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = 0
        ) -> Any:
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    class Keywords(InOrder):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs)

    class NamedKeywords(InOrder):
        def training_step(self, model: Any, inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().training_step(model, inputs, **kwargs)

    rows = texts(kind="copy")
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 1}
    settings |= {"ort_engine": "torch", "per_device_train_batch_size": 4}
    norms = [
        train(kind, arguments(tmp_path, ORTTrainingArguments, **settings), gpt2(), rows).norms
        for kind in (InOrder, Today, Keywords, NamedKeywords)
    ]
    assert norms[1:] == norms[:1] * 3
    assert OwnLoss.loss_is_scaled_for_ga is False
    assert Today.loss_is_scaled_for_ga is None
    assert ORTTrainer.loss_is_scaled_for_ga is None


def test_the_rest_of_the_old_signatures(tmp_path: Path) -> None:
    calls = []

    class Old(ORTTrainer):
        def log(self, logs: Any) -> None:  # type: ignore[override]
            calls.append("log")
            super().log(logs)

        def save_model(self, output_dir: Any = None) -> None:  # type: ignore[override]
            calls.append("save_model")
            super().save_model(output_dir)

        def create_optimizer(self) -> Any:  # type: ignore[override]
            calls.append("create_optimizer")
            return super().create_optimizer()

        def _maybe_log_save_evaluate(  # type: ignore[override]
            self, tr_loss: Any, model: Any, trial: Any, epoch: Any, ignore_keys_for_eval: Any
        ) -> None:
            calls.append("_maybe_log_save_evaluate")
            if self.control.should_log:
                loss = self._nested_gather(tr_loss).mean().item()
                tr_loss -= tr_loss
                self.log({"loss": loss})
            if self.control.should_evaluate:
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                self._save_checkpoint(model, trial, metrics=metrics)

        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
            calls.append("_save_checkpoint")
            super()._save_checkpoint(model, trial, metrics=metrics)
            self._rotate_checkpoints(output_dir=tmp_path)

    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
    settings |= {"metric_for_best_model": "loss"}
    settings |= {"ort_engine": "torch", "max_steps": 3, "save_total_limit": 2}
    args = arguments(tmp_path, ORTTrainingArguments, **settings)
    run = train(Old, args, bert(), texts())
    assert {*calls} == {
        "log",
        "save_model",
        "create_optimizer",
        "_maybe_log_save_evaluate",
        "_save_checkpoint",
    }
    assert len(run.losses) == 3
    assert run.trainer.state.best_metric is not None
    kept = run.trainer._sorted_checkpoints(tmp_path)
    assert len(kept) == 2
    assert Path(kept[-1]).name == "checkpoint-3"


def test_a_call_that_nobody_ever_made_is_still_an_error(tmp_path: Path) -> None:
    trainer = OwnLoss(bert(), arguments(tmp_path), collate, texts())
    with pytest.raises(TypeError, match="nonsense"):
        trainer.compute_loss(trainer.model, {}, nonsense=1)


def test_every_added_parameter_is_one_of_today() -> None:
    for name, added in ADDED.items():
        today = inspect.signature(getattr(Trainer, name)).parameters
        assert {*added} <= {*today}, name


@pytest.mark.filterwarnings(OLD_SPELLING)
def test_positions_are_those_of_then(tmp_path: Path) -> None:
    def metrics(predictions: Any) -> dict[str, float]:
        return {"seen": 1.0}

    rows, tokenizer = texts(), object()
    given = (collate, rows, rows[:8], tokenizer, None, metrics, [TrainerCallback()])
    trainer = ORTTrainer(bert(), arguments(tmp_path), *given)
    assert trainer.compute_metrics is metrics
    assert trainer.compute_loss_func is None
    assert trainer.processing_class is tokenizer
    assert trainer.tokenizer is tokenizer
    trainer.tokenizer = None
    assert trainer.processing_class is None
    with pytest.raises(TypeError, match="eval_dataset by position and by name"):
        ORTTrainer(bert(), arguments(tmp_path), collate, rows, rows, eval_dataset=rows)
    with pytest.raises(TypeError, match="at most 11"):
        ORTTrainer(bert(), arguments(tmp_path), *range(10))


@pytest.mark.filterwarnings(OLD_SPELLING)
def test_callbacks_are_given_the_tokenizer(tmp_path: Path) -> None:
    class Old(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_init_end(self, args: Any, state: Any, control: Any, tokenizer: Any, **kwargs: Any):
            self.seen.append(tokenizer)

        def on_train_end(self, args: Any, state: Any, control: Any, tokenizer: Any, **kwargs: Any):
            self.seen.append(tokenizer)

    class Tokenizer:
        def save_pretrained(self, folder: str) -> None: ...

    callback, tokenizer = Old(), Tokenizer()
    settings = {"tokenizer": tokenizer, "callbacks": [callback], "compute_metrics": None}
    args = arguments(tmp_path, max_steps=1, ort_engine="torch")
    train(ORTTrainer, args, bert(), texts(), **settings)
    assert callback.seen == [tokenizer, tokenizer]


def test_it_is_the_trainer_of_ortrain() -> None:
    assert issubclass(ORTTrainer, ortrain.ORTTrainer)
    assert issubclass(ORTSeq2SeqTrainer, ortrain.ORTSeq2SeqTrainer)
    assert issubclass(ORTSeq2SeqTrainer, ORTTrainer)  # as in Optimum
    assert issubclass(ORTSeq2SeqTrainer, Seq2SeqTrainer)
    assert ORTSeq2SeqTrainer.arguments is ortrain.ORTSeq2SeqTrainer.arguments
    batches = [{"input_ids": torch.zeros(2, 5)}, {"input_ids": torch.zeros(1, 5)}]
    assert ORTTrainer.num_tokens(batches) == 15
    assert ORTTrainer.num_tokens(batches, 3) == 30
