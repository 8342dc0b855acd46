"""ORTTrainer ends where Trainer ends, and the graph did the work."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from ortrain import ORTTrainer
from tests.breadth import sampled
from tests.trainer.models import Run, arguments, bert, both, gpt2, t5, texts, train

# Graphs of a classifier that computes its loss: in the first step it notes the kind of its labels.
NOTING = 2


def assert_equal(plain: Run, ours: Run, *, calls: int, captures: int = 1) -> None:
    """Losses, norms, metric and weights agree, and so many forwards ran as so many graphs."""
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-4)
    assert ours.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=1e-5)
    for name, weight in plain.weights.items():
        # A key's bias has no gradient but roundings, and Adam steps by their signs.
        if "key.bias" in name or "c_attn.bias" in name:
            continue
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-3, atol=1e-4, msg=name)
    report = ours.trainer.ort_report
    assert (report.graph_calls, report.fallback_calls) == (calls, 0)
    assert report.training.captures == captures


def test_a_classifier(tmp_path: Path) -> None:
    assert_equal(*both(tmp_path, bert, texts()), calls=6, captures=NOTING)


def test_a_translator(tmp_path: Path) -> None:
    assert_equal(*both(tmp_path, t5, texts(kind="copy")), calls=6)


def test_accumulation_counts_the_items_of_all_batches(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 3}
    assert_equal(*both(tmp_path, gpt2, texts(kind="copy"), **settings), calls=6)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_large_vocabulary_whose_logits_nobody_reads(tmp_path: Path, accumulated: int) -> None:
    """They are there for some rows at a time in training, and whole in evaluation."""
    settings = {"gradient_accumulation_steps": accumulated, "max_steps": 6 // accumulated}
    plain, ours = both(tmp_path, partial(gpt2, 8192), texts(kind="copy"), **settings)
    assert_equal(plain, ours, calls=6)
    assert [classes for classes, _ in ours.trainer.ort_report.training.blocks] == [8192]


@pytest.mark.parametrize("inside", [False, True], ids=["outside the graph", "inside"])
def test_smoothed_labels_of_a_causal_model_are_shifted(tmp_path: Path, inside: bool) -> None:
    plain, ours = both(
        tmp_path,
        gpt2,
        texts(kind="copy"),
        ort={"use_module_with_loss": inside},
        label_smoothing_factor=0.1,
    )
    assert_equal(plain, ours, calls=6)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, bert, texts(), max_grad_norm=0.01)
    assert_equal(plain, ours, calls=6, captures=NOTING)


@pytest.mark.parametrize("inside", [False, True], ids=["outside the graph", "inside"])
def test_a_loss_function_of_the_users(tmp_path: Path, inside: bool) -> None:
    def soft(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return (outputs.logits - labels[:, None]).square().mean()

    plain, ours = both(
        tmp_path,
        bert,
        texts(),
        ort={"use_module_with_loss": inside},
        more=lambda: {"compute_loss_func": soft},
    )
    assert_equal(plain, ours, calls=6)


class Doubled(Trainer):
    """Twice the model's loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        outputs = model(**inputs)
        loss = 2 * outputs.loss
        return (loss, outputs) if return_outputs else loss


class DoubledThroughGraph(Doubled, ORTTrainer):
    """The same, through the graph."""


@pytest.mark.parametrize("inside", [False, True], ids=["outside the graph", "inside"])
def test_a_loss_of_a_subclass(tmp_path: Path, inside: bool) -> None:
    plain = train(Doubled, arguments(tmp_path, TrainingArguments), bert(), texts())
    args = arguments(tmp_path, use_module_with_loss=inside)
    ours = train(DoubledThroughGraph, args, bert(), texts())
    assert_equal(plain, ours, calls=6, captures=NOTING)


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    def make() -> Any:
        model = bert()
        model.bert.embeddings.requires_grad_(False)
        return model

    plain, ours = both(tmp_path, make, texts())
    assert_equal(plain, ours, calls=6, captures=NOTING)
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(ours.weights[name], make().state_dict()[name])


# peft asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_train_and_the_rest_stays(tmp_path: Path, checkpointing: bool) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(gpt2(), config)

    settings = {"label_smoothing_factor": 0.1, "activation_checkpointing": checkpointing}
    plain, ours = both(tmp_path, make, texts(kind="copy"), **settings)
    # The hook that has the embedding require gradients ends a graph of Dynamo's.
    assert_equal(plain, ours, calls=6, captures=7 if checkpointing else 1)
    ours.trainer.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("make", sampled([bert, gpt2, t5], [bert]), ids=["BERT", "GPT-2", "T5"])
def test_checkpointed_layers_run_again_in_the_graph(tmp_path: Path, make: Any) -> None:
    rows = texts(kind="classes" if make is bert else "copy")
    plain, ours = both(tmp_path, make, rows, activation_checkpointing=True)
    # T5's code sets ``requires_grad`` in front of its layers, which ends a graph of Dynamo's.
    captures = {bert: NOTING, gpt2: 1, t5: 9}[make]
    assert_equal(plain, ours, calls=6, captures=captures)


def test_callbacks_see_the_model_itself(tmp_path: Path) -> None:
    seen: list[str] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.append(type(more["model"]).__name__)

    both(tmp_path, bert, texts(), more=lambda: {"callbacks": [Looks()]})
    assert seen == ["BertForSequenceClassification"] * 12
