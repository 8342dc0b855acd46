"""Pins what the exporter's adapter uses of torch beyond its documentation."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import _trace
from torch.fx.experimental import _config
from torch.onnx._internal.exporter import _building, _core, _registration

from ortrain.capture.trace import exporter


def parameters_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_private_names_have_the_signatures_that_are_used() -> None:
    assert {"exported_program", "registry"} <= set(
        parameters_of(_core._exported_program_to_onnx_program)
    )
    assert {"onnx_function", "fx_target", "signature", "is_custom", "skip_signature_inference"} <= (
        set(parameters_of(_registration.OnnxDecompMeta))
    )
    assert parameters_of(_registration.ONNXRegistry._register)[1:] == [
        "target",
        "onnx_decomposition",
    ]
    assert "opset_version" in parameters_of(_registration.ONNXRegistry.from_torchlib)
    assert parameters_of(_core._set_shape_type)[:2] == ["value", "meta_val"]
    registry = _registration.ONNXRegistry()
    assert hasattr(registry, "_opset_version")
    assert not registry.is_registered(torch.ops.aten.linear.default)


def test_recorder_has_nodes_and_constants() -> None:
    assert {"nodes", "constant_farm"} <= set(vars(_building.OpRecorder(None, {})))


def test_sizes_can_be_kept_oblivious() -> None:
    with _config.patch(backed_size_oblivious=True):
        assert _config.backed_size_oblivious
    assert not _config.backed_size_oblivious


def test_the_cache_of_fake_tensors_can_be_left_out() -> None:
    with exporter._uncached():
        assert not FakeTensorMode().cache_enabled
    assert FakeTensorMode().cache_enabled


def test_torch_has_the_hook_for_assigned_buffers_that_is_left_out() -> None:
    assert callable(vars(_trace)[exporter._HOOK])


def test_tested_version_gives_no_warning_and_another_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter.check_version.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exporter.check_version()
    exporter.check_version.cache_clear()
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    with pytest.warns(UserWarning, match=r"not with 9\.9\.0"):
        exporter.check_version()
    exporter.check_version.cache_clear()
