"""Dropout's masks are the same bits on every engine, forward and backward, whatever the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ortrain.autodiff import differentiate
from ortrain.frontend.export import export
from ortrain.graph.build import Builder
from ortrain.ops import DOMAIN, expand
from ortrain.ops.base import attributes_of
from ortrain.passes import rewrite
from ortrain.program import Program, Role, phase_of, set_role
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.breadth import sampled
from tests.models import MODELS

DRAWING = [name for name in MODELS if name != "resnet"]  # which has no dropout
SIZES = ((3, 7, 0), (2, 5, 2**40 + 1), (4, 2, -3))


def with_masks(program: Program) -> Program:
    """A training program that gives out what each of its dropouts makes of ones, by stream."""
    wrt = [value.name for value in program.inputs(Role.PARAMETER)]
    loss = program.outputs(Role.USER_OUTPUT, Role.LOSS)[0]
    whole = rewrite(differentiate(program, wrt, [loss.name]), "training")
    expand(whole.graph, opset=whole.opset, only=lambda node: node.op_type != "Dropout")
    drawn = [n for n in whole.graph if n.op_type == "Dropout" and n.domain == DOMAIN]
    for number, node in enumerate(drawn):
        x, seed, *index = node.inputs
        assert x is not None
        assert x.dtype is not None
        with Builder.before(node, opset=whole.opset) as op:
            ones = op.Expand(op.constant(1.0, x.dtype), op.Shape(x))
            ones.shape = x.shape
            kept = op.node("Dropout", (ones, seed, *index), domain=DOMAIN, **attributes_of(node))
        kept.name = f"{phase_of(node)} {number} {attributes_of(node)['stream']}"
        kept.shape, kept.dtype = x.shape, x.dtype
        whole.graph.outputs.append(set_role(kept, Role.USER_OUTPUT))
    return whole


def run(
    executor: Any, program: Program, feeds: list[dict[str, Any]]
) -> list[dict[str, np.ndarray]]:
    """The outputs of each call by name."""
    compiled = executor.compile(executor.lower(program))
    results = []
    for given in feeds:
        values = compiled.run([given[name] for name in compiled.input_names])
        names = [v.name or "" for v in program.graph.outputs]
        results.append(dict(zip(names, values, strict=True)))
    return results


@pytest.mark.parametrize("name", sampled(DRAWING, ["mlp", "recurrent"]))
def test_masks_are_the_same_bits_on_both_engines_and_in_both_directions(name: str) -> None:
    case = MODELS[name]
    module = case.build(dropout=0.3)
    program = with_masks(rewrite(export(module, (), case.batch()).program, "forward"))
    state = dict(module.named_parameters(remove_duplicate=False))
    state |= dict(module.named_buffers(remove_duplicate=False))
    gradients = {v.name: np.ones((), np.float32) for v in program.inputs(Role.OUTPUT_GRADIENT)}
    feeds = []
    for rows, length, seed in SIZES:
        given = {**state, **case.batch(rows, length), "seed": torch.tensor(seed)}
        feeds.append({k: v.detach().numpy() for k, v in given.items()} | gradients)
    masks = [v.name or "" for v in program.graph.outputs if (v.name or "").count(" ") == 2]
    streams = {name.split()[-1] for name in masks}
    assert len(masks) > len(streams)  # the backward draws them again
    ours, theirs = (
        run(e, program, feeds) for e in (AtenExecutor(), OnnxRuntimeExecutor(threads=1))
    )
    for mine, its in zip(ours, theirs, strict=True):
        known: dict[str, np.ndarray] = {}
        for mask in masks:
            np.testing.assert_array_equal(mine[mask], its[mask], err_msg=mask)
            kept = mine[mask] != 0
            stream = mask.split()[-1]
            np.testing.assert_array_equal(kept, known.setdefault(stream, kept), err_msg=mask)
        assert any(0 < kept.mean() < 1 for kept in known.values())
