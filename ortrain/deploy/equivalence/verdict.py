"""Which budgets were not kept: one sentence each, with what exceeded it, where, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ortrain.deploy.equivalence.budgets import Budgets
from ortrain.deploy.equivalence.report import Group, OutputDifference
from ortrain.errors import InputError

# Ends of sentences: what to do about it.
_EXCLUDE = "exclude the most sensitive nodes, take a milder configuration, or allow more"


def reasons(
    budgets: Budgets,
    outputs: Mapping[str, OutputDifference],
    task: str | None,
    deciding: Sequence[str],
    overall: Group,
    classes: Mapping[str, Group],
    slices: Mapping[str, Group],
) -> tuple[str, ...]:
    """One sentence for each budget that was not kept.

    Raises:
        InputError: a budget cannot be judged with what there is.
    """
    _expect_judged(budgets, task, overall, classes, slices)
    return (
        *_nonfinite(outputs),
        *_difference(budgets, outputs),
        *_metric(budgets, deciding, overall),
        *_group("class", budgets.max_class_drop, classes, ("recall", "f1")),
        *_group("slice", budgets.max_slice_drop, slices, tuple(deciding)),
        *_agreement(budgets, overall, classes),
    )


def _expect_judged(
    budgets: Budgets,
    task: str | None,
    overall: Group,
    classes: Mapping[str, Group],
    slices: Mapping[str, Group],
) -> None:
    given = budgets.given()
    missing = []
    if "max_metric_drop" in given and overall.drop is None:
        missing.append(("max_metric_drop", "labels"))
    if "max_class_drop" in given and not any(g.drop is not None for g in classes.values()):
        missing.append(("max_class_drop", "labels that are classes"))
    if "max_slice_drop" in given and not any(g.drop is not None for g in slices.values()):
        missing.append(("max_slice_drop", "named slices with labels"))
    if "min_agreement" in given and overall.agreement is None:
        missing.append(("min_agreement", "a model that predicts classes"))
    for name, needed in missing:
        raise InputError(
            f"the budget {name} cannot be judged: it needs {needed}",
            because=f"the task is {task or 'none'}, over {overall.count} predictions",
            help=f"give the golden set {needed}, or leave the budget out",
        )


def _nonfinite(outputs: Mapping[str, OutputDifference]) -> list[str]:
    return [
        f"output {name}: {each.new_nonfinite} elements are NaN or infinite on one side alone, or "
        f"texts that differ (first in example {each.example}); no budget allows that: compute the "
        "nodes that overflow in a wider type"
        for name, each in outputs.items()
        if each.new_nonfinite
    ]


def _difference(budgets: Budgets, outputs: Mapping[str, OutputDifference]) -> list[str]:
    bound = budgets.max_abs_diff
    if bound is None:
        return []
    return [
        f"max_abs_diff={bound:g}: output {name} differs by {each.largest:.3g} in example "
        f"{each.example}; {_EXCLUDE}"
        for name, each in outputs.items()
        if not each.largest <= bound
    ]


def _metric(budgets: Budgets, deciding: Sequence[str], overall: Group) -> list[str]:
    bound = budgets.max_metric_drop
    if bound is None or overall.drop is None or _within(overall.drop, bound):
        return []
    changed = _changed(overall, deciding, overall.drop)
    return [f"max_metric_drop={bound:g}: {changed}; {_EXCLUDE}"]


def _group(
    kind: str, bound: float | None, groups: Mapping[str, Group], names: Sequence[str]
) -> list[str]:
    if bound is None:
        return []
    failed = {
        name: group.drop
        for name, group in groups.items()
        if group.drop is not None and not _within(group.drop, bound)
    }
    if not failed:
        return []
    worst = max(failed, key=lambda name: failed[name])
    others = f", and {len(failed) - 1} more outside" if len(failed) > 1 else ""
    changed = _changed(groups[worst], names, failed[worst])
    told = (
        f"max_{kind}_drop={bound:g}: of the {kind} {worst} ({groups[worst].count} examples) "
        f"{changed}{others}; {_EXCLUDE}"
    )
    return [told]


def _agreement(budgets: Budgets, overall: Group, classes: Mapping[str, Group]) -> list[str]:
    bound = budgets.min_agreement
    if bound is None or overall.agreement is None or overall.agreement >= bound:
        return []
    shares = {n: g.agreement for n, g in classes.items() if g.agreement is not None}
    least = min(shares, key=lambda name: shares[name], default=None)
    where = "" if least is None else f", of the class {least} {shares[least]:.2%}"
    told = (
        f"min_agreement={bound:g}: {overall.agreement:.2%} of the predictions stay as they were"
        f"{where}; {_EXCLUDE}"
    )
    return [told]


def _within(drop: float, bound: float) -> bool:
    # 0.9 - 0.8 is 0.09999999999999998: what is inside by rounding alone is inside.
    return drop <= bound or math.isclose(drop, bound, rel_tol=1e-9, abs_tol=1e-12)


def _changed(group: Group, names: Sequence[str], drop: float) -> str:
    """``accuracy goes from 0.91 to 0.88, by 0.03``, of the metric that the drop is of."""

    def distance(name: str) -> float:
        gap = abs(abs(group.after[name] - group.before[name]) - drop)
        return math.inf if math.isnan(gap) else gap

    name = min(names, key=distance)
    old, new = group.before[name], group.after[name]
    return f"{name} goes from {old:.4g} to {new:.4g}, by {drop:.4g}"
