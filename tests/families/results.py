"""The results that are kept: one line a family, of each exporter's file a verdict."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.families.verdict import EXPORTERS, Outcome, Verdict

FILE = Path(__file__).parent / "results.json"

Kept = dict[str, dict[str, Verdict]]


def load() -> Kept:
    """By family and exporter."""
    if not FILE.exists():
        return {}
    rows = json.loads(FILE.read_text())
    return {n: {e: Verdict.of(v) for e, v in row.items()} for n, row in rows.items()}


def save(kept: Kept) -> None:
    """Writes them, families and exporters in order."""
    rows = []
    for name, row in sorted(kept.items()):
        found = {e: asdict(row[e]) for e in EXPORTERS if e in row}
        rows.append(f"{json.dumps(name)}: {json.dumps(found, ensure_ascii=False)}")
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def totals(kept: Kept) -> str:
    """How many files of each exporter have each outcome, a line each."""
    lines = []
    for exporter in EXPORTERS:
        count = Counter(row[exporter].outcome for row in kept.values() if exporter in row)
        parts = ", ".join(f"{count[outcome]} {outcome}" for outcome in Outcome)
        lines.append(f"{exporter}: {parts}")
    return "\n".join(lines)
