"""``explain``: what a module becomes, what it costs, and how closely it agrees with eager."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ortrain.capture.structure import OutputStructure
from ortrain.config import Options
from ortrain.errors import OrtrainError, listing
from ortrain.module import ORTModule, unwrap
from ortrain.passes.without_dropout import without_dropout

# Agreement that float32 kernels of two libraries reach; what is above is marked.
TOLERANCE = 1e-4


@dataclass
class Explanation:
    """A report on one module and one batch.

    Attributes:
        name: class of the module.
        reason: why it does not run as a graph; empty where it does.
        stages: seconds of each stage.
        programs: name → (nodes before lowering, nodes after it, operators after it).
        saved_bytes: kept between forward and backward.
        where: what runs where, a sentence each.
        parity: output or parameter → largest difference from eager, relative to the largest value;
            with dropout off on both sides.
    """

    name: str
    reason: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    programs: dict[str, tuple[int, int, Counter[str]]] = field(default_factory=dict)
    saved_bytes: int = 0
    where: list[str] = field(default_factory=list)
    parity: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [f"{self.name}", ""]
        rows += ["what runs where", *(f"  {line}" for line in self.where), ""]
        if self.stages:
            rows.append("seconds by stage")
            rows += [f"  {stage:<16}{seconds:8.3f}" for stage, seconds in self.stages.items()]
            rows.append(f"  {'in all':<16}{sum(self.stages.values()):8.3f}")
            rows.append("")
        for title, (before, after, operators) in self.programs.items():
            common = ", ".join(f"{name} {count}" for name, count in operators.most_common(8))
            rows.append(f"{title}: {before} nodes, {after} after lowering ({common})")
        if self.saved_bytes:
            rows.append(f"saved for the backward: {self.saved_bytes / 2**20:.1f} MiB")
        if self.parity:
            rows += ["", "difference from eager, relative to the largest value (dropout off)"]
            worst = sorted(self.parity.items(), key=lambda item: -item[1])
            for name, error in worst[:8]:
                mark = "  <-- above 1e-4" if error > TOLERANCE else ""
                rows.append(f"  {name:<48}{error:10.1e}{mark}")
            if len(worst) > 8:
                rows.append(f"  and {len(worst) - 8} more, all below")
        return "\n".join(rows)


def explain(
    model: nn.Module, *args: Any, options: Options | None = None, **kwargs: Any
) -> Explanation:
    """Captures and differentiates a module for these inputs, and compares it with eager.

    The module is left as it is: gradients, buffers and the random state are untouched.

    Args:
        model: a module, or an ORTModule around one.
        args: positional arguments of one call.
        options: as for ORTModule; the engine is onnxruntime in any case.
        kwargs: keyword arguments of one call.

    Returns:
        The explanation; ``print`` it.
    """
    module = unwrap(model)
    chosen = replace(options or Options(), engine="onnxruntime", fallback="raise")
    result = Explanation(type(module).__name__)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            wrapped = ORTModule(copy.deepcopy(module), options=chosen)
            _step(wrapped, args, kwargs)
        except OrtrainError as error:
            result.reason = str(error)
            result.where = [f"everything in PyTorch: {error}"]
            return result
        report, plan = wrapped.report, wrapped._runner.captures.plan
        assert plan is not None, "without a fallback there is a plan or an error"
        result.stages = dict(report.stages)
        result.saved_bytes = report.saved_bytes
        names = ["forward", *(f"backward {i + 1}" for i in range(len(plan.pieces)))]
        result.programs = {
            name: (len(before.graph), len(after.graph), after.operators())
            for name, before, after in zip(names, plan.programs, plan.lowered, strict=True)
        }
        result.where = [f"forward and backward in {report.engine}", "optimizer in PyTorch"]
        unused = sorted(
            name
            for name, p in module.named_parameters()
            if p.requires_grad and name not in plan.wrt
        )
        if unused:
            result.where.append(f"no gradient for {len(unused)} parameters: {listing(unused)}")
        result.parity = _parity(module, args, kwargs, chosen)
    return result


class _NoDropout(TorchFunctionMode):
    """Dropout that does nothing, in eager."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("dropout", "dropout_", "alpha_dropout", "feature_dropout"):
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return function(*args, **kwargs)


def _step(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs and gradients of one forward and backward, on inputs of its own."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _own, (args, kwargs))
    output = module(*args, **kwargs)
    tensors, _ = OutputStructure.from_output(output)
    roots = [t for t in tensors if t.requires_grad]
    scalars = [t for t in roots if t.dim() == 0]
    if roots:
        root = scalars[0] if scalars else sum(t.float().pow(2).mean() for t in roots)
        assert isinstance(root, torch.Tensor)
        root.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return tensors, gradients


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _parity(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> dict[str, float]:
    """Differences from eager of copies of the module, dropout off in both."""
    eager = copy.deepcopy(module)
    graph = ORTModule(copy.deepcopy(module), options=options)
    graph._runner.captures.rewrites = (without_dropout,)
    eager.zero_grad()
    graph.zero_grad()
    with _NoDropout():
        outputs, gradients = _step(eager, args, kwargs)
    mine, my_gradients = _step(graph, args, kwargs)
    result = {
        f"output {i}": _difference(a, b)
        for i, (a, b) in enumerate(zip(outputs, mine, strict=True))
        if a.is_floating_point()
    }
    # A gradient that is zero but for roundings, such as that of a key's bias, has no digits of its
    # own to compare.
    floor = 1e-3 * max((_largest(g) for g in gradients.values()), default=0.0)
    for name, gradient in gradients.items():
        other = my_gradients.get(name)
        result[name] = float("inf") if other is None else _difference(gradient, other, floor)
    return result


def _difference(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference, relative to the largest value of ``a`` or to ``floor``."""
    difference = _largest(a.detach().double() - b.detach().double())
    return difference / (max(_largest(a), floor) or 1.0)


def _largest(a: torch.Tensor) -> float:
    return float(a.detach().abs().max()) if a.numel() else 0.0
