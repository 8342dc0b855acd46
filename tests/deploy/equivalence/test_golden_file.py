"""Golden sets of text, tokenized by the model's own tokenizer; each broken row is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ortrain.deploy import GoldenSet
from ortrain.errors import InputError
from tests.deploy import classifiers

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "plot", "##s"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model of red, green and blue, and a tokenizer of whole words."""
    folder = classifiers.folder(tmp_path / "model")
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = transformers.BertTokenizerFast(
        vocab=str(tmp_path / "vocab.txt"), model_max_length=6
    )
    tokenizer.save_pretrained(folder)
    return folder


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_texts_are_tokenized_and_padded_batch_by_batch(model: Path, tmp_path: Path) -> None:
    rows = 'text,label,where\n"good, film",red,a\nbad,2,b\n\ngood good good good good,green,a\n'
    file = write(tmp_path / "golden.csv", rows)
    golden = GoldenSet.from_file(file, model, batch_size=2, slice_columns=["where"])
    first, second = golden.batches
    assert first["input_ids"].tolist() == [[2, 5, 1, 7, 3], [2, 6, 3, 0, 0]]
    assert first["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert second["input_ids"].shape == (1, 6)  # cut to what the tokenizer says
    assert golden.labels is not None
    assert golden.labels.tolist() == [0, 2, 1]
    assert golden.slices == {"where=a": [0, 2], "where=b": [1]}
    assert golden.id2label == {0: "red", 1: "green", 2: "blue"}
    assert GoldenSet.from_file(file, model, limit=2).examples == 2
    longest = GoldenSet.from_file(file, model, max_length=3).batches[0]["input_ids"]
    assert longest.shape[1] == 3


def test_tab_separated_text_is_not_quoted(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "golden.tsv", 'text\tlabel\n"good\tred\nfilm"\tblue\n')
    golden = GoldenSet.from_file(file, model)
    assert golden.examples == 2
    assert golden.labels is not None
    assert golden.labels.tolist() == [0, 2]


def test_a_file_without_labels_has_none(model: Path, tmp_path: Path) -> None:
    golden = GoldenSet.from_file(write(tmp_path / "golden.csv", "text\ngood\n"), model)
    assert golden.labels is None


def test_pairs_of_texts_are_one_example(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "golden.jsonl", '{"a": "good", "b": "film", "label": 1}\n')
    golden = GoldenSet.from_file(file, model, text_column=("a", "b"))
    assert golden.batches[0]["input_ids"].tolist() == [[2, 5, 3, 7, 3]]
    assert golden.batches[0]["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]


def test_labels_of_words_are_those_of_their_first_tokens(model: Path, tmp_path: Path) -> None:
    row = {"text": ["good", "films"], "label": ["blue", 0]}
    other = {"text": ["bad"], "label": [1]}
    file = write(tmp_path / "golden.jsonl", f"{json.dumps(row)}\n{json.dumps(other)}\n")
    golden = GoldenSet.from_file(file, model)
    assert golden.batches[0]["input_ids"].tolist() == [[2, 5, 7, 9, 3], [2, 6, 3, 0, 0]]
    assert golden.labels is not None
    assert golden.labels.tolist() == [[-100, 2, 0, -100, -100], [-100, 1, -100, -100, -100]]


def test_numbers_are_the_labels_of_a_regression(model: Path, tmp_path: Path) -> None:
    config(model, problem_type="regression", id2label={"0": "LABEL_0"})
    file = write(tmp_path / "golden.csv", "text,label\ngood,0.5\nbad,-1e1\n")
    golden = GoldenSet.from_file(file, model)
    assert golden.labels is not None
    assert golden.labels.tolist() == [0.5, -10]
    with pytest.raises(InputError, match=r"row 2: the label 'nan' is none") as raised:
        GoldenSet.from_file(write(tmp_path / "golden.csv", "text,label\ngood,nan\n"), model)
    assert "finite number" in raised.value.because


def test_several_labels_are_zeros_and_ones(model: Path, tmp_path: Path) -> None:
    config(model, problem_type="multi_label_classification")
    file = write(tmp_path / "golden.csv", "text,label\ngood,red|blue\nbad,\n")
    golden = GoldenSet.from_file(file, model)
    assert golden.labels is not None
    assert golden.labels.tolist() == [[1, 0, 1], [0, 0, 0]]


def test_names_that_are_numbers_go_before_numbers(model: Path, tmp_path: Path) -> None:
    # As `ortrain train` names the classes of stars from 1 to 3.
    config(model, id2label={"0": "1", "1": "2", "2": "3"})
    rows = '{"text": "good", "label": 3}\n{"text": "bad", "label": "1"}\n'
    golden = GoldenSet.from_file(write(tmp_path / "golden.jsonl", rows), model)
    assert golden.labels is not None
    assert golden.labels.tolist() == [2, 0]


def test_a_text_is_the_label_of_a_causal_language_model(model: Path, tmp_path: Path) -> None:
    config(model, architectures=["GPT2LMHeadModel"])
    golden = GoldenSet.from_file(write(tmp_path / "golden.csv", "text\ngood film\nbad\n"), model)
    assert golden.labels is not None
    assert golden.labels.tolist() == [[2, 5, 7, 3], [2, 6, 3, -100]]
    assert golden.id2label == {}


def test_a_text_is_the_label_of_a_model_that_writes_one(model: Path, tmp_path: Path) -> None:
    config(
        model,
        architectures=["T5ForConditionalGeneration"],
        is_encoder_decoder=True,
        decoder_start_token_id=4,
    )
    file = write(tmp_path / "golden.csv", "text,summary\ngood film,good\nbad,bad plots\n")
    golden = GoldenSet.from_file(file, model, label_column="summary")
    batch = golden.batches[0]
    assert batch["input_ids"].tolist() == [[2, 5, 7, 3], [2, 6, 3, 0]]
    assert batch["decoder_input_ids"].tolist() == [[4, 2, 5, 3, 0], [4, 2, 6, 8, 9]]
    assert golden.labels is not None
    assert golden.labels.tolist() == [[2, 5, 3, -100, -100], [2, 6, 8, 9, 3]]


def test_a_column_of_labels_that_is_named_has_to_be_there(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "golden.csv", "text,label\ngood,red\n")
    with pytest.raises(InputError, match="row 2: there is no label 'colour'"):
        GoldenSet.from_file(file, model, label_column="colour")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "text,label\ngood,pink\n", "row 2: the label 'pink' is none of the model's"),
        ("a.csv", "text,label\ngood,3\n", "row 2: the label '3' is none of the model's"),
        ("a.csv", "text,label\ngood,-1\n", "row 2: the label '-1' is none"),
        ("a.csv", "text,label\ngood\n", "row 2: has 1 fields where there are 2 columns"),
        ("a.csv", "text,text\ngood,bad\n", "two columns have one name"),
        ("a.csv", 'text,label\n"go"od,red\n', "quotation mark"),
        ("a.csv", "words,label\ngood,red\n", "row 2: there is no text 'text'"),
        ("a.csv", "text,label\n", "has no examples"),
        ("a.csv", "", "has no examples"),
        ("a.jsonl", '{"text": "good", "label": 0}\n{"text"\n', "row 2: is no JSON"),
        ("a.jsonl", "[1]\n", "row 1: is no JSON object"),
        ("a.jsonl", '{"text": 3, "label": 0}\n', "row 1: 'text' is 3, and no text"),
        ("a.jsonl", '{"text": "a", "label": 0}\n{"text": "b"}', "row 2: there is no label 'label'"),
        ("a.jsonl", '{"text": "a", "label": true}\n', "row 1: the label True is none"),
        ("a.jsonl", '{"text": ["a"], "label": [0, 1]}\n', "row 1: the label"),
        ("a.txt", "good\n", "has the unknown format '.txt'"),
    ],
)
def test_a_broken_file_is_told_by_its_row(
    name: str, text: str, message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        GoldenSet.from_file(write(tmp_path / name, text), model)


def test_a_file_that_is_no_text_or_is_not_there_is_told(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "golden.csv"
    path.write_bytes(b"text,label\n\xff\xfe,red\n")
    with pytest.raises(InputError, match="is not text in UTF-8"):
        GoldenSet.from_file(path, model)
    with pytest.raises(InputError, match="there is no file"):
        GoldenSet.from_file(tmp_path / "nothing.csv", model)


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    # transformers would make an empty one of config.json.
    folder = classifiers.folder(tmp_path / "model")
    file = write(tmp_path / "golden.csv", "text,label\ngood,red\n")
    with pytest.raises(InputError, match="has no tokenizer") as raised:
        GoldenSet.from_file(file, folder)
    assert "npz" in raised.value.help
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"the tokenizer in .* cannot be loaded"):
        GoldenSet.from_file(file, folder)
