"""Real labelled text that is on every machine: docstrings, labelled by the library they explain.

The sources are parsed, never imported. A name that would give the answer away is taken out of the
text, and whole files go either to training or to evaluation, so that a docstring and its near copy
next door are never on both sides.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import itertools
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LIBRARIES: dict[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "onnx": ("onnx", "onnxscript", "onnx_ir"),
    "python": (),
    "torch": ("torch",),
    "transformers": ("transformers",),
}
"""The packages that stand for each label; ``python`` is the standard library."""

_GIVEAWAYS = re.compile(
    r"""\b(?:
        numpy | np | ndarrays? | onnx\w* | onnx[ _-]?(?:script|runtime|ir) | c?python\w* | py3
      | (?:py)?torch\w* | aten | caffe2 | transformers? | hugging[ _-]?face | pretrained\w*
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
_LINKS = re.compile(r"\[[^\]]*\]\(https?:[^)]*\)|https?:\S+")
_NOT_SOURCES = {"tests", "test", "testing", "site-packages", "idlelib", "lib2to3", "_vendor"}
_SHORTEST, _LONGEST = 80, 240
"""Characters of a text: enough to tell something, and no more than about 60 tokens."""
_OF_A_FILE = 8
"""Texts of one file at most, so that no single file makes up half of a library."""
_HELD_OUT = 5
"""One file in so many is held out."""


@dataclass(frozen=True, slots=True)
class Docstring:
    """One text, the library that it comes from, and whether it is held out."""

    text: str
    library: str
    held_out: bool


def collect(
    training: int, held_out: int, libraries: Sequence[str] = tuple(LIBRARIES)
) -> list[Docstring]:
    """Collect the same number of docstrings of each library.

    The choice depends on the installed sources alone.

    Args:
        training: Docstrings of each library to train on, at most; fewer if it has fewer.
        held_out: Docstrings of each library to evaluate on, at most.
        libraries: Labels, from ``LIBRARIES``.

    Returns:
        The docstrings, library by library.
    """
    chosen: list[Docstring] = []
    seen: set[str] = set()
    for library in libraries:
        wanted = {False: training, True: held_out}
        for root, path in _sources(library):
            held = _is_held_out(library, path.relative_to(root))
            if not wanted[held]:
                if not any(wanted.values()):
                    break
                continue
            for text in itertools.islice(_texts(path), _OF_A_FILE):
                if text not in seen and wanted[held]:
                    seen.add(text)
                    wanted[held] -= 1
                    chosen.append(Docstring(text, library, held))
    return chosen


def _sources(library: str) -> list[tuple[Path, Path]]:
    """The library's files, each with its root, in an order that mixes its parts."""
    roots = []
    for package in LIBRARIES[library]:
        found = importlib.util.find_spec(package)
        if found is not None and found.submodule_search_locations:
            roots.append(Path(found.submodule_search_locations[0]))
    if not LIBRARIES[library]:
        roots.append(Path(sysconfig.get_path("stdlib")))
    files = [
        (root, path)
        for root in roots
        for path in sorted(root.rglob("*.py"))
        if not _NOT_SOURCES.intersection(path.relative_to(root).parts)
    ]
    random.Random(library).shuffle(files)
    return files


def _texts(path: Path) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            # Others' sources may hold escapes that a newer Python warns about.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node, clean=False)):
            text = _cleaned(docstring)
            if len(text) >= _SHORTEST:
                yield text


def _cleaned(docstring: str) -> str:
    """The prose of a docstring in one line, without examples and names that give it away."""
    lines = inspect.cleandoc(docstring).splitlines()
    prose = " ".join(line for line in lines if not line.lstrip().startswith((">>>", "...")))
    prose = " ".join(_GIVEAWAYS.sub("", _LINKS.sub("", prose)).split())
    if len(prose) > _LONGEST:
        prose = prose[:_LONGEST].rsplit(" ", 1)[0]
    return prose


def _is_held_out(library: str, path: Path) -> bool:
    digest = hashlib.sha256(f"{library}/{path.as_posix()}".encode()).digest()
    return digest[0] % _HELD_OUT == 0
