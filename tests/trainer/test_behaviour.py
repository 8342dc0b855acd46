"""What users of Trainer rely on, with ORTTrainer in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ortrain import (
    ORTModule,
    ORTTrainer,
    ORTTrainingArguments,
)
from ortrain.errors import OrtrainWarning, StateError
from ortrain.trainer.arguments import options_of
from tests.breadth import sampled, table
from tests.trainer.models import arguments, bert, collate, gpt2, t5, texts, train


def trainer(folder: Path, model: Any = None, **settings: Any) -> Any:
    """One that is ready to train."""
    more = {name: settings.pop(name) for name in list(settings) if name in OF_TRAINER}
    given = {"train_dataset": texts(), "eval_dataset": texts(16), "data_collator": collate}
    if "model_init" not in more:
        more["model"] = model if model is not None else bert()
    return ORTTrainer(args=arguments(folder, **settings), **{**given, **more})


OF_TRAINER = {
    "callbacks",
    "compute_metrics",
    "eval_dataset",
    "model_init",
    "train_dataset",
    "preprocess_logits_for_metrics",
}


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions[0].argmax(-1) == predictions[1]).mean())}


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", sampled([0.0, 0.1], [0.1]))
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, dropout: float) -> None:
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    whole = trainer(tmp_path / "whole", bert(dropout), **settings)
    whole.train()
    again = trainer(tmp_path / "again", bert(dropout), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert again.ort_report.graph_calls == 4
    expected = whole.model.state_dict()
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.usefixtures("graph_wins")
def test_a_resumed_training_goes_on_with_the_winner_of_the_contest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr("transformers.trainer.logger.warning", warned.append)
    settings = {
        "max_steps": 18,
        "save_strategy": "steps",
        "save_steps": 14,
        "ort_engine": "auto",
        "restore_callback_states_from_checkpoint": True,
    }
    whole = trainer(tmp_path / "whole", bert(0.1), **settings)
    whole.train()
    assert (whole.ort_report.graph_calls, whole.ort_report.fallback_calls) == (12, 6)
    again = trainer(tmp_path / "again", bert(0.1), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-14"))
    assert (again.ort_report.graph_calls, again.ort_report.fallback_calls) == (4, 0)
    expected = whole.model.state_dict()
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert not [text for text in warned if "Checkpoint included callbacks" in text]
    assert list(again.state.stateful_callbacks) == ["TrainerControl"]
    last = json.loads((tmp_path / "again" / "checkpoint-18" / "trainer_state.json").read_text())
    assert last["stateful_callbacks"]["ortrain"]["attributes"] == {"winner": "aten"}


@pytest.mark.parametrize("own", [False, True], ids=["Trainer's loss", "a loss on the instance"])
def test_only_training_steps_read_nothing_but_the_loss(tmp_path: Path, own: bool) -> None:
    """A callback that calls the model between them reads its logits, and so may a loss."""
    within: list[bool] = []
    between: list[bool] = []

    class Watching(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            between.append(ours.model_wrapped.only_loss_is_read)

    ours = trainer(tmp_path, max_steps=2)
    ours.add_callback(Watching())
    inputs, compute = ours._prepare_inputs, ours.compute_loss

    def prepared(*args: Any) -> Any:  # in each training step
        within.append(ours.model_wrapped.only_loss_is_read)
        return inputs(*args)

    ours._prepare_inputs = prepared
    if own:
        ours.compute_loss = lambda *args, **kwargs: compute(*args, **kwargs)
    ours.train()
    assert within == [not own] * 2
    assert between == [False] * 2


def test_a_checkpoint_of_trainer_can_be_continued(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    args = arguments(tmp_path / "plain", TrainingArguments, **settings)
    plain = train(Trainer, args, bert(), texts())
    ours = trainer(tmp_path / "ort", **settings)
    ours.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert ours.ort_report.graph_calls == 2
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=1e-5)


def test_the_callbacks_are_those_of_trainer(tmp_path: Path) -> None:
    plain = Trainer(bert(), arguments(tmp_path, TrainingArguments), collate, texts())
    found = [type(callback) for callback in trainer(tmp_path).callback_handler.callbacks]
    assert found == [type(callback) for callback in plain.callback_handler.callbacks]


def test_a_saved_model_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    ours.train()
    ours.save_model(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    for name, weight in ours.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_the_best_model_is_loaded_and_training_stops_early(tmp_path: Path) -> None:
    def run(kind: type, args_kind: type) -> Any:
        args = arguments(
            tmp_path / kind.__name__,
            args_kind,
            max_steps=40,
            learning_rate=0.02,
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=2,
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            save_total_limit=1,
        )
        callbacks = [EarlyStoppingCallback(early_stopping_patience=2)]
        more = {"compute_metrics": accuracy, "callbacks": callbacks}
        return train(kind, args, bert(), texts(), **more)

    plain, ours = run(Trainer, TrainingArguments), run(ORTTrainer, ORTTrainingArguments)
    assert ours.trainer.state.global_step == plain.trainer.state.global_step < 40
    assert ours.trainer.state.best_metric == plain.trainer.state.best_metric
    assert ours.metrics["eval_accuracy"] == plain.metrics["eval_accuracy"]


def test_training_twice_goes_on_with_one_wrapper(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    ours.train()
    ours.train()
    assert ours.ort_report.graph_calls == 12
    assert not isinstance(ours.model, ORTModule)


# --- evaluation ---------------------------------------------------------------------------------


def test_onnxruntime_evaluates_as_pytorch_does(tmp_path: Path) -> None:
    ours = trainer(tmp_path, compute_metrics=accuracy)
    ours.train()
    before = ours.evaluate()
    for _ in range(2):
        with_ort = ours.evaluate(inference_with_ort=True)
        assert with_ort["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-5)
        assert with_ort["eval_accuracy"] == before["eval_accuracy"]
    report = ours.ort_report.inference
    assert (report.graph_calls, report.captures) == (4, 1)
    found = ours.predict(texts(16), inference_with_ort=True)
    np.testing.assert_allclose(
        found.predictions, ours.predict(texts(16)).predictions, rtol=1e-4, atol=1e-5
    )
    assert ours.model.training is False or ours.model.training is True


def test_evaluation_through_onnxruntime_sees_what_training_changes(tmp_path: Path) -> None:
    ours = trainer(tmp_path, inference_with_ort=True, eval_strategy="steps", eval_steps=2)
    ours.train()
    losses = [e["eval_loss"] for e in ours.state.log_history if "eval_loss" in e]
    assert len(set(losses)) == len(losses) == 3
    assert ours.ort_report.inference.captures == 1


def test_each_of_several_data_sets_is_evaluated_with_onnxruntime(tmp_path: Path) -> None:
    ours = trainer(tmp_path, eval_dataset={"a": texts(8), "b": texts(16)})
    metrics = ours.evaluate(inference_with_ort=True)
    assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)
    assert ours.ort_report.inference.graph_calls == 3


def test_a_trainer_of_a_script_calls_the_loops_by_their_old_names(tmp_path: Path) -> None:
    class WithLoops(ORTTrainer):
        def evaluate(self, name: str) -> Any:  # type: ignore[override]
            loader = self.get_eval_dataloader()
            found = getattr(self, name)(loader, description="Evaluation", ignore_keys=None)
            return found.predictions

    ours = WithLoops(bert(), arguments(tmp_path), eval_dataset=texts(16), data_collator=collate)
    plain = ours.evaluate("evaluation_loop")
    np.testing.assert_array_equal(ours.evaluate("prediction_loop"), plain)
    assert ours.ort_report.inference is None
    for calls, name in enumerate(["evaluation_loop_ort", "prediction_loop_ort"], 1):
        np.testing.assert_allclose(ours.evaluate(name), plain, rtol=1e-4, atol=1e-5)
        assert ours.ort_report.inference.graph_calls == 2 * calls
    np.testing.assert_array_equal(ours.evaluate("evaluation_loop"), plain)


def test_prediction_needs_no_labels(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in texts(10)]
    expected = ours.predict(rows)
    found = ours.predict(rows, inference_with_ort=True)
    assert found.label_ids is expected.label_ids is None
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "kind"), table([(bert, "classes"), (gpt2, "copy"), (t5, "copy")], one_in=3)
)
def test_the_trained_model_is_exported(tmp_path: Path, make: Any, kind: str) -> None:
    ours = trainer(tmp_path, make(), train_dataset=texts(kind=kind), eval_dataset=texts(16, kind))
    ours.train()
    path = ours.export_onnx(tmp_path / "onnx", opset=18)
    assert path == tmp_path / "onnx" / "model.onnx"
    session = onnxruntime.InferenceSession(path)
    assert session.get_outputs()[0].name == "logits"


# --- data, searches, arguments ------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __iter__(self) -> Any:
        return iter(texts())


def test_a_stream_of_examples_and_columns_that_the_model_does_not_take(tmp_path: Path) -> None:
    ours = trainer(tmp_path, train_dataset=Stream())
    ours.train()
    assert ours.ort_report.graph_calls == 6
    assert "input_ids" in ours._signature_columns
    assert "text" not in ours._signature_columns


def test_a_search_trains_each_trial_through_the_graph(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    ours = trainer(tmp_path, model_init=lambda trial=None: bert(), max_steps=2)
    best = ours.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
        n_trials=2,
        direction="minimize",
    )
    assert best.objective > 0
    assert ours.ort_report.graph_calls == 4


def test_old_spellings_warn_and_work(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="adamw_ort_fused"):
        args = arguments(tmp_path, optim="adamw_ort_fused", adam_epsilon=1e-7, weight_decay=0.1)
    assert args.optim == "adamw_ort_fused"
    with pytest.warns(FutureWarning) as caught:
        ours = ORTTrainer(
            bert(),
            args,
            collate,
            texts(),
            tokenizer=None,
            feature="sequence-classification",
            onnx_model_path="model.onnx",
        )
    assert {str(w.message).split()[0] for w in caught} == {"feature=", "onnx_model_path="}
    ours.train()
    from ortrain.optim import AdamWMode, FusedAdam

    assert isinstance(ours.optimizer.optimizer, FusedAdam)
    group = ours.optimizer.param_groups[0]
    assert (group["eps"], group["weight_decay"]) == (1e-7, 0.1)
    assert ours.optimizer.optimizer.defaults.get("adam_w_mode", AdamWMode.ADAMW_TRANSFORMERS) == 1


def test_arguments_may_be_left_out_or_be_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(ORTTrainer(bert()).args, ORTTrainingArguments)
    plain = arguments(tmp_path, TrainingArguments)
    ours = ORTTrainer(bert(), plain, collate, texts(), eval_dataset=texts(8))
    ours.train()
    assert ours.ort_report.graph_calls + ours.ort_report.fallback_calls == 6


def test_a_compiled_training_runs_the_graph_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where there is a GPU, the arguments set flags that torch's own test tools forbid to set.
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: False)
    with pytest.warns(OrtrainWarning, match="torch_compile=True does nothing"):
        ours = trainer(tmp_path, torch_compile=True, torch_compile_backend="eager", max_steps=2)
    ours.train()
    assert ours.ort_report.graph_calls == 2


def test_the_training_graphs_are_saved(tmp_path: Path) -> None:
    ours = trainer(tmp_path, save_onnx=True, onnx_prefix="bert", onnx_log_level="ERROR")
    ours.train()
    assert (tmp_path / "bert_forward_training.onnx").exists()
    assert (tmp_path / "bert_backward_1_training.onnx").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_onnx": True}, "onnx_prefix"),
        ({"save_onnx": True, "onnx_prefix": "a", "onnx_log_level": "LOUD"}, "LOUD"),
        ({"ort_engine": "fast"}, "engine='fast'"),
        ({"ort_fallback": "no"}, "fallback='no'"),
        ({"optim": "adamw_unknown"}, "adamw_unknown"),
    ],
)
def test_an_argument_that_does_not_exist_is_an_error_at_once(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **settings)


def test_a_step_that_goes_around_the_graph_is_an_error(tmp_path: Path) -> None:
    class Around(ORTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            return self.model(**inputs).loss

    with pytest.raises(StateError, match="no step of this training ran through ORTModule"):
        train(Around, arguments(tmp_path), bert(), texts())


@pytest.mark.parametrize("skips", [None, True, False])
def test_padding_is_left_out_as_the_arguments_say(tmp_path: Path, skips: bool | None) -> None:
    settings = {} if skips is None else {"skip_padding": skips}
    assert options_of(arguments(tmp_path, **settings)).skip_padding is skips
    written = {None: [], True: ["--skip_padding", "true"], False: ["--skip_padding", "no"]}[skips]
    parser = HfArgumentParser(ORTTrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *written])
    assert parsed.skip_padding is skips


def test_arguments_that_say_nothing_of_padding_leave_it_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", "0")
    for kind in (ORTTrainingArguments, TrainingArguments):
        assert options_of(arguments(tmp_path, kind)).skip_padding is False
    assert options_of(arguments(tmp_path, skip_padding=True)).skip_padding is True


@pytest.mark.parametrize(
    ("written", "budget"), [("least", "least"), ("0.5", 0.5), ("1000000000", 1_000_000_000)]
)
def test_a_memory_budget_is_an_argument(tmp_path: Path, written: str, budget: Any) -> None:
    assert options_of(arguments(tmp_path, memory_budget=budget)).memory_budget == budget
    parser = HfArgumentParser(ORTTrainingArguments)
    line = ["--output_dir", str(tmp_path), "--memory_budget", written]
    (parsed,) = parser.parse_args_into_dataclasses(line)
    assert options_of(parsed).memory_budget == budget
    with pytest.raises(ValueError, match="memory_budget"):
        arguments(tmp_path, memory_budget="half")


def test_the_report_says_what_ran_where(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    assert str(ours.ort_report) == "ORTTrainer: nothing has run yet"
    ours.train()
    ours.evaluate(inference_with_ort=True)
    text = str(ours.ort_report)
    assert "training: 6 forwards as a graph, 0 in PyTorch" in text
    assert "evaluation: 2 forwards as a graph, 0 in PyTorch" in text
    assert json.dumps(ours.ort_report.training.nodes)
    plain = trainer(tmp_path, ort_engine="torch")
    plain.train()
    plain.evaluate()
    text = str(plain.ort_report)
    assert text == 'training: 0 forwards as a graph, 6 in PyTorch (engine="torch")'
