"""Every training of `examples/` in PyTorch and as a graph, each example in a process of its own.

    python benchmarks/examples.py [NAME ...] [--json FILE] [--arguments="--max_steps 100"]

Each trains, by the same weights and batches, first in PyTorch and then as a graph.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workloads import machine

FOLDER = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


def figures(name: str, arguments: list[str]) -> list[dict[str, Any]]:
    """What an example writes of its runs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--output_dir", folder]
        subprocess.run([*command, "--json_file", str(file), *arguments], check=True)
        runs: list[dict[str, Any]] = json.loads(file.read_text())
    return runs


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each example: samples a second of both, and how much the graph wins."""
    rows = ["| example | PyTorch, samples/s | graph, samples/s | speed-up | first steps included |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for name, (eager, graph) in results.items():
        a, b = (run["samples_per_second"] for run in (eager, graph))
        whole = eager["train_seconds"] / graph["train_seconds"]
        rows.append(f"| `{name}.py` | {a:.0f} | **{b:.0f}** | **{b / a:.2f}x** | {whole:.2f}x |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default="all", choices=[*NAMES, "all"], metavar="NAME")
    parser.add_argument("--arguments", default="", help="of the examples")
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results/examples.json"
    )
    options = parser.parse_args()
    arguments = shlex.split(options.arguments)
    names = NAMES if "all" in options.names else options.names
    results = {name: figures(name, arguments) for name in names}
    print(table(results))
    options.json.parent.mkdir(exist_ok=True)
    found = {"machine": machine(), "arguments": arguments, "examples": results}
    options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
