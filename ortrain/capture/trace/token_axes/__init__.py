"""How each of PyTorch's operators treats axes of tokens: alone, place by place, or mixed.

An axis whose size is a symbol of a trace is one of tokens. An operator carries it where an element
of the result depends, of each operand, on elements at its own place of that axis and on no others,
and on no number of places. In a backward, what is zero wherever the gradients that arrive are zero
may be added up over all tokens at once, as the gradients of weights are.
"""

from __future__ import annotations

from ortrain.capture.trace.token_axes import elementwise, places, sums
from ortrain.capture.trace.token_axes.elementwise import POINTWISE
from ortrain.capture.trace.token_axes.walk import Axes, Ref, Step, Walk

__all__ = ["POINTWISE", "Axes", "Ref", "Step", "Walk", "elementwise", "places", "sums"]
