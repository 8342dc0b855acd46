"""What Linux tells of the processor."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortrain.uncollected import uncollected


@functools.cache
def cpuinfo() -> Mapping[str, str]:
    """Of the first processor, by Linux' names; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


# Seconds that `_python` takes on an EPYC of the fifth generation, where costs of tracing and of
# building were measured. On one of the fourth it takes 1.19 ms, and traces 1.3 times as long.
_MEASURED = 0.92e-3


@functools.cache
def slowness() -> float:
    """How many times as long as on that processor Python takes on this one; at least 1."""
    with uncollected():
        return max(1.0, min(_python() for _ in range(5)) / _MEASURED)


def _python() -> float:
    """Seconds of what tracing does most: to make small objects, and to look names up."""
    start = time.perf_counter()
    known: dict[str, tuple[Any, ...]] = {
        str(number): (number, [number], {number: number}) for number in range(4000)
    }
    for name in sorted(known, key=len):
        known[name] = known[name][:2]
    return time.perf_counter() - start


def processor() -> str:
    """Names the processor, for what was measured on it."""
    known = cpuinfo()
    if not known:
        return platform.machine()
    return f"{known.get('vendor_id', '')}-{known.get('model', '')}-{os.cpu_count()}"
