"""predict_with_generate in onnxruntime: Seq2SeqTrainer's predictions and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from ortrain import OrtrainWarning, ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments
from ortrain.errors import NotServed
from tests.deploy.decoders import Peeks, restless
from tests.trainer.models import arguments, collate, t5, texts


def varied() -> Any:
    return restless(t5(), 5)


def first_tokens(predictions: Any) -> dict[str, float]:
    return {"sum": float(predictions.predictions[:, :6].sum())}


def trainer(
    folder: Path, kind: type = ORTSeq2SeqTrainer, model: Any = None, **settings: Any
) -> Any:
    """One that generates where it evaluates."""
    ours = issubclass(kind, ORTSeq2SeqTrainer)
    given: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 8}
    if ours:
        given |= {"inference_with_ort": True}
    args = arguments(
        folder,
        ORTSeq2SeqTrainingArguments if ours else Seq2SeqTrainingArguments,
        **{**given, **settings},
    )
    rows = texts(20, "copy")
    model = varied() if model is None else model
    return kind(model, args, collate, rows, eval_dataset=rows[:10], compute_metrics=first_tokens)


def test_evaluations_of_a_training_give_seq2seqtrainers_metrics(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.05}
    plain, ours = [
        trainer(tmp_path / kind.__name__, kind, **settings, generation_num_beams=2)
        for kind in (Seq2SeqTrainer, ORTSeq2SeqTrainer)
    ]
    metrics = []
    for each in (plain, ours):
        each.train()
        logs = [entry for entry in each.state.log_history if "eval_loss" in entry]
        metrics.append([(e["eval_sum"], e["eval_loss"]) for e in logs])
    assert metrics[1] == pytest.approx(np.array(metrics[0]), rel=1e-5)
    assert metrics[1][0] != metrics[1][1]
    report = ours.ort_report.generation
    # Twice two batches.
    assert (report.graph_calls, report.fallback_calls, report.torch_runs) == (4, 0, 0)
    assert (report.encoder_runs, report.captures) == (4, 4)
    assert ours.ort_report.inference.captures == 1

    # Another data set, of other sizes, and other searches: a row alone has graphs of its own.
    for rows, more, captures in (
        (7, {}, (4, 1)),
        (1, {"num_beams": 1, "max_length": 12}, (6, 2)),
    ):
        expected, found = [each.predict(texts(rows, "copy"), **more) for each in (plain, ours)]
        np.testing.assert_array_equal(found.predictions, expected.predictions)
        np.testing.assert_array_equal(found.label_ids, expected.label_ids)
        assert found.metrics["test_sum"] == expected.metrics["test_sum"]
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)
        assert (report.captures, ours.ort_report.inference.captures) == captures
    assert report.graph_calls == 6
    text = str(ours.ort_report)
    assert "generation: 6 calls in onnxruntime, 0 in PyTorch" in text
    assert f"6 of the encoder's graph, {report.decoder_runs} of the decoder's" in text
    assert "generate" not in vars(ours.model)


def test_generation_stays_in_pytorch_where_evaluation_does(tmp_path: Path) -> None:
    ours = trainer(tmp_path, inference_with_ort=False)
    ours.evaluate()
    assert ours.ort_report.generation is None
    ours.evaluate(inference_with_ort=True)
    assert ours.ort_report.generation.graph_calls == 2


def test_a_subclass_that_generates_by_itself_does_so_in_onnxruntime(tmp_path: Path) -> None:
    class Own(ORTSeq2SeqTrainer):
        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            inputs = self._prepare_inputs(inputs)
            given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            tokens = self.model.generate(**given, min_new_tokens=7, max_new_tokens=7)
            return None, tokens, inputs["labels"]

    ours = trainer(tmp_path, Own)
    ours.evaluate()
    assert ours.ort_report.generation.decoder_runs == 14


def test_an_error_in_the_middle_puts_generate_back(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    with pytest.raises(ValueError, match="not_an_argument"):
        ours.evaluate(not_an_argument=1)
    assert "generate" not in vars(ours.model)


# peft asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_generate_inside_of_the_model(tmp_path: Path) -> None:
    def adapted() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"], lora_alpha=64)
        model = get_peft_model(varied(), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        return model

    plain = trainer(tmp_path / "plain", Seq2SeqTrainer, adapted())
    ours = trainer(tmp_path / "ours", model=adapted())
    expected, found = [each.predict(texts(6, "copy")).predictions for each in (plain, ours)]
    np.testing.assert_array_equal(found, expected)
    without = trainer(tmp_path / "without", Seq2SeqTrainer).predict(texts(6, "copy")).predictions
    assert (found != without).any()
    report = ours.ort_report.generation
    assert (report.graph_calls, report.fallback_calls) == (1, 0)


@pytest.mark.breadth  # a generator alone: tests/deploy/test_generation.py
def test_a_model_that_reads_its_tokens_as_an_array_generates_between_graphs(tmp_path: Path) -> None:
    expected = trainer(tmp_path / "plain", Seq2SeqTrainer).predict(texts(6, "copy"))
    model = varied()
    model.__class__ = Peeks
    ours = trainer(tmp_path / "ours", model=model, remove_unused_columns=False)
    found = ours.predict(texts(6, "copy"))
    np.testing.assert_array_equal(found.predictions, expected.predictions)
    report = ours.ort_report.generation
    assert (report.graph_calls, report.fallback_calls) == (1, 0)


def test_mixed_precision_generates_in_pytorch_as_seq2seqtrainer_does(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", Seq2SeqTrainer, bf16=True)
    ours = trainer(tmp_path / "ours", bf16=True, ort_fallback="torch")
    expected = plain.predict(texts(6, "copy"))
    with pytest.warns(OrtrainWarning, match="in PyTorch: autocast is on"):
        found = ours.predict(texts(6, "copy"))
    np.testing.assert_array_equal(found.predictions, expected.predictions)
    assert ours.ort_report.generation.fallback_calls == 1
    with pytest.raises(NotServed, match="autocast is on"):
        trainer(tmp_path / "strict", bf16=True).predict(texts(6, "copy"))


@pytest.mark.filterwarnings("ignore:.*autocast is on")
@pytest.mark.parametrize("with_ort", [False, True], ids=["PyTorch", "onnxruntime"])
def test_mixed_precision_generates_as_seq2seqtrainer_does_after_training(
    tmp_path: Path, with_ort: bool
) -> None:
    settings = {"bf16": True, "max_steps": 2, "learning_rate": 0.05}
    plain = trainer(tmp_path / "plain", Seq2SeqTrainer, **settings)
    settings |= {"ort_fallback": "torch", "inference_with_ort": with_ort}
    ours = trainer(tmp_path / "ours", **settings)
    plain.train()
    ours.train()
    precisions = set()
    ours.model.lm_head.register_forward_hook(lambda *io: precisions.add(io[-1].dtype))
    found = ours.predict(texts(9, "copy"))
    assert precisions == {torch.bfloat16}
    expected = plain.predict(texts(9, "copy"))
    np.testing.assert_array_equal(found.predictions, expected.predictions)
    loss = expected.metrics["test_loss"]
    assert found.metrics["test_loss"] == (pytest.approx(loss, rel=1e-3) if with_ort else loss)
    assert "forward" not in ours.model.__dict__
