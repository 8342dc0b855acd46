"""The classes that labels of a file are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortrain.deploy.equivalence.predictions import IGNORED
from ortrain.deploy.equivalence.table import Row
from ortrain.errors import InputError, listing
from ortrain.kinds import shown


class Classes:
    """The classes of a model, and the labels of a file as numbers of them.

    Args:
        file: for errors.
        config: of the model.
    """

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self.file = file
        known = config.get("id2label")
        known = known if isinstance(known, Mapping) else {}
        self.names = {int(key): str(name) for key, name in known.items() if str(key).isdecimal()}
        self._numbers = {name: number for number, name in self.names.items()}
        problem = config.get("problem_type")
        self._are_numbers = problem == "regression" or (problem is None and len(known) == 1)
        self._are_several = problem == "multi_label_classification"

    def of(self, row: Row, label: Any) -> Any:
        """A label as a number, or as zeros and ones where an example may have several."""
        if self._are_numbers:
            return self._number(row, label)
        if self._are_several:
            given = label.split("|") if isinstance(label, str) else label
            if not isinstance(given, list):
                raise self._wrong(row, label, "a list of classes, or a text with | between them")
            flags = [0] * len(self.names)
            for each in given:
                if each != "":
                    flags[self._class(row, each)] = 1
            return flags
        return self._class(row, label)

    def of_words(
        self, row: Row, label: Any, words: Sequence[str], encoded: Any, index: int
    ) -> list[int]:
        """Labels of tokens: that of a word for its first one, -100 for all others."""
        if not isinstance(label, list) or len(label) != len(words):
            raise self._wrong(row, label, f"a list of {len(words)} labels, one for each word")
        numbers = [self._class(row, each) for each in label]
        found, last = [], None
        for word in encoded.word_ids(index):
            found.append(IGNORED if word is None or word == last else numbers[word])
            last = word
        return found

    def _class(self, row: Row, label: Any) -> int:
        # As `ortrain train` names classes: 4 is the class of the name "4", where there is one.
        if isinstance(label, str | int) and str(label) in self._numbers:
            return self._numbers[str(label)]
        number = label if isinstance(label, int) and not isinstance(label, bool) else -1
        text = label.strip() if isinstance(label, str) else ""
        if text.isascii() and text.isdecimal() and len(text) < 19:
            number = int(text)
        if number >= 0 and (number in self.names or not self.names):
            return number
        expected = listing([f"{number} or {name!r}" for number, name in self.names.items()])
        raise self._wrong(row, label, expected or "the number of a class")

    def _number(self, row: Row, label: Any) -> float:
        try:
            found = float(label)
            if not np.isfinite(found) or isinstance(label, bool):
                raise ValueError
        except (TypeError, ValueError):
            raise self._wrong(
                row, label, "a finite number: the model is one of regression"
            ) from None
        return found

    def _wrong(self, row: Row, label: Any, expected: str) -> InputError:
        return InputError(
            f"{self.file}, row {row.number}: the label {shown(label)} is none of the model's",
            because=f"expected {expected}",
            help="correct the row, or give the model that the labels are of",
        )
