"""Public names of a package that load what they need when they are first used."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ortrain.uncollected import uncollected

# Where one load makes more objects than this, they are collected once behind it: `ORTModule` makes
# 340,000, which takes 0.25 s. Else the first step would pay for them, and the third again.
MANY = 50_000


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its name.
        homes: public name → the module that has it.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        wanted = gc.isenabled()
        with uncollected():
            value = getattr(importlib.import_module(homes[name]), name)
            if wanted and gc.get_count()[0] > MANY:
                gc.collect()
        setattr(sys.modules[package], name, value)
        return value

    return load
