"""A module as a graph beside the same module in PyTorch."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

TOLERANCES = {"aten": 1e-6, "onnxruntime": 1e-5, "auto": 1e-5}


class Twins:
    """Both, with the same parameters, buffers and attributes.

    Args:
        module: taken as it is for the graph, and copied for PyTorch.
        engine: that runs the graph.
        options: further ones.
    """

    def __init__(self, module: nn.Module, engine: str, **options: Any) -> None:
        self.eager, self.module = copy.deepcopy(module), module
        settings: dict[str, Any] = {"engine": engine, "fallback": "raise", **options}
        self.graph = ORTModule(module, options=Options(**settings))
        self.tolerance = TOLERANCES[engine]

    def step(self, *args: Tensor, grad: bool = True, precision: Any = None, seed: int = 3) -> None:
        """One call of each, and its gradients where there are any; compared."""
        found = []
        for model in (self.eager, self.graph):
            given = [a.detach().clone().requires_grad_(a.requires_grad and grad) for a in args]
            autocast: Any = contextlib.nullcontext()
            if precision is not None:
                autocast = torch.autocast("cpu", precision)
            torch.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
            with torch.set_grad_enabled(grad), autocast:
                output = model(*given)
            outputs = [output] if isinstance(output, Tensor) else [*output]
            if grad:
                roots = [o for o in outputs if o.requires_grad]
                torch.autograd.backward(roots, [torch.cos(r.detach()) for r in roots])
            rows = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
            rows |= {
                f"whether output {i} requires a gradient": torch.tensor(o.requires_grad)
                for i, o in enumerate(outputs)
            }
            rows |= {f"gradient of argument {i}": a.grad for i, a in enumerate(given)}
            inner = model if model is self.eager else self.module
            rows |= {f"gradient of {n}": p.grad for n, p in inner.named_parameters()}
            rows |= {f"buffer {n}": b.clone() for n, b in inner.named_buffers()}
            inner.zero_grad()
            rows |= {f"argument {i} afterwards": a.detach() for i, a in enumerate(given)}
            rows["numbers drawn next"] = torch.tensor([np.random.rand(), random.random()])  # noqa: NPY002
            found.append(rows)
        eager, graph = found
        assert eager.keys() == graph.keys()
        for name, wanted in eager.items():
            got = graph[name]
            assert (wanted is None) == (got is None), f"{name}: {wanted} and {got}"
            if wanted is not None:
                torch.testing.assert_close(
                    got,
                    wanted,
                    rtol=self.tolerance,
                    atol=self.tolerance,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
