"""Files of graphs: there from the first call on, by the names that they had, and they compute."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from ortrain import DebugOptions, Options, ORTModule
from ortrain.errors import OrtrainWarning
from ortrain.program import Program

STAGES = ("torch_exported", "optimized_pre_grad", "optimized", "execution_model")


def net() -> nn.Module:
    """Of which ReLU6 is an operator of ortrain's."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU6(), nn.LayerNorm(7), nn.Linear(7, 3))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("one_piece")
@pytest.mark.parametrize("engine", ["auto", "onnxruntime", "aten", "reference"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_one_call_writes_each_stage(engine: Any, mode: str, tmp_path: Path) -> None:
    debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path)
    model = ORTModule(net(), debug, options=Options(engine=engine))
    with torch.set_grad_enabled(mode == "training"):
        model(torch.randn(4, 5))
    pieces = ("forward", "backward_1") if mode == "training" else ("forward",)
    names = [*STAGES, *pieces, *(f"{name}_lowered" for name in pieces)]
    assert files(tmp_path) == {f"net_{name}_{mode}.onnx" for name in names}
    assert model.report.mode == "graph"


@pytest.mark.usefixtures("one_piece")
@pytest.mark.parametrize("way", ["autocast", "parameters", "precision"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_before_a_contest_files_are_of_an_engine_that_has_the_kernels(
    mode: str, dtype: torch.dtype, way: str, tmp_path: Path
) -> None:
    debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path)
    precision: Any = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    options = Options(precision=precision if way == "precision" else None)
    own = dtype if way == "parameters" else torch.float32
    model = ORTModule(net().to(own), debug, options=options)
    for _ in range(3):
        with (
            torch.set_grad_enabled(mode == "training"),
            torch.autocast("cpu", dtype, enabled=way == "autocast"),
        ):
            output = model(torch.randn(4, 5, dtype=own))
        assert len(files(tmp_path)) == len(STAGES) + (4 if mode == "training" else 2)
        if mode == "training":
            output.sum().backward()
    assert model.report.reason == "its turn in the contest with the graph"


def test_a_module_in_evaluation_writes_its_graph_for_inference(tmp_path: Path) -> None:
    debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path)
    model = ORTModule(net(), debug, options=Options(engine="onnxruntime")).eval()
    x = torch.randn(4, 5)
    expected = model(x)
    assert expected.requires_grad  # so that it is cut into a forward and a backward
    stages = {f"net_{stage}_inference.onnx" for stage in STAGES}
    pieces = {"net_forward_training.onnx", "net_backward_1_training.onnx"}
    assert stages | pieces <= files(tmp_path)
    session = onnxruntime.InferenceSession(
        tmp_path / "net_execution_model_inference.onnx", providers=["CPUExecutionProvider"]
    )
    feeds = {name: value.detach().numpy() for name, value in model.named_parameters()}
    (found,) = session.run(None, {**feeds, "input": x.numpy()})
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("engine", "stage"),
    [("onnxruntime", "execution_model"), ("onnxruntime", "optimized"), ("aten", "optimized")],
)
def test_the_whole_graph_computes_outputs_and_gradients(
    engine: Any, stage: str, tmp_path: Path
) -> None:
    eager = net()
    debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path)
    model = ORTModule(copy.deepcopy(eager), debug, options=Options(engine=engine))
    model(torch.randn(4, 5))
    x, upstream = torch.randn(6, 5), torch.randn(6, 3)
    expected = eager(x)
    expected.backward(upstream)
    session = onnxruntime.InferenceSession(
        tmp_path / f"net_{stage}_training.onnx", providers=["CPUExecutionProvider"]
    )
    feeds = {name: value.detach().numpy() for name, value in eager.named_parameters()}
    feeds |= {"input": x.numpy(), "output.gradient": upstream.numpy()}
    found = dict(
        zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True)
    )
    np.testing.assert_allclose(found["output"], expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in eager.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(
            found[f"{name}.gradient"], parameter.grad, rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_where_there_is_no_graph_the_first_call_says_so_and_no_file_is_left(tmp_path: Path) -> None:
    class Transformed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x).real * 2

    debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path)
    model = ORTModule(Transformed(), debug)
    with pytest.warns(OrtrainWarning, match="fft"):
        model(torch.randn(4, 5, requires_grad=True))
    assert not files(tmp_path)


@pytest.mark.parametrize("prefix", ["graphs/net", "a/b/net", "./net"])
def test_a_prefix_may_name_folders_which_are_made(prefix: str, tmp_path: Path) -> None:
    debug = DebugOptions(save_onnx=True, onnx_prefix=prefix, save_path=tmp_path / "new")
    model = ORTModule(net(), debug, options=Options(engine="aten"))
    model(torch.randn(2, 5)).sum().backward()
    found = files((tmp_path / "new" / prefix).parent)
    assert {f"net_{stage}_training.onnx" for stage in STAGES} <= found
    assert model.report.mode == "graph"


def test_a_prefix_below_a_file_is_refused_when_the_options_are_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is no folder"):
        DebugOptions(save_onnx=True, onnx_prefix="file/net", save_path=tmp_path)


def test_where_files_cannot_be_written_one_warning_says_so_and_the_graph_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Program, "save", full)
    debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path / "new")
    plain = net()
    model = ORTModule(copy.deepcopy(plain), debug, options=Options(engine="aten"))
    x = torch.randn(2, 5)
    with pytest.warns(OrtrainWarning, match="save_onnx=True: cannot save the graph in") as caught:
        model(x).sum().backward()
    assert len(caught) == 1
    assert "No space left" in str(caught[0].message)
    plain(x).sum().backward()
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
    )
    assert model.report.mode == "graph"
    assert not files(tmp_path / "new")
