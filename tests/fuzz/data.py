"""Malformed data files, by grammar: read rightly, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ortrain.cli.text_classification.examples import read_examples
from ortrain.cli.usage import UsageError
from tests.cli.malformed import File
from tests.fuzz.damage import REFUSED

READ = "read rightly"


def reading(folder: Path) -> Callable[[File], str]:
    """What comes of reading a file."""

    def read(file: File) -> str:
        path = folder / file.name
        path.write_bytes(file.data)
        try:
            examples = read_examples(path)
        except UsageError as error:
            if file.refused is False:
                return f"{file.about}: was refused: {error}"
            return REFUSED if str(error).isprintable() else f"{file.about}: {error!r}"
        except Exception as error:
            return f"{file.about}: {type(error).__name__}: {error}"[:300]
        if file.examples is not None and tuple(examples) != file.examples:
            return f"{file.about}: was read as {examples}"[:300]
        # One label alone, or two that read alike, are refused when all rows are known.
        return READ

    return read
