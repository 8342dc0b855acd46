"""Gradient composites: what a rule emits as one node, for executors that have a kernel of it.

The body spells the gradient in standard operators, as it is for every executor that has none.
"""

from ortrain.ops.gradients import activation, attention, conv, index, norm, pool, softmax

__all__ = ["activation", "attention", "conv", "index", "norm", "pool", "softmax"]
