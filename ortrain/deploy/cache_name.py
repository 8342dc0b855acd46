"""What transformers calls a decoder's cache: ``past_key_values``, and ``cache`` since 5.24."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

_OLD, _NEW = "past_key_values", "cache"


@functools.cache
def cache_name() -> str:
    """Its name among the arguments and results of the models of this transformers."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    named = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
    return _NEW if _NEW in named else _OLD


def take_cache(kwargs: dict[str, Any], given: Any = None) -> Any:
    """Takes the cache out of keyword arguments, under either name; else what was given."""
    found = [kwargs.pop(name, None) for name in (_NEW, _OLD)]
    return next((each for each in found if each is not None), given)
