"""The results that are kept: ``results.json``, one line a row.

Of a sweep of another dtype ``dtypes.json`` keeps how many rows have each outcome, and the rows that
have a bad one.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.sweep.rows import all_rows
from tests.sweep.verdict import Outcome, Verdict

FILE = Path(__file__).parent / "results.json"
OF_DTYPES = Path(__file__).parent / "dtypes.json"
BAD = (Outcome.WRONG, Outcome.RAISES, Outcome.OWN_ERROR)


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


def load_dtypes() -> dict[str, Any]:
    """What is kept of each dtype by its name: ``samples``, ``counts`` by kind, ``bad`` rows."""
    kept: dict[str, Any] = json.loads(OF_DTYPES.read_text()) if OF_DTYPES.exists() else {}
    return kept


def save_dtype(name: str, samples: int, verdicts: dict[str, Verdict]) -> None:
    """Keeps a sweep of all rows in another dtype."""
    kept = load_dtypes()
    bad = {key: f"{v.outcome}: {v.reason}" for key, v in verdicts.items() if v.outcome in BAD}
    kept[name] = {"samples": samples, "counts": counts(verdicts), "bad": bad}
    OF_DTYPES.write_text(
        json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n"
    )


def counts(verdicts: dict[str, Verdict]) -> dict[str, dict[str, int]]:
    """How many rows of each kind have each outcome."""
    found = {}
    for kind in ("operator", "module"):
        count = Counter(v.outcome for key, v in verdicts.items() if key.startswith(f"{kind} "))
        found[kind] = {outcome.value: count[outcome] for outcome in Outcome}
    return found


def totals(verdicts: dict[str, Verdict]) -> str:
    """The same in words, a line each."""
    lines = []
    for kind, count in counts(verdicts).items():
        parts = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
        lines.append(f"{sum(count.values())} {kind}s: {parts}")
    return "\n".join(lines)
