"""Of attention over long sequences the backward keeps no weights, however it is spelled."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax

from ortrain.autodiff import differentiate
from ortrain.autodiff.partition import partition
from ortrain.frontend.export import export
from ortrain.passes import rewrite
from ortrain.program import Role, region_of, target_of
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor

HEADS, WIDTH = 2, 4
SHORT, LONG = 8, 40


def library(q, k, v, mask, rate):
    return (scaled_dot_product_attention(q, k, v, mask, dropout_p=rate),)


def causal(q, k, v, mask, rate):
    return (scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True),)


def spelled(q, k, v, mask, rate):
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    weights = softmax(scores if mask is None else scores + mask, -1, dtype=torch.float32)
    return (dropout(weights.to(q.dtype), rate) @ v,)


def filled(q, k, v, mask, rate):
    scores = (q * WIDTH**-0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(mask < 0, -1e4)
    return (dropout(scores.softmax(-1), rate) @ v,)


def shown(q, k, v, mask, rate):
    weights = softmax(q @ k.transpose(-1, -2), -1)
    return weights @ v, weights


class Attends(nn.Module):
    """Two layers of attention of one form."""

    def __init__(self, form, rate):
        super().__init__()
        torch.manual_seed(0)
        size = HEADS * WIDTH
        self.into = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(2))
        self.form, self.rate = form, rate

    def forward(self, x, mask=None):
        seen = []
        for into in self.into:
            heads = into(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
            y, *weights = self.form(*heads, mask, self.rate)
            seen += weights
            x = x + y.transpose(1, 2).flatten(2)
        return (x.square().mean(), *seen)


def call(length, masked):
    x = torch.randn(2, length, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
    if not masked:
        return (x,)
    mask = torch.zeros(2, 1, 1, length)
    mask[1, ..., length // 2 :] = -1e4
    return x, mask


def pieces(program, executor, sizes):
    names = [value.name for value in program.inputs(Role.PARAMETER)]
    whole = differentiate(program, names, [program.graph.outputs[0].name], keep=executor.keeps,
                          sizes=sizes)  # fmt: skip
    return partition(rewrite(whole, "training"), 1, executor.cheap)


def sizes_of(program, args):
    users = program.inputs(Role.USER_INPUT)
    pairs = [
        p for v, t in zip(users, args, strict=True) for p in zip(v.shape, t.shape, strict=True)
    ]
    return {str(dim): size for dim, size in pairs if not isinstance(dim, int)}


def trained(parts, executor, feeds):
    """The gradients, and how many elements the largest tensor has that the forward keeps."""
    known, kept = dict(feeds), 0
    for part in parts:
        for value in part.inputs(Role.OUTPUT_GRADIENT):
            known[value.name] = np.ones_like(known[target_of(value)])
        compiled = executor.compile(executor.lower(part))
        made = compiled.run([known[name] for name in compiled.input_names])
        known |= dict(zip(compiled.output_names, made, strict=True))
        if part is parts[0]:
            kept = max(known[value.name].size for value in part.outputs(Role.SAVED))
    return {name: array for name, array in known.items() if name.endswith(".gradient")}, kept


FORMS = [
    (form, masked, rate)
    for form, masked, rate in product((library, causal, spelled, filled), (False, True), (0.0, 0.3))
    if not (form is causal and masked)
]


@pytest.mark.parametrize("executor", [AtenExecutor(), OnnxRuntimeExecutor(threads=1)], ids=str)
@pytest.mark.parametrize(
    ("form", "masked", "rate"), FORMS, ids=[f"{f.__name__}-{m}-{r}" for f, m, r in FORMS]
)
def test_no_weights_are_kept_and_the_gradients_are_the_same(form, masked, rate, executor):
    args = call(LONG, masked)
    module = Attends(form, rate)
    program = rewrite(export(module, args).program, "forward")
    sizes = sizes_of(program, args)
    state = {name: p.detach().numpy() for name, p in module.named_parameters()}
    users = zip(program.inputs(Role.USER_INPUT), args, strict=True)
    feeds = {**state, **{v.name: t.numpy() for v, t in users}, "seed": np.array(3, np.int64)}
    plain, found = (pieces(program, executor, known) for known in ({}, sizes))
    expected, before = trained(plain, executor, feeds)
    given, kept = trained(found, executor, feeds)
    weights = 2 * HEADS * LONG * LONG
    assert kept < weights
    assert before >= weights or "FlashAttention" in str(plain[0].operators())
    assert given.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(given[name], wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.usefixtures("one_piece")
@pytest.mark.parametrize("form", [library, spelled])
def test_of_a_short_sequence_they_are(form):
    args = call(SHORT, True)
    program = rewrite(export(Attends(form, 0.3), args).program, "forward")
    parts = pieces(program, OnnxRuntimeExecutor(threads=1), sizes_of(program, args))
    assert not any(region_of(node) for part in parts for node in part.graph)


def test_weights_that_the_user_gets_are_not_computed_again():
    args = call(LONG, False)
    module = Attends(shown, 0.0)
    program = rewrite(export(module, args).program, "forward")
    sizes = sizes_of(program, args)
    parts = pieces(program, OnnxRuntimeExecutor(threads=1), sizes)
    backward = [node.op_type for node in parts[1].graph] if len(parts) > 1 else []
    assert "Softmax" not in backward
