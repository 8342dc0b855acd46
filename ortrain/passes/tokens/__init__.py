"""Work on tokens whose results nobody reads is left out: padding, and what has no label.

Tokens are the places (row, position) of a batch. A walk from the outputs back
(:mod:`~ortrain.passes.tokens.demand`) finds for each value at which places it is read at all: an
attention mask shuts keys out, a loss leaves out labels, a pooler reads one position. Then the
program is changed (:mod:`~ortrain.passes.tokens.packing`): what works on each token alone gets the
tokens that are read, one behind another in one row, and everything else the batch as it was. What
has all tokens computed all the same is told by :mod:`~ortrain.passes.tokens.obstacles`.
"""

from ortrain.passes.tokens.demand import Demands, Shown, demands
from ortrain.passes.tokens.frames import Grid
from ortrain.passes.tokens.kept import Kept, Position
from ortrain.passes.tokens.obstacles import Obstacle, leaves_out, obstacles
from ortrain.passes.tokens.packing import Packed, packed

__all__ = [
    "Demands",
    "Grid",
    "Kept",
    "Obstacle",
    "Packed",
    "Position",
    "Shown",
    "demands",
    "leaves_out",
    "obstacles",
    "packed",
]
