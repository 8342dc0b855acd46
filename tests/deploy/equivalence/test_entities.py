"""Entities of tagged texts: each as a whole, as conlleval and seqeval count them."""

from __future__ import annotations

import importlib.util
import itertools
import math

import numpy as np
import pytest

from ortrain.deploy.equivalence import groups
from ortrain.deploy.equivalence.entities import Entities, Tags, scores
from ortrain.errors import InputError
from tests.deploy.equivalence.test_metrics import rows_of

Array = np.ndarray

BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
BIOES = ("O", *(f"{prefix}-{kind}" for kind in ("PER", "LOC") for prefix in "BIES"))


def found(text: str, names: tuple[str, ...] = BIO) -> list[tuple[str, int, int]]:
    """Kind, first and last token of each entity; ``|`` is between examples."""
    words = text.split()
    example = np.cumsum([word == "|" for word in words])
    kept = [word != "|" for word in words]
    tags = Tags.of(dict(enumerate(names)), len(names))
    assert tags is not None
    classes = np.array([names.index(word) for word in words if word != "|"], np.int64)
    entities = Entities.of(classes, example[kept], tags)
    return [
        (tags.kinds[kind], int(first), int(last))
        for first, last, kind in zip(entities.first, entities.last, entities.kind, strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("O O", []),
        ("B-PER", [("PER", 0, 0)]),
        ("O B-PER I-PER I-PER O B-LOC", [("PER", 1, 3), ("LOC", 5, 5)]),
        ("B-PER B-PER I-PER", [("PER", 0, 0), ("PER", 1, 2)]),
        ("O I-PER I-PER", [("PER", 1, 2)]),  # begun without a beginning
        ("B-PER I-LOC I-LOC", [("PER", 0, 0), ("LOC", 1, 2)]),
        ("I-PER B-PER", [("PER", 0, 0), ("PER", 1, 1)]),
        ("B-PER | I-PER", [("PER", 0, 0), ("PER", 1, 1)]),  # no entity goes on in another text
    ],
)
def test_entities_go_from_their_first_token_to_their_last(
    text: str, expected: list[tuple[str, int, int]]
) -> None:
    assert found(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S-PER S-PER", [("PER", 0, 0), ("PER", 1, 1)]),
        ("B-PER I-PER E-PER I-PER", [("PER", 0, 2), ("PER", 3, 3)]),
        ("B-PER E-PER E-PER", [("PER", 0, 1), ("PER", 2, 2)]),
        ("S-LOC E-LOC", [("LOC", 0, 0), ("LOC", 1, 1)]),
        ("B-LOC S-LOC", [("LOC", 0, 0), ("LOC", 1, 1)]),
    ],
)
def test_an_end_ends_and_a_single_one_stands_alone(
    text: str, expected: list[tuple[str, int, int]]
) -> None:
    assert found(text, BIOES) == expected
    others = str.maketrans({"E": "L", "S": "U"})
    letters = [word[0].translate(others) + word[1:] for word in text.split()]
    names = tuple(name[0].translate(others) + name[1:] for name in BIOES)
    assert found(" ".join(letters), names) == expected


def test_kinds_may_have_dashes_and_any_order() -> None:
    assert found("I-a-b O B-a-b", ("I-a-b", "B-a-b", "O")) == [("a-b", 0, 0), ("a-b", 2, 2)]


@pytest.mark.parametrize(
    "names", [("NOUN", "VERB"), ("O", "PER"), ("O", "O"), ("O", "B-PER", "X"), ("O", "b-PER")]
)
def test_classes_of_which_one_is_no_tag_are_none(names: tuple[str, ...]) -> None:
    assert Tags.of(dict(enumerate(names)), len(names)) is None
    assert Tags.of({0: "O", 1: "B-PER"}, 3) is None


def test_an_entity_counts_where_all_of_it_is_right() -> None:
    tags = Tags.of(dict(enumerate(BIO)), len(BIO))
    assert tags is not None
    example = np.zeros(8, np.int64)
    right = Entities.of(np.array([1, 2, 0, 3, 4, 0, 1, 0]), example, tags)
    said = Entities.of(np.array([1, 2, 0, 3, 0, 0, 3, 0]), example, tags)
    # One of three is whole: the second is cut off, the third of another kind.
    assert scores(said, right) == pytest.approx({"recall": 1 / 3, "precision": 1 / 3, "f1": 1 / 3})
    assert scores(said, right, 0) == pytest.approx({"recall": 1 / 2, "precision": 1, "f1": 2 / 3})
    assert scores(said, right, 1) == {"recall": 0.0, "precision": 0.0, "f1": 0.0}
    nothing = Entities.of(np.zeros(8, np.int64), example, tags)
    assert scores(nothing, right) == {"recall": 0.0, "precision": 0.0, "f1": 0.0}
    assert math.isnan(scores(said, nothing)["recall"])


def slow(text: tuple[str, ...]) -> set[tuple[str, int, int]]:
    """By the table of conlleval: where one ends before a tag, and where one starts with it."""
    result, start = set(), None
    before, kind = "O", ""
    for place, word in enumerate((*text, "O")):
        tag, of = (word, "") if word == "O" else (word[0], word[2:])
        ends = before in "ES" or (before in "BI" and tag in "BSO") or (before != "O" and kind != of)
        if start is not None and ends:
            result.add((kind, start, place - 1))
            start = None
        starts = (
            tag in "BS"
            or (before in "ES" and tag in "EI")
            or (before == "O" and tag in "EI")
            or (tag != "O" and kind != of)
        )
        if starts and tag != "O":
            start = place
        before, kind = tag, of
    return result


def test_every_row_of_four_tags_is_counted_as_by_conlleval() -> None:
    for text in itertools.product(BIOES, repeat=4):
        assert set(found(" ".join(text), BIOES)) == slow(text)


@pytest.mark.skipif(importlib.util.find_spec("seqeval") is None, reason="seqeval is not installed")
def test_drawn_tags_are_counted_as_by_seqeval() -> None:
    from seqeval.metrics import classification_report

    noise = np.random.default_rng(0)
    for names in (BIO, BIOES):
        tags = Tags.of(dict(enumerate(names)), len(names))
        assert tags is not None
        label = noise.integers(0, len(names), (30, 12))
        said = np.where(noise.random(label.shape) < 0.7, label, noise.integers(0, len(names), 12))
        example = np.repeat(np.arange(30), 12)
        sides = [Entities.of(each.reshape(-1), example, tags) for each in (said, label)]
        texts = [[[names[number] for number in row] for row in each] for each in (label, said)]
        expected = classification_report(*texts, output_dict=True, zero_division=0)
        rows = {"micro avg": None, **{kind: number for number, kind in enumerate(tags.kinds)}}
        for row, kind in rows.items():
            mine = scores(*sides, kind)
            assert mine["f1"] == pytest.approx(expected[row]["f1-score"])
            assert mine["recall"] == pytest.approx(expected[row]["recall"])
            assert mine["precision"] == pytest.approx(expected[row]["precision"])
            assert sides[1].count(kind) == expected[row]["support"]


# --- the gate -----------------------------------------------------------------------------------

NAMES = dict(enumerate(BIO))
LABELS = [[1, 2, 0, 3], [0, 1, 2, -100]]
AFTER = [[1, 0, 0, 3], [0, 1, 2, 0]]  # cuts one person of two off


def logits(classes: list[list[int]]) -> Array:
    return np.eye(len(BIO), dtype=np.float32)[np.asarray(classes)]


def test_each_kind_of_entity_is_a_class_of_the_gate() -> None:
    right = [[max(each, 0) for each in row] for row in LABELS]
    rows = rows_of("token-classification", logits(right), logits(AFTER), LABELS)
    found = groups.by_class("token-classification", rows, NAMES)
    assert [*found] == ["PER", "LOC"]
    assert (found["PER"].count, found["LOC"].count) == (2, 1)
    assert found["PER"].before == {"recall": 1.0, "precision": 1.0, "f1": 1.0}
    assert found["PER"].after == {"recall": 0.5, "precision": 0.5, "f1": 0.5}
    assert found["PER"].drop == 0.5
    assert found["PER"].agreement == 0.75  # of four tokens one has changed
    assert found["LOC"].drop == 0
    whole = groups.overall("token-classification", rows, NAMES, ["accuracy"])
    assert whole.before["entity_f1"] == 1
    assert whole.after["entity_f1"] == pytest.approx(2 / 3)
    assert whole.drop == pytest.approx(1 / 7)
    slices = groups.by_slice(
        "token-classification", rows, NAMES, {"a": [0], "b": [1]}, ["entity_f1"]
    )
    assert [slices[name].drop for name in "ab"] == [pytest.approx(0.5), 0]


def test_without_labels_kinds_are_counted_as_they_were() -> None:
    right = [[max(each, 0) for each in row] for row in LABELS]
    rows = rows_of("token-classification", logits(right), logits(AFTER))
    found = groups.by_class("token-classification", rows, NAMES)
    assert [(name, group.count, group.drop) for name, group in found.items()] == [
        ("PER", 2, None),
        ("LOC", 1, None),
    ]


def test_classes_that_are_no_tags_stay_classes() -> None:
    right = [[max(each, 0) for each in row] for row in LABELS]
    rows = rows_of("token-classification", logits(right), logits(AFTER), LABELS)
    found = groups.by_class("token-classification", rows, {0: "DET", 1: "NOUN"})
    assert [*found] == ["DET", "NOUN", "2", "3"]
    with pytest.raises(InputError, match=r"entity_f1 is for tags of entities(?s:.*)DET, NOUN"):
        groups.overall("token-classification", rows, {0: "DET", 1: "NOUN"}, ["entity_f1"])
