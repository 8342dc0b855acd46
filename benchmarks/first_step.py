"""Seconds to the first finished training step, after imports.

    python benchmarks/first_step.py [bert minilm]

Each measurement is a process of its own: without a cache, with an empty `cache_dir`, and with one
that an earlier process has filled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any


def child(workload: str, cache: str) -> dict[str, Any]:
    start = time.perf_counter()
    import torch
    from workloads import WORKLOADS, loss_of

    from ortrain import Options, ORTModule

    imports = time.perf_counter() - start
    module, batch = WORKLOADS[workload].make()
    cache_dir = Path(cache) if cache else None
    model = ORTModule(
        module, options=Options(engine="onnxruntime", fallback="raise", cache_dir=cache_dir)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    start = time.perf_counter()
    loss_of(model(**batch)).backward()
    optimizer.step()
    first = time.perf_counter() - start
    return {"imports": imports, "first_step": first, "stages": model.report.stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["bert", "minilm"])
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results/first_step.json"
    )
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    from workloads import in_a_process, machine

    results: dict[str, Any] = {"machine": machine(), "workloads": {}}
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            runs = {
                "no cache": [in_a_process(__file__, workload, "") for _ in range(options.rounds)],
                "cache, first process": [in_a_process(__file__, workload, folder)],
                "cache, later process": [
                    in_a_process(__file__, workload, folder) for _ in range(options.rounds)
                ],
            }
        results["workloads"][workload] = runs
        print(workload)
        for name, rows in runs.items():
            middle = sorted(rows, key=lambda row: row["first_step"])[len(rows) // 2]
            stages = ", ".join(f"{k} {v:.2f}" for k, v in middle["stages"].items())
            print(f"  {name:<22}{middle['first_step']:6.2f} s  ({stages})")
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
