"""Kinds of operators in a graph.

Private: ``torch._ops.OpOverload``, which ``torch.ops.aten.add.Tensor`` is one of, and
``HigherOrderOperator``, which ``torch.ops.higher_order.cond`` is one of. Without their names the
import fails.
"""

from torch import _ops

OpOverload = _ops.OpOverload
HigherOrderOperator = _ops.HigherOrderOperator
