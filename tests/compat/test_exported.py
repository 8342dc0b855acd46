"""Optimum's classes of exported models, by the arguments and attributes that scripts know."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from transformers import BertConfig, BertModel, pipelines

from ortrain.compat import exported
from ortrain.compat.exported import (
    ORTModelForCausalLM,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
)
from ortrain.compat.pipelines import pipeline
from ortrain.compat.rewriting import ORTOptimizer, ORTQuantizer
from ortrain.deploy import AutoOptimizationConfig, AutoQuantizationConfig, models
from ortrain.errors import InputError, OrtrainWarning
from tests.deploy.exported import call, folder, torch_model
from tests.deploy.models.test_pipelines import TEXTS, tokenizer
from tests.deploy.models.test_saving import names

ROOT = Path(__file__).parents[2]
CPU = "CPUExecutionProvider"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint")
    torch_model("classes").save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def test_each_class_is_that_of_ortrain() -> None:
    for name in models.__all__:
        if name.startswith("ORTModelFor"):
            old, new = getattr(exported, name), getattr(models, name)
            assert issubclass(old, new)
            assert old is not new
            assert old.__name__ == new.__name__


def test_old_arguments_are_taken_and_told(checkpoint: Path, tmp_path: Path) -> None:
    kind = ORTModelForSequenceClassification
    with pytest.warns(OrtrainWarning, match="from_transformers is export now"):
        model = kind.from_pretrained(
            checkpoint, from_transformers=True, model_save_dir=tmp_path / "kept"
        )
    assert names(tmp_path / "kept") >= {"model.onnx", "config.json", "tokenizer.json"}
    with pytest.warns(OrtrainWarning, match="use_auth_token is token now"):
        again = kind.from_pretrained(
            tmp_path / "kept", file_name=None, provider=[CPU], provider_options=[{}],
            use_auth_token="t", config=None, use_io_binding=True, local_files_only=True,
        )  # fmt: skip
    given = call("classes", 2, 6)
    assert torch.equal(again(**given).logits, model(**given).logits)
    with pytest.warns(OrtrainWarning, match="task has no effect"):
        kind.from_pretrained(folder("classes"), task="text-classification", providers=[CPU])
    told = pytest.warns(OrtrainWarning, match="from_transformers")
    with told, pytest.raises(ValueError, match="from_transformers and export are one"):
        kind.from_pretrained(checkpoint, from_transformers=True, export=False)
    with pytest.raises(ValueError, match="provider='FooExecutionProvider'"):
        kind.from_pretrained(folder("classes"), provider="FooExecutionProvider")
    with pytest.raises(TypeError, match="no argument 'colour'"):
        kind.from_pretrained(folder("classes"), colour=1)


def test_what_scripts_look_up_is_there() -> None:
    model: Any = ORTModelForSequenceClassification.from_pretrained(folder("classes"))
    assert isinstance(model.model, onnxruntime.InferenceSession)
    assert [value.name for value in model.model.get_inputs()] == [*model.input_names]
    assert model.output_names == {"logits": 0}
    assert model.model_save_dir == folder("classes")
    assert model.model_path == folder("classes") / "model.onnx"
    assert (model.provider, model.providers, model.use_io_binding) == (CPU, [CPU], True)
    assert model.preprocessors == []
    text: Any = ORTModelForCausalLM.from_pretrained(folder("gpt2"))
    assert (text.use_cache, text.use_merged) == (True, False)
    assert isinstance(text.model, onnxruntime.InferenceSession)
    without: Any = ORTModelForCausalLM.from_pretrained(folder("gpt2"), use_cache=False)
    assert not without.use_cache
    with pytest.warns(OrtrainWarning, match="use_merged has no effect"):
        ORTModelForCausalLM.from_pretrained(folder("gpt2"), use_merged=True)
    paired: Any = ORTModelForSeq2SeqLM.from_pretrained(folder("t5"), use_cache=True)
    for part in (paired.decoder, paired.decoder_with_past):
        assert part.session.get_providers() == [CPU]
        assert part.device == torch.device("cpu")
    assert paired.encoder.session.inference_session.get_providers() == [CPU]


def test_generation_does_not_take_the_names_of_parts_for_a_model() -> None:
    """Its check of arguments asks ``decoder.forward`` for what it takes."""
    ids = torch.tensor([[5, 6, 7]])
    for name in ("t5", "bart"):
        model: Any = ORTModelForSeq2SeqLM.from_pretrained(folder(name))
        found = model.generate(ids, max_new_tokens=5)
        assert torch.equal(found, torch_model(name).generate(ids, max_new_tokens=5))


def test_files_may_be_written_beside_the_source_but_not_over_it(tmp_path: Path) -> None:
    model = ORTModelForSequenceClassification.from_pretrained(folder("classes"))
    model.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    optimizer = ORTOptimizer.from_pretrained(tmp_path)
    optimizer.optimize(AutoOptimizationConfig.O2(), tmp_path)
    config = AutoQuantizationConfig.avx2(is_static=False)
    quantizer = ORTQuantizer.from_pretrained(tmp_path, file_name="model_optimized.onnx")
    quantizer.quantize(config, tmp_path)
    added = {"model_optimized.onnx", "model_optimized_quantized.onnx", "ort_config.json"}
    assert names(tmp_path) == {path.name for path in before} | added
    for suffix in (None, ""):
        with pytest.raises(ValueError, match=r"model\.onnx is a file of the source"):
            optimizer.optimize(AutoOptimizationConfig.O1(), tmp_path, file_suffix=suffix)
    assert {path: path.read_bytes() for path in before} == before
    assert names(tmp_path) == {path.name for path in before} | added


def test_of_several_files_the_plain_names_are_taken_and_told(tmp_path: Path) -> None:
    classes, paired = tmp_path / "classes", tmp_path / "paired"
    for name, place in (("classes", classes), ("t5", paired)):
        shutil.copytree(folder(name), place)
        ORTOptimizer.from_pretrained(place).optimize(AutoOptimizationConfig.O1(), place)
    with pytest.warns(OrtrainWarning, match=r"model\.onnx is taken, and model_optimized\.onnx not"):
        one = ORTModelForSequenceClassification.from_pretrained(classes)
    assert [path.name for path in one.onnx_files] == ["model.onnx"]
    with pytest.warns(OrtrainWarning, match=r"(en|de)coder(_with_past)?_model\.onnx is taken"):
        several = ORTModelForSeq2SeqLM.from_pretrained(paired)
    assert [path.name for path in several.onnx_files] == [
        "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx",
    ]  # fmt: skip
    chosen = ORTModelForSequenceClassification.from_pretrained(classes, "model_optimized.onnx")
    assert [path.name for path in chosen.onnx_files] == ["model_optimized.onnx"]


def test_optimums_pipeline_finds_model_and_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    torch_pipe = pipelines.pipeline(
        "text-classification", model=torch_model("classes"), tokenizer=tokenizer()
    )
    expected = [each["label"] for each in torch_pipe(TEXTS)]
    ORTModelForSequenceClassification.from_pretrained(checkpoint, export=True).save_pretrained(
        tmp_path
    )
    loaded = ORTModelForSequenceClassification.from_pretrained(tmp_path)
    for model in (checkpoint, str(tmp_path), loaded):
        run = pipeline("sentiment-analysis", model=model, accelerator="ort")
        assert isinstance(run.model, ORTModelForSequenceClassification)
        assert [each["label"] for each in run(TEXTS)] == expected
    with pytest.raises(ValueError, match="accelerator='bettertransformer'"):
        pipeline("text-classification", model=tmp_path, accelerator="bettertransformer")
    with pytest.raises(ValueError, match="model is missing"):
        pipeline("text-classification")
    with pytest.raises(InputError, match="no exported model for 'depth-estimation'"):
        pipeline("depth-estimation", model=tmp_path)


def answered(question: str, context: str, most: int) -> tuple[float, int, int]:
    """The best span of PyTorch's scores, by trying all of them."""
    given = tokenizer()(question, context, return_tensors="pt")
    inside = [each == 1 for each in given.sequence_ids(0)]
    with torch.no_grad():
        scores = torch_model("answers")(**given)
    shown = [i for i, is_in in enumerate(inside) if is_in or i == 0]  # with that of no answer
    begins, ends = (s[0, shown].softmax(0) for s in (scores.start_logits, scores.end_logits))
    spans = [
        (float(begins[b] * ends[e]), shown[b], shown[e])
        for b in range(1, len(shown))
        for e in range(b, min(b + most, len(shown)))
    ]
    score, begin, end = max(spans)
    return score, given.token_to_chars(0, begin).start, given.token_to_chars(0, end).end


def test_questions_are_answered_by_the_best_part_of_the_context() -> None:
    model = exported.ORTModelForQuestionAnswering.from_pretrained(folder("answers"))
    run = pipeline("question-answering", model=model, tokenizer=tokenizer())
    question, context = "word7 word9", "word20 word21 word22  word8 word40 word41"
    for most in (1, 3, 15):
        found = run(question=question, context=context, max_answer_len=most)
        score, start, end = answered(question, context, most)
        assert found["score"] == pytest.approx(score, abs=1e-5)
        assert (found["start"], found["end"]) == (start, end)
        assert found["answer"] == context[start:end]
    both = run([{"question": question, "context": context}] * 2)
    assert both == [run(question, context)] * 2
    several = run(question=question, context=context, top_k=3)
    assert [each["score"] for each in several] == sorted(e["score"] for e in several)[::-1]
    assert run(question=question, context=context, top_k=40, handle_impossible_answer=True)
    long = " ".join(f"word{5 + i % 50}" for i in range(60))
    parts = run(question=question, context=long, max_seq_len=20, doc_stride=5)
    assert long[parts["start"] : parts["end"]] == parts["answer"]
    with pytest.raises(InputError, match="expected questions with their contexts"):
        run("word7")
    with pytest.raises(ValueError, match="top_k=0"):
        run(question=question, context=context, top_k=0)


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("text2text-generation", "generated_text"),
        ("summarization", "summary_text"),
        ("translation_en_to_fr", "translation_text"),
    ],
)
def test_texts_are_written_of_texts(task: str, key: str) -> None:
    model = ORTModelForSeq2SeqLM.from_pretrained(folder("t5"))
    run = pipeline(task, model=model, tokenizer=tokenizer())
    given = [tokenizer()(text, return_tensors="pt") for text in TEXTS]
    search = {"max_new_tokens": 6, "num_beams": 2}
    expected = [
        tokenizer().batch_decode(
            torch_model("t5").generate(each["input_ids"], **search), skip_special_tokens=True
        )[0]
        for each in given
    ]
    assert [each[key] for each in run(TEXTS, **search)] == expected
    assert run(TEXTS[0], **search) == [{key: expected[0]}]
    several = run(TEXTS, num_return_sequences=2, **search)
    assert [len(each) for each in several] == [2] * len(TEXTS)


SENTENCES = """
import ortrain.compat
import numpy as np
from sentence_transformers import SentenceTransformer, models
from sentence_transformers import export_dynamic_quantized_onnx_model, export_optimized_onnx_model

words = models.Transformer("plain")
SentenceTransformer(modules=[words, models.Pooling(16)]).save_pretrained("sentences")
texts = ["word7 word12", "word9", "word20 word21 word22"]
expected = SentenceTransformer("sentences", device="cpu").encode(texts)
model = SentenceTransformer("sentences", backend="onnx", device="cpu")
assert np.abs(model.encode(texts) - expected).max() < 1e-5
model.save_pretrained("saved")
saved = SentenceTransformer("saved", backend="onnx", device="cpu")
export_optimized_onnx_model(saved, "O2", "saved")
export_dynamic_quantized_onnx_model(saved, "avx2", "saved")
for file, most in (("model_O2.onnx", 1e-5), ("model_quint8_avx2.onnx", 0.2)):
    other = SentenceTransformer("saved", backend="onnx", model_kwargs={"file_name": file})
    assert np.abs(other.encode(texts) - expected).max() < most, file
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="needs sentence-transformers"
)
def test_sentence_transformers_runs_optimizes_and_quantizes_its_models(tmp_path: Path) -> None:
    config: BertConfig = torch_model("features").config
    BertModel(config).save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SENTENCES],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert not done.returncode, done.stderr
