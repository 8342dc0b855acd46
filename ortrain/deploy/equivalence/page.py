"""A report of equivalence as one page of HTML that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from ortrain.deploy.equivalence.plots import columns, pairs, text
from ortrain.deploy.equivalence.summary import most_different, number, ratio, share, size

if TYPE_CHECKING:
    from ortrain.deploy.equivalence.report import EquivalenceReport, Group

# Of the plot of classes; the table has all of them.
_MOST_BARS = 30
_DECADES = ("< 1e-8", *(f"1e{power}" for power in range(-8, 1)), "≥ 10")


def html(report: EquivalenceReport) -> str:
    """The page."""
    verdict = "inside the budgets" if report.passed else "outside the budgets"
    if report.passed and not report.budgets.given():
        verdict = "compared without budgets"
    style = resources.files("ortrain.deploy.equivalence").joinpath("page.css").read_text("utf-8")
    sections = [
        _verdict(report, verdict),
        _outputs(report),
        _metrics(report),
        _groups("Classes", "class", report.classes, report.worst_class),
        _groups("Slices", "slice", report.slices, report.worst_slice),
        _changes(report),
        _cost(report),
        _operators(report),
        _ground(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>Equivalence: {text(verdict)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        "<main>\n" + "\n".join(filter(None, sections)) + "\n</main>\n</body>\n</html>\n"
    )


def _verdict(report: EquivalenceReport, verdict: str) -> str:
    kind = "passed" if report.passed else "failed"
    told = "".join(f"<li>{text(reason)}</li>" for reason in report.reasons)
    rows = []
    overall = report.overall
    used = {
        "max_abs_diff": report.max_abs_diff,
        "max_metric_drop": overall.drop,
        "max_class_drop": _drop(report.classes, report.worst_class),
        "max_slice_drop": _drop(report.slices, report.worst_slice),
        "min_agreement": overall.agreement,
    }
    for name, bound in report.budgets.given().items():
        failed = any(reason.startswith(f"{name}=") for reason in report.reasons)
        rows.append([name, number(bound), number(used[name]), "exceeded" if failed else "kept"])
    table = _table(["budget", "allowed", "found", ""], rows, "Budgets") if rows else ""
    return (
        f'<header class="{kind}">\n<h1>{"✓" if report.passed else "✗"} {text(verdict)}</h1>\n'
        f"<p>{text(report.after.path)}<br>against {text(report.before.path)}, "
        f"over {report.examples} examples</p>\n"
        + (f"<ul>{told}</ul>" if told else "")
        + f"</header>\n{table}"
    )


def _drop(groups: Mapping[str, Group], worst: str | None) -> float | None:
    return None if worst is None else groups[worst].drop


def _outputs(report: EquivalenceReport) -> str:
    rows = [
        [
            name,
            number(each.largest),
            number(each.mean),
            number(each.relative),
            str(each.elements),
            str(each.new_nonfinite),
            str(each.example),
        ]
        for name, each in most_different(report)
    ]
    heads = ["output", "largest", "mean", "largest / scale", "elements", "new NaN or infinite"]
    shown = most_different(report)[:4]
    plots = "".join(
        f"<h3>{text(name)}</h3>"
        + columns(
            f"Elements of {name} by their absolute difference",
            list(zip(_DECADES, each.histogram, strict=True)),
        )
        for name, each in shown
    )
    return _section(
        "Differences of outputs",
        _table([*heads, "in example"], rows, "Absolute differences, output by output")
        + "<p>How many elements differ by so much, from each bound to the next; the heights are "
        "square roots.</p>" + plots,
    )


def _metrics(report: EquivalenceReport) -> str:
    overall = report.overall
    if overall.agreement is None and not overall.before:
        return ""
    rows = [
        [
            name + (" (decides)" if name in report.metrics else ""),
            number(old),
            number(overall.after[name]),
            number(overall.after[name] - old),
        ]
        for name, old in overall.before.items()
    ]
    parts = []
    if overall.agreement is not None:
        parts.append(
            f"<p>{share(overall.agreement)} of {overall.count} predictions are what they were; "
            f"{report.changed} have changed.</p>"
        )
    if rows:
        parts.append(_table(["metric", "before", "after", "change"], rows, "Over all examples"))
    if report.flips:
        flips = [
            [f"{f.threshold:g}", str(f.up), str(f.down), str(f.decisions)] for f in report.flips
        ]
        parts.append(
            _table(
                ["threshold", "come over it", "fallen below it", "decisions"],
                flips,
                "Decisions that are others at a threshold of the probability",
            )
        )
    return _section(f"Predictions: {report.task}", "".join(parts))


def _groups(title: str, kind: str, groups: Mapping[str, Group], worst: str | None) -> str:
    if not groups:
        return ""
    order = sorted(groups, key=lambda name: -(groups[name].drop or 0.0))
    metrics = next((list(g.before) for g in groups.values() if g.before), [])
    heads = [kind, "examples", "agreement"]
    for name in metrics:
        heads += [f"{name} before", f"{name} after"]
    rows = []
    for name in order:
        group = groups[name]
        row = [name, str(group.count), share(group.agreement)]
        for metric in metrics:
            row += [number(group.before.get(metric)), number(group.after.get(metric))]
        rows.append([*row, number(group.drop)])
    plot = ""
    if metrics:
        bars = [
            (name, groups[name].before.get(metrics[0]), groups[name].after.get(metrics[0]))
            for name in order[:_MOST_BARS]
        ]
        unit = None if metrics[0] in ("mse", "loss") else 1.0
        plot = _LEGEND + pairs(f"{metrics[0]} of each {kind}, before and after", bars, number, unit)
    first = f"<p>Worst {kind}: {text(worst)}.</p>" if worst is not None else ""
    caption = f"Each {kind}, the largest drop first"
    return _section(title, first + plot + _table([*heads, "drop"], rows, caption))


def _changes(report: EquivalenceReport) -> str:
    if not report.changes:
        return ""
    rows = [
        [str(each.example), "–" if each.label is None else each.label, each.before, each.after]
        for each in report.changes
    ]
    more = report.changed - len(rows)
    return _section(
        "Changed predictions",
        _table(
            ["example", "label", "before", "after"],
            rows,
            "Those of which the model before was surest come first",
        )
        + (f"<p>{more} more are left out.</p>" if more else ""),
    )


def _cost(report: EquivalenceReport) -> str:
    before, after = report.before, report.after
    parts = [
        _LEGEND,
        pairs("Bytes of all files", [("size", before.size, after.size)], _bytes),
    ]
    rows = [["size", size(before.size), size(after.size), ratio(after.size, before.size)]]
    if before.peak_memory is not None and after.peak_memory is not None:
        peaks = (before.peak_memory, after.peak_memory)
        parts.append(pairs("Peak of memory", [("peak of memory", *peaks)], _bytes))
        rows.append(["peak of memory", *(size(each) for each in peaks), ratio(*reversed(peaks))])
    if after.latency:
        bars: list[tuple[str, float, float]] = []
        for batch, (median, high) in after.latency.items():
            was, was_high = before.latency[batch]
            bars += [(f"{batch}, median", was, median), (f"{batch}, 95 %", was_high, high)]
        rows += [[n, f"{a:.3g} ms", f"{b:.3g} ms", ratio(b, a)] for n, a, b in bars]
        parts.append(pairs("Milliseconds of a run", bars, _milliseconds))
    table = _table(["", "before", "after", "after / before"], rows, "Cost")
    return _section("Size, memory and latency", "".join(parts) + table)


def _operators(report: EquivalenceReport) -> str:
    before, after = report.before.operators, report.after.operators
    rows = [
        [name, str(before.get(name, 0)), str(after.get(name, 0)), f"{change:+d}" if change else ""]
        for name in sorted({*before, *after})
        for change in (after.get(name, 0) - before.get(name, 0),)
    ]
    new = ", ".join(f"{name} ({count})" for name, count in report.fused.items())
    told = f"{report.before.nodes} nodes before, {report.after.nodes} after."
    told += f" More than before: {new}." if new else ""
    return _section(
        "Operators",
        f"<p>{text(told)}</p><details><summary>All operators</summary>"
        + _table(["operator", "before", "after", "change"], rows, "Nodes of each operator")
        + "</details>",
    )


def _ground(report: EquivalenceReport) -> str:
    notes = "".join(f"<li>{text(note)}</li>" for note in report.notes)
    rows = [[name, value] for name, value in report.environment.items()]
    for kind, side in (("before", report.before), ("after", report.after)):
        rows += [
            [f"{kind}: {name}", f"{size(side.files[name])}, sha256 {checksum}"]
            for name, checksum in side.sha256.items()
        ]
    return _section(
        "What this rests on",
        (f"<ul>{notes}</ul>" if notes else "") + _table(["", ""], rows, "Versions and files"),
    )


_LEGEND = (
    '<p class="legend"><span class="before"></span> before <span class="after"></span> after</p>'
)


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{text(title)}</h2>\n{content}\n</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    head = "".join(f'<th scope="col">{text(each)}</th>' for each in heads)
    body = "".join(
        f'<tr><th scope="row">{text(first)}</th>'
        + "".join(f"<td>{text(each)}</td>" for each in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="wide"><table><caption>{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _bytes(value: float | None) -> str:
    return "–" if value is None else size(value)


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} ms"
