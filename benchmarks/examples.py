"""Every training of `examples/` in eager PyTorch and in ours, by precision.

    python benchmarks/examples.py [NAME …] [--contestants eager aten] [--arguments="--max_steps 9"]

Each training is a process of its own, from the same weights and on the same batches; compared are
the steps behind the first five.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measurement import Results, Row, arguments, last_line, one_of, turns

FOLDER = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")
PRECISIONS: dict[str, list[str]] = {"fp32": [], "bf16": ["--bf16", "True"]}
ENGINES = {"eager": "torch", "ort": "onnxruntime", "aten": "aten", "auto": "auto"}


def train(name: str, contestant: str, more: list[str]) -> Row:
    """What an example writes of one run; the reason where it ends with an error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--output_dir", folder]
        command += ["--engine", ENGINES[contestant], "--json_file", str(file), *more]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return {"skipped": last_line(done.stderr)}
        (run,) = json.loads(file.read_text())
    found: Row = run
    return found


def measure(example: str, names: list[str], more: list[str], rounds: int) -> dict[str, Row]:
    """The run with the middle speed of each contestant."""
    runs: dict[str, list[Row]] = {name: [] for name in names}
    for name in turns(names, rounds):
        if not any("skipped" in run for run in runs[name]):
            runs[name].append(train(example, name, more))
    return {name: _middle(each) for name, each in runs.items()}


def _middle(runs: list[Row]) -> Row:
    if "skipped" in runs[-1]:
        return runs[-1]
    speed = statistics.median_low(run["samples_per_second"] for run in runs)
    return next(run for run in runs if run["samples_per_second"] == speed)


def gain(rows: Mapping[str, Row], name: str, key: str = "samples_per_second") -> float | None:
    """How many times as fast as eager a contestant trains; None where one of them has not."""
    if not all(key in rows.get(each, {}) for each in ("eager", name)):
        return None
    value: float = rows[name][key] / rows["eager"][key]
    return 1 / value if key == "train_seconds" else value


def table(results: Mapping[str, Mapping[str, Any]], names: list[str]) -> str:
    """A row for each example and precision: the speed-up of each contestant."""
    ours = [name for name in names if name != "eager"]
    rows = ["| example | eager, samples/s |" + "".join(f" {name} |" for name in ours)]
    rows.append("| --- | --- |" + " --- |" * len(ours))
    for example, by_precision in results.items():
        for precision, found in by_precision.items():
            base = found.get("eager", {}).get("samples_per_second")
            cells = [f"{base:.0f}" if base else "–", *(_cell(found, name) for name in ours)]
            rows.append(f"| `{example}.py`, {precision} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(found: Mapping[str, Row], name: str) -> str:
    speed, whole = gain(found, name), gain(found, name, "train_seconds")
    if speed is None:
        return str(found[name].get("skipped", "–"))
    return f"**{speed:.2f}x**, {whole:.2f}x with the first steps"


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("names", nargs="*", default=NAMES, type=one_of(NAMES))
    parser.add_argument(
        "--contestants", nargs="+", default=["eager", "ort", "aten"], type=one_of(ENGINES)
    )
    parser.add_argument("--precisions", nargs="+", default=[*PRECISIONS], type=one_of(PRECISIONS))
    parser.add_argument("--arguments", default="", help="of the examples")
    options = parser.parse_args()
    more = shlex.split(options.arguments)
    results = Results("examples", options.json)
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for name in options.names:
        found[name] = {
            precision: measure(name, options.contestants, more + flags, options.rounds)
            for precision, flags in PRECISIONS.items()
            if precision in options.precisions
        }
        results.save(arguments=more, examples=found)
    print(table(found, options.contestants))


if __name__ == "__main__":
    main()
