"""Seconds to the first finished training step, after imports.

    python benchmarks/first_step.py [bert minilm] [--contestants ort aten]

Each measurement is a process of its own: without a cache, with an empty `cache_dir`, and with one
that an earlier process has filled. With each go the seconds of its stages, and those of the
processor on all threads, which others on the machine disturb less.
"""

from __future__ import annotations

import json
import tempfile
import time
from typing import Any

from measurement import ProcessFailed, Results, Row, arguments, in_a_process, one_of

OURS = ("ort", "aten", "aten-bf16", "auto", "auto-bf16")


def child(workload: str, name: str, cache: str) -> Row:
    start = time.perf_counter()
    from contestants import Training
    from workloads import WORKLOADS

    import ortrain.module

    imports = time.perf_counter() - start
    training = Training(name, WORKLOADS[workload])
    training.wrap(cache_dir=cache or None)
    busy = time.process_time()
    first = training.turn(1, warm_up=0) / 1e3
    busy = time.process_time() - busy
    assert isinstance(training.model, ortrain.module.ORTModule)
    stages = dict(training.report.stages)
    stages["the step itself"] = first - sum(stages.values())
    return {"imports": imports, "first_step": first, "processor_time": busy, "stages": stages}


def measure(workload: str, name: str, rounds: int) -> dict[str, list[Row]]:
    """The runs without a cache, with an empty one, and with a full one."""

    def runs(cache: str, count: int) -> list[Row]:
        return [in_a_process(__file__, workload, name, cache) for _ in range(count)]

    with tempfile.TemporaryDirectory() as folder:
        return {
            "no cache": runs("", rounds),
            "cache, first process": runs(folder, 1),
            "cache, later process": runs(folder, rounds),
        }


def middle(runs: list[Row]) -> Row:
    """The run with the middle time."""
    return sorted(runs, key=lambda run: float(run["first_step"]))[len(runs) // 2]


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("workloads", nargs="*", default=["bert", "minilm"])
    parser.add_argument("--contestants", nargs="+", default=["ort", "aten"], type=one_of(OURS))
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    results = Results("first_step", options.json)
    for workload in options.workloads:
        found: dict[str, Any] = {}
        for name in options.contestants:
            try:
                found[name] = measure(workload, name, options.rounds)
            except ProcessFailed as failure:
                found[name] = {"skipped": str(failure)}
                print(f"{workload}, {name}: skipped: {failure}")
                continue
            print(f"{workload}, {name}")
            for kind, runs in found[name].items():
                run = middle(runs)
                stages = ", ".join(f"{key} {value:.2f}" for key, value in run["stages"].items())
                wall, busy = run["first_step"], run["processor_time"]
                times = f"{wall:6.2f} s, of the processor {busy:.2f} s"
                print(f"  {kind:<22}{times}  ({stages})", flush=True)
        results.save(workloads={workload: found})


if __name__ == "__main__":
    main()
