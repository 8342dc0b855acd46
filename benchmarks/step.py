"""One training step under each engine, alternating in one process.

    python benchmarks/step.py [bert minilm mlp] [--rounds N] [--json FILE] [--no-compile]

Contestants: PyTorch eager in float32, eager under bfloat16 autocast, ortrain with the graph forced,
and ortrain with its default options. torch.compile, where there is a compiler, alternates with
eager in a process of its own, because its presence slows small eager steps down by half.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS, Workload, in_a_process, loss_of, machine

from ortrain import Options, ORTModule

ENGINES = ("eager fp32", "ortrain graph", "ortrain default", "eager bf16 autocast")
COMPILED = "torch.compile fp32"


def contestants(workload: Workload, names: Sequence[str]) -> dict[str, Callable[[], None]]:
    """A function for each contestant that does one step on a model of its own."""
    base, batch = workload.make()
    result: dict[str, Callable[[], None]] = {}

    wrappers: dict[str, Any] = {
        "ortrain graph": lambda m: ORTModule(
            m, options=Options(engine="onnxruntime", fallback="raise")
        ),
        "ortrain default": ORTModule,
        COMPILED: torch.compile,
    }

    def add(name: str) -> None:
        model = copy.deepcopy(base)
        model = wrappers[name](model) if name in wrappers else model
        autocast = "autocast" in name
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

        def step() -> None:
            if autocast:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(model(**batch))
            else:
                loss = loss_of(model(**batch))
            loss.backward()
            if workload.optimizer:
                optimizer.step()
            for parameter in parameters:
                parameter.grad = None

        result[name] = step

    for name in names:
        add(name)
    return result


def measure(
    workload: Workload, names: Sequence[str], rounds: int, seconds: float
) -> dict[str, Any]:
    """Medians and spreads of every contestant, in milliseconds; eager is the first."""
    steps = contestants(workload, names)
    first: dict[str, float] = {}
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        first[name] = time.perf_counter() - start
    warm_up = max(10, min(100, int(1.0 / _once(steps["eager fp32"]))))
    for name, step in steps.items():
        # The default engine decides during its first steps: let it finish.
        for _ in range(warm_up if name == "ortrain default" else 3):
            step()
    inner = max(1, int(seconds / rounds / _once(steps["eager fp32"]) / 4))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            step = steps[name]
            step()  # the other contestants have filled the caches
            start = time.perf_counter()
            for _ in range(inner):
                step()
            times[name].append((time.perf_counter() - start) / inner * 1e3)
    base = statistics.median(times["eager fp32"])
    return {
        "title": workload.title,
        "target": workload.target,
        "steps_per_round": inner,
        "contestants": {
            name: {
                "median_ms": statistics.median(values),
                "min_ms": min(values),
                "max_ms": max(values),
                "first_step_s": first[name],
                "speedup_over_eager": base / statistics.median(values),
                "paired_speedup": statistics.median(
                    e / v for e, v in zip(times["eager fp32"], values, strict=True)
                ),
            }
            for name, values in times.items()
        },
    }


def _once(step: Callable[[], None]) -> float:
    step()
    start = time.perf_counter()
    step()
    return max(time.perf_counter() - start, 1e-5)


def table(result: dict[str, Any]) -> str:
    rows = [f"{result['title']} (target {result['target']:.2f}x eager)"]
    rows.append(f"  {'':<22}{'median':>10}{'min':>10}{'max':>10}{'first step':>12}{'speed-up':>10}")
    for name, row in result["contestants"].items():
        rows.append(
            f"  {name:<22}{row['median_ms']:>8.3f}ms{row['min_ms']:>8.3f}ms{row['max_ms']:>8.3f}ms"
            f"{row['first_step_s']:>11.2f}s{row['paired_speedup']:>9.2f}x"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=40.0, help="per workload, about")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/step.json")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        name, rounds, seconds = options.child
        names = [ENGINES[0], COMPILED]
        with tempfile.TemporaryDirectory() as folder:  # nothing that an earlier process compiled
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            print(json.dumps(measure(WORKLOADS[name], names, int(rounds), float(seconds) / 2)))
        return
    results = {"machine": machine(), "workloads": {}}
    print("  ".join(f"{k}={v}" for k, v in results["machine"].items()))
    compiled = not options.no_compile and shutil.which("g++") is not None
    for name in options.workloads:
        result = measure(WORKLOADS[name], ENGINES, options.rounds, options.seconds)
        if compiled:
            other = in_a_process(__file__, name, str(options.rounds), str(options.seconds))
            result["contestants"][COMPILED] = other["contestants"][COMPILED]
        results["workloads"][name] = result
        print(table(result), flush=True)
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
