"""In float16 every rule states the dtypes that it computes, and stays near its float32 result."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.autodiff import differentiate
from ortrain.program import target_of
from tests.autodiff.test_rules import KNOWN
from tests.cases import ALL
from tests.programs import run

CASES = [case for case in ALL if case.id not in KNOWN]


def gradients(case, dtype):
    program, feeds = case.build(np.dtype(dtype), case.tried_opsets()[0])
    outputs = [v.name for v in program.graph.outputs]
    values = run(program, feeds)
    chosen = None if case.seeds is None else [outputs[i] for i in case.seeds]
    training = differentiate(program, case.differentiable(feeds), chosen)
    rng = np.random.default_rng(1)
    for seed in training.graph.inputs[len(program.graph.inputs) :]:
        draw = rng.standard_normal(values[target_of(seed)].shape)
        feeds[seed.name] = draw.astype(seed.dtype.numpy())
    results = run(training, feeds)  # checks every dtype on the way
    made = training.graph.outputs[len(outputs) :]
    return {target_of(v): (feeds[target_of(v)].dtype, results[v.name]) for v in made}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_in_float16_have_its_dtype_and_about_the_right_value(case):
    half, single = gradients(case, np.float16), gradients(case, np.float32)
    assert list(half) == list(single)
    for name, (dtype, gradient) in half.items():
        wanted = single[name][1]
        assert gradient.dtype == dtype
        difference = np.abs(gradient.astype(np.float64) - wanted)
        assert difference.max(initial=0) <= 0.02 * np.abs(wanted).max(initial=0), name
