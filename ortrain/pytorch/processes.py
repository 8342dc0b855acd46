"""What processes that train together share.

Private: ``torch.distributed.distributed_c10d._get_default_store``. Without it each process goes by
its own clock.
"""

from __future__ import annotations

from typing import Any

from torch import distributed


def store() -> Any:
    """The store of the default process group; None where no other process trains along."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if distributed.get_world_size() < 2:
        return None
    known = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if known is None else known()
