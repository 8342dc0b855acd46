"""``FineTuning``: how long, how fast and on what loss a model is trained for its quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortrain.kinds import expect, expect_flag, expect_number, expect_whole

RANGES = ("learnt", "fixed")
LOSSES = ("auto", "labels", "distillation")


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """A short training run.

    Attributes:
        steps: updates, one batch each.
        ranges: ``"learnt"``: ends of ranges are trained beside the weights, of activations where
            they are calibrated, and of symmetric weights; ``"fixed"``: they stay as they were
            calibrated, and those of weights are their smallest and largest numbers.
        range_learning_rate: the share by which a step changes the end of an activation's range at
            most, in the schedule of the learning rate; that of a weight by a tenth of it.
        stop_early: whether it ends as soon as the quantized model keeps the budgets on the first
            batches of the training data, where it is compared after each eighth of the steps.
        distillation: how much the original's outputs count where labels are learnt by
            ``loss="auto"``, 0 to 1; the labels count for the rest.
        learning_rate: of AdamW, the highest: it rises over the first tenth of the steps and falls
            to zero over the others.
        seed: of the order of batches.
        batch_size: rows of a batch, where the data are not in batches.
        temperature: by which logits are divided before a model learns from those of the original.
        max_norm: 2-norm that all gradients together have at most.
        loss: ``"labels"``: cross entropy of classes, the mean square of numbers;
            ``"distillation"``: the original's outputs are what is learnt: the divergence of
            softened classes, the mean square of other outputs; ``"auto"``: both where there are
            labels that the task has a loss for, by ``distillation``; else distillation.

    Raises:
        TypeError: a value is of another type.
        ValueError: it is out of its range.
    """

    steps: int = 200
    learning_rate: float = 5e-5
    seed: int = 0
    batch_size: int = 16
    temperature: float = 2.0
    max_norm: float = 1.0
    loss: str = "auto"
    ranges: str = "learnt"
    range_learning_rate: float = 1e-2
    distillation: float = 0.5
    stop_early: bool = False

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("seed", 0), ("batch_size", 1)):
            value = getattr(self, name)
            expect_whole(name, value)
            if value < least:
                raise ValueError(f"{name}={value}: expected a whole number from {least} up")
        for name in ("learning_rate", "temperature", "max_norm", "range_learning_rate"):
            value = getattr(self, name)
            expect_number(name, value)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: expected a finite number above 0")
        expect_flag("stop_early", self.stop_early)
        expect_number("distillation", self.distillation)
        if not 0 <= self.distillation <= 1:
            raise ValueError(f"distillation={self.distillation}: expected a share, 0 to 1")
        expect("ranges", self.ranges, str, "'learnt' or 'fixed'")
        if self.ranges not in RANGES:
            raise ValueError(f"ranges={self.ranges!r}: expected one of {', '.join(RANGES)}")
        expect("loss", self.loss, str, "the name of a loss")
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r}: expected one of {', '.join(LOSSES)}")
