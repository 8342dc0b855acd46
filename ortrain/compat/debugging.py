"""How the first ORTModule was told what to show: by functions, and by attributes of its own.

Today both are :class:`ortrain.DebugOptions`; graphs are saved under its names, of which the ends
are ``_torch_exported_training.onnx`` and others.
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ortrain.config import LogLevel
from ortrain.kinds import NONE, expect, expect_path, refused
from ortrain.module import ORTModule


def save_intermediate_onnx_graphs(
    model: Any, prefix: str | os.PathLike[str] | None = None, enable: bool = True
) -> bool:
    """Has an ORTModule write its graphs as ONNX files, from the next call on, or no longer.

    Args:
        model: the ORTModule.
        prefix: folder and start of the files' names; None or an empty one writes none.
        enable: whether graphs are written.

    Returns:
        Whether they are.

    Raises:
        TypeError: the model is no ORTModule, or the prefix no path.
        NotADirectoryError: the prefix has no folder, or there is none.
        NameError: the prefix has nothing behind the folder.
    """
    _expect_ort_module(model)
    expect_path("prefix", prefix, NONE)
    if not enable or not (given := os.fspath(prefix or "")):
        model._show(replace(model._debug_options, save_onnx=False))
        return False
    folder, name = os.path.split(given)
    if not folder or not Path(folder).is_dir():
        raise NotADirectoryError(
            f"prefix={given!r}: {folder!r} is not a valid directory to save ONNX graphs; write "
            "folder/start_of_names"
        )
    if not name.strip():
        raise NameError(
            f"prefix={given!r}: {name!r} is not a valid prefix name for the ONNX graph files; "
            "write folder/start_of_names"
        )
    shown = replace(model._debug_options, save_onnx=True, onnx_prefix=name, save_path=folder)
    model._show(shown)
    return True


def set_log_level(model: Any, level: LogLevel) -> None:
    """Sets how much an ORTModule says, from the next call on.

    Args:
        model: the ORTModule.
        level: one of :class:`ortrain.LogLevel`.

    Raises:
        TypeError: the model is no ORTModule, or the level no LogLevel.
    """
    _expect_ort_module(model)
    expect("level", level, LogLevel, "a LogLevel")
    model._show(replace(model._debug_options, log_level=level))


def _expect_ort_module(model: object) -> None:
    if not isinstance(model, ORTModule):
        raise refused("model", model, "an ORTModule")
