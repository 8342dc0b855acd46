"""Makes docs/libraries.md of the results: its text up to the table is the page's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
Found = Mapping[str, Any]
HEAD = (
    "| library | training | numbers | 60 steps | 300 steps | captures | as a graph | on |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def write_page(results: Mapping[str, Found], rows: Mapping[str, Any]) -> None:
    """Writes the tables into the page, one for each version of torch.

    Args:
        results: version of torch → key of a row → what was found.
        rows: name → :class:`~tests.libraries.__main__.Row`.
    """
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(results, rows)}\n{END}{rest.partition(END)[2]}")


def tables(results: Mapping[str, Found], rows: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    parts = []
    for version, found in results.items():
        lines = [line(rows[key.split(",")[0]], key, of) for key, of in ordered(found, rows)]
        told = [said(rows[key.split(",")[0]], key, of) for key, of in ordered(found, rows)]
        parts += [f"### torch {version}", "\n".join([HEAD, *lines])]
        parts += ["\n".join(filter(None, told))]
    return "\n\n".join(filter(None, parts))


def ordered(found: Found, rows: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The results in the order of the rows."""
    names = [*rows]
    known = [item for item in found.items() if item[0].split(",")[0] in rows]
    return sorted(known, key=lambda item: (names.index(item[0].split(",")[0]), "," in item[0]))


def line(row: Any, key: str, found: Found) -> str:
    """One row of a table."""
    title = f"{row.title}, larger" if "," in key else row.title
    long = found.get("default, 300", {})
    calls = long.get("graph", 0) + long.get("eager", 0)
    share = f"{long['graph'] / calls:.0%}" if calls else ""
    columns = [
        row.library,
        title,
        number(found),
        seconds(found, 60),
        seconds(found, 300),
        str(long.get("captures", "")),
        f"{share}, else parts" if "parts" in long.get("modes", ()) else share,
        found.get("processor", ""),
    ]
    return f"| {' | '.join(columns)} |"


def number(found: Found) -> str:
    """How far the losses are from plain ones."""
    asked = found["aten, 20"]
    if "failed" in asked:
        return f"**{asked['failed']}**" if asked["failed"] == "stopped" else "**fails**"
    if found["difference"] is None:
        return "plain fails"
    share = asked["graph"] / max(asked["graph"] + asked["eager"], 1)
    return f"{found['difference']:.0e} ({share:.0%} graph)"


def seconds(found: Found, steps: int) -> str:
    """Plain → default, whole seconds."""
    plain, ours = found.get(f"plain, {steps}"), found.get(f"default, {steps}")
    if plain is None or ours is None:
        return ""
    both = [of.get("failed", f"{of.get('seconds', 0):.1f}") for of in (plain, ours)]
    text = " → ".join("fails" if len(each) > 10 else each for each in both)
    if "failed" in plain or "failed" in ours:
        return f"**{text}**"
    return f"{text} ({plain['seconds'] / ours['seconds']:.2f}×)"


def said(row: Any, key: str, found: Found) -> str:
    """What a run of 300 steps says at its end; where it says nothing, why steps were no graph's."""
    long = found.get("default, 300") or found["aten, 20"]
    told = long.get("said") or [each for each in long.get("reasons", []) if each]
    if not told:
        return ""
    title = f"{row.title}, larger" if "," in key else row.title
    return f"- {row.library}, {title}: {told[-1].split(chr(10))[0].removeprefix('ORTTrainer: ')}"
