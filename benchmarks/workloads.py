"""The models that the benchmarks train, and the machine they run on."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """One model and its batch.

    Attributes:
        title: for the table.
        make: returns the module and the keyword arguments of one call, whose result has a loss.
        optimizer: whether a fused AdamW step is part of what is timed.
        target: wanted ratio of eager's time to the graph's.
    """

    title: str
    make: Callable[[], tuple[nn.Module, dict[str, Any]]]
    optimizer: bool
    target: float


def bert(layers: int = 4, batch: int = 8, length: int = 128) -> tuple[nn.Module, dict[str, Any]]:
    """The first layers of BERT-base with a classifier, random weights, dropout on."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    module = BertForSequenceClassification(BertConfig(num_hidden_layers=layers, num_labels=2))
    return module.train(), text_batch(module.config.vocab_size, batch, length)


def minilm(batch: int = 32, length: int = 48) -> tuple[nn.Module, dict[str, Any]]:
    """The shape of all-MiniLM-L6-v2 (22 M parameters), random weights, dropout on."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=2,
    )
    return BertForSequenceClassification(config).train(), text_batch(30522, batch, length)


def text_batch(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Random token ids without padding, and binary labels."""
    ids = torch.randint(1000, vocabulary, (batch, length))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, 2, (batch,)),
    }


class Perceptron(nn.Module):
    """Three layers of width 64, loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def perceptron() -> tuple[nn.Module, dict[str, Any]]:
    """A perceptron at batch 32."""
    torch.manual_seed(0)
    return Perceptron(), {"x": torch.randn(32, 64)}


WORKLOADS = {
    "bert": Workload("4 layers of BERT-base, batch 8 x 128, dropout, AdamW", bert, True, 1.8),
    "minilm": Workload("MiniLM-L6 shape, batch 32 x 48, dropout, AdamW", minilm, True, 1.6),
    "mlp": Workload(
        "3-layer perceptron of width 64, batch 32, no optimizer", perceptron, False, 1 / 1.1
    ),
}


def loss_of(output: Any) -> torch.Tensor:
    """The scalar that a step goes backward from."""
    loss = getattr(output, "loss", None)
    result: torch.Tensor = output.sum() if loss is None else loss
    return result


def in_a_process(script: str, *arguments: str) -> dict[str, Any]:
    """Runs ``script --child ARGUMENTS`` alone; returns the JSON object in its last line."""
    command = [sys.executable, script, "--child", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def alternate(
    functions: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of each call of some functions, in turns; each round another one is first."""
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            functions[name]()
            if turn >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def waited(function: Callable[[], Any], host: list[float]) -> Callable[[], None]:
    """The function, and a wait for the GPU; to ``host`` go milliseconds until it returned."""

    def call() -> None:
        start = time.perf_counter()
        function()
        host.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()

    return call


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores, versions and the BLAS of the baseline; name and driver of a GPU."""
    import onnxruntime

    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = found.group(1) if found else name
    configuration = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", configuration)
    gpu = {} if device == "cpu" else _gpu()
    return gpu | {
        "processor": name,
        "vendor": _vendor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_blas": blas.group(1) if blas else "unknown",
        "onnxruntime": onnxruntime.__version__,
        "python": platform.python_version(),
    }


def _gpu() -> dict[str, str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    name, driver = found.stdout.splitlines()[0].split(", ")
    return {"gpu": name, "driver": driver, "cuda": torch.version.cuda or "none"}


def _vendor() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"vendor_id\s*: (.*)", path.read_text()) if path.exists() else None
    return found.group(1) if found else "unknown"
