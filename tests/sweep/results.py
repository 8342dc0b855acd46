"""The results that are kept: a file an engine, such as ``aten.json``, one line a row.

Of a sweep of another dtype ``dtypes.json`` keeps, by engine, how many rows have each outcome, and
the rows that have a bad one.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ortrain.config import Engine
from tests.sweep.rows import all_rows
from tests.sweep.verdict import ENGINES, Outcome, Verdict

FOLDER = Path(__file__).parent
OF_DTYPES = FOLDER / "dtypes.json"
BAD = (Outcome.WRONG, Outcome.RAISES, Outcome.OWN_ERROR)


def load(engine: Engine = ENGINES[0]) -> dict[str, Verdict]:
    """The verdict of each row by its key."""
    file = FOLDER / f"{engine}.json"
    if not file.exists():
        return {}
    rows = json.loads(file.read_text())
    return {key: Verdict.of(row) for key, row in rows.items()}


def save(engine: Engine, verdicts: dict[str, Verdict]) -> None:
    """Writes the verdicts in the order of PyTorch's tables; rows that they lost are left out."""
    rows = [
        f"{json.dumps(key)}: {json.dumps(asdict(verdicts[key]), ensure_ascii=False)}"
        for key in all_rows()
        if key in verdicts
    ]
    (FOLDER / f"{engine}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


def load_dtypes() -> dict[str, Any]:
    """By engine and dtype what is kept: ``samples``, ``counts`` by kind, ``bad`` rows."""
    kept: dict[str, Any] = json.loads(OF_DTYPES.read_text()) if OF_DTYPES.exists() else {}
    return kept


def save_dtype(engine: Engine, name: str, samples: int, verdicts: dict[str, Verdict]) -> None:
    """Keeps a sweep of all rows in another dtype."""
    kept = load_dtypes()
    bad = {key: f"{v.outcome}: {v.reason}" for key, v in verdicts.items() if v.outcome in BAD}
    found = {"samples": samples, "counts": counts(verdicts), "bad": bad}
    kept[engine] = dict(sorted({**kept.get(engine, {}), name: found}.items()))
    OF_DTYPES.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


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
