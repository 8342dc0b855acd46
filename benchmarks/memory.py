"""Peak resident memory of a training step, each engine in a process of its own.

    python benchmarks/memory.py [bert minilm bert-checkpointed]

The peak over steps 3 to 10, less what was resident once model and optimizer were made. What the
import of ortrain and the capture leave behind is part of that number and is shown apart.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

PAGE = 4096


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def make(workload: str) -> tuple[Any, dict[str, Any]]:
    """The model and its batch; checkpointed layers with four times the batch."""
    from workloads import WORKLOADS, bert

    if workload != "bert-checkpointed":
        return WORKLOADS[workload].make()
    model, batch = bert(batch=32)
    model.activation_checkpointing_enable()
    return model, batch


class Peak(threading.Thread):
    """Samples the resident set every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.value, self.stopped = 0, False

    def run(self) -> None:
        while not self.stopped:
            self.value = max(self.value, resident())
            time.sleep(0.001)


def child(workload: str, engine: str) -> dict[str, Any]:
    import torch
    from workloads import loss_of

    model, batch = make(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    before = resident()
    left_behind = 0
    if engine != "eager":
        from ortrain import Options, ORTModule

        options = (
            Options() if engine == "default" else Options(engine="onnxruntime", fallback="raise")
        )
        model = ORTModule(model, options=options)
        imported = resident()
        import importlib

        for name in ("ortrain.capture.export", "ortrain.step.runner"):
            importlib.import_module(name)
        from ortrain.capture.export import capture

        capture(model.module, (), batch)
        left_behind = resident() - before
        del imported
    peak = Peak()
    for number in range(1, 11):
        if number == 3:
            peak.start()
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak.stopped = True
    peak.join()
    return {"peak": peak.value - before, "import_and_capture": left_behind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["bert", "minilm", "bert-checkpointed"])
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/memory.json")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    from workloads import in_a_process, machine

    results: dict[str, Any] = {"machine": machine(), "workloads": {}}
    for workload in options.workloads:
        rows = results["workloads"][workload] = {}
        for engine in ("eager", "graph", "default"):
            rows[engine] = in_a_process(__file__, workload, engine)
        base = rows["eager"]["peak"]
        print(workload)
        for engine, row in rows.items():
            left = row["import_and_capture"]
            net = row["peak"] - left
            print(
                f"  {engine:<8} peak {row['peak'] / 2**20:7.0f} MiB"
                f" ({row['peak'] / base:.2f} of eager); import and capture {left / 2**20:5.0f} MiB;"
                f" without them {net / 2**20:7.0f} MiB ({net / base:.2f})"
            )
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
