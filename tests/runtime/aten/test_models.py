"""Whole models, forward and backward, on PyTorch's functions and on onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.autodiff import differentiate
from ortrain.autodiff.partition import partition
from ortrain.frontend.export import export
from ortrain.passes import rewrite
from ortrain.program import Role, role_of, target_of
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten.refusals import missing
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.breadth import sampled
from tests.models import MODELS

SAMPLE = ("cnn", "mlp", "recurrent")


def trained(executor, program, pieces):
    """The forward and the pieces of the backward, ready to run."""
    wrt = [value.name for value in program.inputs(Role.PARAMETER)]
    whole = rewrite(differentiate(program, wrt, keep=executor.keeps), "training")
    parts = partition(whole, pieces)
    return [(part, executor.compile(executor.lower(part))) for part in parts]


def results(parts, feeds):
    """What users and optimizers get of a step, by name."""
    known, found = dict(feeds), {}
    rng = np.random.default_rng(0)
    for part, compiled in parts:
        for value in part.inputs(Role.OUTPUT_GRADIENT):
            if value.name not in known:
                y = known[target_of(value)]
                known[value.name] = np.asarray(rng.standard_normal(y.shape), y.dtype)
        made = compiled.run([known[name] for name in compiled.input_names])
        for value, array in zip(part.graph.outputs, made, strict=True):
            known[value.name] = array
            if role_of(value) is not Role.SAVED:
                found[value.name] = array
    return found


@pytest.mark.parametrize("name", sampled(MODELS, SAMPLE))
def test_a_training_step_is_that_of_onnxruntime(name):
    case = MODELS[name]
    module = case.build(dropout=0.1)
    program = rewrite(export(module, (), case.batch()).program, "forward")
    weights = dict(module.named_parameters(remove_duplicate=False))
    weights |= dict(module.named_buffers(remove_duplicate=False))
    state = {name: tensor.detach().numpy() for name, tensor in weights.items()}
    engines = (AtenExecutor(), OnnxRuntimeExecutor(threads=1))
    ours, theirs = (trained(executor, program, pieces=3) for executor in engines)
    for batch, length in ((3, 7), (2, 5)):
        call = {k: v.numpy() for k, v in case.batch(batch, length).items()}
        feeds = {**call, **state, "seed": np.array(7, np.int64)}
        expected, found = results(theirs, feeds), results(ours, feeds)
        assert found.keys() == expected.keys()
        for key, wanted in expected.items():
            scale = np.abs(wanted).max(initial=0.01)  # a bias in front of a norm has none
            np.testing.assert_allclose(found[key], wanted, rtol=0, atol=1e-4 * scale, err_msg=key)


@pytest.mark.parametrize("name", sampled(MODELS, SAMPLE))
def test_nothing_of_a_model_is_missing(name):
    case, executor = MODELS[name], AtenExecutor()
    program = export(case.build(dropout=0.1), (), case.batch()).program
    wrt = [value.name for value in program.inputs(Role.PARAMETER)]
    for keep in (None, executor.keeps):
        whole = rewrite(differentiate(program, wrt, keep=keep), "training")
        assert missing(executor.lower(whole)) == []
