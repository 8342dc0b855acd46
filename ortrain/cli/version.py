"""``ortrain --version``: what a report of a defect needs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
from typing import Any

import ortrain

PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "onnx", "torch", "transformers")


def versions() -> str:
    """The versions of ortrain, Python and the packages that are installed, one a line."""
    found = {"ortrain": ortrain.__version__, "Python": platform.python_version()}
    for name in PACKAGES:  # not imported, which takes seconds
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return "\n".join(f"{name} {version}" for name, version in found.items())


class Version(argparse.Action):
    """Prints the versions and ends; argparse's own would put them in one paragraph."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and exit with status 0."""
        print(versions())
        parser.exit()
