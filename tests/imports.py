"""Imports every module of ortrain where some packages are not there; run as a script.

Usage: imports.py PACKAGE…   Prints, as JSON, module → "" or what its import raises.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "ortrain"

for package in sys.argv[1:]:
    sys.modules[package] = None  # type: ignore[assignment]

found = {}
for path in sorted(ROOT.rglob("*.py")):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    try:
        importlib.import_module(name)
    except ImportError as error:
        found[name] = f"{type(error).__name__}: {error}"
    else:
        found[name] = ""
print(json.dumps(found))
