"""What a model is trained on is none of what judges it."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.deploy import GoldenSet
from ortrain.deploy.quantization import FineTuning
from ortrain.deploy.quantization.tuning.rows import Rows
from ortrain.errors import InputError

SETTINGS = FineTuning(batch_size=4)


def texts(*rows: list[int], width: int = 4, dtype: type = np.int64) -> dict[str, np.ndarray]:
    """Rows of ids, padded with zeros."""
    ids = np.zeros((len(rows), width), dtype)
    mask = np.zeros((len(rows), width), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


GOLDEN = GoldenSet([texts([1, 2, 3], [4, 5], [6])], labels=np.array([0, 1, 0]))


def test_rows_keep_their_labels_and_batches() -> None:
    given = GoldenSet([texts([7, 8], [9]), texts([10])], labels=np.array([1, 0, 1]))
    rows = Rows.of(given, GOLDEN, SETTINGS)
    assert (rows.count, rows.left_out, len(rows.batches)) == (3, 0, 2)
    assert rows.labels is not None
    assert [each.tolist() for each in rows.labels] == [[1, 0], [1]]


def test_a_row_of_the_golden_set_is_left_out_however_it_is_padded() -> None:
    given = GoldenSet([texts([4, 5], [7, 8], width=6, dtype=np.int32)], labels=np.array([1, 0]))
    rows = Rows.of(given, GOLDEN, SETTINGS)
    assert (rows.count, rows.left_out) == (1, 1)
    assert rows.batches[0]["input_ids"][0, :2].tolist() == [7, 8]
    assert rows.labels is not None
    assert rows.labels[0].tolist() == [0]


def test_other_padding_is_no_other_row_but_other_words_are() -> None:
    given = GoldenSet([texts([4, 5, 0], [4], [5, 4])])
    rows = Rows.of(given, GOLDEN, SETTINGS)
    assert (rows.count, rows.left_out) == (3, 0)


def test_the_golden_set_itself_is_refused() -> None:
    with pytest.raises(InputError, match="the training data are the golden set itself"):
        Rows.of(GOLDEN, GOLDEN, SETTINGS)


def test_the_rows_of_the_golden_set_are_refused_with_others_among_them() -> None:
    given = GoldenSet([texts([1, 2, 3], [4, 5], [7], [8], [9])])
    with pytest.raises(InputError, match="have 2 of the 3 different rows of the golden set"):
        Rows.of(given, GOLDEN, SETTINGS)


def test_labels_beside_make_no_other_row() -> None:
    same = [{"input_ids": np.array([1, 2, 3, 0]), "labels": n} for n in range(2)]
    golden = GoldenSet([{"input_ids": np.array([[1, 2, 3, 0]])}])
    with pytest.raises(InputError, match="have 1 of the 1 different rows"):
        Rows.of(same, golden, SETTINGS)


def test_rows_of_a_list_are_put_into_batches_of_one_size() -> None:
    data = [{"input_ids": np.arange(3 + n % 2) + n, "labels": n % 2} for n in range(8)]
    rows = Rows.of(data, GOLDEN, FineTuning(batch_size=2))
    assert rows.count == 8
    assert all(len(batch["input_ids"]) <= 2 for batch in rows.batches)


def test_data_of_another_kind_or_of_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="the training data are empty"):
        Rows.of([], GOLDEN, SETTINGS)
    with pytest.raises(TypeError, match=r"training_data='train\.csv'"):
        Rows.of("train.csv", GOLDEN, SETTINGS)
