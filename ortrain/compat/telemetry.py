"""What example scripts of transformers told its makers of."""

from __future__ import annotations

import warnings
from typing import Any

from ortrain.errors import OrtrainWarning


def send_example_telemetry(
    example_name: str, *example_args: Any, framework: str = "pytorch"
) -> None:
    """Sends nothing, and says so.

    Args:
        example_name: of the script.
        *example_args: what it was called with; not read.
        framework: not read.
    """
    message = f"send_example_telemetry: nothing is sent of {example_name}"
    warnings.warn(message, OrtrainWarning, stacklevel=2)
