"""Losses."""

from __future__ import annotations

import numpy as np
from torch.nn import functional as F  # noqa: N812

from ortrain.testing import OpCase, integers, normal, positive

IGNORING = np.array([1, -100, 4, 0, -100, 2], np.int64)


def cross_entropy(
    logits, target, weight=None, ignore_index=-100, label_smoothing=0.0, reduction="mean"
):
    rows = target.reshape(-1).long()
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        rows,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


def case(note, inputs, **attributes):
    return OpCase(
        "ortrain::CrossEntropy",
        {"logits": normal(6, 5), "target": IGNORING, **inputs},
        attributes,
        wrt=("logits",),
        torch=cross_entropy,
        tolerance="sums",
        note=note,
    )


def linear_cross_entropy(
    x, weight, target, bias=None, class_weight=None, ignore_index=-100, label_smoothing=0.0,
    reduction="mean",
):  # fmt: skip
    return F.cross_entropy(
        F.linear(x, weight, bias), target.long(), class_weight, ignore_index=ignore_index,
        label_smoothing=label_smoothing, reduction=reduction,
    )  # fmt: skip


def linear(note, inputs, rows=2, count=6, **attributes):
    return OpCase(
        "ortrain::LinearCrossEntropy",
        {
            "x": normal(count, 3),
            "weight": normal(5, 3),
            "target": integers(5, count),
            "bias": None,
            "class_weight": None,
            **inputs,
        },
        {"rows": rows, **attributes},
        wrt=("x", "weight", *(["bias"] if inputs.get("bias") else [])),
        torch=linear_cross_entropy,
        tolerance="sums",
        note=note,
    )


ALL_INPUTS = {"target": IGNORING, "bias": normal(5), "class_weight": positive(5)}

STANDARD = {"SoftmaxCrossEntropyLoss": F.cross_entropy, "NegativeLogLikelihoodLoss": F.nll_loss}


def standard(operator, note, inputs, outputs=1, seeds=None, torch=None, **attributes):
    function = STANDARD[operator]

    def loss(scores, target, weights=None, ignore_index=-100, reduction="mean"):
        return function(
            scores, target.long(), weights, ignore_index=ignore_index, reduction=reduction
        )

    return OpCase(
        operator, {"scores": normal(6, 5), "target": integers(5, 6), **inputs}, attributes,
        wrt=("scores",), outputs=outputs, seeds=seeds, torch=torch or loss, tolerance="sums",
        note=note,
    )  # fmt: skip


def both(scores, target):
    return F.cross_entropy(scores, target), F.log_softmax(scores, 1)


CASES = [
    *(case(reduction, {}, reduction=reduction) for reduction in ("mean", "sum", "none")),
    *(
        case(f"smoothing-{reduction}", {}, reduction=reduction, label_smoothing=0.2)
        for reduction in ("mean", "sum", "none")
    ),
    *(
        case(f"weight-{reduction}", {"weight": positive(5)}, reduction=reduction)
        for reduction in ("mean", "sum", "none")
    ),
    *(
        case(f"weight-smoothing-{reduction}", {"weight": positive(5)}, reduction=reduction,
             label_smoothing=0.1)
        for reduction in ("mean", "none")
    ),
    case("ignore-0", {"target": np.array([1, 0, 4, 0, 3, 2])}, ignore_index=0),
    case("batched", {"logits": normal(2, 3, 5), "target": integers(5, 2, 3)}),
    case("batched-none", {"logits": normal(2, 3, 5), "target": integers(5, 2, 3)},
         reduction="none"),
    case("int32", {"target": IGNORING.astype(np.int32)}),
    *(linear(f"{rows}-rows", {"target": IGNORING}, rows) for rows in (1, 4, 5, 6, 7)),
    *(
        linear(f"all-{reduction}", ALL_INPUTS, reduction=reduction, label_smoothing=0.1)
        for reduction in ("mean", "sum")
    ),
    linear("bias", {"bias": normal(5)}, reduction="sum"),
    linear("class-weight", {"class_weight": positive(5)}),
    linear("smoothing", {"target": IGNORING}, label_smoothing=0.2),
    linear("ignore-0", {"target": np.array([1, 0, 4, 0, 3, 2], np.int32)}, ignore_index=0),
    linear("one-row", {}, count=1),
    *(
        standard(operator, reduction, {}, reduction=reduction)
        for operator in STANDARD for reduction in ("mean", "sum", "none")
    ),
    *(standard(operator, "default", {}) for operator in STANDARD),
    *(
        standard(operator, f"ignoring-{reduction}", {"target": IGNORING}, ignore_index=-100,
                 reduction=reduction)
        for operator in STANDARD for reduction in ("mean", "none")
    ),
    *(
        standard(operator, f"weights-{reduction}", {"target": IGNORING, "weights": positive(5)},
                 ignore_index=-100, reduction=reduction)
        for operator in STANDARD for reduction in ("mean", "sum", "none")
    ),
    *(
        standard(operator, f"pixels-{reduction}",
                 {"scores": normal(2, 5, 2, 3), "target": integers(5, 2, 2, 3)},
                 reduction=reduction)
        for operator in STANDARD for reduction in ("mean", "none")
    ),
    standard("SoftmaxCrossEntropyLoss", "two-outputs", {}, outputs=2, torch=both),
    standard("SoftmaxCrossEntropyLoss", "only-log-prob", {}, outputs=2, seeds=(1,),
             torch=lambda scores: F.log_softmax(scores, 1)),
    standard("SoftmaxCrossEntropyLoss", "int32", {"target": np.array([1, 0, 4], np.int32),
                                                  "scores": normal(3, 5)}),
]  # fmt: skip
