"""Every architecture captures whole, and its graph computes what the module does."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ortrain.capture import translation
from ortrain.capture.export import Captured, capture
from ortrain.program import PHASE, Role, origin_of, role_of
from tests.breadth import sampled
from tests.capture.running import check, untyped
from tests.models import MODELS, SAMPLE

every_model = pytest.mark.parametrize("name", sampled(MODELS, SAMPLE))


@functools.cache
def built(name: str, dropout: float = 0.0, train: bool = True) -> tuple[nn.Module, Captured]:
    """A model and its capture at batch 3 and length 7; made once for all tests of a process."""
    case = MODELS[name]
    module = case.build(dropout=dropout, train=train)
    return module, capture(module, kwargs=case.batch(batch=3, length=7))


@every_model
def test_training_forward_equals_the_module_at_any_batch_and_length(name: str) -> None:
    case = MODELS[name]
    module, captured = built(name)
    for batch, length in ((3, 7), (5, 11), (1, 9), (4, case.shortest), (1, case.shortest)):
        check(captured, module, **case.batch(batch, length, seed=batch))
    assert bool(captured.program.outputs(Role.UPDATED_BUFFER)) == case.buffers


@pytest.mark.parametrize("name", ["bert", "cnn", "resnet"])
def test_eval_forward_equals_the_module(name: str) -> None:
    module, captured = built(name, dropout=0.1, train=False)
    assert not captured.program.inputs(Role.SEED)
    assert not captured.program.outputs(Role.UPDATED_BUFFER)
    for batch, length in ((3, 7), (1, 4)):
        check(captured, module, **MODELS[name].batch(batch, length))


@pytest.mark.parametrize("name", ["bert", "t5", "mlp"])
def test_dropout_draws_from_one_seed_with_a_stream_each(name: str) -> None:
    _, captured = built(name, dropout=0.1)
    (seed,) = captured.program.inputs(Role.SEED)
    assert seed.name == "seed"
    drawing = [
        node
        for node in captured.program.graph
        if node.domain == "ortrain" and "stream" in node.attributes
    ]
    assert drawing
    assert all(seed in node.inputs for node in drawing)
    streams = [node.attributes["stream"].as_int() for node in drawing]
    assert sorted(streams) == list(range(len(streams)))


@every_model
def test_graph_is_typed_and_says_where_it_comes_from(name: str) -> None:
    _, captured = built(name)
    program = captured.program
    assert program.opset == 21
    assert not program.model.functions
    assert {node.domain for node in program.graph} <= {"", "ortrain"}
    assert not untyped(program)
    assert all(node.metadata_props[PHASE] == "forward" for node in program.graph)
    assert all(origin_of(node) for node in program.graph)


@every_model
def test_inputs_come_in_order_under_the_names_of_the_module(name: str) -> None:
    case = MODELS[name]
    module, captured = built(name)
    inputs = captured.program.graph.inputs
    order = [Role.USER_INPUT, Role.SEED, Role.BUFFER, Role.PARAMETER]
    roles = [role_of(value) for value in inputs]
    assert roles == sorted(roles, key=order.index)
    names = {role: [v.name for v in inputs if role_of(v) is role] for role in order}
    assert names[Role.USER_INPUT] == [user.name for user in captured.inputs]
    assert set(names[Role.USER_INPUT]) <= set(case.batch())
    parameters = [name for name, _ in module.named_parameters()]
    assert names[Role.PARAMETER] == [name for name in parameters if name in names[Role.PARAMETER]]
    buffers = [name for name, _ in module.named_buffers()]
    assert names[Role.BUFFER] == [name for name in buffers if name in names[Role.BUFFER]]


def test_origin_names_module_and_line() -> None:
    _, captured = built("bert")
    origins = [origin_of(n) for n in captured.program.graph if n.op_type == "MatMul"]
    expected = r"bert\.encoder\.layer\.0\.attention\.self\.query \(modeling_bert\.py:\d+\)"
    assert re.fullmatch(expected, origins[0])


def test_tied_weight_is_one_input_under_its_first_name() -> None:
    module, captured = built("gpt2")
    parameters = [v.name for v in captured.program.inputs(Role.PARAMETER)]
    assert "transformer.wte.weight" in parameters
    assert "lm_head.weight" not in parameters
    assert len(parameters) == len(list(module.parameters()))


def test_padding_index_is_kept() -> None:
    _, captured = built("bert")
    embeddings = [n for n in captured.program.graph if n.op_type == "Embedding"]
    kept = [node.attributes["padding_idx"].as_int() for node in embeddings]
    assert sorted(kept) == [-1, -1, 1]


@pytest.mark.parametrize("name", ["distilbert", "cnn"])
def test_common_models_need_nothing_of_upstreams_table(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translation, "_registries", {})
    capture(MODELS[name].build(), kwargs=MODELS[name].batch())
    assert "everything" not in vars(translation.registry_of(21))


def test_opset_18_spells_gelu_out() -> None:
    case = MODELS["mlp"]
    module = case.build()
    captured = capture(module, kwargs=case.batch(), opset=18)
    assert captured.program.opset == 18
    assert "Gelu" not in captured.program.operators()
    check(captured, module, **case.batch(2))


def test_float64_module_stays_float64() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)).double()
    captured = capture(module, (torch.randn(3, 4, dtype=torch.float64),))
    check(captured, module, torch.randn(2, 4, dtype=torch.float64), tolerance=1e-12)


@pytest.mark.parametrize("name", ["torch._subclasses.fake_tensor", "torch.export", "onnx_ir"])
def test_what_pytorch_logs_of_trials_in_a_translation_is_not_heard(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    translate = translation._translate

    def noisy(*args: Any) -> Any:
        logging.getLogger(name).error("failed while attempting to run meta for aten.fft")
        warnings.warn("of a trial", UserWarning, stacklevel=1)
        return translate(*args)

    monkeypatch.setattr(translation, "_translate", noisy)
    with caplog.at_level(logging.ERROR):
        capture(nn.Linear(2, 2), (torch.ones(1, 2),))
        assert caplog.records == []
        logging.getLogger(name).error("afterwards")  # what others do is heard as before
    assert [record.getMessage() for record in caplog.records] == ["afterwards"]
