"""``ortrain run``: a script for ONNX Runtime Training or Optimum, as it stands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

DESCRIPTION = (
    "Run a script or a module in which the imports of torch_ort, onnxruntime.training and "
    "optimum.onnxruntime resolve to ortrain; see docs/migration.md."
)


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands, for the list of them: `run_script` runs it."""
    parser = commands.add_parser(
        "run",
        help="run a script for ONNX Runtime Training or Optimum as it stands",
        description=DESCRIPTION,
        usage="ortrain run [-h] [-m module | script.py] [argument ...]",
    )
    parser.add_argument("script", metavar="script.py", help="the script, or -m and a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the script")


def run_script(arguments: Sequence[str]) -> int:
    """Run a script; what it raises, and how it exits, is its own.

    Args:
        arguments: the command line behind ``ortrain run``.

    Returns:
        0 at its end, 2 where there is no such script.
    """
    from ortrain.compat.running import NothingToRun, run

    try:
        run(arguments)
    except NothingToRun as error:
        print(f"ortrain: error: {error}", file=sys.stderr)
        return 2
    return 0
