"""``python -m torch_ort.configure`` and its like: there is nothing to compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Where the extensions of the old builds stood, which scripts give to `is_installed`.
TORCH_CPP_DIR = str(Path(__file__).parent)


def build_torch_cpp_extensions(*_: Any, **__: Any) -> None:
    """Says that nothing needs compiling."""
    print("ortrain has no extensions: nothing needs compiling")


def is_installed(*_: Any, **__: Any) -> bool:
    """True: what has to be compiled is there, which is nothing."""
    return True


if __name__ == "__main__":
    build_torch_cpp_extensions()
