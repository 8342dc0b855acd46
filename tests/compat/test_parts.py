"""What old names stand for where it is more than another name."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.compat import (
    activation,
    capabilities,
    configure,
    fallback,
    graph_config,
    nested,
    ranges,
)
from ortrain.compat.inference import OpenVINOProviderOptions, ORTInferenceModule
from ortrain.compat.memory import log_memory_usage
from ortrain.compat.seed import set_seed
from ortrain.compat.tables import PTable
from ortrain.config import _POLICIES
from ortrain.errors import NotServed, OrtrainError
from ortrain.hooks import GlobalSubscriberManager, StatisticsSubscriber

# --- seeds and capabilities ---------------------------------------------------------------------


def test_a_seed_repeats_the_dropout_of_a_graph() -> None:
    module = ORTModule(nn.Dropout(0.5), options=Options(engine="aten", fallback="raise"))
    x, masks = torch.ones(4, 100, requires_grad=True), []
    for seed in (3, 3, 4):
        set_seed(seed)
        masks.append(module(x))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_what_a_build_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capabilities.is_ortmodule_available()
    assert not capabilities.is_triton_enabled()
    assert capabilities.is_torch_interop_default_on()
    version = capabilities.get_runtime_pytorch_version()
    assert version >= (2, 0)
    assert "+" not in version
    monkeypatch.setenv("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "")
    for wanted in (False, True):
        capabilities.enable_custom_autograd_support(wanted)
        assert Options().custom_autograd is wanted


def test_the_least_version_of_pytorch_is_what_the_package_asks_for() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f"torch>={capabilities.MINIMUM_RUNTIME_PYTORCH_VERSION_STR}" in text
    least = capabilities.MINIMUM_RUNTIME_PYTORCH_VERSION_STR.split(".")
    assert capabilities.get_runtime_pytorch_version() >= tuple(int(part) for part in least)


def test_no_extension_is_missing() -> None:
    assert configure.is_installed(configure.TORCH_CPP_DIR)
    assert Path(configure.TORCH_CPP_DIR).is_dir()


@pytest.mark.parametrize("level", graph_config.PropagateCastLevel)
@pytest.mark.parametrize("strategy", graph_config.PropagateCastOpsStrategy)
def test_casts_move_without_settings(strategy: Any, level: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph_config.set_propagate_cast_ops_optimization(nn.Linear(1, 1), strategy, level)
    assert bool(caught) == (level > 1)
    with pytest.raises(ValueError, match="7"):
        graph_config.set_propagate_cast_ops_optimization(nn.Linear(1, 1), strategy, 7)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("model", {"model": None}),
        ("strategy", {"strategy": None}),
        ("strategy", {"strategy": bool}),
        ("level", {"level": None}),
    ],
)
def test_settings_of_casts_of_another_kind_are_refused(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{name}="):
        graph_config.set_propagate_cast_ops_optimization(**{"model": nn.Linear(1, 1), **given})


# --- fallback -----------------------------------------------------------------------------------


def test_the_policies_are_those_of_the_variable() -> None:
    policies = fallback._FallbackPolicy
    assert {*policies.__members__} == {*_POLICIES}
    both = policies.FALLBACK_UNSUPPORTED_DEVICE | policies.FALLBACK_DISABLE
    assert both.is_disabled()
    assert both.is_set(policies.FALLBACK_UNSUPPORTED_DEVICE)
    assert not both.is_set(policies.FALLBACK_UNSUPPORTED_DATA)


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("FALLBACK_UNSUPPORTED_DEVICE", "ORTModuleDeviceException"),
        ("FALLBACK_UNSUPPORTED_DATA", "ORTModuleIOError"),
        ("FALLBACK_UNSUPPORTED_TORCH_MODEL", "ORTModuleTorchModelException"),
        ("FALLBACK_UNSUPPORTED_ONNX_MODEL", "ORTModuleONNXModelException"),
        ("FALLBACK_BAD_INITIALIZATION", "ORTModuleInitException"),
    ],
)
def test_an_old_class_catches_what_its_policy_lets_fall_back(policy: str, name: str) -> None:
    old = getattr(fallback, name)
    assert issubclass(old, fallback.ORTModuleFallbackException)
    for kind in _POLICIES[policy]:
        assert issubclass(kind, old)
    assert fallback.ORTModuleFallbackException is OrtrainError


def test_what_fell_back_by_default_are_all_kinds_of_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = [p.name for p in fallback._FallbackPolicy if p in fallback.ORTMODULE_FALLBACK_POLICY]
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "|".join(str(name) for name in named))
    asked = Options()
    monkeypatch.delenv("ORTMODULE_FALLBACK_POLICY")
    monkeypatch.delenv("ORTMODULE_FALLBACK_RETRY", raising=False)
    assert all(issubclass(kind, asked.policy) for kind in Options().policy)
    assert Options().retry is fallback.ORTMODULE_FALLBACK_RETRY


# --- statistics ---------------------------------------------------------------------------------


def test_a_tensor_is_recorded_by_the_old_function_as_by_the_new_one(tmp_path: Path) -> None:
    class Probed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            context = GlobalSubscriberManager.get_run_context()
            return activation._InspectActivation.apply("doubled", None, context, x * 2) + 1

    model, folder = Probed(), tmp_path / "statistics"
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(folder)])
    try:
        x = torch.ones(3, requires_grad=True)
        model(x).sum().backward()
    finally:
        GlobalSubscriberManager.unsubscribe()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    names = (folder / "step_0" / "order.txt").read_text().split()
    assert {"doubled_forward", "doubled_backward"} <= {*names}


# --- structures, tables, ranges, memory ---------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


T = torch.arange(3.0)
STRUCTURES = [T, (T, 1), [T, [T, {"k": T, "n": None}]], Pair(T, ("s", True)), {}, 2.5, None]


@pytest.mark.parametrize("data", STRUCTURES, ids=str)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_structure_comes_back(data: Any, as_tensor: bool) -> None:
    device = torch.device("cpu") if as_tensor else None
    tensors, schema = nested.extract_data_and_schema(data, as_tensor, device)
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    back = nested.unflatten_data_using_schema(tensors, schema)
    assert type(back) is type(data) or (as_tensor and isinstance(back, torch.Tensor))
    assert str(back) == str(data) or as_tensor
    with pytest.raises(ValueError, match="were given"):
        nested.unflatten_data_using_schema([*tensors, T], schema)


def test_constants_as_tensors_need_a_device() -> None:
    with pytest.raises(TypeError, match="device"):
        nested.extract_data_and_schema((1,), constant_as_tensor=True)


def test_a_table_is_as_wide_as_its_entries() -> None:
    table, below = PTable(sortable=True), PTable()
    below.add_row(["detail"])
    table.add_row(["zzz", 1]).append_annotation_table(below)
    table.add_row(["a", "second"])
    assert str(table) == "a   : second\nzzz : 1\n  detail\n"
    assert table.get_string(5).startswith("a     : second")
    with pytest.raises(ValueError, match="3 columns"):
        table.add_row([1, 2, 3])
    assert str(PTable()) == ""


def test_ranges_wrap_a_call() -> None:
    @ranges.nvtx_function_decorator
    def double(x: int) -> int:
        """Its own words."""
        return 2 * x

    assert double(2) == 4
    assert double.__doc__ == "Its own words."
    ranges.torch_nvtx_range_push("here")
    ranges.torch_nvtx_range_pop()


def test_memory_is_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Linear(512, 512)
    log_memory_usage("end of step", step_info="step 3", module=module)
    told = capsys.readouterr().out
    assert told.startswith("step 3 end of step: ")
    assert "parameters 1 MiB, gradients 0 MiB, buffers 0 MiB" in told
    with caplog.at_level(logging.INFO):
        log_memory_usage("end", logger=logging.getLogger("memory"))
    assert "end: process" in caplog.text


# --- inference ----------------------------------------------------------------------------------


def test_inference_runs_in_onnxruntime_without_gradients() -> None:
    linear, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    module = ORTInferenceModule(linear)
    found = module(x)
    assert not found.requires_grad
    torch.testing.assert_close(found, linear(x).detach())
    assert module.report.mode == "graph"
    assert module.options.engine == "onnxruntime"


def test_openvino_is_asked_for_where_it_is() -> None:
    for given in ({"backend": "GPU"}, {"precision": "FP16"}, {"provider": "tensorrt"}):
        with pytest.raises(NotServed, match="OpenVINO"):
            OpenVINOProviderOptions(**given)
    if "OpenVINOExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(NotServed, match="has no OpenVINO"):
            ORTInferenceModule(nn.Linear(1, 1), provider_options=OpenVINOProviderOptions())
