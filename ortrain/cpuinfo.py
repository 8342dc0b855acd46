"""What Linux tells of the processor."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def cpuinfo() -> Mapping[str, str]:
    """Of the first processor, by Linux' names; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def processor() -> str:
    """Names the processor, for what was measured on it."""
    known = cpuinfo()
    if not known:
        return platform.machine()
    return f"{known.get('vendor_id', '')}-{known.get('model', '')}-{os.cpu_count()}"
