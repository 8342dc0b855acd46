"""Optimum's ``ORTOptimizer`` and ``ORTQuantizer``, which may write beside what they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from ortrain.deploy.optimization import ORTOptimizer as _Optimizer
from ortrain.deploy.quantization import ORTQuantizer as _Quantizer


class ORTOptimizer(_Optimizer):
    """As ``ortrain.deploy``'s; ``save_dir`` may be the source's folder, where names have a suffix.

    The files of the source stay as they are: one of them in the way is a ValueError.
    """

    @classmethod
    def from_pretrained(cls, model_or_path: Any, file_names: Sequence[str] | None = None) -> Self:
        """As ``ortrain.deploy``'s."""
        made: Any = super().from_pretrained(model_or_path, file_names)
        made.folder = replace(made.folder, grows=True)
        return made


class ORTQuantizer(_Quantizer):
    """As ``ortrain.deploy``'s; ``save_dir`` may be the source's folder, where names have a suffix.

    The files of the source stay as they are: one of them in the way is a ValueError.
    """

    @classmethod
    def from_pretrained(
        cls, model_or_path: Any, file_name: str | Sequence[str] | None = None
    ) -> Self:
        """As ``ortrain.deploy``'s."""
        made: Any = super().from_pretrained(model_or_path, file_name)
        made._source = replace(made._source, grows=True)
        return made
