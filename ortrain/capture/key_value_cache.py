"""Key-value caches of transformers' decoders, which neither training nor a plain forward needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def caching_configs(module: nn.Module) -> list[Any]:
    """The configs that ask for a cache; the decoder of an encoder-decoder has one of its own."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            configs[id(config)] = config
    return list(configs.values())


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """No caches meanwhile."""
    configs = caching_configs(module)
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True
