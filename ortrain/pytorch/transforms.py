"""Tensors of ``torch.func`` transforms.

Private: ``torch._C._functorch.is_functorch_wrapped_tensor``. Without its name the import fails: a
tensor of a transform that has ended says that it requires a gradient, and gives none.
"""

from typing import Any

from torch._C import _functorch

is_wrapped: Any = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform, such as ``torch.func.grad``, be it over or not."""
