"""What makes old names importable: a finder of modules, and what installed ones lack."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from ortrain.compat.hugging_face import EXTENSIONS, HOSTS
from ortrain.compat.table import (
    PACKAGES,
    PROGRAMS,
    explicit,
    home_of,
    names_of,
    removal_of,
    starred,
)
from ortrain.errors import OrtrainWarning, RemovedAttribute, RemovedImport


def install() -> None:
    """Has old names resolve from now on; a second call changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    # None stands there for what must not be imported.
    present: dict[str, ModuleType | None] = {**sys.modules}
    for name, module in present.items():
        if module is not None and (name in PACKAGES or name in EXTENSIONS):
            _complete(module)


class _Finder(MetaPathFinder):
    """Finds the modules of the table: those installed, completed, and in their absence our own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        known = fullname in PACKAGES or fullname in EXTENSIONS
        if not known and removal_of(fullname) is None:
            return None
        installed = self._installed(fullname, path, target)
        if installed is not None:
            if known and installed.loader is not None:
                installed.loader = _Completing(installed.loader)
            return installed
        if (removal := removal_of(fullname)) is not None:
            raise removal.error(RemovedImport, fullname)
        if fullname not in PACKAGES or fullname in HOSTS:
            return None
        return ModuleSpec(fullname, _Old(), origin="ortrain.compat", is_package=True)

    def _installed(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """What the other finders find."""
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


class _Old(Loader):
    """Loads a module that holds nothing but the names of the table, each when it is asked for."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _OldModule(spec.name, f"Old names, served by ortrain: {_served(spec.name)}.")
        module.__dict__["__getattr__"] = _lookup(spec.name, None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass

    def get_code(self, name: str) -> CodeType:
        """What ``-m`` runs.

        Raises:
            ImportError: the module is no program.
        """
        if name not in PROGRAMS:
            raise ImportError(f"{name} is no program that -m can run", name=name)
        spec = importlib.util.find_spec(PROGRAMS[name])
        assert spec is not None
        code: CodeType = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        return code


class _OldModule(ModuleType):
    """A module of old names, which lists them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "ONNX_OPSET_VERSION":
            warnings.warn(
                f"{self.__name__}.{name} = {value!r} does nothing here: "
                "ORTMODULE_ONNX_OPSET_VERSION or ortrain.Options(opset=) sets the opset",
                OrtrainWarning,
                stacklevel=2,
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *names_of(self.__name__)]


class _Completing(Loader):
    """The loader of an installed module, behind which the names are added that it lacks."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module shows its own loader, of which others ask for files and sources.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _complete(sys.modules.get(module.__name__, module))
        # transformers.processing_utils runs its package again, which is another module then.
        root = sys.modules.get(module.__name__.partition(".")[0])
        if root is not None and root.__name__ in HOSTS and not _is_complete(root):
            _complete(root)


def _is_complete(module: ModuleType) -> bool:
    return getattr(vars(module).get("__getattr__"), "__module__", None) == __name__


def _complete(module: ModuleType) -> None:
    """Adds the names and arguments of the table that a module lacks, in memory alone."""
    name = module.__name__
    if name in PACKAGES and not isinstance(module, _OldModule):
        module.__dict__["__getattr__"] = _lookup(name, _own_lookup(module))
    for extend in EXTENSIONS.get(name, ()):
        _target(extend)(module)


def _own_lookup(module: ModuleType) -> Callable[[str], Any] | None:
    """How the module itself answers for attributes that are not in its dictionary."""
    own: Callable[[str], Any] | None = module.__dict__.get("__getattr__")
    if own is None and (method := getattr(type(module), "__getattr__", None)) is not None:
        own = method.__get__(module)
    return own


def _lookup(module: str, own: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: first its own, then the table."""

    def load(name: str) -> Any:
        missing = AttributeError(f"module {module!r} has no attribute {name!r}")
        if own is not None:
            try:
                return own(name)
            except AttributeError as error:
                missing = error
        full = f"{module}.{name}"
        # Where a program looks for the attributes that every module may have, nothing is loaded.
        if not name.startswith("__") or name == "__all__":
            if (home := home_of(module, name)) is not None:
                value = _target(home)
                sys.modules[module].__dict__[name] = value
                return value
            if name == "__all__" and isinstance(sys.modules[module], _OldModule):
                return names_of(module)
            if (removal := removal_of(full)) is not None:
                raise removal.error(RemovedAttribute, full)
            if full in PACKAGES:
                return importlib.import_module(full)
        raise missing

    return load


def _target(home: str) -> Any:
    """What ``module:name`` stands for."""
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)


def _served(module: str) -> str:
    """What a module has, for its docstring."""
    return ", ".join([*explicit(module), *starred(module)]) or "the packages below it"
