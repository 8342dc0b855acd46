"""One of several processes of trainings on DeepSpeed ZeRO; see `tests.processes`.

The settings are a list of trainings, each run twice: with the library's own methods, and with those
that `FP16_Optimizer` puts in their place.

- ``config``: of DeepSpeed;
- ``optimizer``: "FusedAdam" or "AdamW";
- ``overflow``: the step in which the last process has an infinite gradient, or None;
- ``graph``: whether the second time the model is in an ORTModule as well.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from tests import on_deepspeed
from tests.processes import Place, join, leave

STEPS = 6


def network() -> nn.Module:
    """Parameters of sizes that partitions cut, and that alignment pads."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def client(name: str, model: nn.Module) -> torch.optim.Optimizer:
    from ortrain.optim import FusedAdam

    kind = {"FusedAdam": FusedAdam, "AdamW": torch.optim.AdamW}[name]
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.01)
    return optimizer


class Counter:
    """Counts the calls of an object's own methods."""

    def __init__(self, target: Any) -> None:
        self.calls = {name: 0 for name, value in vars(target).items() if name in METHODS}
        for name in self.calls:
            setattr(target, name, self._counted(name, getattr(target, name)))

    def _counted(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return method(*args, **kwargs)

        return call


METHODS = ("has_overflow_serial", "has_overflow_partitioned_grads_serial", "get_grad_norm_direct")


def train(place: Place, run: dict[str, Any], replaces: bool) -> dict[str, Any]:
    """Figures and weights, on each of the processes."""
    import deepspeed

    from ortrain import Options, ORTModule, OrtrainWarning
    from ortrain.optim import FP16_Optimizer

    model = network()
    if run["graph"] and replaces:
        narrow = {"bf16", "torch_autocast"} & run["config"].keys()
        kind: Any = "aten" if narrow else "onnxruntime"
        model = ORTModule(model, options=Options(engine=kind, fallback="raise"))
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=client(run["optimizer"], model),
        config=run["config"],
        dist_init_required=False,
    )
    warned: list[str] = []
    if replaces:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OrtrainWarning)
            assert FP16_Optimizer(optimizer) is optimizer
        warned = [str(each.message) for each in caught]
    counter = Counter(optimizer)
    at = {"step": -1}

    def overflows(gradient: torch.Tensor) -> torch.Tensor:
        last = place.rank == place.world - 1
        return (
            torch.full_like(gradient, torch.inf)
            if last and at["step"] == run["overflow"]
            else gradient
        )

    # Of the last parameter, and so of the last partition alone.
    model[-1].bias.register_hook(overflows)
    losses, norms, skipped = [], [], []
    dtype = next(model.parameters()).dtype
    for step in range(STEPS * engine.gradient_accumulation_steps()):
        at["step"] = step
        loss = engine(batch(step, place.rank).to(dtype)).float().square().mean()
        engine.backward(loss)
        ends = engine.is_gradient_accumulation_boundary()
        engine.step()
        losses.append(loss.item())
        if ends:
            norms.append(float(engine.get_global_grad_norm() or 0.0))
            skipped.append(bool(getattr(optimizer, "overflow", False)))
    masters = getattr(optimizer, "single_partition_of_fp32_groups", [])
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    return {
        "class": type(optimizer).__name__,
        "losses": losses,
        "norms": norms,
        "skipped": skipped,
        "weights": {n: v.detach().float().clone() for n, v in model.state_dict().items()},
        "masters": [part.detach().clone() for part in masters],
        "calls": counter.calls,
        "warned": warned,
        "scale": None if scaler is None else scaler.get_scale(),
        "graph_calls": model.report.graph_calls if isinstance(model, ORTModule) else 0,
    }


def main() -> None:
    on_deepspeed.prepare()
    place = join(alone=True)
    results = []
    for run in place.settings:
        found = [train(place, run, replaces) for replaces in (False, True)]
        everywhere: list[Any] = [None] * place.world
        torch.distributed.all_gather_object(everywhere, found)
        results.append(everywhere)
    leave(place, results)


if __name__ == "__main__":
    main()
