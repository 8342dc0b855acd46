"""No import runs back up, there is no circle of files, and every folder says what is in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ortrain"

# From the lowest: files of a row import those of their own row and of rows above it, no others.
LAYERS = """
    errors uncollected lazy exclusive files cpuinfo units
    extras kinds config variables
    json_config
    program graph ops
    autodiff
    passes cache
    pytorch
    aside key_value_cache
    capture.origin capture.traced capture.writes capture.call capture.refusal
    capture.onnx
    capture.fx
    capture
    runtime
    runtime.reference runtime.onnxruntime runtime.aten
    runtime.engines
    step
    frontend
    methods assigned_forward
    module
    explanation deploy
    optim data hooks hierarchical
    trainer
    ondevice.contract
    ondevice.running
    ondevice.making.optim
    ondevice.making
    ondevice.onnxblock
    ondevice
    deploy.quantization
    classic
    testing
    compat.hugging_face compat.table compat.finder
    compat
    cli
    __main__
"""
ROWS = [line.split() for line in LAYERS.splitlines() if line.strip()]
HEIGHT = {name: row for row, names in enumerate(ROWS) for name in names}


def modules() -> dict[str, Path]:
    """Files by their names behind ``ortrain.``; the package's own is empty."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(tree: ast.AST) -> Iterator[str]:
    """What a file imports of ortrain, in functions too; what is for types alone is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ortrain":
            folder = (node.module or "").removeprefix("ortrain").removeprefix(".")
            for alias in node.names:
                name = f"{folder}.{alias.name}".removeprefix(".")
                yield name if name in MODULES else folder
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("ortrain."):
                    yield alias.name.removeprefix("ortrain.")
        else:
            yield from imports(node)


IMPORTS = {
    name: {each for each in imports(ast.parse(path.read_text())) if each != name}
    for name, path in MODULES.items()
}


def layer(name: str) -> str:
    """The longest entry of LAYERS that a module is in."""
    parts = name.split(".")
    return next(
        (each for i in range(len(parts), 0, -1) if (each := ".".join(parts[:i])) in HEIGHT), ""
    )


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_no_import_runs_back_up(name: str) -> None:
    own = layer(name)
    assert own, f"{name} is in no layer"
    for other in IMPORTS[name] - {""}:
        assert HEIGHT[layer(other)] <= HEIGHT[own], f"{name} imports {other}"


def test_there_is_no_circle_of_files() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize("name", [n for n, path in MODULES.items() if path.stem == "__init__"])
def test_a_folder_says_what_is_in_it(name: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[name].read_text()))
