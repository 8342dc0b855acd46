"""PyTorch's ways answer as eager does, and files of one content are measured once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inference
import numpy as np
import pytest
import quantization
import torch
from torch import nn

from ortrain.deploy import export_onnx


class Words(nn.Module):
    """Logits of a bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classes = nn.Embedding(20, 16), nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits(input_ids))

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classes(self.embedding(input_ids).mean(1))
        return logits


class Exported(nn.Module):
    def __init__(self, model: Words) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.logits(input_ids)


FEEDS = {"input_ids": np.arange(12).reshape(2, 6)}


@pytest.mark.parametrize("name", [name for name in inference.EAGER if name != "torchao-int8"])
def test_pytorchs_ways_answer_as_eager_does(name: str) -> None:
    model = Words().eval()
    expected = model(torch.from_numpy(FEEDS["input_ids"])).logits.detach().numpy()
    contestant = inference.EAGER[name](model)
    found = contestant(FEEDS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert (found == expected).all() == (name == "eager")
    assert contestant.size > 0
    assert model.classes.weight.dtype == torch.float32


def test_what_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(RuntimeError, match="torchao is not installed"):
        inference.torchao(Words())
    with pytest.raises(RuntimeError, match="no engine abacus"):
        inference.int8("abacus")(Words())


def test_presets_of_one_file_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Words().eval()
    path = tmp_path / "exported" / "model.onnx"
    sample = {"input_ids": torch.from_numpy(FEEDS["input_ids"])}
    export_onnx(Exported(model).eval(), [sample], path)
    monkeypatch.setitem(sys.modules, "torchao", None)
    held_out = [(FEEDS, 0)]
    classifier: Any = SimpleNamespace(
        model=model, path=path, calibration=[FEEDS], held_out=held_out
    )
    names = ["eager", "torchao-int8", "dynamic-arm64", "dynamic-ppc64le", "static-avx2"]
    found, missing = quantization.made(classifier, names, tmp_path, threads=1)
    assert [*found] == ["float32", "eager", "dynamic-arm64", "static-avx2"]
    assert missing == {
        "torchao-int8": {"skipped": "torchao is not installed"},
        "dynamic-ppc64le": {"same_file_as": "dynamic-arm64"},
    }
    rows = quantization.answered(found, held_out)
    assert rows["float32"]["agreement"] == 1
    assert rows["float32"]["kernels"] == {"Gemm": 1}
    assert sum(rows["dynamic-arm64"]["kernels"].values()) > 0
    (file,) = (tmp_path / "dynamic-arm64").glob("*.onnx")
    assert rows["dynamic-arm64"]["bytes"] == file.stat().st_size
