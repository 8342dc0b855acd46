"""The peak of memory, and what a page says of cost; nothing here asserts a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortrain.deploy import GoldenSet, ModelFolder
from ortrain.deploy.equivalence import facts, peak
from ortrain.deploy.equivalence.memory import peak_memory
from ortrain.deploy.equivalence.sessions import opened
from tests.deploy import classifiers

CPU = "CPUExecutionProvider"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="elsewhere it is coarser")
def test_the_peak_is_that_of_the_weights_and_no_other_process(tmp_path: Path) -> None:
    held = np.ones(1 << 25)  # 256 MiB of this process, which a child would inherit as its peak
    wide = classifiers.weights()
    wide["table"] = np.ones((1 << 20, 3), np.float32)  # 12 MiB
    folder = ModelFolder.open(
        classifiers.folder(tmp_path, classifiers.graph("classification", wide))
    )
    side, _ = opened(folder, folder, CPU, 1)
    found, trouble = peak_memory(side, classifiers.batches()[0][0], CPU, 1)
    assert trouble == ""
    assert found is not None
    assert wide["table"].nbytes <= found < 128 << 20
    assert held.nbytes > 128 << 20


def test_the_script_needs_nothing_of_ortrain() -> None:
    code = Path(peak.__file__).read_text()
    assert "import ortrain" not in code
    assert "from ortrain" not in code


def test_a_script_that_fails_is_told_by_its_last_line(tmp_path: Path) -> None:
    asked = {"files": [{"model": "none.onnx", "feeds": "none.npz"}], "provider": CPU, "threads": 1}
    done = subprocess.run(
        [sys.executable, "-P", os.fspath(Path(peak.__file__))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "none.npz" in done.stderr.splitlines()[-1]


def test_operators_of_functions_and_subgraphs_count(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "own" : 1]>\n'
        "g (bool c, float[n] x) => (float[n] y) {\n"
        "  y = If (c) <then_branch = t () => (float[n] a) { a = own.twice(x) },"
        " else_branch = e () => (float[n] b) { b = Neg(x) }>\n}\n"
        '<domain: "own", opset_import: ["" : 21]>\ntwice (x) => (y) { y = Add(x, x) }'
    )
    folder = ModelFolder.open(classifiers.folder(tmp_path, model))
    _, _, operators = facts.files_of(folder)
    assert operators == {"If": 1, "own::twice": 1, "Neg": 1, "Add": 1}


def test_weights_beside_a_file_are_of_its_size(tmp_path: Path) -> None:
    path = classifiers.folder(tmp_path)
    model = onnx.load(path / "model.onnx")
    onnx.save(
        model, path / "model.onnx", save_as_external_data=True, location="w", size_threshold=0
    )
    sizes, checksums, _ = facts.files_of(ModelFolder.open(path))
    assert sizes.keys() == checksums.keys() == {"model.onnx", "w"}
    assert sizes["w"] == (path / "w").stat().st_size


def test_the_environment_names_what_figures_rest_on() -> None:
    found = facts.environment(CPU, 2)
    assert found["threads"] == "2"
    assert found["processor"] != ""
    assert {"onnxruntime", "onnx", "numpy", "python", "system"} <= found.keys()


def test_a_golden_set_of_one_batch_is_timed_once_for_each_size() -> None:
    from ortrain.deploy.equivalence.speed import size_of

    golden = GoldenSet([{"x": np.zeros((1, 3)), "y": np.zeros((1, 2, 2))}])
    assert size_of(golden.batches[0]) == "1 x 2 x 2"
    assert size_of({"input_ids": np.zeros((4, 2)), "z": np.zeros((4, 9))}) == "4 x 2"
