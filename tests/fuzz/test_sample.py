"""A small part of ``make fuzz``: each kind of attack on each kind of file and command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the attacks are made in forks")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_and_nothing_damaged_is_accepted(tmp_path: Path) -> None:
    # In a process of its own, without the threads that others have started: it forks.
    command = [sys.executable, "-m", "tests.fuzz", "--share", "0.003", "--seed", "1"]
    done = subprocess.run(
        [*command, "--keep", str(tmp_path / "counts.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "counts.json").read_text())
    assert found["wrong"] == 0
    assert len(found["counts"]) > 40
