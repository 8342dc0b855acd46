"""Trains with the trainers of other libraries, plainly and through ortrain, and writes a table.

    python -m tests.libraries [NAME ...] [--write]

Each training is a process of its own, with as many threads as PyTorch takes. The time begins when
the library is imported, and ends with the training: it holds the import of ortrain, tracing,
building and timing. A row of more than ten minutes is stopped. ``results.json`` has the results by
version of torch, ``docs/libraries.md`` is made of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.libraries.page import write_page
from tests.libraries.ways import Way

RESULTS = Path(__file__).with_name("results.json")
# Of a row, in seconds.
LIMIT = 600
# Of the comparison of numbers, which comes from an engine that is asked for.
NUMBERS, ENGINE = 20, "aten"
Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A training.

    Attributes:
        library: that it is of.
        title: what is trained.
        place: module and function.
        large: whether it is also run with a model of which a plain step takes some 0.2 s.
        smoke: whether numbers alone are compared.
    """

    library: str
    title: str
    place: str
    large: bool = False
    smoke: bool = False

    @property
    def package(self) -> str:
        """What has to be there."""
        return PACKAGES.get(self.library, self.library.lower().replace("-", "_"))


PACKAGES = {"PyG": "torch_geometric"}
ROWS = {
    "sft": Row("trl", "SFT, varied lengths", "of_trl.sft", large=True),
    "sft-bf16": Row("trl", "SFT in bf16", "of_trl.sft_bf16", large=True),
    "sft-dft": Row("trl", "SFT by whole logits", "of_trl.sft_dft"),
    "dpo": Row("trl", "DPO", "of_trl.dpo", large=True),
    "grpo": Row("trl", "GRPO", "of_trl.grpo"),
    "kto": Row("trl", "KTO", "of_trl.kto"),
    "reward": Row("trl", "Reward", "of_trl.reward"),
    "mnrl": Row("sentence-transformers", "MNRL", "of_sentence_transformers.mnrl", large=True),
    "cached-mnrl": Row(
        "sentence-transformers", "CachedMNRL", "of_sentence_transformers.cached_mnrl"
    ),
    "setfit": Row("setfit", "body, on pairs", "of_sentence_transformers.setfit"),
    "lora": Row("PEFT", "LoRA, saved, loaded, merged", "of_peft.lora", large=True),
    "two-adapters": Row("PEFT", "two adapters in turns", "of_peft.two_adapters"),
    "dora": Row("PEFT", "DoRA", "of_peft.dora"),
    "ia3": Row("PEFT", "IA3", "of_peft.ia3"),
    "lora-trainer": Row("PEFT", "LoRA by a Trainer, resumed", "of_peft.trainer"),
    "gcn": Row("PyG", "GCN", "of_geometric.gcn", large=True),
    "gin": Row("PyG", "GIN", "of_geometric.gin"),
    "sage": Row("PyG", "GraphSAGE", "of_geometric.sage"),
    "pooling": Row("PyG", "top-k pooling", "of_geometric.pooling"),
    "data-objects": Row("PyG", "GCN on `Data` objects", "of_geometric.data_objects"),
    "lightning": Row("Lightning", "a transformer", "of_others.lightning", large=True),
    "accelerate": Row("accelerate", "own loop, accumulation", "of_others.accelerate", large=True),
    "unet": Row("diffusers", "UNet", "of_others.unet", large=True),
    "dit": Row("diffusers", "DiT", "of_others.dit", large=True),
    "keras": Row("Keras", "a module among layers", "smoke.keras", smoke=True),
    "skorch": Row("skorch", "a regressor", "smoke.skorch", smoke=True),
    "stable-baselines3": Row("stable-baselines3", "PPO", "smoke.stable_baselines3", smoke=True),
    "gpytorch": Row("gpytorch", "a deep kernel", "smoke.gpytorch", smoke=True),
    "pyro": Row("pyro", "an autoencoder", "smoke.pyro", smoke=True),
    "e3nn": Row("e3nn", "a tensor product", "smoke.e3nn", smoke=True),
}


def child(name: str, large: bool, options: Found | None, steps: int) -> Found:
    """One training, in this process."""
    place, function = ROWS[name].place.split(".")
    train = getattr(importlib.import_module(f"tests.libraries.{place}"), function)
    way = Way(options, steps, large)
    start = time.perf_counter()
    with way.listening():
        train(way)
    seconds = time.perf_counter() - start
    reports = way.reports()
    return {
        "seconds": round(seconds, 2),
        "losses": way.losses,
        "graph": sum(report.graph_calls for report in reports),
        "eager": sum(report.eager_calls for report in reports),
        "captures": sum(getattr(report, "captures", 0) for report in reports),
        "modes": [report.mode for report in reports],
        "reasons": sorted({report.reason for report in reports if report.eager_calls}),
        "said": way.said[-5:],
        "lines said": len(way.said),
    }


def trained(name: str, large: bool, options: Found | None, steps: int, limit: float) -> Found:
    """One training in a process of its own, or why there is none."""
    asked = json.dumps([name, large, options, steps])
    command = [sys.executable, "-W", "ignore", "-m", "tests.libraries", "--child", asked]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(limit, 1), env=environment
        )
    except subprocess.TimeoutExpired:
        return {"failed": "stopped"}
    if done.returncode:
        return {"failed": done.stderr.strip().split("\n")[-1][:300]}
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def row(name: str, large: bool) -> Found:
    """All trainings of a row."""
    end = time.monotonic() + LIMIT
    ways: dict[str, tuple[Found | None, int]] = {
        f"plain, {NUMBERS}": (None, NUMBERS),
        f"{ENGINE}, {NUMBERS}": ({"engine": ENGINE}, NUMBERS),
    }
    for steps in () if ROWS[name].smoke else (60, 300):
        ways |= {f"plain, {steps}": (None, steps), f"default, {steps}": ({}, steps)}
    found: Found = {}
    losses: dict[str, list[float]] = {}
    for way, (options, steps) in ways.items():
        found[way] = trained(name, large, options, steps, end - time.monotonic())
        losses[way] = found[way].pop("losses", [])
    found["difference"] = apart(losses[f"plain, {NUMBERS}"], losses[f"{ENGINE}, {NUMBERS}"])
    if not ROWS[name].smoke:
        found["difference by default"] = apart(losses["plain, 60"], losses["default, 60"])
    return found


def apart(plain: list[float], ours: list[float]) -> float | None:
    """The largest relative difference of two runs' losses; of small ones, to the largest."""
    if not plain or len(plain) != len(ours):
        return None
    floor = max(map(abs, plain)) * 1e-2 or 1.0
    return max(abs(a - b) / max(abs(a), floor) for a, b in zip(plain, ours, strict=True))


def processor() -> str:
    """Maker and generation of this one."""
    known = importlib.import_module("benchmarks.processor")  # which mypy knows by another name
    return str(known.slug(known.first_processor(known.CPUINFO.read_text())))


def main() -> None:
    """Trains, and tells what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.libraries")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--size", choices=("small", "large"), help="both by default")
    parser.add_argument("--write", action="store_true", help="results.json and the page")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(child(*json.loads(asked.child))))
        return
    if unknown := set(asked.names) - ROWS.keys():
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    import torch

    version = torch.__version__.split("+")[0]
    for name in asked.names or ROWS:
        for large in (False, True) if ROWS[name].large else (False,):
            if asked.size and large != (asked.size == "large"):
                continue
            start = time.monotonic()
            found = row(name, large)
            found["seconds"] = round(time.monotonic() - start, 1)
            found["processor"] = processor()
            key = f"{name}, large" if large else name
            print(key, json.dumps(found, indent=1), flush=True)
            if asked.write:
                whole = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
                whole.setdefault(version, {})[key] = found
                RESULTS.write_text(json.dumps(whole, indent=1) + "\n")
    if asked.write:
        write_page(json.loads(RESULTS.read_text()), ROWS)


if __name__ == "__main__":
    main()
