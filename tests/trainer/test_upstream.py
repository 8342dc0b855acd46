"""What Optimum's trainer was tested for, here with numbers: each run beside one of Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    BartConfig,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    RobertaConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ortrain import (
    ORTModule,
    ORTSeq2SeqTrainer,
    ORTSeq2SeqTrainingArguments,
    ORTTrainer,
    ORTTrainingArguments,
)
from ortrain.trainer.loss import ModuleWithLoss
from tests.breadth import sampled
from tests.trainer.models import (
    LABELS,
    WORDS,
    Run,
    arguments,
    bert,
    both,
    collate,
    gpt2,
    t5,
    texts,
    train,
)

Rows = list[dict[str, Any]]
INSIDE = {"use_module_with_loss": True}

# --- models and data ----------------------------------------------------------------------------

ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DISTILBERT = {
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


def small(kind: str, config: type, **sizes: Any) -> Callable[[], Any]:
    """Makes a model of a class of transformers, always with the same weights."""

    def make() -> Any:
        torch.manual_seed(0)
        return getattr(transformers, kind)(config(vocab_size=WORDS, num_labels=LABELS, **sizes))

    return make


distilbert = small("DistilBertForSequenceClassification", DistilBertConfig, **DISTILBERT)
roberta = small("RobertaForSequenceClassification", RobertaConfig, **ENCODER, pad_token_id=0)
electra = small("ElectraForSequenceClassification", ElectraConfig, **ENCODER, embedding_size=8)
tagger = small("BertForTokenClassification", BertConfig, **ENCODER)
bart = small("BartForConditionalGeneration", BartConfig, **BART)


def tags() -> Rows:
    """Each word has a class, and every third takes no part."""
    rows = texts(kind="copy")
    for row in rows:
        row["labels"] = row["labels"] % LABELS
        row["labels"][::3] = -100
    return rows


def copies() -> Rows:
    return texts(kind="copy")


TASKS: dict[str, tuple[Callable[[], Any], Callable[[], Rows]]] = {
    "distilbert": (distilbert, texts),
    "roberta": (roberta, texts),
    "electra": (electra, texts),
    "token classification": (tagger, tags),
    "text generation": (gpt2, copies),
    "text2text with T5": (t5, copies),
    "text2text with BART": (bart, copies),
}
SAMPLE = ("distilbert", "token classification", "text generation", "text2text with T5")
SMOOTHED = ("distilbert", "token classification", "text2text with BART")


# --- comparisons --------------------------------------------------------------------------------


class FirstGradients(TrainerCallback):
    """Keeps the gradient of every parameter at the first step of the optimizer."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor | None] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 0:
            self.gradients = {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in more["model"].named_parameters()
            }


def accuracy(predictions: Any) -> dict[str, float]:
    logits = predictions.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    takes_part = predictions.label_ids != -100
    right = (logits.argmax(-1) == predictions.label_ids)[takes_part]
    return {"accuracy": float(right.mean())}


def watched() -> dict[str, Any]:
    return {"callbacks": [FirstGradients()], "compute_metrics": accuracy}


def first_gradients(run: Run) -> dict[str, torch.Tensor | None]:
    callbacks = run.trainer.callback_handler.callbacks
    found = next(callback for callback in callbacks if isinstance(callback, FirstGradients))
    return found.gradients


def assert_same_training(plain: Run, ours: Run, *, calls: int = 6) -> None:
    """First loss and gradients, all losses, the metric; and that it all ran as a graph."""
    expected, found = first_gradients(plain), first_gradients(ours)
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(
                found[name],
                gradient,
                rtol=1e-5,
                atol=1e-6 * scale,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)
    assert ours.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=2e-6)
    assert ours.metrics.get("eval_accuracy") == plain.metrics.get("eval_accuracy")
    report = ours.trainer.ort_report
    assert (report.graph_calls, report.fallback_calls) == (calls, 0)


def arrays(value: Any) -> list[np.ndarray]:
    """The arrays of a prediction, however nested."""
    if isinstance(value, tuple | list):
        return [array for part in value for array in arrays(part)]
    return [value]


def assert_same_predictions(found: Any, expected: Any) -> None:
    for a, b in zip(arrays(found.predictions), arrays(expected.predictions), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert (found.label_ids is None) == (expected.label_ids is None)
    assert found.metrics.keys() == expected.metrics.keys()
    for name in {"test_loss", "test_accuracy"} & expected.metrics.keys():
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5)


def assert_saved(ours: Any, folder: Path) -> None:
    """An ordinary model of transformers: its own names, and a config beside them."""
    ours.save_model(folder)
    assert (folder / "config.json").is_file()
    stored, own = load_file(folder / "model.safetensors"), ours.model.state_dict()
    assert stored.keys() <= own.keys()
    loaded = type(ours.model).from_pretrained(folder).state_dict()
    assert loaded.keys() == own.keys()
    for name, weight in own.items():
        assert torch.equal(loaded[name], weight), name


# --- train, save, evaluate, predict -------------------------------------------------------------


@pytest.mark.parametrize("task", sampled(TASKS, SAMPLE))
def test_a_task_is_trained_saved_evaluated_and_predicted(tmp_path: Path, task: str) -> None:
    make, rows = TASKS[task]
    plain, ours = both(tmp_path, make, rows(), more=watched)
    assert_same_training(plain, ours)
    assert_saved(ours.trainer, tmp_path / "saved")

    places = [weight.data_ptr() for weight in ours.trainer.model.parameters()]
    for with_ort in (False, True):
        metrics = ours.trainer.evaluate(inference_with_ort=with_ort)
        assert metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=1e-5)
        assert metrics["eval_accuracy"] == plain.metrics["eval_accuracy"]
        found = ours.trainer.predict(rows()[:10], inference_with_ort=with_ort)
        assert_same_predictions(found, plain.trainer.predict(rows()[:10]))
    assert ours.trainer.ort_report.inference.graph_calls == 4
    # The weights that the graph read are those of the model, where they were.
    assert [weight.data_ptr() for weight in ours.trainer.model.parameters()] == places


@pytest.mark.parametrize("inside", [False, True], ids=["outside the graph", "inside"])
@pytest.mark.parametrize("task", sampled(SMOOTHED, ["token classification"]))
def test_a_task_with_smoothed_labels(tmp_path: Path, task: str, inside: bool) -> None:
    make, rows = TASKS[task]
    settings = {"label_smoothing_factor": 0.1, "ort": {"use_module_with_loss": inside}}
    plain, ours = both(tmp_path, make, rows(), more=watched, **settings)
    assert_same_training(plain, ours)


@pytest.mark.parametrize(
    "task", sampled(["text generation", "text2text with T5"], ["text2text with T5"])
)
def test_a_training_with_its_key_value_cache_on_is_trainers(tmp_path: Path, task: str) -> None:
    make, rows = TASKS[task]
    plain, ours = both(tmp_path, make, rows(), more=watched, use_cache=True, max_steps=2)
    assert_same_training(plain, ours, calls=2)


def assert_same_bits(plain: Run, ours: Run, *, calls: int) -> None:
    assert ours.losses == plain.losses
    assert ours.metrics["eval_loss"] == plain.metrics["eval_loss"]
    for name, weight in plain.weights.items():
        assert torch.equal(ours.weights[name], weight), name
    report = ours.trainer.ort_report
    assert (report.graph_calls, report.fallback_calls) == (0, calls)
    assert report.training.reason


# --- precision ----------------------------------------------------------------------------------


def test_fp16_without_a_gpu_is_the_fp32_that_it_is_for_trainer(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, bert, texts(), more=watched, fp16=True)
    assert next(iter(ours.weights.values())).dtype == torch.float32
    assert_same_training(plain, ours)


# --- optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"])
def test_an_optimizer_of_transformers_is_made_and_steps_as_there(tmp_path: Path, name: str) -> None:
    settings = {"optim": name, "adam_beta1": 0.8, "adam_epsilon": 1e-7, "weight_decay": 0.1}
    plain, ours = both(tmp_path, bert, texts(), more=watched, **settings)
    kind, kwargs = ORTTrainer.get_optimizer_cls_and_kwargs(ours.trainer.args)
    assert (kind, kwargs) == Trainer.get_optimizer_cls_and_kwargs(plain.trainer.args)
    optimizer, expected = (run.trainer.optimizer.optimizer for run in (ours, plain))
    assert type(optimizer) is type(expected) is kind
    assert optimizer.defaults == expected.defaults
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in expected.param_groups
    ]
    assert_same_training(plain, ours)


@pytest.mark.parametrize("name", ["adamw_ort_fused", "adamw_hf"])
def test_an_optimizer_by_an_old_name_is_fused_adam_with_the_arguments(
    tmp_path: Path, name: str
) -> None:
    from ortrain.optim import FusedAdam

    settings = {"learning_rate": 2e-3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7}
    with pytest.warns(FutureWarning, match=name):
        args = arguments(tmp_path, optim=name, **settings)
    expected = (FusedAdam, {"lr": 2e-3, "betas": (0.8, 0.9), "eps": 1e-7})
    assert ORTTrainer.get_optimizer_cls_and_kwargs(args) == expected
    # The maths of transformers' old AdamW is torch's but for where eps stands and when it decays.
    ours = train(ORTTrainer, args, bert(), texts())
    plain = train(Trainer, arguments(tmp_path, TrainingArguments, **settings), bert(), texts())
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    assert ours.trainer.ort_report.graph_calls == 6


# --- the loss inside the graph ------------------------------------------------------------------


def test_a_model_with_its_loss_inside_is_saved_evaluated_and_predicted_as_itself(
    tmp_path: Path,
) -> None:
    plain, ours = both(tmp_path, bert, texts(), more=watched, ort=INSIDE)
    assert_same_training(plain, ours)
    assert isinstance(ours.trainer.model_wrapped.module, ModuleWithLoss)
    unlabelled = [{k: v for k, v in row.items() if k != "labels"} for row in texts(10)]
    for data in (texts(10), unlabelled):
        expected = plain.trainer.predict(data)
        for with_ort in (False, True):
            found = ours.trainer.predict(data, inference_with_ort=with_ort)
            assert_same_predictions(found, expected)
    assert_saved(ours.trainer, tmp_path / "saved")
    # And it goes on training with the loss inside.
    ours.trainer.train()
    assert ours.trainer.ort_report.graph_calls == 12


@pytest.mark.breadth  # a search: tests/trainer/test_behaviour.py
def test_a_search_with_the_loss_inside_finds_what_trainers_search_finds(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="the extra `search` is not installed")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    wrapped: list[str] = []

    class Looks(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wrapped.append(type(search.model_wrapped.module).__name__)

    found = []
    for kind in (Trainer, ORTTrainer):
        ours = kind is ORTTrainer
        settings: dict[str, Any] = INSIDE if ours else {}
        args = arguments(
            tmp_path / kind.__name__,
            ORTTrainingArguments if ours else TrainingArguments,
            max_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            label_smoothing_factor=0.1,
            **settings,
        )
        search = kind(
            args=args,
            model_init=lambda trial=None: bert(),
            data_collator=collate,
            train_dataset=texts(),
            eval_dataset=texts(16),
            callbacks=[Looks()] if ours else [],
        )
        best = search.hyperparameter_search(
            hp_space=lambda trial: {
                "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1)
            },
            sampler=optuna.samplers.GridSampler({"learning_rate": [1e-3, 1e-2]}, seed=0),
            n_trials=2,
            direction="minimize",
        )
        found.append(best)
    assert found[1].hyperparameters == found[0].hyperparameters
    assert found[1].objective == pytest.approx(found[0].objective, rel=1e-5)
    assert wrapped == ["ModuleWithLoss"] * 2
    assert (search.ort_report.graph_calls, search.ort_report.fallback_calls) == (4, 0)


# --- construction -------------------------------------------------------------------------------


def test_a_model_that_is_wrapped_already_is_unwrapped_and_trains_the_same(tmp_path: Path) -> None:
    plain = train(Trainer, arguments(tmp_path, TrainingArguments), bert(), texts(), **watched())
    wrapped = ORTModule(bert())
    ours = train(ORTTrainer, arguments(tmp_path), wrapped, texts(), **watched())
    assert ours.trainer.model is wrapped.module
    assert_same_training(plain, ours)


@pytest.mark.filterwarnings("ignore:ORTModule runs .* in PyTorch.* is on cuda")
def test_a_training_without_arguments_has_those_of_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = []
    for kind in (Trainer, ORTTrainer):
        run = kind(model=bert(), data_collator=collate, train_dataset=texts(16))
        run.args.dataloader_pin_memory = False
        runs.append((run, run.train().training_loss))
    (plain, expected), (ours, found) = runs
    assert ours.args.output_dir == plain.args.output_dir
    assert ours.state.global_step == plain.state.global_step == 6
    assert found == pytest.approx(expected, rel=1e-5)


# --- data, batches, evaluations -----------------------------------------------------------------


def test_a_smaller_batch_is_tried_where_the_first_does_not_fit(tmp_path: Path) -> None:
    class OutOfMemory(TrainerCallback):
        """More than seven rows do not fit, which shows in the second step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.train_batch_size > 7 and state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")

    more = {"callbacks": [OutOfMemory()]}
    plain, ours = both(tmp_path, bert, texts(), more=lambda: more, auto_find_batch_size=True)
    assert ours.trainer.state.train_batch_size == plain.trainer.state.train_batch_size == 7
    assert len(ours.losses) == 6
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    report = ours.trainer.ort_report
    assert (report.graph_calls, report.fallback_calls) == (1 + 6, 0)
    assert isinstance(ours.trainer.model_wrapped, ORTModule)


def test_a_smaller_batch_is_tried_where_the_models_code_is_out_of_memory(tmp_path: Path) -> None:
    class Large(transformers.BertForSequenceClassification):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
            if len(input_ids) > 7:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(input_ids, attention_mask, labels=labels)

    def make() -> Any:
        torch.manual_seed(0)
        return Large(bert().config)

    settings = {"auto_find_batch_size": True, "per_device_eval_batch_size": 4}
    plain, ours = both(tmp_path, make, texts(), **settings)
    assert ours.trainer.state.train_batch_size == plain.trainer.state.train_batch_size == 7
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    report = ours.trainer.ort_report
    assert (report.graph_calls, report.fallback_calls) == (6, 0)


@pytest.mark.parametrize("remove", [True, False])
def test_columns_that_the_model_does_not_take_are_removed_or_left_to_the_collator(
    tmp_path: Path, remove: bool
) -> None:
    seen: list[set[str]] = []

    def looks(rows: Rows) -> dict[str, Any]:
        seen.append(set(rows[0]))
        return collate(rows)

    rows = [{**row, "text": "a"} for row in texts()]
    settings: dict[str, Any] = {"remove_unused_columns": remove, "max_steps": 2}
    more = {"data_collator": looks}
    plain, ours = both(tmp_path, bert, rows, more=lambda: {**more, **watched()}, **settings)
    assert_same_training(plain, ours, calls=2)
    kept = {"input_ids", "attention_mask", "labels"}
    assert all(names == (kept if remove else {*kept, "text"}) for names in seen)


@pytest.mark.parametrize("strategy", ["group_by_length", "sequential", "batch_rebalance"])
def test_batches_are_drawn_as_trainer_draws_them(tmp_path: Path, strategy: str) -> None:
    settings = {"train_sampling_strategy": strategy}
    assert_same_training(*both(tmp_path, bert, texts(), more=watched, **settings))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"eval_strategy": "steps", "eval_steps": 2}, 3),
        ({"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}, 2),
        ({"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}, 3),
        ({"eval_strategy": "steps", "eval_steps": 3, "gradient_accumulation_steps": 2}, 2),
    ],
    ids=["steps", "epoch", "on start", "accumulation"],
)
def test_evaluations_in_training_are_trainers(
    tmp_path: Path, settings: dict[str, Any], count: int
) -> None:
    def losses(run: Run) -> list[tuple[int, float]]:
        history = run.trainer.state.log_history[:-1]  # the last is after training
        return [(e["step"], e["eval_loss"]) for e in history if "eval_loss" in e]

    plain, ours = both(tmp_path, bert, texts(24), more=watched, **settings)
    expected, found = losses(plain), losses(ours)
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert len(found) == count
    values = [value for _, value in expected]
    assert [value for _, value in found] == pytest.approx(values, rel=2e-6)
    assert len(set(values)) == count
    assert ours.trainer.ort_report.fallback_calls == 0


# --- generation ---------------------------------------------------------------------------------


def shifted(rows: Rows) -> dict[str, Any]:
    """With what the decoder starts from, as T5 needs it where the labels are smoothed."""
    batch = collate(rows)
    before = batch["labels"][:, :-1].clamp(min=0)
    return {**batch, "decoder_input_ids": torch.nn.functional.pad(before, (1, 0))}


def test_generated_tokens_are_those_of_trainer(tmp_path: Path) -> None:
    """With beams and lengths of the arguments, and a prefix of its own for predictions."""
    settings = {
        "predict_with_generate": True,
        "generation_max_length": 7,
        "generation_num_beams": 2,
        "label_smoothing_factor": 0.1,
        "learning_rate": 0.02,
    }
    kinds = [
        (Seq2SeqTrainer, Seq2SeqTrainingArguments),
        (ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments),
    ]
    runs = [
        train(
            kind,
            arguments(tmp_path / kind.__name__, args, **settings),
            t5(),
            copies(),
            data_collator=shifted,
        )
        for kind, args in kinds
    ]
    plain, ours = runs
    assert ours.trainer.ort_report.fallback_calls == 0
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=1e-5)
    expected, found = (run.trainer.predict(copies()[:10]) for run in runs)
    assert not found.predictions[:, 7:].any()
    np.testing.assert_array_equal(found.predictions, expected.predictions)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)
