"""``python -m torch_ort.configure`` and its like: there is nothing to compile."""

from __future__ import annotations

from typing import Any


def build_torch_cpp_extensions(*_: Any, **__: Any) -> None:
    """Says that nothing needs compiling."""
    print("ortrain has no extensions: nothing needs compiling")


def is_installed(*_: Any, **__: Any) -> bool:
    """True: what has to be compiled is there, which is nothing."""
    return True


if __name__ == "__main__":
    build_torch_cpp_extensions()
