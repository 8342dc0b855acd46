"""An exported file answers as the module does, or is not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from ortrain.deploy import export, export_onnx
from ortrain.errors import GraphError, ParityError
from ortrain.program import Program
from tests.trainer.models import bert, collate, gpt2, t5, texts


def batches(kind: str, *names: str) -> list[dict[str, Any]]:
    """Batches of different sizes without labels, one of a single row among them."""
    rows = texts(9, kind)
    parts = [collate(part) for part in (rows[:6], rows[6:8], rows[8:])]
    return [{name: part[name] for name in names} for part in parts]


@pytest.mark.parametrize("opset", [18, 21])
def test_a_classifier_answers_alike_at_every_size(tmp_path: Path, opset: int) -> None:
    model, path = bert().train(), tmp_path / "new" / "model.onnx"
    samples = batches("classes", "input_ids", "attention_mask")
    assert export_onnx(model, samples, path, opset=opset) < 1e-5
    assert model.training
    onnx.checker.check_model(path, full_check=True)
    loaded = onnx.load(path)
    assert [i.name for i in loaded.graph.input] == ["input_ids", "attention_mask"]
    assert [o.name for o in loaded.graph.output] == ["logits"]
    assert {(o.domain, o.version) for o in loaded.opset_import} == {("", opset)}
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]


def test_results_keep_their_names(tmp_path: Path) -> None:
    export_onnx(gpt2(), batches("copy", "input_ids", "attention_mask"), tmp_path / "gpt2.onnx")
    samples = [
        {**batch, "decoder_input_ids": batch["input_ids"][:, :3]}
        for batch in batches("copy", "input_ids", "attention_mask")
    ]
    export_onnx(t5(), samples, tmp_path / "t5.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "t5.onnx")
    assert [o.name for o in session.get_outputs()] == ["logits", "encoder_last_hidden_state"]


def test_the_file_holds_the_weights_of_now(tmp_path: Path) -> None:
    model, samples = bert(), batches("classes", "input_ids", "attention_mask")
    for scale in (1.0, 3.0):
        with torch.no_grad():
            model.classifier.weight.mul_(scale)
        export_onnx(model, samples, tmp_path / "model.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        found = session.run(None, {k: v.numpy() for k, v in samples[0].items()})[0]
        expected = model.eval()(**samples[0]).logits.detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_wrong_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standalone = export._standalone

    def with_another_bias(*arguments: Any) -> Program:
        program = standalone(*arguments)
        bias = program.graph.initializers["classifier.bias"]
        bias.const_value = ir.tensor(bias.const_value.numpy() + np.float32(0.001))
        return program

    monkeypatch.setattr(export, "_standalone", with_another_bias)
    samples = batches("classes", "input_ids", "attention_mask")
    with pytest.raises(ParityError, match=r"differs from PyTorch by 1\.0e-03"):
        export_onnx(bert(), samples, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_outputs_that_are_asked_for_and_what_they_need(tmp_path: Path) -> None:
    samples = [
        {**batch, "decoder_input_ids": batch["input_ids"][:, :3]}
        for batch in batches("copy", "input_ids", "attention_mask")
    ]
    path = tmp_path / "encoder.onnx"
    export_onnx(t5(), samples, path, outputs=["encoder_last_hidden_state"])
    loaded = onnx.load(path)
    assert [o.name for o in loaded.graph.output] == ["encoder_last_hidden_state"]
    assert [i.name for i in loaded.graph.input] == ["input_ids", "attention_mask"]
    assert not [i.name for i in loaded.graph.initializer if "decoder" in i.name]
    with pytest.raises(ValueError, match=r"has no output heads; it has logits, encoder_last_hid"):
        export_onnx(t5(), samples, tmp_path / "other.onnx", outputs=["heads"])
    assert [p.name for p in tmp_path.iterdir()] == ["encoder.onnx"]


def test_names_of_dimensions_are_given_beside_constants_too(tmp_path: Path) -> None:
    class Loss(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(x, y)

    samples = [{"x": torch.randn(5, 4), "y": torch.arange(5) % 4}]
    export_onnx(Loss(), samples, tmp_path / "loss.onnx", dimensions=("batch",))
    graph = onnx.load(tmp_path / "loss.onnx").graph
    sizes = [[d.dim_param for d in v.type.tensor_type.shape.dim][:1] for v in graph.input]
    assert sizes == [["batch"], ["batch"]]


def test_open_dimensions_take_the_names_that_are_given(tmp_path: Path) -> None:
    samples = [
        {**batch, "decoder_input_ids": batch["input_ids"][:, :3]}
        for batch in batches("copy", "input_ids", "attention_mask")
    ]
    export_onnx(t5(), samples, tmp_path / "t5.onnx", dimensions=("batch", "sequence"))
    session = onnxruntime.InferenceSession(tmp_path / "t5.onnx")
    shapes = {value.name: value.shape for value in [*session.get_inputs(), *session.get_outputs()]}
    assert shapes["input_ids"] == shapes["attention_mask"] == ["batch", "sequence"]
    assert shapes["encoder_last_hidden_state"] == ["batch", "sequence", 16]
    batch, length = shapes["decoder_input_ids"]
    assert batch == "batch"
    assert length not in ("batch", "sequence")
    assert shapes["logits"] == ["batch", length, 60]


def test_large_weights_go_beside_the_file(tmp_path: Path) -> None:
    samples = batches("classes", "input_ids", "attention_mask")
    export_onnx(bert(), samples, tmp_path / "model.onnx", external_data_above=1000)
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    onnxruntime.InferenceSession(tmp_path / "model.onnx")


def test_a_module_that_draws_in_evaluation_is_refused(tmp_path: Path) -> None:
    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x, 0.5, training=True)

    with pytest.raises(GraphError, match="draws random numbers"):
        export_onnx(Noisy(), [{"x": torch.ones(2, 3)}], tmp_path / "model.onnx")


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 2 else x * 3


def test_a_file_for_one_size_alone_is_told_and_not_written(tmp_path: Path) -> None:
    samples = [{"x": torch.ones(2, 4)}, {"x": torch.ones(3, 4)}]
    with pytest.raises(
        ParityError, match=r"(?s)does not run on x\[3, 4\].*sizes of the first call"
    ):
        export_onnx(Branching(), samples, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


class Cutting(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : 2 * (x.shape[1] // 2)] if x.shape[1] % 2 else x[:, :4]


def test_a_result_of_other_sizes_is_told(tmp_path: Path) -> None:
    samples = [{"x": torch.ones(2, 6)}, {"x": torch.ones(2, 7)}]
    with pytest.raises(
        ParityError, match=r"(?s)gives output\[2, 4\], and PyTorch \[2, 6\]|not run"
    ):
        export_onnx(Cutting(), samples, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # 30 s: all sizes are tried as symbols first
def test_windows_as_large_as_the_image_are_exported_for_images_of_their_size(
    tmp_path: Path,
) -> None:
    """Swin's last stage sets the size of its windows, which then is the one of all images."""
    from transformers import SwinConfig, SwinForImageClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 4, "embed_dim": 8, "window_size": 2}
    config = SwinConfig(depths=[1], num_heads=[1], num_labels=3, **sizes)
    model = SwinForImageClassification(config)
    samples = [{"pixel_values": torch.randn(rows, 3, 8, 8)} for rows in (2, 3, 1)]
    path = tmp_path / "model.onnx"
    difference = export_onnx(model, samples, path, outputs=["logits"], dimensions=("batch",))
    assert difference < 1e-5
    (pixels,) = onnx.load(path).graph.input
    shape = [dim.dim_param or dim.dim_value for dim in pixels.type.tensor_type.shape.dim]
    assert shape == ["batch", 3, 8, 8]
