"""On-device training against PyTorch eager, alternating in one process.

    python benchmarks/ondevice.py [--device cpu|cuda] [--rounds N] [--json FILE]

- one step with AdamW of an MLP (64-128-10, batch 32) and of a MiniLM-shaped encoder (batch 8 x 64):
  the fused step, the pair of training and optimizer model, and eager with ``AdamW(fused=True)``;
- the encoder's update alone;
- seconds from loading its artifacts to the end of the first step, in a process of its own;
- the encoder with all but its last block frozen: saved bytes and time, beside its share of the
  floating-point operations.

On CUDA, the first two alone: batches come from the host, and a step ends when the device has done
it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurement import Results, Row, alternate, arguments, compared, table, waited
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from ortrain.autodiff import differentiate
from ortrain.autodiff.held import saved_bytes
from ortrain.autodiff.partition import partition
from ortrain.ondevice import (
    CheckpointState,
    LossType,
    Module,
    Optimizer,
    TrainStep,
    generate_artifacts,
)
from ortrain.ondevice.making.module_source import from_module
from ortrain.ondevice.optim import AdamW

LAYERS = 6
FIRST_STEP = """
import sys, time
import numpy as np
start = time.perf_counter()
from ortrain.ondevice import CheckpointState, TrainStep
imported = time.perf_counter()
folder = sys.argv[1]
batch = np.load(folder + "/batch.npz")
state = CheckpointState.load_checkpoint(folder + "/checkpoint")
step = TrainStep(folder + "/train_step_model.onnx", state)
step(*(batch[name] for name in step.input_names()))
print(time.perf_counter() - imported, imported - start)
"""


class Encoder(nn.Module):
    """A BERT of MiniLM-L6's shape, without dropout, that returns its logits."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "hidden_size": 384,
            "num_attention_heads": 12,
            "intermediate_size": 1536,
        }
        off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.body = BertForSequenceClassification(
            BertConfig(num_hidden_layers=layers, **sizes, **off)
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 2] of token ids [batch, length]."""
        logits: torch.Tensor = self.body(input).logits
        return logits


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return module, torch.randn(32, 64), torch.randint(0, 10, (32,))


def encoder() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Encoder(), torch.randint(1, 30522, (8, 64)), torch.randint(0, 2, (8,))


class Contest:
    """Artifacts of a module, and what runs on them."""

    def __init__(
        self, folder: Path, make: Callable[[], Any], device: str = "cpu", **more: Any
    ) -> None:
        torch.manual_seed(0)
        self.module, self.x, self.labels = make()
        generate_artifacts(
            self.module,
            loss=LossType.CrossEntropyLoss,
            optimizer=AdamW(),
            example_inputs=(self.x,),
            artifact_directory=folder,
            **more,
        )
        self.batch = (self.x.numpy(), self.labels.numpy())
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.fused = TrainStep(folder / "train_step_model.onnx", state, device=device)
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.training = Module(folder / "training_model.onnx", state, device=device)
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.training)
        self.module.to(device)
        self.device = device
        self.eager_optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        self.folder = folder

    def eager(self) -> None:
        logits = self.module(self.x.to(self.device))
        loss = nn.functional.cross_entropy(logits, self.labels.to(self.device))
        self.eager_optimizer.zero_grad()
        loss.backward()
        self.eager_optimizer.step()

    def step(self) -> None:
        self.fused(*self.batch)

    def forward_and_backward(self) -> None:
        self.training(*self.batch)
        self.training.lazy_reset_grad()

    def pair(self) -> None:
        self.training(*self.batch)
        self.optimizer.step()
        self.training.lazy_reset_grad()


def measure(
    functions: dict[str, Callable[[], None]], rounds: int, device: str = "cpu"
) -> dict[str, Row]:
    """Medians in milliseconds, compared with the first one's."""
    if device != "cpu":
        functions = {name: waited(function, []) for name, function in functions.items()}
    return compared(alternate(functions, rounds, warm_up=3))


def saved(frozen: bool, layers: int = LAYERS) -> int:
    """Bytes that the encoder's forward keeps for its backward."""
    module = Encoder(layers)
    names = [name for name, _ in module.named_parameters()]
    trained = last_block(names, layers) if frozen else names
    _, x, _ = encoder()
    forward = from_module(module, (x,), (), None, trained)
    sizes = {"batch": 8, "length": 64}
    (value,) = [v for v in forward.training.graph.inputs if v.name == "input"]
    assert value.shape is not None
    named = dict(zip(map(str, value.shape), sizes.values(), strict=True))
    return saved_bytes(partition(differentiate(forward.training, forward.trainable)), named)


def last_block(names: list[str], layers: int = LAYERS) -> list[str]:
    """The parameters of the last block and of what follows it."""
    parts = (f"layer.{layers - 1}.", "pooler", "classifier")
    return [name for name in names if any(part in name for part in parts)]


def first_step(folder: Path, contest: Contest, rounds: int) -> dict[str, float]:
    """Seconds in new processes."""
    import numpy as np

    np.savez(folder / "batch.npz", input=contest.batch[0], labels=contest.batch[1])
    command = [sys.executable, "-c", FIRST_STEP, str(folder)]
    rows = []
    for _ in range(rounds):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append([float(word) for word in done.stdout.split()])
    seconds, imports = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"seconds": seconds, "import_seconds": imports}


def main() -> None:
    parser = arguments(__doc__, rounds=21)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    device = options.device
    results = Results("ondevice", options.json, device)

    def tell(key: str, title: str, functions: dict[str, Callable[[], None]], times: int = 1) -> Row:
        rows = measure(functions, times * options.rounds, device)
        results.save(**{key: rows})
        print(table(title, rows), flush=True)
        return rows

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = Contest(folder / "mlp", mlp, device)
        contestants = {"eager": small.eager, "fused step": small.step, "two models": small.pair}
        tell("mlp", "MLP 64-128-10, batch 32", contestants, 100)
        large = Contest(folder / "encoder", encoder, device)
        contestants = {"eager": large.eager, "fused step": large.step, "two models": large.pair}
        tell("encoder", "MiniLM-shaped encoder, batch 8 x 64", contestants)
        contestants = {"AdamW(fused=True)": large.eager_optimizer.step}
        contestants["optimizer model"] = large.optimizer.step
        large.training(*large.batch)
        tell("update", "its update alone", contestants)
        if device != "cpu":
            return
        found = first_step(large.folder, large, 5)
        results.save(first_step=found)
        print(f"first step: {found['seconds']:.2f} s; {found['import_seconds']:.2f} s of imports")

        names = [name for name, _ in large.module.named_parameters()]
        frozen = Contest(folder / "frozen", encoder, requires_grad=last_block(names))
        contestants = {"all trained": large.forward_and_backward}
        contestants["last block trained"] = frozen.forward_and_backward
        rows = tell("frozen", "forward and backward", contestants)
        share = (LAYERS + 2) / (3 * LAYERS)
        ratio = rows["last block trained"]["ratio"]
        print(f"  share of operations {share:.3f}; time is {ratio / share:.2f} of that")
        whole, less, kept = saved(False), saved(False, LAYERS - 1), saved(True)
        head = whole - LAYERS * (whole - less)
        results.save(frozen_bytes={"saved": kept, "block": whole - less, "rest": head})
        print(
            f"  saved {kept / 2**20:.2f} MiB; of all trained {whole / 2**20:.2f}, of a block "
            f"{(whole - less) / 2**20:.2f} MiB: {kept / (whole - less):.2f} of that"
        )


if __name__ == "__main__":
    main()
