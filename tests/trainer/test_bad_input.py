"""Bad input is one clear error before anything has changed, and good input raises none."""

from __future__ import annotations

import base64
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from ortrain import OrtrainWarning, ORTTrainer, ORTTrainingArguments
from ortrain.errors import InputError, OrtrainError
from tests.breadth import crossed
from tests.trainer.models import LABELS, WORDS, arguments, bert, collate, gpt2, t5, texts

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Rows = list[dict[str, Any]]


def trainer(folder: Path, model: Any, rows: Any, kind: type = ORTTrainer, **more: Any) -> Any:
    """One that is ready to train in PyTorch: what it is given is looked at before the engine."""
    settings = {
        n: more.pop(n) for n in list(more) if n in ORTTrainingArguments.__dataclass_fields__
    }
    if kind is not Trainer:
        settings = {"ort_engine": "torch", **settings}
    args = arguments(
        folder, TrainingArguments if kind is Trainer else ORTTrainingArguments, **settings
    )
    return kind(model, args, train_dataset=rows, **{"data_collator": collate, **more})


def without_labels(rows: Rows) -> Rows:
    return [{name: row[name] for name in row if name != "labels"} for row in rows]


def assert_untouched(ours: Any, act: Callable[[], Any], error: type[Exception], match: str) -> None:
    """The error comes before any forward or step, and leaves the weights as they were."""
    before = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    with pytest.raises(error, match=match):
        act()
    assert ours.ort_report.graph_calls + ours.ort_report.fallback_calls == 0
    assert ours.optimizer is None or not ours.optimizer.state
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# --- labels of the training data ----------------------------------------------------------------


@pytest.mark.parametrize("engine", ["onnxruntime", "auto", "torch"])
def test_training_data_without_labels_is_an_error_before_the_first_forward(
    tmp_path: Path, engine: str
) -> None:
    ours = trainer(tmp_path, bert(), without_labels(texts()), ort_engine=engine)
    assert_untouched(ours, ours.train, InputError, "train_dataset has no labels: BertForSequence")


@pytest.mark.parametrize("make", [gpt2, t5])
def test_a_language_model_whose_collator_makes_no_labels_has_none(
    tmp_path: Path, make: Any
) -> None:
    rows = without_labels(texts(kind="copy"))
    if make is t5:
        rows = [{**row, "decoder_input_ids": row["input_ids"]} for row in rows]

    def pad(rows: Rows) -> dict[str, Any]:
        batch = collate(rows)
        return {**batch, "decoder_input_ids": batch["input_ids"]} if make is t5 else batch

    ours = trainer(tmp_path, make(), rows, data_collator=pad)
    assert_untouched(ours, ours.train, InputError, "and no labels")


@pytest.mark.parametrize("kind", ["rows", "datasets", "stream"])
def test_the_error_tells_the_columns_that_the_model_does_not_take(
    tmp_path: Path, kind: str
) -> None:
    rows: Any = [{"input_ids": [4, 5], "sentiment": 1, "text": "a b"}] * 8
    data = {"rows": rows, "datasets": Dataset.from_list(rows), "stream": Stream(rows)}[kind]
    ours = trainer(tmp_path, bert(), data, data_collator=default_data_collator)
    with pytest.raises(InputError, match="the first batch has input_ids and no labels") as caught:
        ours.train()
    assert ("(sentiment, text dropped" in str(caught.value)) == (kind != "stream")


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Reconstruction(nn.Module):
    """Takes labels and does without."""

    def __init__(self, *, only_in_training: bool = False, as_tuple: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.noise = nn.Dropout(0.5)
        self.count = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
        self.only_in_training, self.as_tuple = only_in_training, as_tuple
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.calls += 1
        loss = (self.inner(self.noise(x)) - x).square().mean()
        if self.as_tuple:
            return loss, x
        return {"loss": loss} if self.training or not self.only_in_training else {"logits": x}


def vectors(count: int = 48) -> Rows:
    generator = torch.Generator().manual_seed(1)
    return [{"x": row} for row in torch.randn(count, 4, generator=generator)]


@pytest.mark.parametrize("settings", [{}, {"only_in_training": True}, {"as_tuple": True}])
def test_a_module_with_a_loss_of_its_own_needs_no_labels(
    tmp_path: Path, settings: dict[str, bool]
) -> None:
    more = {"data_collator": default_data_collator, "max_steps": 3}
    plain = trainer(tmp_path, Reconstruction(**settings), vectors(), Trainer, **more)
    plain.train()
    ours = trainer(tmp_path, Reconstruction(**settings).eval(), vectors(), **more)
    ours.train()
    # The model was asked for a batch, without a trace in it or in the random numbers.
    assert ours.model.calls == plain.model.calls == 3
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], weight), name


def labels_from_ids(rows: Rows) -> dict[str, Any]:
    batch = collate(rows)
    return {**batch, "labels": batch["input_ids"].clone()}


def lora() -> Any:
    torch.manual_seed(0)
    return get_peft_model(
        gpt2(), LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    )


def questions() -> Any:
    return BertForQuestionAnswering(small(BertConfig, num_labels=2))


def small(kind: Any, **more: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(**{**sizes, "intermediate_size": 32, "vocab_size": WORDS, "num_labels": 3, **more})


def of_length_six(**labels: Any) -> Rows:
    return [{"input_ids": [4, 5, 6, 7, 8, 9], **labels} for _ in range(16)]


class OwnLoss(ORTTrainer):
    """Computes the loss without labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(**inputs).logits.square().mean()


SPAN = {"start_positions": 1, "end_positions": 2}
PLAIN = {"data_collator": default_data_collator}
WITH_LABELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "label": (bert, of_length_six(label=1), {"data_collator": default_data_collator}),
    "label_ids": (
        bert,
        of_length_six(label_ids=torch.tensor(1)),
        {"data_collator": default_data_collator},
    ),
    "a stream": (bert, Stream(texts()), {}),
    "a data set of datasets": (
        bert,
        Dataset.from_list(of_length_six(label=1, text="a")),
        PLAIN,
    ),
    "all columns kept": (bert, texts(), {"remove_unused_columns": False}),
    "labels made by the collator": (
        gpt2,
        without_labels(texts(kind="copy")),
        {"data_collator": labels_from_ids},
    ),
    "adapters": (lora, without_labels(texts(kind="copy")), {"data_collator": labels_from_ids}),
    "spans": (questions, of_length_six(**SPAN), PLAIN),
    "names given": (
        questions,
        of_length_six(**SPAN),
        {"label_names": ["start_positions"], **PLAIN},
    ),
    "smoothing": (bert, texts(), {"label_smoothing_factor": 0.1}),
    "a loss function": (
        bert,
        without_labels(texts()),
        {"compute_loss_func": lambda out, labels, **_: out.logits.square().mean()},
    ),
    "a loss of a subclass": (bert, without_labels(texts()), {"kind": OwnLoss}),
}


@pytest.mark.parametrize("case", WITH_LABELS)
def test_data_that_the_model_can_train_on_is_no_error(tmp_path: Path, case: str) -> None:
    make, rows, more = WITH_LABELS[case]
    ours = trainer(tmp_path, make(), rows, **{"max_steps": 1, **more})
    ours.train()
    assert ours.state.global_step == 1


# --- labels of the evaluation data --------------------------------------------------------------

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
BEST: dict[str, Any] = {
    **EVERY_STEP,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
}


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions[0].argmax(-1) == predictions[1]).mean())}


@pytest.mark.parametrize(
    ("data", "settings", "match"),
    [
        (
            without_labels(texts(8)),
            BEST,
            "eval_dataset has no labels, so that there is no eval_loss",
        ),
        ([], BEST, "eval_dataset is empty, so that there is no eval_loss"),
        (
            without_labels(texts(8)),
            {**BEST, "metric_for_best_model": "accuracy", "compute_metrics": accuracy},
            "so that there is no eval_accuracy",
        ),
        (
            {"a": texts(8), "b": without_labels(texts(8))},
            {**EVERY_STEP, "metric_for_best_model": "eval_b_loss"},
            r"eval_dataset\['b'\] has no labels, so that there is no eval_b_loss",
        ),
    ],
)
def test_evaluation_without_what_chooses_the_best_model_is_an_error_before_training(
    tmp_path: Path, data: Any, settings: dict[str, Any], match: str
) -> None:
    ours = trainer(tmp_path, bert(), texts(), eval_dataset=data, **settings)
    assert_untouched(ours, ours.train, InputError, match)


def test_metrics_that_will_not_be_computed_are_said_to(tmp_path: Path) -> None:
    more: dict[str, Any] = {**EVERY_STEP, "compute_metrics": accuracy}
    ours = trainer(tmp_path, bert(), texts(), eval_dataset=without_labels(texts(8)), **more)
    with pytest.warns(OrtrainWarning, match="compute_metrics will not be called") as caught:
        ours.train()
    assert [warning.filename for warning in caught] == [__file__]
    assert ours.state.global_step == 1


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (without_labels(texts(8)), EVERY_STEP),
        (without_labels(texts(8)), {**EVERY_STEP, "metric_for_best_model": "runtime"}),
        (
            {"a": texts(8), "b": without_labels(texts(8))},
            {**BEST, "metric_for_best_model": "a_loss"},
        ),
        (Stream(texts(8)), BEST),
        (texts(8), {**BEST, "data_collator": labels_from_ids}),
    ],
    ids=["no metric", "speed", "another data set", "a stream", "the collator's labels"],
)
def test_evaluation_that_has_what_it_needs_is_no_error(
    tmp_path: Path, data: Any, settings: dict[str, Any]
) -> None:
    model = gpt2() if "data_collator" in settings else bert()
    ours = trainer(tmp_path, model, texts(), eval_dataset=data, **settings)
    ours.train()
    assert ours.state.global_step == 1


def test_looking_at_the_evaluation_data_changes_no_random_number(tmp_path: Path) -> None:
    def noisy(rows: Rows) -> dict[str, Any]:
        batch = collate(rows)
        return {**batch, "labels": torch.randint(LABELS, batch["labels"].shape)}

    runs = []
    for kind in (Trainer, ORTTrainer):
        more: dict[str, Any] = {**BEST, "max_steps": 3, "data_collator": noisy}
        run = trainer(
            tmp_path / kind.__name__, bert(0.1), texts(), kind, eval_dataset=texts(8), **more
        )
        run.train()
        runs.append([e["eval_loss"] for e in run.state.log_history if "eval_loss" in e])
    assert runs[0] == runs[1]
    assert len(runs[0]) == 3


# --- no data ------------------------------------------------------------------------------------


def test_an_empty_data_set_is_named(tmp_path: Path) -> None:
    ours = trainer(tmp_path, bert(), [])
    assert_untouched(ours, ours.train, InputError, "train_dataset is empty")


def test_no_data_set_is_transformers_own_error(tmp_path: Path) -> None:
    ours = trainer(tmp_path, bert(), None)
    assert_untouched(ours, ours.train, ValueError, "training requires a train_dataset")


def test_an_empty_stream_is_an_error_of_the_loader(tmp_path: Path) -> None:
    ours = trainer(tmp_path, bert(), Stream([]))
    assert_untouched(ours, ours.train, ValueError, "Batch does not contain any data")


def test_a_training_to_which_no_batch_came_is_an_error(tmp_path: Path) -> None:
    ours = trainer(tmp_path, bert(), texts(4), dataloader_drop_last=True)
    assert_untouched(ours, ours.train, InputError, "nothing was trained: no batch came")


def test_a_training_that_was_over_before_is_no_error(tmp_path: Path) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch"}
    trainer(tmp_path, bert(), texts(16), **settings).train()
    again = trainer(tmp_path, bert(), texts(16), **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


# --- arguments ----------------------------------------------------------------------------------


def test_an_argument_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no_such"):
        ORTTrainingArguments(str(tmp_path), no_such=1)


def test_a_log_level_that_does_not_exist_is_an_error_also_where_nothing_is_logged(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="onnx_log_level='LOUD'"):
        arguments(tmp_path, onnx_log_level="LOUD")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "there is no such file"),
        ('{"zero_optimization": ', "is not JSON: Expecting value: line 1"),
        ("[1, 2]", "holds no JSON object but a list"),
    ],
)
def test_a_deepspeed_file_that_cannot_be_read_is_an_error_without_deepspeed_too(
    tmp_path: Path, content: str | None, match: str
) -> None:
    path = tmp_path / "zero.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"deepspeed='.*zero.json'.*{match}"):
        arguments(tmp_path, deepspeed=str(path))


def test_a_deepspeed_argument_that_is_json_itself_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        arguments(tmp_path, deepspeed='{"zero_optimization": ')


def test_a_deepspeed_configuration_that_can_be_read_is_left_to_transformers(tmp_path: Path) -> None:
    from ortrain.trainer.checks import check_deepspeed_config

    config = {"zero_optimization": {"stage": 1}}
    text = json.dumps(config)
    path = tmp_path / "zero.json"
    path.write_text(text)
    for form in (
        None,
        config,
        text,
        path,
        str(path),
        base64.urlsafe_b64encode(text.encode()).decode(),
    ):
        check_deepspeed_config(form)


# --- checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of BERT after two of four steps."""
    folder = tmp_path_factory.mktemp("bert")
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer(folder, bert(), texts(), **settings).train()
    return folder / "checkpoint-2"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an adapter of GPT-2 after two of four steps."""
    folder = tmp_path_factory.mktemp("adapter")
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer(folder, lora(), texts(kind="copy"), **settings).train()
    return folder / "checkpoint-2"


def resume(folder: Path, model: Any, checkpoint: Path, match: str, error: Any = InputError) -> None:
    """Resuming raises the error, and warns of nothing."""
    ours = trainer(folder, model, texts(kind="copy"), max_steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_untouched(
            ours, lambda: ours.train(resume_from_checkpoint=str(checkpoint)), error, match
        )


def test_a_model_that_loads_by_code_of_its_own_decides_what_fits(tmp_path: Path) -> None:
    class Growing(BertForSequenceClassification):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("seen", torch.zeros(1))

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen = state_dict["seen"].clone()
            return super().load_state_dict(state_dict, *args, **kwargs)

    model = Growing(small(BertConfig, num_hidden_layers=1))
    model.seen = torch.arange(3.0)
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, model, texts(), **settings).train()
    ours = trainer(tmp_path, Growing(small(BertConfig, num_hidden_layers=1)), texts(), max_steps=3)
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert ours.state.global_step == 3
    assert torch.equal(ours.model.seen, torch.arange(3.0))


def test_a_checkpoint_of_a_wider_model_is_refused_with_names_and_shapes(
    tmp_path: Path, checkpoint: Path
) -> None:
    name = "bert.embeddings.word_embeddings.weight"
    model = BertForSequenceClassification(small(BertConfig, hidden_size=24, num_hidden_layers=2))
    match = (
        rf"(?s){checkpoint} does not fit this BertForSequenceClassification\n.*"
        rf"{name} is \[60, 16\] there and \[60, 24\] in the model.*help:.*the model that the"
    )
    resume(tmp_path, model, checkpoint, match)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: BertForSequenceClassification(small(BertConfig, num_hidden_layers=2)),
            r"only the model has bert.encoder.layer.1.attention.self.query.weight, .* and 13 more",
        ),
        (
            lambda: BertForSequenceClassification(small(BertConfig, num_hidden_layers=0)),
            r"only the checkpoint has bert.encoder.layer.0",
        ),
        (gpt2, "does not fit this GPT2LMHeadModel: it is of a BertForSequenceClassification"),
        (lora, "does not fit this PeftModel: it is of a BertForSequenceClassification"),
    ],
    ids=["deeper", "shallower", "another architecture", "with adapters"],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, checkpoint: Path, make: Any, match: str
) -> None:
    resume(tmp_path, make(), checkpoint, match)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: adapted(r=8), r"lora_A.weight is \[4, 16\] there and \[8, 16\] in the model"),
        (lambda: adapted(target_modules=["c_proj"]), r"only the model has .*c_proj.lora_A.weight"),
        (gpt2, "it holds adapters, and the model has none"),
    ],
    ids=["another rank", "other layers", "no adapters"],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    tmp_path: Path, adapter: Path, make: Any, match: str
) -> None:
    resume(tmp_path, make(), adapter, match)


def adapted(**settings: Any) -> Any:
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    return get_peft_model(gpt2(), LoraConfig(**{**config, **settings}))


def test_a_checkpoint_of_adapters_is_continued(tmp_path: Path, adapter: Path) -> None:
    ours = trainer(tmp_path, lora(), texts(kind="copy"), max_steps=4)
    ours.train(resume_from_checkpoint=str(adapter))
    assert ours.state.global_step == 4


def test_weights_under_two_names_are_stored_under_one(tmp_path: Path) -> None:
    config = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": WORDS, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**config))
    assert model.lm_head.weight is model.transformer.wte.weight
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    ours = trainer(tmp_path, model, texts(kind="copy"), **settings)
    ours.train()
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert ours.state.global_step == 2


@pytest.mark.parametrize("form", ["pytorch_model.bin", "shards"])
def test_other_forms_of_weights_are_compared_as_well(
    tmp_path: Path, checkpoint: Path, form: str
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    (copy / "model.safetensors").unlink()
    if form == "shards":
        bert().save_pretrained(copy, max_shard_size="8KB")
        assert len(list(copy.glob("model-*.safetensors"))) > 1
    else:
        torch.save(bert().state_dict(), copy / form)
    ours = trainer(tmp_path, bert(), texts(), max_steps=4)
    ours.train(resume_from_checkpoint=str(copy))
    assert ours.state.global_step == 4
    resume(tmp_path, gpt2(), copy, "does not fit this GPT2LMHeadModel")
    if form == "shards":
        shard = next(copy.glob("model-*.safetensors"))
        shard.unlink()
        resume(tmp_path, bert(), copy, f"{shard.name} is missing")


def test_a_folder_that_does_not_exist_is_transformers_own_error(tmp_path: Path) -> None:
    resume(tmp_path, bert(), tmp_path / "nowhere", "Can't find a valid checkpoint at", ValueError)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"]
)
def test_a_checkpoint_that_lacks_a_file_is_refused(
    tmp_path: Path, checkpoint: Path, name: str
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    (copy / name).unlink()
    resume(tmp_path, bert(), copy, rf"(?s)cannot go on from {copy}.*{name} is missing")


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_checkpoint_with_a_truncated_file_is_refused(
    tmp_path: Path, checkpoint: Path, name: str, share: float
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: int(share * len(content))])
    resume(tmp_path, bert(), copy, rf"{name} is cut off")


# --- batches that the model does not take -------------------------------------------------------


def floats(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "input_ids": batch["input_ids"].float()}


def short_mask(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "attention_mask": batch["attention_mask"][:, :-1]}


def fewer_labels(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "labels": batch["labels"][:-1]}


def unknown_words(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "input_ids": batch["input_ids"] + WORDS}


def unknown_classes(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "labels": batch["labels"] + LABELS}


def words_below_zero(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "input_ids": batch["input_ids"] - WORDS}


def classes_below_zero(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "labels": batch["labels"] - LABELS}


SPOILS = [
    floats,
    short_mask,
    fewer_labels,
    unknown_words,
    unknown_classes,
    words_below_zero,
    classes_below_zero,
]


@pytest.mark.parametrize(("spoil", "fallback"), crossed(SPOILS, ["raise", "torch"], one_in=2))
def test_a_batch_that_the_model_does_not_take_is_pytorchs_own_error_and_no_other(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    spoil: Callable[[dict[str, Any]], dict[str, Any]],
    fallback: str,
) -> None:
    step = {"raise": 1, "torch": 3}[fallback]

    def at_step(rows: Rows) -> dict[str, Any]:
        batches.append(collate(rows))
        return spoil(batches[-1]) if len(batches) == step else batches[-1]

    batches: list[Any] = []
    plain = trainer(tmp_path, bert(), texts(), Trainer, data_collator=at_step)
    with pytest.raises((RuntimeError, ValueError, IndexError)) as expected:
        plain.train()
    assert plain.state.global_step == step - 1

    batches.clear()
    settings = {"ort_engine": "onnxruntime", "ort_fallback": fallback}
    ours = trainer(tmp_path, bert(), texts(), data_collator=at_step, **settings)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(type(expected.value)) as found:
            ours.train()
    assert str(found.value) == str(expected.value)
    assert not isinstance(found.value, OrtrainError)
    assert found.value.__context__ is None
    assert found.value.__cause__ is None
    assert "onnxruntime" not in "".join(capfd.readouterr())
    assert ours.state.global_step == ours.ort_report.graph_calls == step - 1


def test_a_refusal_of_a_call_that_pytorch_takes_is_still_told(tmp_path: Path) -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": (self.inner(x) * 1j).abs().mean()}

    settings = {"ort_engine": "onnxruntime", "ort_fallback": "raise"}
    more = {"data_collator": default_data_collator, **settings}
    with pytest.raises(OrtrainError, match="is complex"):
        trainer(tmp_path, Turning(), vectors(), **more).train()


def test_a_training_that_failed_leaves_the_trainer_outside_of_training(tmp_path: Path) -> None:
    ours = trainer(tmp_path, bert(), without_labels(texts()), eval_dataset=texts(8))
    with pytest.raises(InputError):
        ours.train()
    assert not ours.is_in_train
    plain = trainer(tmp_path, bert(), texts(), Trainer, eval_dataset=texts(8))
    assert ours.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
