"""Peak memory of a training step, each contestant in a process of its own.

    python benchmarks/memory.py [bert minilm bert-checkpointed] [--contestants eager ort auto]

The peak over steps 3 to 10 of what is resident, less what was once model and optimizer were made.
Another such training runs before and is deleted. What it and the imports leave behind is part of
that number, and is shown apart.
In use are the C library's blocks that are not free: what is left of the peak without holes in its
heap, whose size is partly luck: the same steps take 879 MiB in one process and 936 in another.
"""

from __future__ import annotations

import gc
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from contestants import CONTESTANTS, Training
from measurement import ProcessFailed, Results, Row, arguments, in_a_process, one_of
from workloads import MODELS

from ortrain.runtime.memory import Ceiling, in_use, release_pools, resident


class Peak(threading.Thread):
    """Samples every millisecond what is resident and what is in use, where that is told."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.resident = self.in_use = 0
        self.stopped = False

    def run(self) -> None:
        told = Ceiling.serves()
        while not self.stopped:
            self.resident = max(self.resident, resident())
            if told:
                self.in_use = max(self.in_use, in_use())
            time.sleep(0.001)


def peak(workload: str, name: str) -> Row:
    """A contestant's peak, measured in a process of its own.

    Raises:
        ProcessFailed: the contestant has raised an error.
    """
    apart = CONTESTANTS[name].apart
    with tempfile.TemporaryDirectory() as folder:
        environment = apart.environment(Path(folder)) if apart is not None else {}
        return in_a_process(__file__, workload, name, environment=environment)


def child(workload: str, name: str) -> Row:
    """The same, measured in this process."""
    training = Training(name, MODELS[workload])
    before = resident()
    training.wrap()
    left_behind = _left_by_another(workload, name) - before
    held = in_use() if Ceiling.serves() else 0
    training.turn(2, warm_up=0)
    sampled = Peak()
    sampled.start()
    training.turn(8, warm_up=0)
    sampled.stopped = True
    sampled.join()
    return {
        "peak": sampled.resident - before,
        "import_and_capture": left_behind,
        "in_use": max(0, sampled.in_use - held),
    }


def _left_by_another(workload: str, name: str) -> int:
    """What is resident once another such training has had a graph and is deleted.

    With the default engine a graph comes at the third step only.
    """
    other = Training(name.replace("auto", "aten"), MODELS[workload])
    other.wrap()
    other.turn(1, warm_up=0)
    del other
    gc.collect()
    release_pools()  # what is free is there for the steps
    return resident()


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    default = ["bert", "minilm", "bert-checkpointed"]
    parser.add_argument("workloads", nargs="*", default=default, type=one_of(MODELS))
    parser.add_argument(
        "--contestants", nargs="+", default=["eager", "ort", "auto"], type=one_of(CONTESTANTS)
    )
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    results = Results("memory", options.json)
    for workload in options.workloads:
        print(workload)
        rows: dict[str, Any] = {}
        for name in options.contestants:
            absent = CONTESTANTS[name].absent("cpu")
            try:
                row = {"skipped": absent} if absent else peak(workload, name)
            except ProcessFailed as failure:
                row = {"skipped": str(failure)}
            rows[name] = row
            print(f"  {name:<20}{told(row, rows[options.contestants[0]])}", flush=True)
        results.save(workloads={workload: rows})


def told(row: Row, base: Row) -> str:
    """A row in words, compared with another."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    left = row["import_and_capture"]
    net, other = row["peak"] - left, base["peak"] - base["import_and_capture"]
    return (
        f"peak {row['peak'] / 2**20:7.0f} MiB ({row['peak'] / base['peak']:.2f} of the first); "
        f"left by another {left / 2**20:5.0f} MiB; "
        f"without them {net / 2**20:7.0f} MiB ({net / other:.2f}); "
        f"in use {row['in_use'] / 2**20:7.0f} MiB ({row['in_use'] / max(base['in_use'], 1):.2f})"
    )


if __name__ == "__main__":
    main()
