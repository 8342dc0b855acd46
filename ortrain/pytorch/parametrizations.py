"""Whether PyTorch keeps parametrized tensors from call to call.

Private: ``torch.nn.utils.parametrize._cache_enabled``, of ``parametrize.cached()``. Without it a
copy of a module that runs aside may leave in that cache what it has computed.
"""

from torch.nn.utils import parametrize


def parametrizations_are_kept() -> bool:
    """Whether ``torch.nn.utils.parametrize.cached()`` is around."""
    return bool(getattr(parametrize, "_cache_enabled", 0))
