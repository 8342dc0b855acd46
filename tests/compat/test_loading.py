"""``load_dataset`` takes the arguments of datasets 2; calls of today are as they are."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from datasets import Audio, ClassLabel, Dataset, Features, Image, Value

import ortrain.compat  # noqa: F401
from ortrain.errors import OrtrainWarning

BYTES = pa.struct({"bytes": pa.binary(), "path": pa.string()})
TEXTS = {"text": ["a", "b", "c"], "label": [0, 1, 0]}
LABEL = ClassLabel(names=["no", "yes"])


@pytest.fixture(autouse=True)
def quiet() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def file(folder: Path, features: dict[str, Any], columns: dict[str, Any] | None = None) -> str:
    """A parquet file of three rows; pictures and sounds are bytes that nobody decodes."""
    kinds = Features(features)
    table = pa.table(
        {
            name: pa.array([{"bytes": b"x", "path": None}] * 3, type=BYTES)
            if isinstance(feature, Image | Audio)
            else pa.array((columns or {}).get(name, [0, 1, 0]), type=feature.pa_type)
            for name, feature in kinds.items()
        }
    )
    path = str(folder / "rows.parquet")
    Dataset(table.replace_schema_metadata(kinds.arrow_schema.metadata)).to_parquet(path)
    return path


def load(path: str, **arguments: Any) -> Any:
    folder = str(Path(path).parent / "cache")
    return datasets.load_dataset("parquet", data_files=path, cache_dir=folder, **arguments)


def test_calls_of_today_are_as_they_are(tmp_path: Path) -> None:
    path = file(tmp_path, {"text": Value("string"), "label": LABEL}, TEXTS)
    assert load(path)["train"].to_dict() == TEXTS
    assert load(path, split="train[:2]", task=None, use_auth_token=None).num_rows == 2
    assert list(inspect.signature(datasets.load_dataset).parameters)[:2] == ["path", "name"]
    with pytest.raises(TypeError, match="'task'"):
        load(path, task="anything")
    with pytest.raises(TypeError, match="'nothing'"):
        load(path, nothing=1)


def test_use_auth_token_and_ignore_verifications_are_other_arguments(tmp_path: Path) -> None:
    path = file(tmp_path, {"text": Value("string"), "label": LABEL}, TEXTS)
    given = {"data_files": path, "cache_dir": str(tmp_path / "cache"), "split": "train"}
    with pytest.warns(OrtrainWarning, match="load_dataset: use_auth_token is token now") as seen:
        found = datasets.load_dataset("parquet", use_auth_token=False, **given)
    assert found.to_dict() == TEXTS
    with pytest.warns(OrtrainWarning, match="verification_mode='no_checks' now"):
        assert load(path, ignore_verifications=True, split="train").to_dict() == TEXTS
    assert load(path, ignore_verifications=False, split="train").to_dict() == TEXTS
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("task", "features", "columns"),
    [
        ("image-classification", {"image": Image(), "label": LABEL}, ["image", "labels"]),
        ("image-classification", {"n": Value("int64"), "label": LABEL, "img": Image()}, None),
        ("image-classification", {"image": Image(), "labels": LABEL}, ["image", "labels"]),
        ("image-classification", {"image": Image(), "coarse": LABEL, "label": LABEL}, None),
        ("audio-classification", {"sound": Audio(), "label": LABEL}, ["audio", "labels"]),
    ],
)
def test_a_task_has_its_columns_alone_by_its_names(
    task: str, features: dict[str, Any], columns: list[str] | None, tmp_path: Path
) -> None:
    found = load(file(tmp_path, features), task=task)
    names = found["train"].column_names
    assert sorted(names) == sorted(columns or ["image", "labels"])
    assert found["train"].features["labels"] == LABEL
    assert isinstance(found["train"].features[task.partition("-")[0]], Image | Audio)
    assert found["train"]["labels"][:] == [0, 1, 0]
    one = load(file(tmp_path, features), task=task, split="train")
    assert one.column_names == names


def test_texts_are_classified_as_well(tmp_path: Path) -> None:
    features = {"idx": Value("int64"), "sentence": Value("string"), "label": LABEL}
    path = file(tmp_path, features, {"sentence": TEXTS["text"]})
    found = load(path, task="text-classification", split="train")
    assert found.to_dict() == {"text": ["a", "b", "c"], "labels": [0, 1, 0]}


@pytest.mark.parametrize(
    ("task", "features", "told"),
    [
        ("image-classification", {"label": LABEL}, "one column of Image, not none"),
        ("image-classification", {"image": Image(), "label": Value("int64")}, "of ClassLabel, not"),
        (
            "image-classification",
            {"image": Image(), "fine": LABEL, "coarse": LABEL},
            r"one column of ClassLabel is expected, not \['fine', 'coarse'\]",
        ),
        ("summarization", {"label": LABEL}, "task='summarization' is not here; leave task= out"),
    ],
)
def test_columns_that_a_task_cannot_tell_are_an_error(
    task: str, features: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = file(tmp_path, features)
    with pytest.raises(ValueError, match=told):
        load(path, task=task)


def test_with_streaming_a_task_never_did_anything(tmp_path: Path) -> None:
    path = file(tmp_path, {"image": Image(), "label": LABEL})
    with pytest.warns(OrtrainWarning, match="has no effect with streaming=True"):
        found = load(path, task="image-classification", streaming=True, split="train")
    assert found.column_names == ["image", "label"]
