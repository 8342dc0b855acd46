"""What scripts of 2021 set inside of an ORTModule acts, or is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import LogLevel, Options, ORTModule
from ortrain.compat.debugging import save_intermediate_onnx_graphs, set_log_level
from ortrain.errors import OrtrainWarning

ROOT = Path(__file__).parents[2]
GRAPH = Options(engine="aten", fallback="raise")


def made() -> Any:
    # Importing anything of ortrain.compat gives ORTModule its old insides.
    return ORTModule(nn.Linear(3, 2), options=GRAPH)


def test_without_ortrain_compat_there_are_no_such_insides() -> None:
    script = (
        "import torch, ortrain\n"
        "model = ortrain.ORTModule(torch.nn.Linear(3, 2))\n"
        "names = ('_execution_manager', '_torch_module', '_save_onnx', '_original_module')\n"
        "assert not any(hasattr(model, name) for name in names)\n"
        "import ortrain.compat\n"
        "assert all(hasattr(model, name) for name in names)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_graphs_are_saved_under_the_prefix_that_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = made()
    model._save_onnx = True
    model._save_onnx_prefix = "MNIST"
    assert (model._save_onnx, model._save_onnx_prefix) == (True, "MNIST")
    model(torch.ones(2, 3)).sum().backward()
    assert (tmp_path / "MNIST_torch_exported_training.onnx").exists()
    assert not hasattr(model.module, "_save_onnx")


def test_a_prefix_with_a_folder_and_a_switch_that_is_off(tmp_path: Path) -> None:
    model = made()
    manager = model._execution_manager(is_training=True)
    manager._save_onnx_prefix = f"{tmp_path}/bert_"
    manager._save_onnx = False
    model(torch.ones(2, 3))
    assert not [*tmp_path.iterdir()]
    model = made()
    for training in (True, False):
        model._execution_manager(training)._save_onnx_prefix = f"{tmp_path}/bert_"
        model._execution_manager(training)._save_onnx = True
    model(torch.ones(2, 3)).sum().backward()
    assert all(path.name.startswith("bert_") for path in tmp_path.iterdir())
    assert [*tmp_path.iterdir()]


def test_settings_are_read_as_they_were_laid_out() -> None:
    model = made()
    model._execution_manager()._loglevel = LogLevel.ERROR
    manager = model._torch_module._execution_manager(True)
    assert manager._loglevel is manager._debug_options.logging.log_level is LogLevel.ERROR
    assert not manager._debug_options.save_onnx_models.save
    assert model._original_module is model.module


def test_what_else_is_set_is_told_once() -> None:
    model = made()
    with pytest.warns(OrtrainWarning, match=r"_use_static_shape = True does nothing") as told:
        model._execution_manager(True)._use_static_shape = True
    model._execution_manager(False)._use_static_shape = True  # a warning would be an error here
    assert len(told) == 1
    assert told[0].filename == __file__
    torch.testing.assert_close(model(torch.ones(1, 3)), model.module(torch.ones(1, 3)))


# --- the functions of torch-ort that set the same -----------------------------------------------


def test_functions_of_torch_ort_save_graphs_and_set_the_level(tmp_path: Path) -> None:
    model = ORTModule(nn.Linear(3, 2), options=GRAPH)
    set_log_level(model, LogLevel.FATAL)
    assert save_intermediate_onnx_graphs(model, f"{tmp_path}/graph")
    assert model._debug_options.log_level is LogLevel.FATAL
    model(torch.ones(2, 3)).sum().backward()
    assert (tmp_path / "graph_torch_exported_training.onnx").exists()
    for off in ({"prefix": ""}, {"enable": False, "prefix": f"{tmp_path}/graph"}):
        assert not save_intermediate_onnx_graphs(model, **off)  # type: ignore[arg-type]
        assert not model._debug_options.save_onnx


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ((None, "/tmp/x"), TypeError, "model=None: expected an ORTModule"),
        ((0, 1), TypeError, "prefix=1"),
        ((0, "/no/such/folder/x"), NotADirectoryError, "not a valid directory"),
        ((0, "name"), NotADirectoryError, "'' is not a valid directory"),
        ((0, "/tmp/"), NameError, "not a valid prefix name"),
    ],
)
def test_what_they_cannot_take_is_told(
    arguments: tuple[Any, Any], error: type[Exception], told: str
) -> None:
    model, prefix = arguments
    model = ORTModule(nn.Linear(3, 2)) if model == 0 else model
    with pytest.raises(error, match=told):
        save_intermediate_onnx_graphs(model, prefix)


def test_a_level_is_a_log_level() -> None:
    model = ORTModule(nn.Linear(3, 2))
    for level in (None, 1):
        with pytest.raises(TypeError, match="expected a LogLevel"):
            set_log_level(model, level)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an ORTModule"):
        set_log_level(nn.Linear(3, 2), LogLevel.INFO)
