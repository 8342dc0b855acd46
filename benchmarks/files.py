"""Saving and loading a large checkpoint, with its checksum and without, alternating in one process.

    python benchmarks/files.py [--megabytes 400] [--rounds 9]

``without`` is the same code with a checksum that costs nothing; ``safetensors`` is that package's
own reading and writing of the same tensors, which is synchronized alike.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from measurement import Results, alternate, arguments, compared, ratio
from safetensors import safe_open
from safetensors.numpy import save_file

from ortrain.files import crc32, seal
from ortrain.ondevice.running import checkpoint_file

ACTIONS = ("save", "load")


@contextlib.contextmanager
def no_checksum() -> Iterator[None]:
    """Checksums cost nothing and are not compared."""
    with (
        mock.patch.object(crc32, "of", return_value=0),
        mock.patch.object(seal, "compare", return_value=None),
    ):
        yield


def contestants(folder: Path, megabytes: int) -> dict[str, Callable[[], object]]:
    """What is timed, each on a file of its own; all save before the first loads."""
    generator = np.random.default_rng(0)
    size = megabytes * 2500
    weights = {f"w{i}": (generator.standard_normal(size, np.float32), True) for i in range(100)}
    content = checkpoint_file.new(weights, {})

    def save_plain() -> None:
        save_file(content.tensors, folder / "safetensors")
        with (folder / "safetensors").open("rb") as file:
            os.fsync(file.fileno())

    def load_plain() -> dict[str, np.ndarray]:
        with safe_open(folder / "safetensors", framework="np") as file:
            return {name: file.get_tensor(name) for name in content.tensors}

    return {
        "save with": lambda: checkpoint_file.write(content, folder / "with"),
        "save without": no_checksum()(lambda: checkpoint_file.write(content, folder / "without")),
        "save safetensors": save_plain,
        "load with": lambda: checkpoint_file.read(folder / "with"),
        "load without": no_checksum()(lambda: checkpoint_file.read(folder / "without")),
        "load safetensors": load_plain,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    options = parser.parse_args()
    results = Results("files", options.json)
    with tempfile.TemporaryDirectory() as folder:
        times = alternate(contestants(Path(folder), options.megabytes), options.rounds)
    found = {}
    for action in ACTIONS:
        own = {name.split()[1]: each for name, each in times.items() if name.startswith(action)}
        rows = {name: row["median_ms"] / 1e3 for name, row in compared(own).items()}
        times_ratio = ratio(own["with"], own["without"])
        found[action] = {"median_seconds": rows, "median_of_with_over_without": times_ratio}
        told = ", ".join(f"{name} {value:.3f} s" for name, value in rows.items())
        print(f"{action}: {told}; with / without {times_ratio:.2f}")
    results.save(checksum=crc32.of.__module__, megabytes=options.megabytes, **found)


if __name__ == "__main__":
    main()
