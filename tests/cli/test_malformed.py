"""Files that are right, and files that are not, by the hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortrain.cli.text_classification.examples import Example, label_names, read_examples
from ortrain.cli.usage import UsageError

from .malformed import File, files


def read(directory: Path, file: File) -> list[Example] | str:
    """The examples of a file, or the line that refuses it."""
    path = directory / file.name
    path.write_bytes(file.data)
    try:
        examples = read_examples(path)
        if len({example.label for example in examples}) > 1:
            label_names(examples, path)
    except UsageError as error:
        return str(error).replace(str(path), file.name)
    return examples


@pytest.mark.parametrize("seed", range(4))
def test_a_file_is_read_rightly_or_refused_by_row_in_one_line(tmp_path: Path, seed: int) -> None:
    for number, file in enumerate(files(seed, 300)):
        found = read(tmp_path, file)
        about = f"{number}: {file.about}"
        if isinstance(found, str):
            assert found.isprintable(), about
            assert found.startswith(file.name), about
            assert "; " in found, f"{about}: no remedy: {found}"
            assert len(found) < 400, about
        if file.refused:
            assert isinstance(found, str), about
            if file.row is not None:
                assert found.startswith(f"{file.name}, row {file.row}: "), f"{about}: {found}"
        elif file.refused is False:
            assert found == list(file.examples or ()), f"{about}: {str(found)[:300]}"
        elif not isinstance(found, str):
            assert found, about
            rows = [example.row for example in found]
            assert rows == sorted(set(rows)), about
            for example in found:
                assert "\0" not in (example.text + example.label), about
                assert example.text.encode(), about
                assert example.label == example.label.strip() != "", about
                assert len(example.label.splitlines()) == 1, about


def test_the_files_of_a_seed_are_always_the_same() -> None:
    assert list(files(7, 50)) == list(files(7, 50))
