"""Whole seconds of runs in which each call finds something new: a size, an attribute, a hook.

    python benchmarks/hostile.py [nothing size attribute ...] [--contestants eager aten auto]

A step of a small transformer takes some 20 ms. Each run is a process of its own. Nobody tells how
many steps are to come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from measurement import ProcessFailed, Results, Row, arguments, in_a_process, one_of
from torch import nn

STEPS = 100
NAMES = ("eager", "aten", "auto")


class Model(nn.Module):
    """Two layers of a transformer, and what is there to be changed."""

    shift: torch.Tensor
    head: nn.Module

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(128, 2)
        self.scale, self.notes = 1.0, dict[str, float]()
        self.register_buffer("shift", torch.zeros(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x + self.shift) * self.scale
        return self.finish(self.head(x.mean(1)))

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return x.square().mean()


class Adapter(nn.Module):
    """A low-rank update beside a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def attribute(model: Model, step: int) -> None:
    model.scale = 1.0 + step / 1000


def note(model: Model, step: int) -> None:
    model.notes[f"at {step}"] = float(step)


def new_attribute(model: Model, step: int) -> None:
    setattr(model, f"mark_{step}", step)


def method(model: Model, step: int) -> None:
    def finish(self: Model, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean() * (1 + step % 7)

    model.finish = MethodType(finish, model)  # type: ignore[method-assign]


def hook(model: Model, step: int) -> None:
    handle = model.head.register_forward_hook(lambda *_: None)
    if step % 2:
        handle.remove()


def buffer(model: Model, step: int) -> None:
    model.shift = torch.full((128,), step / 1000)


def new_buffer(model: Model, step: int) -> None:
    model.register_buffer(f"table_{step}", torch.zeros(2))


def adapter(model: Model, step: int) -> None:
    base: Any = model.head.base if isinstance(model.head, Adapter) else model.head
    model.head = Adapter(base)


def mode(model: Model, step: int) -> None:
    model.layers.layers[step % 2].train(step % 3 == 0)


def frozen(model: Model, step: int) -> None:
    for place, parameter in enumerate(model.layers.parameters()):
        parameter.requires_grad_((place + step) % 5 > 0)


CHANGES: dict[str, Callable[[Model, int], None] | None] = {
    "nothing": None,
    "size": None,
    "attribute": attribute,
    "note": note,
    "new-attribute": new_attribute,
    "method": method,
    "hook": hook,
    "buffer": buffer,
    "new-buffer": new_buffer,
    "adapter": adapter,
    "mode": mode,
    "frozen": frozen,
}


def child(kind: str, name: str) -> Row:
    """One run, in this process."""
    torch.manual_seed(0)
    inner, change = Model(), CHANGES[kind]
    start = time.perf_counter()
    model: Any = inner
    if name != "eager":
        from ortrain import Options, ORTModule  # its time counts

        options: dict[str, Any] = {"engine": name}
        model = ORTModule(inner, options=Options(**options))
    loss = torch.zeros(())
    for step in range(STEPS):
        if change is not None:
            change(inner, step)
        x = torch.randn(8, 16 + step if kind == "size" else 48, 128)
        loss = model(x)
        loss.backward()
        with torch.no_grad():
            for parameter in inner.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-3)
                    parameter.grad = None
    seconds = time.perf_counter() - start
    found: Row = {"seconds": seconds, "loss": float(loss.detach())}
    if model is not inner:
        report = model.report
        found |= {
            "graph_calls": report.graph_calls,
            "captures": report.captures,
            "reason": report.reason.split("\n")[0],
        }
    return found


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("kinds", nargs="*", default=[*CHANGES], type=one_of(CHANGES))
    parser.add_argument("--contestants", nargs="+", default=[*NAMES], type=one_of(NAMES))
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    results = Results("hostile", options.json)
    for kind in options.kinds:
        rows: dict[str, Row] = {}
        for name in options.contestants:
            try:
                rows[name] = in_a_process(__file__, kind, name)
            except ProcessFailed as failure:
                rows[name] = {"skipped": str(failure)}
            print(f"{kind:<14}{name:<8}{told(rows[name], rows)}", flush=True)
        results.save(kinds={kind: rows})


def told(row: Row, rows: dict[str, Row]) -> str:
    """A run in words, compared with eager's."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    text = f"{row['seconds']:6.2f} s"
    if "graph_calls" in row:
        over = row["seconds"] / rows["eager"]["seconds"]
        text += f" ({over:.2f} of eager's), {row['graph_calls']} of {STEPS} as a graph, "
        text += f"{row['captures']} captures; {row['reason']}"
    return text


if __name__ == "__main__":
    main()
