"""The results that are kept: ``results.json``, one line a row."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.sweep.rows import all_rows
from tests.sweep.verdict import Outcome, Verdict

FILE = Path(__file__).parent / "results.json"


def load() -> dict[str, Verdict]:
    """The verdict of each row by its key."""
    if not FILE.exists():
        return {}
    rows = json.loads(FILE.read_text())
    return {key: Verdict.of(row) for key, row in rows.items()}


def save(verdicts: dict[str, Verdict]) -> None:
    """Writes the verdicts in the order of PyTorch's tables; rows that they lost are left out."""
    rows = [
        f"{json.dumps(key)}: {json.dumps(asdict(verdicts[key]), ensure_ascii=False)}"
        for key in all_rows()
        if key in verdicts
    ]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def totals(verdicts: dict[str, Verdict]) -> str:
    """How many rows of each kind have each outcome."""
    lines = []
    for kind in ("operator", "module"):
        count = Counter(v.outcome for key, v in verdicts.items() if key.startswith(f"{kind} "))
        parts = ", ".join(f"{count[outcome]} {outcome}" for outcome in Outcome)
        lines.append(f"{sum(count.values())} {kind}s: {parts}")
    return "\n".join(lines)
