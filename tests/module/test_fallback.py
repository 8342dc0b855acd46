"""What cannot run as a graph runs in PyTorch and says why, or raises where that was asked for."""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from ortrain import DebugOptions, LogLevel, Options, ORTModule, explain
from ortrain.config import Fallback
from ortrain.errors import CaptureError, ExecutionError, NotServed, OrtrainWarning
from ortrain.frontend import graph
from ortrain.frontend.backend import _KNOWN
from ortrain.frontend.graphs import Graphs
from tests.models import MODELS
from tests.module.agreement import GRAPH, loss_of

EAGER_IF_NEEDED = Options(engine="onnxruntime")


class Scaled(nn.Module):
    """Its inner layer takes a number out of a tensor."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            hidden: Tensor = self.layer(value)
            return hidden * float(hidden.sum())

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled.Inner()

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.inner(value)
        return result


class Fourier(nn.Module):
    """Uses an operator of complex numbers, and has no products that a graph would be left with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(4)

    def forward(self, value: Tensor) -> Tensor:
        return torch.fft.rfft(self.layer(value)).abs()


class Opaque:
    """An argument that a graph cannot take."""

    scale = 2.0


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: Any, extra: Any = None) -> Any:
        hidden = self.layer(value)
        return hidden * extra.scale if isinstance(extra, Opaque) else hidden


def rows() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def assert_eager_step(model: ORTModule, eager: nn.Module, *args: Any) -> None:
    """Raises unless outputs and gradients are eager's to the bit."""
    for each in (model, eager):
        each.zero_grad()
        each(*args).sum().backward()
    assert torch.equal(model(*args), eager(*args))
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)
    assert model.report.mode == "eager"


# --- fallback="torch" ---------------------------------------------------------------------------


def test_the_module_runs_eagerly_with_one_warning_that_says_why() -> None:
    eager = Fourier()
    model = ORTModule(copy.deepcopy(eager), options=EAGER_IF_NEEDED)
    with pytest.warns(OrtrainWarning, match="runs Fourier in PyTorch: .*fft") as caught:
        output = model(rows())
    assert torch.equal(output, eager(rows()))
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points at the call"
    assert "computes with real numbers" in model.report.reason
    assert_eager_step(model, eager, rows())
    model.eval()
    with torch.no_grad():
        model(rows())


def test_a_module_whose_parameters_another_library_partitions_runs_eagerly() -> None:
    eager = nn.Linear(4, 4)
    model = ORTModule(copy.deepcopy(eager), options=EAGER_IF_NEEDED)
    model.weight.ds_status = "NOT_AVAILABLE"
    with pytest.warns(OrtrainWarning, match="weight is partitioned by DeepSpeed ZeRO stage 3"):
        model(rows())
    assert_eager_step(model, eager, rows())


def test_two_modules_warn_each() -> None:
    for _ in range(2):
        with pytest.warns(OrtrainWarning):
            ORTModule(Fourier(), options=EAGER_IF_NEEDED)(rows())


def test_an_operator_that_no_graph_has_runs_eagerly() -> None:
    eager = Fourier()
    model = ORTModule(copy.deepcopy(eager), options=EAGER_IF_NEEDED)
    with pytest.warns(OrtrainWarning, match="fft"):
        model(rows())
    assert_eager_step(model, eager, rows())


@pytest.mark.parametrize("stage", ["graph.translated", "form.build"])
def test_an_error_of_our_own_costs_no_training_run(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a bug")

    _KNOWN.clear()  # or a graph that another test has made would serve
    monkeypatch.setattr(f"ortrain.frontend.{stage}", broken)
    eager = Takes()
    model = ORTModule(copy.deepcopy(eager), options=EAGER_IF_NEEDED)
    with pytest.warns(OrtrainWarning, match="KeyError: 'a bug'"):
        model(rows())
    assert_eager_step(model, eager, rows())
    with pytest.raises(CaptureError, match="ortrain itself failed while") as caught:
        ORTModule(eager, options=GRAPH)(rows())
    assert isinstance(caught.value.__cause__, KeyError)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Triples(Takes):
    def forward(self, value: Any, extra: Any = None) -> Any:
        return Tripled.apply(self.layer(value))


# As with a version of PyTorch or onnxruntime in which a name is gone, or takes something else.
@pytest.mark.parametrize(
    ("name", "now", "kind", "where", "doing"),
    [
        ("ortrain.frontend.graph._axes_of", math.sqrt, "TypeError", "frontend/graph.py",
         "making the graph"),
        ("ortrain.runtime.onnxruntime.exchange._wrap", math.sqrt, "TypeError",
         "runtime/onnxruntime/exchange.py", "running the graph"),
    ],
)  # fmt: skip
def test_an_error_that_a_line_of_ortrain_raises_is_told_as_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, now: Any, kind: str, where: str, doing: str
) -> None:
    _KNOWN.clear()
    model = ORTModule(Takes(), options=EAGER_IF_NEEDED)
    with monkeypatch.context() as patches:
        patches.setattr(name, now)
        with pytest.warns(OrtrainWarning, match=f"ortrain itself failed while {doing}"):
            model(rows())
    assert f"{kind}: " in model.report.reason
    assert f"with torch {torch.__version__}" in model.report.reason
    assert f"(ortrain/{where}:" in model.report.reason
    assert "the forward raises" not in model.report.reason


class Doubled(nn.Module):
    """Two layers, with more around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(value))) * 2 + 1
        return result


class Masks(nn.Module):
    """Masks with numbers of numpy, as models of speech do; its layer has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Doubled()

    def forward(self, value: Tensor) -> Tensor:
        mask = torch.tensor(np.random.rand(4) > 0.5)  # noqa: NPY002 - the global one is the point
        result: Tensor = self.layer(value) * mask
        return result


def test_each_step_draws_its_own_numbers_with_numpy() -> None:
    eager = Masks()
    model = ORTModule(copy.deepcopy(eager), options=EAGER_IF_NEEDED)

    def outputs(module: nn.Module) -> list[Tensor]:
        np.random.seed(0)  # noqa: NPY002
        return [module(rows()) for _ in range(8)]

    found, expected = outputs(model), outputs(eager)
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found[0] == 0, found[1] == 0)
    assert model.report.graph_calls == 8


def test_an_argument_of_a_class_of_the_users_is_one_of_a_graph() -> None:
    eager = Takes()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for extra in (Opaque(), None, Opaque()):
        for each in (model, eager):
            each.zero_grad()
            each(rows(), extra).sum().backward()
        torch.testing.assert_close(model(rows(), extra), eager(rows(), extra))
        torch.testing.assert_close(model.layer.weight.grad, eager.layer.weight.grad)
    assert model.report.mode == "graph"


def test_a_sparse_input_runs_eagerly() -> None:
    eager = Takes()
    model = ORTModule(copy.deepcopy(eager), options=EAGER_IF_NEEDED)
    with pytest.warns(OrtrainWarning, match="sparse"):
        model(rows().to_sparse())
    assert_eager_step(model, eager, rows().to_sparse())


def test_a_log_level_above_warning_keeps_quiet() -> None:
    debug = DebugOptions(log_level=LogLevel.ERROR)
    model = ORTModule(Fourier(), debug, options=EAGER_IF_NEEDED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(rows())
    assert model.report.mode == "eager"


def test_a_call_that_was_no_graph_is_not_tried_again_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        tries.append(1)
        return whole(*args, **kwargs)

    whole = Graphs.whole
    monkeypatch.setattr(Graphs, "whole", counted)
    for retry in (False, True):
        tries.clear()
        model = ORTModule(Fourier(), options=Options(engine="onnxruntime", retry=retry))
        with pytest.warns(OrtrainWarning):
            model(rows())
        model(rows())
        model(rows())
        assert len(tries) == (3 if retry else 1)


# --- fallback="raise" ---------------------------------------------------------------------------


def test_the_error_names_operator_module_and_source() -> None:
    model = ORTModule(Fourier(), options=GRAPH)
    with pytest.raises(CaptureError, match="fft") as caught:
        model(rows())
    assert f"{Path(__file__).name}:" in str(caught.value)


def test_the_error_names_the_module_path() -> None:
    held = {
        name: ORTModule(nn.Sequential(OrderedDict({name: Fourier()})), options=GRAPH)
        for name in ("one", "other")
    }
    for name, model in held.items():
        with pytest.raises(CaptureError, match="fft") as caught:
            model(rows())
        assert caught.value.where.startswith(f"{name} (")
        assert f"{Path(__file__).name}:" in caught.value.where
        assert "the real and the imaginary part" in caught.value.help


def test_the_error_of_an_argument_says_what_it_is() -> None:
    model = ORTModule(Takes(), options=GRAPH)
    with pytest.raises(CaptureError, match="sparse"):
        model(rows().to_sparse())
    with pytest.raises(TypeError, match="must be Tensor, not list"):
        model([1.0])


def test_reduced_precision_raises() -> None:
    model = ORTModule(nn.Linear(4, 4).bfloat16(), options=GRAPH)
    with pytest.raises(NotServed, match=r"^weight is torch\.bfloat16: .* served by onnxruntime; "):
        model(rows().bfloat16())
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), options=GRAPH)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotServed, match=r"^autocast is on"):
        model(rows())
    model(rows()).sum().backward()
    assert model.report.mode == "graph"


# --- engine="torch" -----------------------------------------------------------------------------


def test_the_torch_engine_never_captures(recwarn: pytest.WarningsRecorder) -> None:
    eager = Takes()
    policies: tuple[Fallback, ...] = ("torch", "raise")
    for fallback in policies:
        options = Options(engine="torch", fallback=fallback)
        model = ORTModule(copy.deepcopy(eager), options=options)
        assert_eager_step(model, eager, rows())
        assert model.report.captures == 0
        assert model.report.reason == 'engine="torch"'
    assert not recwarn.list


# --- environment variables ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "fallback"),
    [
        ("FALLBACK_DISABLE", "raise"),
        ("FALLBACK_FORCE_TORCH_FORWARD", "torch"),
        ("FALLBACK_UNSUPPORTED_DEVICE|FALLBACK_UNSUPPORTED_TORCH_MODEL", "torch"),
        ("", "torch"),
    ],
)
def test_the_policy_in_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, policy: str, fallback: str
) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
    assert Options().fallback == fallback
    model = ORTModule(Fourier(), options=Options(engine="onnxruntime"))
    if fallback == "raise":
        with pytest.raises(CaptureError):
            model(rows())
    else:
        with pytest.warns(OrtrainWarning):
            model(rows())


def test_a_policy_for_one_kind_of_error_lets_the_others_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA")
    model = ORTModule(Fourier(), options=Options(engine="onnxruntime"))
    with pytest.raises(CaptureError):
        model(rows())


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    assert Options(fallback="torch").fallback == "torch"


def test_an_unknown_policy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_SOMETIMES")
    with pytest.raises(ValueError, match=r"ORTMODULE_FALLBACK_POLICY='FALLBACK_SOMETIMES'"):
        ORTModule(nn.Linear(1, 1))


def test_opset_retry_and_cache_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "20")
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", "1")
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    options = Options()
    assert (options.opset, options.retry, options.cache_dir) == (20, True, tmp_path)


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engine": "tensorflow"}, "engine='tensorflow': expected 'auto'"),
        ({"fallback": "never"}, "fallback='never': expected 'torch' or 'raise'"),
        ({"opset": 9}, "opset=9: expected 18 to 23"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_expected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**wrong)


def test_a_provider_that_this_onnxruntime_lacks_is_named() -> None:
    options = Options(engine="onnxruntime", fallback="raise", provider="NoSuchProvider")
    with pytest.raises(ExecutionError, match="NoSuchProvider") as caught:
        ORTModule(nn.Linear(4, 4), options=options)(rows())
    assert "CPUExecutionProvider" in caught.value.help


def test_a_provider_that_its_session_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its libraries are missing: onnxruntime then goes on without it."""
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda _: [])
    options = Options(engine="onnxruntime", fallback="raise", provider="CPUExecutionProvider")
    with pytest.raises(ExecutionError, match="could not load its CPUExecutionProvider"):
        ORTModule(nn.Linear(4, 4), options=options)(rows())


def test_a_provider_takes_tensors_of_the_cpu_alone() -> None:
    options = Options(engine="onnxruntime", provider="CPUExecutionProvider")
    model = ORTModule(nn.Linear(4, 4, device="meta"), options=options)
    with pytest.warns(OrtrainWarning, match="on meta"):
        assert model(rows().to("meta")).device.type == "meta"


@pytest.mark.parametrize("opset", [18, 20, 21])
def test_every_opset_trains(opset: int) -> None:
    options = Options(engine="onnxruntime", fallback="raise", opset=opset)
    eager: Any = MODELS["cnn"].build()
    model = ORTModule(copy.deepcopy(eager), options=options)
    batch = MODELS["cnn"].batch()
    loss_of(model(**batch)).backward()
    loss_of(eager(**batch)).backward()
    torch.testing.assert_close(model.head.weight.grad, eager.head.weight.grad)


# --- debug options ------------------------------------------------------------------------------


def test_saving_needs_a_prefix() -> None:
    with pytest.raises(ValueError, match="onnx_prefix"):
        DebugOptions(save_onnx=True)


def test_a_log_level_in_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "info")
    assert DebugOptions().log_level is LogLevel.INFO
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="ORTMODULE_LOG_LEVEL='loud': expected one of VERBOSE"):
        DebugOptions()


@pytest.fixture(params=["option", "environment"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, DebugOptions]]:
    """A folder for graphs, named in either way."""
    debug = DebugOptions(save_onnx=True, onnx_prefix="cnn", save_path=str(tmp_path / "graphs"))
    if request.param == "environment":
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path / "elsewhere"))
        yield tmp_path / "elsewhere", debug
    else:
        yield tmp_path / "graphs", debug


@pytest.mark.usefixtures("one_piece")
def test_graphs_are_saved_for_training_and_inference(folder: tuple[Path, DebugOptions]) -> None:
    place, debug = folder
    case = MODELS["cnn"]
    model = ORTModule(case.build(), debug, options=GRAPH)
    batch = case.batch()
    loss_of(model(**batch)).backward()
    model.eval()
    with torch.no_grad():
        model(**batch)
    stems = ("forward_training", "backward_1_training", "forward_inference")
    names = {f"cnn_{stem}.onnx" for stem in stems}
    names |= {f"cnn_{s.rsplit('_', 1)[0]}_lowered_{s.rsplit('_', 1)[1]}.onnx" for s in stems}
    stages = ("torch_exported", "optimized_pre_grad", "optimized", "execution_model")
    names |= {f"cnn_{s}_{mode}.onnx" for s in stages for mode in ("training", "inference")}
    assert {path.name for path in place.iterdir()} == names
    for name in names:
        proto = onnx.load(place / name)
        standard = {node.domain for node in proto.graph.node} <= {""}
        onnx.checker.check_model(proto, full_check=standard)
        inputs = {value.name for value in proto.graph.input}
        if "forward" in name:
            assert {"pixel_values", "labels", "head.weight"} <= inputs
    lowered = onnx.load(place / "cnn_forward_lowered_inference.onnx")
    assert "ortrain" not in {node.domain for node in lowered.graph.node}


# --- reports ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_piece")
def test_a_report_reads_well_before_and_after() -> None:
    case = MODELS["mlp"]
    model = ORTModule(case.build(), options=GRAPH)
    assert str(model.report) == "ORTModule: not called yet"
    loss_of(model(**case.batch())).backward()
    text = str(model.report)
    assert text.startswith("ORTModule: graph\n")
    for word in ("onnxruntime CPUExecutionProvider", "captures  1", "trace ", "forward"):
        assert word in text
    assert set(model.report.stages) >= {"differentiate", "partition", "compile"}
    assert model.report.saved_bytes > 0
    assert set(model.report.nodes) == {"forward", "backward 1"}


def test_the_report_of_an_eager_module_says_why() -> None:
    model = ORTModule(nn.Linear(4, 4), options=Options(engine="torch"))
    model(rows())
    assert str(model.report).splitlines() == [
        'ORTModule: eager (engine="torch")',
        "  calls     0 as a graph, 1 in PyTorch",
    ]


@pytest.mark.usefixtures("one_piece")
def test_explain_shows_stages_graphs_and_parity() -> None:
    case = MODELS["bert"]
    module = case.build(dropout=0.3)
    batch: dict[str, Any] = {**case.batch()}
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    explanation = explain(module, **batch)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert explanation.reason == ""
    assert {"differentiate", "compile"} <= set(explanation.stages)
    assert list(explanation.programs) == ["forward", "backward 1"]
    assert explanation.saved_bytes > 0
    weights = {name for name, _ in module.named_parameters()}
    assert set(explanation.parity) >= weights | {"loss", "logits"}
    assert max(explanation.parity.values()) < 1e-5, "dropout draws the same in both"
    text = str(explanation)
    for words in ("BertForSequenceClassification", "what runs where", "seconds by stage", "saved"):
        assert words in text


def test_explain_says_why_a_module_is_no_graph() -> None:
    explanation = explain(nn.Embedding(4, 2, sparse=True), torch.tensor([1, 2]))
    assert "sparse" in explanation.reason
    assert "everything in PyTorch" in str(explanation)


def test_explain_takes_a_wrapped_module_and_leaves_inputs_alone() -> None:
    model = ORTModule(Takes())
    value = rows().requires_grad_()
    explanation = explain(model, value)
    assert explanation.name == "Takes"
    assert value.grad is None
    assert model.report.mode == ""


def test_explain_runs_a_wrapped_module_as_its_own_options_say() -> None:
    for engine in ("aten", "reference"):
        model = ORTModule(Takes(), options=Options(engine=engine))
        assert engine in explain(model, rows()).where[0]
        assert "in onnxruntime" in explain(model, rows(), options=Options()).where[0]


@pytest.mark.parametrize("how", ["autocast", "options", "weights"])
def test_explain_shows_a_graph_in_bfloat16(how: str) -> None:
    model, x = Takes(), rows()
    options = Options(precision="bf16") if how == "options" else Options()
    if how == "weights":
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        explanation = explain(model, x, options=options)
    assert explanation.reason == ""
    assert "in aten" in explanation.where[0]


def test_explain_counts_parameters_without_a_gradient() -> None:
    class Unused(Takes):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    explanation = explain(Unused(), rows())
    assert "no gradient for 2 parameters: spare.bias, spare.weight" in str(explanation)


def test_a_wrong_graph_shows_in_the_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graph.translated

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = made(*args, **kwargs)
        for node in found.program.graph:
            if node.op_type == "Relu":
                node.op_type = "Sigmoid"
        return found

    monkeypatch.setattr(graph, "translated", changed)
    explanation = explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), rows())
    assert "<-- above 1e-4" in str(explanation)
    assert "does not compute what PyTorch does" in explanation.reason
