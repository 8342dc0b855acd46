"""What a call that stays PyTorch's costs within a graph, and a BERT with one in each layer.

    python benchmarks/kept.py [--parts overhead bert divided] [--rounds N]

Overhead is of a row of small layers with a custom function behind each, beyond the same layers
without one and beyond the function's own time in eager PyTorch; the least of all rounds, as the
machine may do other things as well. The BERT's steps alternate by rounds, on texts without padding.
Of tokens that nobody reads (all but the first, in the last layer) a graph leaves none out in front
of a call that it does not know; the function here is one that it knows to treat each token alone.
"whole" is ours with ``skip_padding=False``, which leaves none out. "divided" is the same BERT with
a hook on its encoder, which runs in PyTorch then: its layers are graphs of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measurement import Results, Row, alternate, arguments, compared, one_of, table
from torch import nn
from workloads import bert, loss_of

from ortrain import Options, ORTModule

LAYERS, WIDTH, BATCH = 20, 64, 8
BERTS: dict[str, dict[str, Any]] = {
    "eager": {"engine": "torch"},
    "aten": {"engine": "aten"},
    "aten whole": {"engine": "aten", "skip_padding": False},
}
PARTS = ("overhead", "bert", "divided")


class Halved(torch.autograd.Function):
    """The identity, with half of the gradient: its backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


class Halving(nn.Module):
    """Calls the function behind a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Halved.apply(self.inner(x))
        return result


def row(functions: bool) -> nn.Module:
    """Linear layers, with a function behind each or without."""
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*[Halving(layer) if functions else layer for layer in layers])


def overhead(engine: str, rounds: int) -> Row:
    """Microseconds of a kept call beyond the function's own, forward and backward."""
    x = torch.randn(BATCH, WIDTH)
    calls: dict[str, Callable[[], Any]] = {}
    runs: Any
    for name, runs in (("eager", "torch"), ("graph", engine)):
        for functions in (False, True):
            model = ORTModule(row(functions), options=Options(engine=runs, fallback="raise"))

            def forward(model: ORTModule = model) -> torch.Tensor:
                result: torch.Tensor = model(x).sum()
                return result

            def step(forward: Callable[[], torch.Tensor] = forward) -> None:
                forward().backward()

            calls[f"{name} {functions} forward"], calls[f"{name} {functions} step"] = forward, step
    least = {key: min(values) * 1e3 for key, values in alternate(calls, rounds, 10).items()}
    found: Row = {}
    for name in ("eager", "graph"):
        both = {
            kind: (least[f"{name} True {kind}"] - least[f"{name} False {kind}"]) / LAYERS
            for kind in ("forward", "step")
        }
        found[name] = {"forward_us": both["forward"], "backward_us": both["step"] - both["forward"]}
    found["overhead"] = {
        key: found["graph"][key] - found["eager"][key] for key in ("forward_us", "backward_us")
    }
    return found


def berts(rounds: int) -> dict[str, Row]:
    """Steps of a BERT, of ours and of eager PyTorch, with a function in each layer and without."""
    steps: dict[str, Callable[[], Any]] = {}
    for functions in (False, True):
        for name, settings in BERTS.items():
            module: Any
            module, (batch, *_) = bert(padded=False)
            layers = module.bert.encoder.layer
            for layer in layers if functions else ():
                layer.output.dropout = Halving(layer.output.dropout)
            model = ORTModule(module, options=Options(fallback="raise", **settings))

            def step(model: ORTModule = model, batch: Any = batch) -> None:
                model.zero_grad()
                loss_of(model(**batch)).backward()

            steps[f"{name}{' with functions' if functions else ''}"] = step
    times = alternate(steps, rounds, 2)
    rows = compared(times, "eager")
    for name in BERTS:
        both = f"{name} with functions"
        rows[both]["speed_kept"] = 1 / compared(times, name)[both]["ratio"]
    return rows


def divided(rounds: int) -> dict[str, Row]:
    """Steps of a BERT in eager PyTorch, as one graph, and as a graph for each of its parts."""
    steps: dict[str, Callable[[], Any]] = {}
    for name in ("eager", "aten", "onnxruntime", "aten parts", "onnxruntime parts"):
        module: Any
        module, (batch, *_) = bert(padded=False)
        engine, _, parts = name.partition(" ")
        if parts:
            module.bert.encoder.register_forward_hook(lambda *_: None)
        settings: Any = {"engine": "torch" if name == "eager" else engine}
        model = ORTModule(module, options=Options(**settings))

        def step(model: ORTModule = model, batch: Any = batch) -> None:
            model.zero_grad()
            loss_of(model(**batch)).backward()

        steps[name] = step
    return compared(alternate(steps, rounds, 2), "eager")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", default=[*PARTS], type=one_of(PARTS))
    options = parser.parse_args()
    results = Results("kept", options.json)
    if "overhead" in options.parts:
        found = {e: overhead(e, 20 * options.rounds) for e in ("aten", "onnxruntime")}
        results.save(overhead=found)
        for engine, rows in found.items():
            told = ", ".join(
                f"{key.removesuffix('_us')} {value:.0f} µs"
                for key, value in rows["overhead"].items()
            )
            print(f"{engine}: a kept call takes, beyond its own time, {told}", flush=True)
    if "bert" in options.parts:
        rows = berts(options.rounds)
        results.save(bert=rows)
        print(table("4 layers of BERT-base, 8 x 128", rows))
        for name in BERTS:
            kept = rows[f"{name} with functions"]["speed_kept"]
            print(f"{name} keeps {kept:.3f} of its speed with functions")
    if "divided" in options.parts:
        rows = divided(options.rounds)
        results.save(divided=rows)
        print(table("4 layers of BERT-base, 8 x 128, whole and in parts", rows))


if __name__ == "__main__":
    main()
