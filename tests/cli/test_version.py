"""``ortrain --version`` says what is installed, and imports none of it."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys

import pytest

import ortrain
from ortrain.cli import main, version


def test_the_versions_of_what_is_installed_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "PACKAGES", (*version.PACKAGES, "no-such-package"))
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"ortrain {ortrain.__version__}", f"Python {platform.python_version()}"]
    for name in ("numpy", "onnx", "torch"):
        assert f"{name} {importlib.metadata.version(name)}" in lines
    assert not any("no-such-package" in line for line in lines)


def test_nothing_large_is_imported_for_it() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['ortrain', '--version']\n"
        "try:\n    runpy.run_module('ortrain', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "loaded = {'torch', 'onnx', 'onnxruntime', 'transformers'} & {*sys.modules}\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ortrain ")
