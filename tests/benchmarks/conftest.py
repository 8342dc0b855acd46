"""The scripts in benchmarks/ import each other by name, as Python finds them when it runs one."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
