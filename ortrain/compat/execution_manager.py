"""What scripts of 2021 set inside of an ORTModule, before there was ``DebugOptions``.

``model._save_onnx = True``, ``model._save_onnx_prefix = "bert"`` and the same of
``model._execution_manager(is_training=True)`` act as ``DebugOptions`` does. What else such a script
sets of the manager is told, once for each name, and changes nothing.
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import os
import warnings
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

from ortrain.config import LogLevel
from ortrain.errors import OrtrainWarning
from ortrain.module import ORTModule

_ASKED, _PREFIX = "_ort_saves_onnx", "_ort_onnx_prefix"
# Where a script asks for files and names none: the start of their names then.
_DEFAULT_PREFIX = "ortmodule"


class ExecutionManager:
    """The old settings of an ORTModule, of both its modes at once.

    Args:
        model: the ORTModule.
    """

    _model: ORTModule

    def __init__(self, model: ORTModule) -> None:
        self.__dict__["_model"] = model

    @property
    def _save_onnx(self) -> bool:
        return bool(self._model._debug_options.save_onnx)

    @_save_onnx.setter
    def _save_onnx(self, save: object) -> None:
        self._model.__dict__[_ASKED] = bool(save)
        self._show()

    @property
    def _save_onnx_prefix(self) -> str:
        return str(self._model.__dict__.get(_PREFIX, ""))

    @_save_onnx_prefix.setter
    def _save_onnx_prefix(self, prefix: str | None) -> None:
        self._model.__dict__[_PREFIX] = prefix or ""
        self._show()

    @property
    def _loglevel(self) -> LogLevel:
        return LogLevel(self._model._debug_options.log_level)

    @_loglevel.setter
    def _loglevel(self, level: LogLevel) -> None:
        self._model._show(replace(self._model._debug_options, log_level=level))

    @property
    def _debug_options(self) -> SimpleNamespace:
        """What is shown, as it was laid out then; to be read."""
        now = self._model._debug_options
        saved = SimpleNamespace(
            save=now.save_onnx, name_prefix=now.onnx_prefix, path=str(now.folder)
        )
        logging = SimpleNamespace(log_level=now.log_level)
        return SimpleNamespace(logging=logging, save_onnx_models=saved)

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr(type(self), name, None)
        if isinstance(own, property) and own.fset is not None:
            super().__setattr__(name, value)
            return
        told = self._model.__dict__.setdefault("_ort_told", set())
        if name not in told:
            told.add(name)
            warnings.warn(
                f"_execution_manager(…).{name} = {value!r} does nothing here; what can be set is "
                "in ortrain.Options and ortrain.DebugOptions",
                OrtrainWarning,
                stacklevel=2,
            )

    def _show(self) -> None:
        """Has the ORTModule save graphs as both settings together say."""
        own = self._model.__dict__
        folder, name = os.path.split(own.get(_PREFIX) or "")
        shown = replace(
            self._model._debug_options,
            save_onnx=own.get(_ASKED, False),
            onnx_prefix=name or _DEFAULT_PREFIX,
            save_path=folder,
        )
        self._model._show(shown)


def extend(module: ModuleType) -> None:
    """Gives ORTModule the old insides.

    Args:
        module: ``ortrain.module``.
    """
    kind = module.ORTModule
    if hasattr(kind, "_execution_manager"):
        return

    def _execution_manager(self: ORTModule, is_training: bool = True) -> ExecutionManager:
        return ExecutionManager(self)

    kind._execution_manager = _execution_manager
    kind._torch_module = property(lambda self: self)
    kind._original_module = property(lambda self: self.module)
    for name in ("_save_onnx", "_save_onnx_prefix"):
        setattr(kind, name, _of_the_manager(name))


def _of_the_manager(name: str) -> property:
    """A setting of the manager, of the ORTModule itself."""
    return property(
        lambda self: getattr(ExecutionManager(self), name),
        lambda self, value: setattr(ExecutionManager(self), name, value),
    )
