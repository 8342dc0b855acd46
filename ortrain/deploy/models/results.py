"""From a file's outputs to a result of transformers: ``logits`` and ``hidden_states.3`` by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.utils.generic import ModelOutput

from ortrain.deploy.models.cache import PRESENT
from ortrain.deploy.models.session import Session

_NUMBERED = re.compile(r"(.+)\.(\d+)")


class Results:
    """Makes the result of a call.

    Args:
        session: the file.
        kind: of the result, a class of transformers.
        aliases: other names that a file may have for a field → the field.
    """

    def __init__(
        self, session: Session, kind: type[ModelOutput], aliases: dict[str, str] | None = None
    ) -> None:
        self.kind = kind
        fields = {field.name for field in dataclasses.fields(cast(Any, kind))}
        self._plain: list[tuple[str, int]] = []
        self._beside: list[tuple[str, int]] = []
        self._tuples: dict[str, dict[int, int]] = {}
        for index, name in enumerate(session.outputs):
            if PRESENT.fullmatch(name):
                continue
            field = (aliases or {}).get(name, name)
            numbered = _NUMBERED.fullmatch(field)
            if field in fields:
                self._plain.append((field, index))
            elif numbered is not None and numbered[1] in fields:
                self._tuples.setdefault(numbered[1], {})[int(numbered[2])] = index
            else:
                self._beside.append((name, index))

    @property
    def fields(self) -> set[str]:
        """What the file gives of the result's fields."""
        return {name for name, _ in self._plain} | set(self._tuples)

    def of(self, outputs: Sequence[torch.Tensor], arrays: bool = False, **more: Any) -> Any:
        """The result.

        Args:
            outputs: of the file.
            arrays: whether they are to be numpy arrays.
            more: fields that do not come from the file.
        """
        values: Sequence[Any] = outputs
        if arrays:
            values = [tensor.cpu().numpy() for tensor in outputs]
        found: dict[str, Any] = {name: values[index] for name, index in self._plain}
        for name, indices in self._tuples.items():
            found[name] = tuple(values[indices[place]] for place in sorted(indices))
        result = self.kind(**found, **more)
        for name, index in self._beside:
            result[name] = values[index]
        return result
