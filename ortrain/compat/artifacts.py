"""``generate_artifacts`` as scripts call it, with options that it did not look at."""

from __future__ import annotations

from ortrain.extras import require

require("onnx", __name__)

import difflib
import functools
import inspect
import warnings
from typing import Any

from ortrain import ondevice
from ortrain.errors import OrtrainWarning

__all__ = ["generate_artifacts"]

_KNOWN = tuple(inspect.signature(ondevice.generate_artifacts).parameters)


@functools.wraps(ondevice.generate_artifacts)
def generate_artifacts(*args: Any, **options: Any) -> None:
    """As :func:`ortrain.ondevice.generate_artifacts`.

    An option that does not exist is left out and told in a warning: the original never looked at
    such options, and scripts pass on to it what they give to the exporter.
    """
    for name in [name for name in options if name not in _KNOWN]:
        del options[name]
        near = difflib.get_close_matches(name, _KNOWN, 1)
        warnings.warn(
            f"generate_artifacts: there is no option {name!r}, and there was none"
            + (f"; near it is {near[0]!r}" if near else ""),
            OrtrainWarning,
            stacklevel=2,
        )
    ondevice.generate_artifacts(*args, **options)
