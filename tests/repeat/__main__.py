"""Whether two runs with the same seed are the same run, by default options and with dropout.

    python -m tests.repeat [--pairs 20] [--deterministic] [--write]

Each run is a process of its own. Half of the pairs run beside two processes that multiply matrices,
as on a machine with other users. Two runs are equal if their losses are, to the bit; they have
drawn the same masks if these differ by roundings alone. ``results.json`` has, by version of torch
and with or without ``Options(deterministic=True)``, how many pairs were equal and how many drew the
same, and of each when its runs parted and how far.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortrain import Options, ORTModule

RESULTS = Path(__file__).with_name("results.json")
STEPS = 40
# Another mask changes a loss by some hundredths of it, and a rounding by some millionths.
ROUNDINGS = 1e-3
BUSY = "import torch; torch.set_num_threads(1); a = torch.randn(1500, 1500)\nwhile True: a @ a"


class Model(nn.Module):
    """Two layers of a transformer with dropout, a step of which takes some 150 ms."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(256, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x).mean(1)), labels)


def run(seed: int, deterministic: bool = False) -> dict[str, Any]:
    """One training: its losses, and how many steps ran as a graph."""
    torch.set_num_threads(1)  # on a busy machine several would wait for one another
    torch.manual_seed(seed)
    model = ORTModule(Model(), options=Options(deterministic=deterministic))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for step in range(STEPS):
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(16, 64, 256, generator=drawn)
        loss = model(x, (x.mean((1, 2)) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "graph": model.report.graph_calls, "mode": model.report.mode}


def pair(seed: int, busy: bool, deterministic: bool) -> dict[str, Any]:
    """Two runs, one after the other, and where they part."""
    beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 if busy else 0)]
    try:
        command = [sys.executable, "-W", "ignore", "-m", "tests.repeat", "--seed", str(seed)]
        command += ["--deterministic"] if deterministic else []
        lines = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        ]
    finally:
        for process in beside:
            process.kill()
            process.wait()
    first, second = (json.loads(line.splitlines()[-1]) for line in lines)
    return {"seed": seed, "busy": busy, **compared(first, second)}


def compared(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Where two runs part, None where they are equal to the bit, and how far."""
    both = [*zip(first["losses"], second["losses"], strict=True)]
    return {
        "apart": float(f"{max(abs(a - b) / abs(a) for a, b in both):.1e}"),
        "parted at step": next((step for step, (a, b) in enumerate(both) if a != b), None),
        "graph steps": [first["graph"], second["graph"]],
        "last losses": [round(each["losses"][-1], 6) for each in (first, second)],
    }


def main() -> None:
    """Runs the pairs, and tells what came of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeat")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help="after the pairs that are written")
    parser.add_argument("--write", action="store_true", help="results.json")
    parser.add_argument("--deterministic", action="store_true")
    asked = parser.parse_args()
    if asked.seed is not None:
        print(json.dumps(run(asked.seed, asked.deterministic)))
        return
    version = torch.__version__.split("+")[0] + ", deterministic" * asked.deterministic
    whole = json.loads(RESULTS.read_text()) if asked.write and RESULTS.exists() else {}
    rows = whole.get(version, {}).get("pairs", []) if asked.resume else []
    for seed in range(len(rows), asked.pairs):
        start = time.monotonic()
        row = pair(seed, bool(seed % 2), asked.deterministic)
        rows.append({**row, "seconds": round(time.monotonic() - start, 1)})
        print(rows[-1], flush=True)
        if asked.write:
            counts = {"equal": equal(rows), "same masks": alike(rows)}
            whole[version] = {**counts, "minutes": minutes(rows), "pairs": rows}
            RESULTS.write_text(json.dumps(whole, indent=1) + "\n")
    told = f"{equal(rows)} of {len(rows)} pairs are equal, {alike(rows)} drew the same"
    print(f"{told}; {minutes(rows)} minutes")


def equal(rows: list[dict[str, Any]]) -> int:
    """How many pairs never part."""
    return sum(row["parted at step"] is None for row in rows)


def alike(rows: list[dict[str, Any]]) -> int:
    """How many pairs differ by roundings alone."""
    return sum(row["apart"] < ROUNDINGS for row in rows)


def minutes(rows: list[dict[str, Any]]) -> float:
    """Of all pairs."""
    return round(sum(row["seconds"] for row in rows) / 60, 1)


if __name__ == "__main__":
    main()
