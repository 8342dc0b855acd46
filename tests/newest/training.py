"""Nine models train as graphs on both engines as they do in eager, with the versions of today.

Two of them generate text as well: their graphs, and the files that are exported of them.

Run by ``make test-newest`` from a copy of the tests, in an environment of its own that has the
wheel and nothing of the tests' tools. A row fails where a number differs, and where a step was not
a graph's.
"""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ortrain
from ortrain import Options, ORTModule
from ortrain.deploy import models as ort_models
from ortrain.deploy.generation import ORTGenerator
from tests.models import LABELS, MODELS, ModelCase, _rows
from tests.module.agreement import DRIFTED, RELATIVE, assert_agree, double, in_double, step

AT_LEAST = (2, 14, 1)
SHOWN = ("torch", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "transformers", "numpy")
STEPS = 4


class Clipped(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so that it stays PyTorch's in a graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (2 * x * gradient).clamp(-0.01, 0.01)


class WithFunction(nn.Module):
    """Two linear layers with the function between them, and a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, LABELS)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = Clipped.apply(self.first(features))
        return nn.functional.cross_entropy(self.second(hidden), labels)


NAMES = ("mlp", "cnn", "recurrent", "bert", "gpt2", "llama", "t5", "vit")
CASES = [MODELS[name] for name in NAMES]
GENERATING = {"gpt2": "ORTModelForCausalLM", "t5": "ORTModelForSeq2SeqLM"}
CASES.append(ModelCase("custom function", WithFunction, _rows, has_length=False))


def trained(case: ModelCase, engine: Any) -> int:
    """Compares some steps of SGD with eager's; returns how many captures they took."""
    eager = case.build()
    graph = ORTModule(copy.deepcopy(eager), options=Options(engine=engine, fallback="raise"))
    truth = in_double(eager)
    models = (graph, eager, truth)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for number in range(STEPS):
        batch = case.batch(3 - number % 2, 7 - number % 3, number)
        ours, theirs, exact = step(graph, batch), step(eager, batch), step(truth, double(batch))
        # Then weights have drifted apart by roundings.
        assert_agree(ours, theirs, exact, relative=DRIFTED if number else RELATIVE)
        for optimizer in optimizers:
            optimizer.step()
    report = graph.report
    assert report.graph_calls == STEPS, f"{report.graph_calls} of {STEPS} steps: {report.reason}"
    return report.captures


def generated(name: str, kind: str) -> int:
    """Compares generated tokens with eager's; returns how many calls ran as a graph."""
    model: Any = MODELS[name].build().eval()
    ids = torch.randint(3, 20, (2, 5), generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 8,
    }
    arguments |= {"num_beams": 2, "use_cache": True}
    with torch.no_grad():
        wanted = model.generate(**arguments)
    generator = ORTGenerator(model, options=Options(fallback="raise"))
    assert torch.equal(generator.generate(**arguments), wanted)
    loaded = getattr(ort_models, kind).from_pretrained(model, export=True)
    assert torch.equal(loaded.generate(**arguments), wanted)
    assert generator.report.graph_calls, "nothing ran as a graph"
    return generator.report.graph_calls


def main() -> int:
    """Trains all; returns how many rows have failed."""
    torch.set_num_threads(1)
    print(f"Python {sys.version.split()[0]}, ortrain of {Path(ortrain.__file__).parent}")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in SHOWN), flush=True)
    assert Path(ortrain.__file__).is_relative_to(sys.prefix), "this is not the wheel's"
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:3]))
    assert version >= AT_LEAST, f"torch {torch.__version__} is older than {AT_LEAST}"
    rows: list[tuple[str, str, Callable[[], str]]] = []
    for case, engine in itertools.product(CASES, ("onnxruntime", "aten")):
        told = f"{STEPS} steps of a graph as eager's, captures: %d"
        rows.append((case.name, engine, lambda c=case, e=engine, t=told: t % trained(c, e)))
    for name, kind in GENERATING.items():
        told = "tokens as eager's, of a graph and of a file, graph calls: %d"
        rows.append((name, "generate", lambda n=name, k=kind, t=told: t % generated(n, k)))
    failed = 0
    for name, what, run in rows:
        began = time.perf_counter()
        try:
            told = run()
        except Exception:
            failed += 1
            told = f"FAILED\n{traceback.format_exc(limit=-3)}"
        took = time.perf_counter() - began
        print(f"{name:<16} {what:<12} {took:5.1f} s  {told}", flush=True)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
