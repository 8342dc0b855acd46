"""Saving and loading a large checkpoint, with its checksum and without, alternating in one process.

    python benchmarks/files.py [--megabytes 400] [--rounds 9]

``without`` is the same code with a checksum that costs nothing; ``safetensors`` is that package's
own reading and writing of the same tensors, which is synchronized alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from workloads import machine

from ortrain.ondevice.running import checkpoint_file, safetensors_file


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/files.json")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    size = options.megabytes * 2500
    weights = {f"w{i}": (generator.standard_normal(size, np.float32), True) for i in range(100)}
    content = checkpoint_file.new(weights, {})
    free = SimpleNamespace(crc32=lambda data, start=0: 0)
    with tempfile.TemporaryDirectory() as folder:
        path, plain = Path(folder) / "checkpoint", Path(folder) / "plain"

        def save_plain() -> None:
            save_file(content.tensors, plain)
            with plain.open("rb") as file:
                os.fsync(file.fileno())

        def load_plain() -> dict[str, np.ndarray]:
            with safe_open(plain, framework="np") as file:
                return {name: file.get_tensor(name) for name in content.tensors}

        def without(call: Callable[[], object]) -> Callable[[], object]:
            def run() -> object:
                with (
                    mock.patch.object(safetensors_file, "zlib", free),
                    mock.patch.object(safetensors_file.seal, "compare", return_value=None),
                ):
                    return call()

            return run

        def save() -> None:
            checkpoint_file.write(content, path)

        def load() -> object:
            return checkpoint_file.read(path)

        contestants: dict[str, dict[str, Callable[[], object]]] = {
            "with": {"save": save, "load": load},
            "without": {"save": without(save), "load": without(load)},
            "safetensors": {"save": save_plain, "load": load_plain},
        }
        found: dict[str, dict[str, list[float]]] = {
            name: {"save": [], "load": []} for name in contestants
        }
        for _ in range(options.rounds):
            for name, calls in contestants.items():
                for action, call in calls.items():
                    found[name][action].append(seconds(call))
            save()  # what is loaded next has its checksum
    results: dict[str, Any] = {
        "machine": machine(),
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "megabytes": options.megabytes,
    }
    for action in ("save", "load"):
        rows = {name: statistics.median(times[action]) for name, times in found.items()}
        pairs = zip(found["with"][action], found["without"][action], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        results[action] = {"median_seconds": rows, "median_of_with_over_without": ratio}
        told = ", ".join(f"{name} {value:.3f} s" for name, value in rows.items())
        print(f"{action}: {told}; with / without {ratio:.2f}")
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
