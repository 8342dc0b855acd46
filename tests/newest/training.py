"""Nine models train as graphs on both engines as they do in eager, with the versions of today.

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
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ortrain
from ortrain import Options, ORTModule
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


def main() -> int:
    """Trains all; returns how many rows have failed."""
    torch.set_num_threads(1)
    print(f"Python {sys.version.split()[0]}, ortrain of {Path(ortrain.__file__).parent}")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in SHOWN), flush=True)
    assert Path(ortrain.__file__).is_relative_to(sys.prefix), "this is not the wheel's"
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:3]))
    assert version >= AT_LEAST, f"torch {torch.__version__} is older than {AT_LEAST}"
    engines = ("onnxruntime", "aten")
    failed = 0
    for case, engine in itertools.product(CASES, engines):
        began = time.perf_counter()
        try:
            captures = trained(case, engine)
        except Exception:
            failed += 1
            told = f"FAILED\n{traceback.format_exc(limit=-3)}"
        else:
            told = f"{STEPS} steps of a graph as eager's, captures: {captures}"
        took = time.perf_counter() - began
        print(f"{case.name:<16} {engine:<12} {took:5.1f} s  {told}", flush=True)
    rows = len(CASES) * len(engines)
    print(f"{rows - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
