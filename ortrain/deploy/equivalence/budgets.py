"""``Budgets``: how much worse a rewritten model may be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ortrain.kinds import NONE, expect_number


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bounds on how a model after a rewrite may differ; None for what may be anything.

    Whatever the budgets are, a model fails that gives NaN or an infinity where the one before gives
    a number, or the other way round.

    Attributes:
        max_abs_diff: the largest absolute difference of an element of an output.
        max_metric_drop: by how much each metric that decides may be worse over all examples, in its
            own units: 0.01 is one point of a hundred of accuracy. Needs labels.
        max_class_drop: the same for each class.
        max_slice_drop: the same for each named slice.
        min_agreement: the least share of predictions that stay as they were, 0 to 1.
    """

    max_abs_diff: float | None = None
    max_metric_drop: float | None = None
    max_class_drop: float | None = None
    max_slice_drop: float | None = None
    min_agreement: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            expect_number(name, value, NONE)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: expected a number from 0 up")
        if self.min_agreement is not None and self.min_agreement > 1:
            raise ValueError(f"min_agreement={self.min_agreement}: expected a share, 0 to 1")

    def given(self) -> Mapping[str, float]:
        """The bounds that are not None, by name."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in values if value is not None}

    @property
    def need_labels(self) -> bool:
        """Whether they can be judged with labels only."""
        return bool({"max_metric_drop", "max_class_drop", "max_slice_drop"} & self.given().keys())
