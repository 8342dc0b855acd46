"""How casts move in a graph, which has no settings here."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import enum
import warnings
from typing import Any

from torch import nn

from ortrain.errors import OrtrainWarning
from ortrain.kinds import expect


class PropagateCastOpsStrategy(enum.Enum):
    """The old strategies."""

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2


class PropagateCastLevel(enum.IntEnum):
    """The old levels, under their old names."""

    NOT_USED = -1
    FASTER_KEEP_PRECISION = 1
    AGGRRESSIVE_MIXED_PRECISION = 2


def set_propagate_cast_ops_optimization(
    model: Any,
    strategy: PropagateCastOpsStrategy = PropagateCastOpsStrategy.FLOOD_FILL,
    level: PropagateCastLevel = PropagateCastLevel.NOT_USED,
) -> None:
    """Checks what it is given, and says where it asks for more than graphs do.

    Casts always move as far as no number changes, which is what the middle level asks for.

    Args:
        model: an ORTModule, or a module with some inside.
        strategy: how casts would move.
        level: how far.

    Raises:
        TypeError: the model is no module, or the strategy or the level is none.
        ValueError: there is no such strategy or level.
    """
    expect("model", model, nn.Module, "an ORTModule")
    expect("strategy", strategy, (PropagateCastOpsStrategy, int), "a PropagateCastOpsStrategy")
    expect("level", level, int, "a PropagateCastLevel")
    strategy, level = PropagateCastOpsStrategy(strategy), PropagateCastLevel(level)
    if level > 1:
        warnings.warn(
            f"the level {level.name} does nothing: casts move as far as no number changes; "
            "Options(precision='bf16') has operators compute in 16 bits as autocast does",
            OrtrainWarning,
            stacklevel=2,
        )
