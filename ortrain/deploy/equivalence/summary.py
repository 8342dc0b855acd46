"""A report of equivalence in a few lines, and the figures as all of its forms write them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortrain.deploy.equivalence.report import EquivalenceReport, OutputDifference

# Of the list of outputs; a cache has two for each layer.
_MOST_OUTPUTS = 6
_UNITS = ("B", "kB", "MB", "GB", "TB")


def text(report: EquivalenceReport) -> str:
    """The report in a few lines."""
    lines = ["passed" if report.passed else "not passed"]
    lines += [f"  {reason}" for reason in report.reasons]
    lines.append(f"examples    {report.examples}")
    for name, each in most_different(report)[:_MOST_OUTPUTS]:
        bad = f", {each.new_nonfinite} NaN or infinite on one side" if each.new_nonfinite else ""
        lines.append(
            f"difference  {name}: largest {number(each.largest)}, mean {number(each.mean)}{bad}"
        )
    if len(report.outputs) > _MOST_OUTPUTS:
        lines.append(f"            {len(report.outputs) - _MOST_OUTPUTS} more outputs differ less")
    overall = report.overall
    if overall.agreement is not None:
        changed = f"{report.changed} of {overall.count} changed"
        lines.append(f"agreement   {share(overall.agreement)} of the predictions ({changed})")
    for name, old in overall.before.items():
        marked = " *" if name in report.metrics else ""
        lines.append(f"metric      {name}: {number(old)} → {number(overall.after[name])}{marked}")
    if overall.before:
        lines.append(f"            * decides, and is worse by {number(overall.drop)}")
    for kind, worst, groups in (
        ("class", report.worst_class, report.classes),
        ("slice", report.worst_slice, report.slices),
    ):
        if worst is not None:
            lines.append(f"worst {kind} {worst}: worse by {number(groups[worst].drop)}")
    for flip in report.flips:
        lines.append(
            f"threshold   {flip.threshold:g}: {flip.up} decisions up, {flip.down} down, "
            f"of {flip.decisions}"
        )
    old_size, new_size = report.before.size, report.after.size
    lines.append(f"size        {size(old_size)} → {size(new_size)} ({ratio(new_size, old_size)})")
    for batch, (median, high) in report.after.latency.items():
        was, was_high = report.before.latency[batch]
        lines.append(
            f"latency     {batch}: median {was:.3g} → {median:.3g} ms ({was / median:.2f} x as "
            f"fast), 95 % {was_high:.3g} → {high:.3g} ms"
        )
    memory = (report.before.peak_memory, report.after.peak_memory)
    if memory[0] is not None and memory[1] is not None:
        lines.append(f"memory      {size(memory[0])} → {size(memory[1])} at the peak")
    nodes = f"{report.before.nodes} → {report.after.nodes} nodes"
    new = ", ".join(f"{name} +{count}" for name, count in report.fused.items())
    lines.append(f"operators   {nodes}" + (f"; {new}" if new else ""))
    lines += [f"note        {note}" for note in report.notes]
    return "\n".join(lines)


def most_different(report: EquivalenceReport) -> list[tuple[str, OutputDifference]]:
    """The outputs, those that are not finite on one side first, then by their difference."""
    return sorted(
        report.outputs.items(), key=lambda each: (-each[1].new_nonfinite, -each[1].largest)
    )


def number(value: float | None) -> str:
    """Four digits; a dash for nothing."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return f"{value:.4g}"


def share(value: float | None) -> str:
    """A share in per cent; what is not all of it is never rounded to all."""
    if value is None or math.isnan(value):
        return "–"
    digits = 2 if value == 1 or value < 0.9999 else 6
    return f"{value * 100:.{digits}f} %"


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def ratio(new: float, old: float) -> str:
    """``0.26 of it``."""
    return f"{new / old:.3g} of it" if old else "–"
