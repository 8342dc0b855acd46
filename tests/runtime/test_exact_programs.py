"""Random programs of exact numbers on every engine: all dtypes, sizes 0 and 1, any strides."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ortrain.errors import ExecutionError
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten.executor import as_array, constant
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.breadth import sampled
from tests.programs import run
from tests.runtime.exact_programs import DTYPES, exact_program
from tests.runtime.layouts import LAYOUTS, repeated

# What onnxruntime has most kernels for.
SERVED = ("float32", "float64", "int32", "int64")
EACH = 8  # programs of a case
NAMES = [f"{dtype} {part}" for dtype in DTYPES for part in range(30)]
SAMPLE = [f"{dtype} 0" for dtype in SERVED]


def programs(case):
    dtype, part = case.split()
    for seed in range(int(part) * EACH, (int(part) + 1) * EACH):
        yield f"{dtype} {seed}", *exact_program(dtype, seed)


def same(found, wanted):
    numbers = (found.astype(np.float64), wanted.astype(np.float64))
    return found.dtype == wanted.dtype and found.shape == wanted.shape and np.array_equal(*numbers)


def laid(tensors, draw):
    """The tensors in other layouts; some of one memory, some of one number along an axis."""
    given = [draw.choice([*LAYOUTS.values(), repeated(draw.choice([0, -1]))])(t) for t in tensors]
    if len(given) > 1 and draw.random() < 0.5:  # two views of one memory, which overlap
        i, j = draw.sample(range(len(given)), 2)
        one, other = given[i], given[j]
        memory = torch.cat([one.reshape(-1), other.reshape(-1)])
        begin = max(memory.numel() - other.numel() - 1, 0)
        given[i] = memory[: one.numel()].view(one.shape)
        given[j] = memory[begin : begin + other.numel()].view(other.shape)
    return given


@pytest.mark.parametrize("case", sampled(NAMES, [f"{dtype} 0" for dtype in DTYPES]))
def test_pytorchs_operators_compute_it_of_tensors_as_they_lie(case):
    executor = AtenExecutor()
    for name, subject, feeds in programs(case):
        compiled = executor.compile(executor.lower(subject))
        inputs = subject.graph.inputs
        held = [constant(feeds[value.name], value.dtype) for value in inputs]
        for given in (held, laid(held, random.Random(name))):
            before = [tensor.clone() for tensor in given]
            fed = {v.name: as_array(t, v.dtype) for v, t in zip(inputs, before, strict=True)}
            wanted = run(subject, fed)
            results = compiled.run_values(list(given))
            for value, result in zip(subject.graph.outputs, results, strict=True):
                message = f"{name}: {value.name}\n{compiled.source}"
                assert same(as_array(result, value.dtype), wanted[value.name]), message
            assert all(map(torch.equal, given, before)), f"{name} writes into what it is given"
            memory = [t.untyped_storage().data_ptr() for t in results if t.numel()]
            memory += {t.untyped_storage().data_ptr() for t in given if t.numel()}
            assert len(set(memory)) == len(memory), f"{name} gives memory away twice"


@pytest.mark.parametrize("case", sampled([c for c in NAMES if c.split()[0] in SERVED], SAMPLE))
def test_onnxruntime_computes_it_or_refuses_it_at_once(case):
    executor = OnnxRuntimeExecutor("CPUExecutionProvider", 1)
    ran = 0
    for name, subject, feeds in programs(case):
        inputs = zip(subject.graph.inputs, feeds.values(), strict=True)
        if any(not array.size and value.shape != array.shape for value, array in inputs):
            continue  # a symbol stands for some elements
        try:
            compiled = executor.compile(executor.lower(subject))
        except ExecutionError:
            continue
        results = compiled.run([feeds[each] for each in compiled.input_names])
        wanted = run(subject, feeds)
        for output, result in zip(compiled.output_names, results, strict=True):
            assert same(result, wanted[output]), f"{name}: {output}"
        ran += 1
    assert ran
