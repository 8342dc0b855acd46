"""Runs an exported program on the stock onnxruntime, and compares it with the module."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.utils import _pytree as pytree

from ortrain.frontend.export import Exported
from ortrain.ops import expand
from ortrain.program import Program, Role, role_of, target_of

TOLERANCE = 1e-5


def call_of(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def run(
    exported: Exported,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int = 0,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The module's output as the program computes it, and its updated buffers by name."""
    program = exported.program.clone()
    expand(program.graph, opset=program.opset)
    known = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    known.update(zip(exported.tensors, _tensors(args, kwargs), strict=True))
    feed = {
        value.name: np.array(seed, np.int64)
        if role_of(value) is Role.SEED
        else known[value.name].detach().numpy()
        for value in program.graph.inputs
    }
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        program.serialize(), options, providers=["CPUExecutionProvider"]
    )
    results = session.run(None, feed)
    outputs = list(zip(program.graph.outputs, map(torch.from_numpy, results), strict=True))
    user = [t for v, t in outputs if role_of(v) is Role.USER_OUTPUT]
    buffers = {target_of(v): t for v, t in outputs if role_of(v) is Role.UPDATED_BUFFER}
    return exported.rebuild(user), buffers


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def check(
    exported: Exported,
    module: torch.nn.Module,
    *args: Any,
    tolerance: float = TOLERANCE,
    **kwargs: Any,
) -> None:
    """The program takes this call, and computes what a copy of the module does."""
    shapes = [tuple(tensor.shape) for tensor in _tensors(args, kwargs)]
    assert exported.accepts(shapes), shapes
    got, buffers = run(exported, module, args, kwargs)
    eager = copy.deepcopy(module)
    want = eager(*args, **kwargs)
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    assert got_spec == want_spec
    for mine, own in zip(got_leaves, want_leaves, strict=True):
        if isinstance(own, torch.Tensor):
            assert mine.dtype == own.dtype
            torch.testing.assert_close(mine, own.detach(), atol=tolerance, rtol=tolerance)
        else:
            assert mine == own
    changed = dict(eager.named_buffers())
    for name, tensor in buffers.items():
        torch.testing.assert_close(tensor, changed[name], atol=tolerance, rtol=tolerance)
    for name, before in module.named_buffers():
        if name not in buffers:
            assert torch.equal(before, changed[name]), f"{name} should have been updated"


def untyped(program: Program) -> list[str]:
    """Values of a program without a dtype or a rank."""
    return [
        str(value.name)
        for node in program.graph
        for value in node.outputs
        if value.dtype is None or value.shape is None
    ]
