"""Golden sets: of arrays, drawn from data, and read from files; what is no golden set is told."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ortrain.deploy import GoldenSet
from ortrain.errors import InputError
from tests.deploy import classifiers

IDS = np.arange(6).reshape(3, 2)


# --- of arrays ----------------------------------------------------------------------------------


def test_batches_may_differ_in_every_size() -> None:
    golden = GoldenSet([{"x": np.zeros((2, 3))}, {"x": [[1.0, 2.0]]}], [0, 1, 0])  # type: ignore[arg-type]
    assert golden.examples == 3
    assert isinstance(golden.batches[1]["x"], np.ndarray)
    assert isinstance(golden.labels, np.ndarray)


def test_an_empty_golden_set_is_refused() -> None:
    for batches in ([], [{"x": np.zeros((0, 3))}]):
        with pytest.raises(InputError, match="the golden set is empty"):
            GoldenSet(batches)
    with pytest.raises(InputError, match="batch 1 of the golden set has no inputs"):
        GoldenSet([{"x": IDS}, {}])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"labels": [0, 1]}, InputError, "there are 2 labels of 3 examples"),
        ({"labels": ["red", "green", "blue"]}, InputError, "labels are numbers"),
        ({"slices": {"none": []}}, InputError, "the slice 'none' is empty"),
        ({"slices": {"far": [0, 3]}}, InputError, "the slice 'far' has the example 3"),
        ({"slices": {"odd": [0.5]}}, InputError, "the slice 'odd' is no list of indices"),
        ({"slices": [[0]]}, TypeError, "slices="),
        ({"task": "poetry"}, ValueError, "task='poetry': expected classification, "),
        ({"metric": "bleu"}, ValueError, "metric='bleu': expected "),
        ({"task": "regression", "metric": "f1"}, ValueError, "metric='f1': expected mse, corr"),
    ],
)
def test_what_is_not_of_these_examples_is_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GoldenSet([{"x": IDS}], **given)


def test_arrays_of_different_batches_are_refused() -> None:
    with pytest.raises(InputError, match="batch 0 of the golden set has 3 examples, and 2 of 'y'"):
        GoldenSet([{"x": IDS, "y": IDS[:2]}])


# --- drawn --------------------------------------------------------------------------------------


def test_rows_of_a_dataset_come_in_batches_of_one_size() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(
        {
            "input_ids": [[1, 2], [3, 4], [5, 6, 7], [8, 9]],
            "text": ["a", "b", "c", "d"],
            "language": ["de", "en", "de", "en"],
            "label": [0, 1, 0, 1],
        }
    )
    golden = GoldenSet.draw(data, batch_size=2, slice_columns=["language"])
    shapes = [batch["input_ids"].shape for batch in golden.batches]
    assert shapes == [(2, 2), (1, 3), (1, 2)]
    assert set(golden.batches[0]) == {"input_ids"}
    assert golden.labels is not None
    assert golden.labels.tolist() == [0, 1, 0, 1]
    assert golden.slices == {"language=de": [0, 2], "language=en": [1, 3]}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
def test_batches_of_a_loader_are_taken_apart_and_put_together() -> None:
    rows = [
        {"input_ids": torch.tensor([n, n + 1]), "labels": torch.tensor(n % 2)} for n in range(7)
    ]
    loader = torch.utils.data.DataLoader(rows, batch_size=3)  # type: ignore[arg-type]
    golden = GoldenSet.draw(loader, limit=5, batch_size=4)
    assert [batch["input_ids"].shape for batch in golden.batches] == [(4, 2), (1, 2)]
    assert golden.labels is not None
    assert golden.labels.tolist() == [0, 1, 0, 1, 0]


def test_tuples_have_names_given() -> None:
    pairs = [(torch.zeros(2, 3), torch.tensor([0, 1])), (torch.ones(1, 3), torch.tensor([1]))]
    golden = GoldenSet.draw(pairs, input_names=["x"], batched=True)
    assert golden.examples == 3
    assert golden.labels is not None
    assert golden.labels.tolist() == [0, 1, 1]
    with pytest.raises(TypeError, match="name its inputs with input_names="):
        GoldenSet.draw(pairs)


def test_a_generator_is_read_no_further_than_the_limit() -> None:
    def endless() -> Iterator[Any]:
        number = 0
        while True:
            yield UserDict(input_ids=[number, 1])
            number += 1

    golden = GoldenSet.draw(endless(), limit=3)
    assert golden.batches[0]["input_ids"][:, 0].tolist() == [0, 1, 2]


def test_a_seed_draws_from_all_of_the_data_in_its_order() -> None:
    data = [{"input_ids": [n], "label": n} for n in range(100)]
    labels = [GoldenSet.draw(data, limit=10, seed=seed).labels for seed in (1, 1, 2)]
    assert np.array_equal(labels[0], labels[1])  # type: ignore[arg-type]
    assert not np.array_equal(labels[0], labels[2])  # type: ignore[arg-type]
    assert labels[0] is not None
    assert sorted(labels[0]) == list(labels[0])
    assert max(labels[0]) > 10
    with pytest.raises(TypeError, match="has no length and no index"):
        GoldenSet.draw(iter(data), seed=1)


def test_slices_follow_what_was_drawn() -> None:
    data = [{"input_ids": [n], "label": n % 2} for n in range(100)]
    golden = GoldenSet.draw(data, limit=20, seed=0, slices={"low": range(50)})
    ids = np.concatenate([batch["input_ids"] for batch in golden.batches])[:, 0]
    assert [ids[n] < 50 for n in range(20)] == [n in golden.slices["low"] for n in range(20)]
    with pytest.raises(InputError, match="none of the 3 examples drawn is of the slice 'high'"):
        GoldenSet.draw(data, limit=3, slices={"high": range(50, 100)})


def test_labels_of_tokens_have_none_behind_their_end() -> None:
    data = [{"input_ids": [1, 2], "labels": [0, 1]}, {"input_ids": [1, 2, 3], "labels": [1, 1, 0]}]
    golden = GoldenSet.draw(data)
    assert golden.labels is not None
    assert golden.labels.tolist() == [[0, 1, -100], [1, 1, 0]]


def test_both_positions_of_an_answer_are_its_label() -> None:
    golden = GoldenSet.draw([{"input_ids": [1, 2], "start_positions": 0, "end_positions": 1}])
    assert golden.labels is not None
    assert golden.labels.tolist() == [[0, 1]]


def test_labels_may_be_given_beside_the_data() -> None:
    data = [{"input_ids": [n]} for n in range(4)]
    golden = GoldenSet.draw(data, labels=[3, 2, 1, 0], limit=2)
    assert golden.labels is not None
    assert golden.labels.tolist() == [3, 2]
    with pytest.raises(InputError, match="there are 1 labels, and example 3 was drawn"):
        GoldenSet.draw(data, labels=[3])


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ([], {}, InputError, "nothing to draw examples from"),
        (3, {}, TypeError, "data=3"),
        (["text"], {}, TypeError, "expected dicts of arrays"),
        ([{"text": "a", "label": 1}], {}, InputError, "example 0 has no inputs of numbers"),
        ([{"x": [1.0]}], {}, ValueError, "say batched=True or batched=False"),
        ([{"x": [1.0]}], {"batched": False, "labels": "y"}, InputError, "example 0 has no 'y'"),
        (
            [{"input_ids": [1], "label": 1}, {"input_ids": [1]}],
            {},
            InputError,
            "example 1 has no label",
        ),
        ([{"input_ids": [1]}], {"slice_columns": ["z"]}, InputError, "to tell its slice by"),
        ([{"input_ids": [1]}], {"limit": 0}, ValueError, "limit=0"),
    ],
)
def test_what_cannot_be_drawn_is_told(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GoldenSet.draw(data, **options)


# --- of a file of arrays ------------------------------------------------------------------------


def test_arrays_of_a_file_are_cut_into_batches(tmp_path: Path) -> None:
    path, model = tmp_path / "golden.npz", classifiers.folder(tmp_path / "model")
    ids = np.arange(20).reshape(10, 2)
    np.savez(
        path,
        allow_pickle=False,
        **{
            "input_ids": ids,
            "labels": np.arange(10) % 3,
            "slice:even": np.arange(10) % 2 == 0,
            "slice:first": np.array([0, 1]),
        },
    )
    golden = GoldenSet.from_file(path, model, batch_size=4)
    assert [len(batch["input_ids"]) for batch in golden.batches] == [4, 4, 2]
    assert golden.slices == {"even": [0, 2, 4, 6, 8], "first": [0, 1]}
    assert GoldenSet.from_file(path, model, limit=5).examples == 5
    assert GoldenSet.from_file(path, model, limit=5).slices["even"] == [0, 2, 4]
    with pytest.raises(InputError, match="has no columns to tell slices by"):
        GoldenSet.from_file(path, model, slice_columns=["language"])


def test_a_file_that_has_no_arrays_is_told(tmp_path: Path) -> None:
    model, path = classifiers.folder(tmp_path / "model"), tmp_path / "golden.npz"
    path.write_bytes(b"PK no archive")
    with pytest.raises(InputError, match="cannot be read as arrays"):
        GoldenSet.from_file(path, model)
    np.savez(path, allow_pickle=True, input_ids=np.array([{}, {}], dtype=object))
    with pytest.raises(InputError, match="cannot be read as arrays"):
        GoldenSet.from_file(path, model)
    np.savez(path, allow_pickle=False, input_ids=IDS, labels=np.zeros(2))
    with pytest.raises(InputError, match="different numbers of examples"):
        GoldenSet.from_file(path, model)
    np.savez(path, allow_pickle=False, labels=np.zeros(2))
    with pytest.raises(InputError, match="has no examples"):
        GoldenSet.from_file(path, model)
