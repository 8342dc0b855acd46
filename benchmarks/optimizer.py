"""One optimizer step on the 109 M parameters of BERT-base, alternating in one process.

    python benchmarks/optimizer.py [--device cpu|cuda] [--rounds N] [--layers N] [--json FILE]

Contestants: FusedAdam in each mode, torch.optim.AdamW with each of its implementations, Lamb, and
gradient clipping with and without a step, ours and torch's, of gradients that are too long and of
such that are short enough. On CUDA, a step ends when the device has done it; ``host_ms`` is until
the call returns.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measurement import Results, Row, alternate, arguments, compared, table, waited
from torch import nn

from ortrain.optim import AdamWMode, FusedAdam, Lamb, clip_grad_norm_

BASE = "AdamW(fused=True)"


def bert(layers: int, device: str) -> list[nn.Parameter]:
    """The parameters of the first layers of BERT-base, with gradients."""
    shapes = [
        (30522, 768),
        (512, 768),
        (2, 768),
        (768,),
        (768,),
        (768, 768),
        (768,),
        (2, 768),
        (2,),
    ]
    layer = [(768, 768), (768,)] * 4 + [(768,)] * 4 + [(3072, 768), (3072,), (768, 3072), (768,)]
    torch.manual_seed(0)
    values = [0.02 * torch.randn(shape) for shape in shapes + layers * layer]
    parameters = [nn.Parameter(value.to(device)) for value in values]
    for parameter in parameters:
        parameter.grad = (1e-3 * torch.randn(parameter.shape)).to(device)
    return parameters


def contestants(parameters: list[nn.Parameter]) -> dict[str, dict[str, Callable[[], Any]]]:
    """Functions that do one step, by table and name; all work on the same parameters.

    On the CPU on the same moments, too: those of their own would be 3 GB for four layers of it. On
    CUDA, where steps lie is part of what is timed, and the mode says where.
    """
    on_cpu = parameters[0].is_cpu
    options: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
    optimizers: dict[str, Any] = {BASE: torch.optim.AdamW(parameters, fused=True, **options)}
    for mode in AdamWMode:
        optimizers[f"FusedAdam {mode.name}"] = FusedAdam(parameters, adam_w_mode=mode, **options)
    optimizers["AdamW(foreach=True)"] = torch.optim.AdamW(parameters, foreach=True, **options)
    optimizers["AdamW(), the default"] = torch.optim.AdamW(parameters, **options)
    if not on_cpu:  # there the default is foreach
        optimizers["AdamW(foreach=False)"] = torch.optim.AdamW(parameters, foreach=False, **options)
    optimizers["Lamb"] = Lamb(parameters, max_norm_clip=None, **options)
    if on_cpu:
        for optimizer in optimizers.values():
            optimizer.state = optimizers[BASE].state
    tables = {"optimizer step": {name: each.step for name, each in optimizers.items()}}

    ours, torchs = clip_grad_norm_, torch.nn.utils.clip_grad_norm_
    fused, one = optimizers[BASE], optimizers["FusedAdam ADAMW_TORCH"]
    for title, bound in (("too long", shrinking), ("short enough", lambda: 1e9)):
        tables[f"clipping, gradients {title}"] = {
            "torch.nn.utils": partial(clip, torchs, parameters, bound),
            "ortrain": partial(clip, ours, parameters, bound),
        }
        tables[f"clipping and step, gradients {title}"] = {
            "torch.nn.utils, AdamW(fused=True)": partial(clip, torchs, parameters, bound, fused),
            "ortrain, AdamW(fused=True)": partial(clip, ours, parameters, bound, fused),
            "FusedAdam.clip_and_step": lambda bound=bound: one.clip_and_step(bound()),
            f"{BASE} without clipping": fused.step,
        }
    return tables


def clip(
    function: Callable[..., Any],
    parameters: list[nn.Parameter],
    bound: Callable[[], float],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Clips, and takes a step where there is an optimizer."""
    function(parameters, bound())
    if optimizer is not None:
        optimizer.step()


CALLS = itertools.count()


def shrinking() -> float:
    """A bound below the one before, so that gradients clipped to that are too long again."""
    return 0.1 * 0.99 ** next(CALLS)


def measure(functions: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, Row]:
    """Medians and spreads in milliseconds; the first is what the others are compared with."""
    host: dict[str, list[float]] = {name: [] for name in functions}
    if device != "cpu":
        functions = {name: waited(function, host[name]) for name, function in functions.items()}
    # The first call, which makes moments, is left out.
    rows = compared(alternate(functions, rounds))
    for name, values in host.items():
        if values:
            rows[name]["host_ms"] = statistics.median(values[1:])
    return rows


def until_return(row: Row) -> str:
    return f"{row['host_ms']:>8.2f}ms until it returns" if "host_ms" in row else ""


def main() -> None:
    parser = arguments(__doc__, rounds=31)
    parser.add_argument("--layers", type=int, default=12, help="of BERT-base")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    results = Results("optimizer", options.json, options.device)
    parameters = bert(options.layers, options.device)
    elements = sum(parameter.numel() for parameter in parameters)
    print(f"{len(parameters)} parameters of {elements / 1e6:.1f} M elements")
    for title, functions in contestants(parameters).items():
        rows = measure(functions, options.rounds, options.device)
        results.save(parameters=elements, tables={title: rows})
        print(table(title, rows, until_return), flush=True)


if __name__ == "__main__":
    main()
