"""What of a call's masks may lead code another way than its trace, which sees no values.

Libraries leave a mask out where it hides nothing: ``if not is_tracing(mask) and mask.all()``. In a
graph it is always there. Both ways should give the same numbers, and one call cannot tell. So the
first call of each kind is compared with the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Kind = tuple[tuple[bool, bool], ...]


class Kinds:
    """Tells kinds of calls apart: which tensors of truths and whole numbers hold no zero.

    Of a batch or a length of 1 a comparison says nothing about others.

    Args:
        tensors: of the first call, by their places.

    Attributes:
        compared: the kinds of calls that were compared with the module.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places = [
            place
            for place, tensor in enumerate(tensors)
            if tensor.ndim > 1 and not tensor.is_floating_point() and not tensor.is_complex()
        ]
        self.compared: set[Kind] = set()

    def of(self, tensors: Sequence[torch.Tensor]) -> Kind:
        """That of a call. A mask of 8 x 128 takes 3 us."""
        marked = [tensors[place] for place in self._places]
        return tuple([(bool(each.all()), 1 in each.shape) for each in marked])

    def is_that_of(self, tensors: Sequence[torch.Tensor], rows: Mapping[int, int]) -> bool:
        """Whether a call has the kind of so many first rows of its tensors, by their places."""
        first = [t[: rows[place]] if place in rows else t for place, t in enumerate(tensors)]
        return self.of(first) == self.of(tensors)
