"""What Linux tells of the processor."""

from __future__ import annotations

import functools
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
