"""What a graphics card does with ortrain, cell by cell: called by gpu.sh, which says how.

A cell is a model, a contestant, a batch and a device; each runs in a process of its own and is
written down at once. The order is that of worth: what runs by default beside eager and
torch.compile, the tests that need a card, further models in bf16, the processor beside the card,
then the rest. Products in float32 may use TF32 on a card.

Beside milliseconds stand the peak of the memory and the share of the card's arithmetic that is used
(MFU): the multiplications of the plain step, padding included, over the time and the card's peak.
"""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trainer
import workloads
from contestants import CONTESTANTS, Training
from measurement import ProcessFailed, Results, Row, arguments, in_a_process
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from workloads import Made, Workload

ROOT = Path(__file__).parents[1]
# Seconds of one cell, and those under which none is begun.
LIMIT, LEAST = 75, 15
# Dense bf16 products of a card, in operations a second, by the makers' data sheets.
PEAKS = {"h100": 989e12, "h200": 989e12, "a100": 312e12, "l40s": 362e12, "l4": 121e12}
# A card's results stay where these are the same; drivers change from one machine to the next.
ALIKE = ("gpu", "processor", "torch")


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        model: of ``MODELS``.
        contestant: of ``CONTESTANTS``; of the model ``TRAINED``, a trainer.
        batch: rows.
        device: ``"cuda"`` or ``"cpu"``.
    """

    model: str
    contestant: str
    batch: int = 8
    device: str = "cuda"

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.model}, batch {self.batch}, {self.contestant}"


# --- models ---------------------------------------------------------------------------------------


def bert_base(batch: int, layers: int = 12, padded: bool = True) -> Made:
    """BERT-base on 128 words."""
    return workloads.bert(batch=batch, layers=layers, padded=padded)


def gpt2(batch: int, layers: int = 12) -> Made:
    """GPT-2 small (124 M parameters) on 256 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = torch.randint(0, 50257, (batch, 256))
    module = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False)).train()
    return module, [{"input_ids": ids, "labels": ids}]


def llama_lora(batch: int, layers: int = 16) -> Made:
    """A Llama of 16 layers of width 1024 on 256 words, of which LoRA trains some."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    parts = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    module: Any = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=16, target_modules=parts))
    ids = torch.randint(0, 32000, (batch, 256))
    return module.train(), [{"input_ids": ids, "labels": ids}]


class ActorCritic(nn.Module):
    """Two perceptrons of width 256 on observations of 64 numbers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, out)
            )
            for out in (8, 1)
        )

    def forward(self, seen: torch.Tensor, done: torch.Tensor, gained: torch.Tensor) -> torch.Tensor:
        """Of observations [batch, 64], actions [batch] and returns [batch]."""
        value = self.critic(seen)[:, 0]
        chosen = self.actor(seen).log_softmax(-1).gather(1, done[:, None])[:, 0]
        return -(chosen * (gained - value.detach())).mean() + (gained - value).square().mean()


def actor_critic(batch: int, layers: int = 0) -> Made:
    """On 32 environments for each row of the batch."""
    torch.manual_seed(0)
    rows = batch * 32
    return ActorCritic(), [
        {
            "seen": torch.randn(rows, 64),
            "done": torch.randint(0, 8, (rows,)),
            "gained": torch.randn(rows),
        }
    ]


def resnet50(batch: int, layers: int = 0) -> Made:
    """ResNet-50 on images of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config: Any = ResNetConfig(depths=[1, 1, 1, 1]) if layers == 1 else ResNetConfig()
    config.num_labels = 10
    images = {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": torch.arange(batch) % 10}
    return ResNetForImageClassification(config).train(), [images]


class Convolutions(nn.Module):
    """Three graph convolutions of PyTorch Geometric; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.layers = nn.ModuleList(GCNConv(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of nodes [nodes, 64], edges [2, edges] and labels [nodes]."""
        for layer in self.layers:
            x = layer(x, edges).relu()
        return nn.functional.cross_entropy(x, labels)


def small_graph(batch: int, layers: int = 0) -> Made:
    """Graphs of 256 nodes."""
    torch.manual_seed(0)
    nodes = 256 * batch
    edges = torch.randint(0, nodes, (2, nodes * 4))
    labels = torch.randint(0, 64, (nodes,))
    return Convolutions(), [{"x": torch.randn(nodes, 64), "edges": edges, "labels": labels}]


MODELS: dict[str, Any] = {
    "bert-base": bert_base,
    "bert-base, dense": partial(bert_base, padded=False),
    "gpt2": gpt2,
    "llama-lora": llama_lora,
    "actor-critic": actor_critic,
    "resnet50": resnet50,
    "small-gnn": small_graph,
    # Those of step.py, whose batches are given.
    "bert": lambda batch, layers=4: workloads.bert(layers=layers),
    "minilm": lambda batch, layers=0: workloads.minilm(),
    "resnet": lambda batch, layers=0: workloads.resnet(),
}
NEEDS = {"small-gnn": "torch_geometric", "llama-lora": "peft"}
FIRST = ("bert-base", "gpt2", "llama-lora", "actor-critic")
# A whole training by transformers' Trainer and by ORTTrainer, of texts of many lengths.
TRAINED, STEPS = "minilm, trained", 300


def defaults() -> Iterator[Cell]:
    """What nobody has set anything for, beside eager and torch.compile."""
    names = ("eager", "compile", "compile-graphs", "auto")
    for end in ("-bf16", ""):
        for model in FIRST[:2]:
            yield from (Cell(model, f"{name}{end}") for name in names)
        yield from (Cell(TRAINED, f"{name}{end}", trainer.BATCH) for name in trainer.TRAINERS)


def cells() -> Iterator[Cell]:
    """All cells, those of most worth first."""
    bf16 = ("eager-bf16", "compile-bf16", "compile-graphs-bf16", "auto-bf16")
    yield from defaults()
    for model in FIRST[2:]:
        yield from (Cell(model, name) for name in bf16)
    for model in FIRST:
        yield Cell(model, "aten-graphs-bf16")
    for model in ("bert", "minilm", "resnet", "llama-lora"):
        for end in ("", "-bf16"):
            names = ("eager", "compile", "aten", "auto")
            yield from (Cell(model, f"{name}{end}", device="cpu") for name in names)
    for model in ("resnet50", "small-gnn", "bert-base, dense"):
        yield from (Cell(model, name) for name in bf16)
    for model in FIRST[2:]:
        yield from (Cell(model, name.removesuffix("-bf16")) for name in bf16)
    for batch in (1, 64, 256):
        for model in FIRST[:3]:
            yield from (Cell(model, name, batch) for name in bf16)


# --- one cell -------------------------------------------------------------------------------------


def child(cell: Cell, layers: int | None) -> Row:
    """Measures a cell, in this process.

    Args:
        cell: which.
        layers: of the model where all is to be small.
    """
    if cell.model == TRAINED:
        return trained(cell, STEPS if layers is None else 3)
    if cell.device == "cuda":
        torch.set_float32_matmul_precision("high")
    more = {} if layers is None else {"layers": layers}
    make = partial(MODELS[cell.model], cell.batch, **more)
    training = Training(cell.contestant, Workload(title=cell.key, make=make), cell.device)
    counter = FlopCounterMode(display=False)
    with counter, torch.random.fork_rng([]):
        contestant = training.contestant
        contestant.loss(training.model, training.batches[0], cell.device).backward()
    training.model.zero_grad()
    training.wrap()
    first = training.turn(1, warm_up=0) / 1e3
    training.settle()
    if cell.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if layers is None:
        steps = max(1, int(1000 / training.turn(1, warm_up=2)))
        times = [training.turn(steps) / steps for _ in range(5)]
    else:  # a processor may take seconds for a step in bf16
        times = [training.turn(1, warm_up=0)]
    row = {
        "median_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "first_step_s": first,
        "flops": counter.get_total_flops(),
        "ran": training.ran(),
    }
    if cell.device == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def trained(cell: Cell, steps: int) -> Row:
    """A whole training, by the step; captures, recordings and the contest are in it."""
    name, _, precision = cell.contestant.partition("-")
    row = trainer.child(name, precision or "fp32", "auto", str(steps), cell.device)
    return {"median_ms": row["seconds"] / steps * 1e3, "steps": steps, **row}


def measured(cell: Cell, layers: int | None, seconds: float) -> Row:
    """A cell in a process of its own; what fails, hangs or is not there says so."""
    if absent := missing(cell):
        return {"skipped": absent}
    small = [] if layers is None else ["--layers", str(layers)]
    try:
        return in_a_process(__file__, json.dumps(asdict(cell)), *small, limit=seconds)
    except ProcessFailed as failure:
        return {"failed": str(failure)[:300]}


def missing(cell: Cell) -> str:
    """What a cell needs and is not there; empty where all is."""
    package = NEEDS.get(cell.model)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if cell.model == TRAINED:
        return ""
    return CONTESTANTS[cell.contestant].absent(cell.device)


def tests(seconds: float) -> Row:
    """The tests that need a card."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {seconds:.0f} s"}
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-500:])
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    return {what: int(count) for count, what in counts} | {"which": failed[:20]}


# --- a run ----------------------------------------------------------------------------------------


def share_used(row: Row, gpu: str) -> str:
    """The share of the card's products that a step uses, in words; empty where it is unknown."""
    peak = next((of for name, of in PEAKS.items() if name in gpu.lower().split()), None)
    if peak is None or "flops" not in row:
        return ""
    return f"{row['flops'] / (row['median_ms'] / 1e3) / peak:.1%} of the card"


def told(row: Row, gpu: str) -> str:
    """A row in words."""
    if "median_ms" not in row:
        return ", ".join(f"{name}: {value}" for name, value in row.items())
    text = f"{row['median_ms']:9.3f} ms  {share_used(row, gpu)}"
    if "peak_bytes" in row:
        text += f"  {row['peak_bytes'] / 2**20:.0f} MiB"
    if "first_step_s" in row:
        text += f"  first step {row['first_step_s']:.1f} s"
    return f"{text}  {row['ran']}"


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--dry-run", action="store_true", help="all cells, small, on the processor")
    parser.add_argument("--list", action="store_true", help="what is left")
    parser.add_argument("--child")
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(Cell(**json.loads(options.child)), options.layers)))
        return
    end = time.monotonic() + 60 * options.minutes
    if options.dry_run:
        rehearse(end)
        return
    files = {d: Results("gpu", options.json, d, alike=ALIKE) for d in ("cuda", "cpu")}
    kept = {device: file.kept().get("cells", {}) for device, file in files.items()}
    gpu = files["cuda"].machine["gpu"]
    waiting = [cell for cell in cells() if cell.key not in kept[cell.device]]
    again = [c for c in cells() if "failed" in kept[c.device].get(c.key, {})]
    if options.list:
        print("\n".join(cell.key for cell in [*waiting, *again]))
        return
    first = [*defaults()]
    for cell in [*waiting, *again]:
        if cell not in first and "tests" not in files["cuda"].kept():
            found = tests(end - time.monotonic() - LEAST)
            files["cuda"].save(tests=found)
            print("tests", found, flush=True)
        left = end - time.monotonic()
        if left < LEAST:
            break
        row = measured(cell, None, min(LIMIT, left))
        if "failed" in row and left < LIMIT:
            break  # it had not its time
        files[cell.device].save(cells={cell.key: row})
        print(f"{cell.device} {cell.key:<44}{told(row, gpu)}", flush=True)


def rehearse(end: float) -> None:
    """Runs each model in eager, and each contestant on the smallest; nothing is kept.

    All of it runs on the processor, which may take seconds for a step of a large one in bf16.
    """
    known = [*cells()]
    trained = [f"{TRAINED}/{name}" for name in trainer.TRAINERS]
    models = [
        f"{model}/eager" for model in dict.fromkeys(c.model for c in known if c.model != TRAINED)
    ]
    names = [c.contestant.replace("-graphs", "") for c in known if c.model != TRAINED]
    others = [f"actor-critic/{name}" for name in names]  # recordings are a card's
    failed = False
    for each in dict.fromkeys([*models, *others, *trained]):
        model, _, name = each.partition("/")
        left = end - time.monotonic()
        small = Cell(model, name, 2, "cpu")
        row = measured(small, 1, left) if left > 0 else {"failed": "no time is left"}
        failed |= "failed" in row
        print(f"{small.key:<44}{told(row, '')}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
