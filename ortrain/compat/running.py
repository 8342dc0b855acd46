"""Runs a script or a module as Python itself does, with old imports resolving.

Also in processes that the script starts by ``multiprocessing``: these run the main module again.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ortrain.errors import InputError
from ortrain.files.regular import expect_regular

USAGE = "[-m module | script.py] [argument ...]"
# What a process of multiprocessing imports in place of the main module.
_AGAIN = "ortrain.compat.again"


class NothingToRun(Exception):
    """The command line names no script or module, or one that is not there; one line."""


def run(arguments: Sequence[str]) -> None:
    """Runs ``script.py …`` or ``-m module …`` as the main module.

    ``sys.argv`` and ``sys.path`` are as they are under Python's own command; what the script raises
    comes through.

    Args:
        arguments: the command line behind the command.

    Raises:
        NothingToRun: there is no such script or module.
    """
    if not arguments:
        raise NothingToRun(f"expected {USAGE}")
    if arguments[0] == "-m":
        if len(arguments) < 2:
            raise NothingToRun("-m needs the name of a module")
        sys.path[0] = str(Path.cwd())
        code, origin, package = _module(arguments[1])
        sys.argv = [origin, *arguments[2:]]
    else:
        if arguments[0].startswith("-"):
            raise NothingToRun(f"{arguments[0]!r} is no option; expected {USAGE}")
        script = Path(arguments[0])
        if script.is_dir():
            script /= "__main__.py"
        origin, package = str(script), ""
        sys.argv = list(arguments)
        sys.path[0] = str(script.parent.absolute())
        code = _code(script)
    _execute(code, origin, package, "__main__")


def run_again(script: str, into: dict[str, Any]) -> None:
    """Runs the main module of the process that started this one, and hands over its names."""
    path = Path(script)
    folders = [path.parent]
    while (folders[-1] / "__init__.py").exists():
        folders.append(folders[-1].parent)
    package = ".".join(folder.name for folder in reversed(folders[:-1]))
    into.update(vars(_execute(_code(path), str(path), package, "__mp_main__")))


def _module(name: str) -> tuple[CodeType, str, str]:
    """A module's code, file and package; of a package, those of its ``__main__``."""
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        main = f"{name}.__main__"
        if (inner := _spec(main)) is not None:
            name, spec = main, inner
    code = None
    loader: Any = None if spec is None else spec.loader
    if hasattr(loader, "get_code"):
        try:
            code = loader.get_code(name)
        except ImportError as error:
            raise NothingToRun(str(error)) from None
    if code is None:
        raise NothingToRun(f"there is no module {name!r} to run")
    return code, code.co_filename, name.rpartition(".")[0]


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if name == error.name or name.startswith(f"{error.name}."):
            return None
        raise


def _code(path: Path) -> CodeType:
    try:
        expect_regular(path)
        if path.suffix == ".pyc":
            found = SourcelessFileLoader("__main__", str(path)).get_code("__main__")
            assert found is not None
            return found
        with io.open_code(str(path.absolute())) as file:
            return compile(file.read(), str(path), "exec", dont_inherit=True)
    except InputError as error:
        raise NothingToRun(f"{error.what}; {error.help}") from None
    except OSError as error:
        raise NothingToRun(f"{path}: {error.strerror}") from None


def _execute(code: CodeType, origin: str, package: str, name: str) -> ModuleType:
    """Runs code as a main module."""
    main = ModuleType(name)
    main.__dict__.update(__file__=origin, __builtins__=__builtins__)
    main.__package__ = package or None
    # multiprocessing's processes import what is named here, by which they know the old names, too.
    main.__spec__ = ModuleSpec(_AGAIN, None, origin=origin)
    sys.modules[name] = main
    exec(code, main.__dict__)
    return main
