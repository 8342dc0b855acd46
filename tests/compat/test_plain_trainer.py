"""transformers' own Trainer around an ORTModule, as scripts of transformers 4 write it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.utils.data import SequentialSampler

from ortrain import ORTModule
from ortrain.compat.plain_trainer import extend, extend_callbacks
from tests.compat.test_trainers import expected
from tests.trainer.models import arguments, gpt2, texts, train

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from transformers import (
    BertConfig, BertForSequenceClassification, HfArgumentParser, Seq2SeqTrainer,
    Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments,
)
(args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
torch.manual_seed(0)
config = BertConfig(
    vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
    max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
rows = [{"input_ids": torch.arange(i, i + 6) % 16, "labels": i % 2} for i in range(16)]

class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 2.0]))
        return (loss, outputs) if return_outputs else loss

class Seen(TrainerCallback):
    def on_train_end(self, args, state, control, tokenizer=None, **kwargs):
        print("tokenizer", tokenizer)

trainer = Weighted(
    model=model, args=args, train_dataset=rows, eval_dataset=rows, tokenizer=None,
    callbacks=[Seen()],
)
print("wrapped", type(trainer.model).__name__, trainer.tokenizer)
trainer.train()
trainer.evaluate()
trainer.save_model()
print("graph", getattr(trainer.model, "report", ""))
print("weights", sum(float(p.double().abs().sum()) for p in model.parameters()))
two = Seq2SeqTrainingArguments("two", fp16=False, no_cuda=True, report_to="none")
print("seq2seq", Seq2SeqTrainer(model=model, args=two, tokenizer="mine").processing_class)
"""


def run(folder: Path, *options: str) -> dict[str, str]:
    (folder / "script.py").write_text(SCRIPT)
    line = "--output_dir out --overwrite_output_dir --evaluation_strategy no --max_steps 6 "
    line += "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --save_strategy no "
    line += "--learning_rate 0.01 --disable_tqdm True --report_to none --no_cuda"
    done = subprocess.run(
        [sys.executable, "-m", "ortrain", "run", "script.py", *line.split(), *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE",
        },
    )
    assert not done.returncode, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if line[:1].isalpha())


def test_a_script_of_then_trains_in_an_ort_module_as_without(tmp_path: Path) -> None:
    plain, wrapped = run(tmp_path), run(tmp_path, "--ort")
    assert plain["wrapped"] == "BertForSequenceClassification None"
    assert wrapped["wrapped"] == "ORTModule None"
    assert wrapped["graph"].startswith("ORTModule:")
    assert wrapped["tokenizer"] == "None"
    assert wrapped["seq2seq"] == "mine"
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert float(plain["weights"]) == pytest.approx(float(wrapped["weights"]), rel=1e-6)


# --- the pieces, on classes that are no trainers -------------------------------------------------


def trainers() -> Any:
    class Trainer:
        def __init__(self, model: Any = None, args: Any = None, processing_class: Any = None):
            self.model, self.args, self.processing_class = model, args, processing_class

        def training_step(self) -> None:
            pass

    module = ModuleType("transformers.trainer")
    vars(module)["Trainer"] = Trainer
    extend(module)
    own = Trainer.__init__
    extend(module)
    assert Trainer.__init__ is own
    return Trainer


def test_a_tokenizer_is_the_processing_class() -> None:
    kind = trainers()
    trainer = kind(tokenizer="t")
    assert trainer.tokenizer == trainer.processing_class == "t"
    trainer.tokenizer = "u"
    assert trainer.processing_class == "u"
    assert kind(processing_class="p", tokenizer=None).tokenizer == "p"
    for args, kwargs in (((None, None, "p"), {}), ((), {"processing_class": "p"})):
        with pytest.raises(ValueError, match="tokenizer and processing_class are one"):
            kind(*args, tokenizer="t", **kwargs)


def test_classes_with_an_init_of_their_own_take_it_too() -> None:
    base = trainers()

    class Seq2SeqTrainer(base):  # type: ignore[misc]
        __module__ = "transformers.trainer_seq2seq"

        def __init__(self, model: Any = None, processing_class: Any = None) -> None:
            super().__init__(model, None, processing_class)

    class Own(base):  # type: ignore[misc]
        __module__ = "transformers.other"

        def __init__(self, tokenizer: Any) -> None:
            super().__init__(tokenizer=tokenizer)

    assert Seq2SeqTrainer(tokenizer="t").tokenizer == "t"
    assert Own("t").tokenizer == "t"


@pytest.mark.parametrize("by_name", [True, False])
def test_arguments_that_say_ort_wrap_the_model_once(by_name: bool) -> None:
    kind, args, model = trainers(), SimpleNamespace(ort=True), nn.Linear(2, 2)
    trainer = kind(model=model, args=args) if by_name else kind(model, args)
    assert isinstance(trainer.model, ORTModule)
    assert trainer.model.module is model
    assert kind(trainer.model, args).model is trainer.model
    assert kind(model, SimpleNamespace(ort=False)).model is model
    assert kind(None, args).model is None


def test_callbacks_are_given_the_tokenizer_by_both_names() -> None:
    class CallbackHandler:
        def __init__(self, processing_class: Any) -> None:
            self.processing_class = processing_class

        def call_event(self, event: str, *args: Any, **kwargs: Any) -> Any:
            return event, args, kwargs

    module = ModuleType("transformers.trainer_callback")
    vars(module)["CallbackHandler"] = CallbackHandler
    extend_callbacks(module)
    handler = CallbackHandler("t")
    assert handler.call_event("on_log", 1, logs={}) == (
        "on_log",
        (1,),
        {"logs": {}, "tokenizer": "t"},
    )
    assert handler.call_event("on_log", tokenizer="u")[2] == {"tokenizer": "u"}


# --- overrides of then, in subclasses of transformers' own Trainer -------------------------------

Trainer: Any = importlib.import_module("transformers").Trainer
TrainingArguments: Any = importlib.import_module("transformers").TrainingArguments


class InOrder(Trainer):  # type: ignore[misc]
    """Takes its batches in the order of the data."""

    def _get_train_sampler(self) -> Any:
        return SequentialSampler(self.train_dataset)


class OwnLoss(InOrder):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class StepAround(OwnLoss):
    def training_step(self, model: Any, inputs: Any) -> Any:
        return super().training_step(model, inputs)


class OwnStep(InOrder):
    """A step as Trainer's own was in 4.45."""

    def training_step(self, model: Any, inputs: Any) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = 2 * self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach() / self.args.gradient_accumulation_steps


@pytest.mark.parametrize("ort", [False, True])
@pytest.mark.parametrize("kind", [OwnLoss, StepAround, OwnStep])
def test_an_old_override_accumulates_means_as_it_did(kind: Any, ort: bool, tmp_path: Path) -> None:
    rows = texts(kind="copy")
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 4, "max_grad_norm": 1e9, "ort": ort}
    run = train(kind, arguments(tmp_path, TrainingArguments, **settings), gpt2(), rows)
    loss, norm = expected(gpt2(), rows, 4, 2)
    assert run.losses[0] == pytest.approx(loss, rel=1e-4)
    assert run.norms[0] == pytest.approx(norm, rel=1e-4)
    assert (type(run.trainer.model) is ORTModule) == ort
