"""The key-value cache of a decoder's file: which inputs and outputs are its tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from ortrain.deploy.cached_decoder import fill
from ortrain.deploy.models.session import Session, Value
from ortrain.errors import InputError, UnsupportedInput

PAST = re.compile(r"past_key_values\.(\d+)\.(?:(decoder|encoder)\.)?(key|value)")
PRESENT = re.compile(r"present(?:_key_values)?\.(\d+)\.(?:(decoder|encoder)\.)?(key|value)")
BRANCH = "use_cache_branch"


class CacheNames:
    """Names of a file's inputs and outputs that are keys and values, keys and values in turn.

    Args:
        session: the file.
        config: of the decoder, for the sizes that the file leaves open.

    Attributes:
        past: inputs of the tokens before, layer by layer; empty where the file takes no cache.
        cross: inputs of the encoder's states.
        present: positions of the outputs, with the new tokens.
        computed: positions of the outputs of the encoder's states.
        branch: whether the file has both a way with a cache and one without.

    Raises:
        InputError: the file has a cache of another form.
    """

    def __init__(self, session: Session, config: Any) -> None:
        self.session, self._config = session, config
        names = [*session.outputs]
        own, other = _sorted(session, PAST, session.inputs)
        self.past: list[Value] = [session.inputs[name] for name in own]
        self.cross: list[Value] = [session.inputs[name] for name in other]
        own, other = _sorted(session, PRESENT, session.outputs)
        self.present = [names.index(name) for name in own]
        self.computed = [names.index(name) for name in other]
        self.branch = BRANCH in session.inputs
        for value in (*self.past, *self.cross):
            if len(value.shape) != 4:
                raise InputError(
                    f"{session.path.name} has a cache of another form: {value}",
                    help="export the model again: keys and values of [batch, heads, length, size]",
                )

    def empty(self, values: Sequence[Value], rows: int, device: torch.device) -> list[torch.Tensor]:
        """States of no tokens; of one where the file does not read them."""
        length = 1 if self.branch else 0
        return [
            torch.zeros(rows, *self._sizes(value, length), dtype=value.dtype, device=device)
            for value in values
        ]

    def _sizes(self, value: Value, length: int) -> tuple[int, int, int]:
        config = self._config
        heads, size = value.shape[1], value.shape[3]
        if not isinstance(heads, int):
            heads = _first(config, "num_key_value_heads", "decoder_attention_heads", "num_heads")
            heads = heads or _first(config, "num_attention_heads", "n_head")
        if not isinstance(size, int):
            size = _first(config, "head_dim", "d_kv")
            if size is None:
                width = _first(config, "hidden_size", "d_model", "n_embd")
                queries = _first(config, "num_attention_heads", "decoder_attention_heads", "n_head")
                size = width // queries if width and queries else None
        if heads is None or size is None:
            raise InputError(
                f"{self.session.path.name} leaves the sizes of its cache open: {value}",
                help="export the model again, with heads and sizes of the cache as numbers",
            )
        return heads, length, size


def _first(config: Any, *names: str) -> int | None:
    return next((v for name in names if (v := getattr(config, name, None)) is not None), None)


def _sorted(session: Session, pattern: re.Pattern[str], names: Any) -> tuple[list[str], list[str]]:
    """Those of the decoder's own tokens and those of the encoder's, by layer, keys first."""
    found: dict[bool, list[tuple[int, str, str]]] = {False: [], True: []}
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            found[match[2] == "encoder"].append((int(match[1]), match[3], name))
        elif name.startswith(("past_key_values", "present")):
            raise InputError(
                f"{session.path.name} has a cache of another form: {name}",
                help="export the model again: key and value of each layer are taken apart",
            )
    for entries in found.values():
        layers = [entry[0] for entry in sorted(entries)]
        if layers != [i // 2 for i in range(len(entries))]:
            raise InputError(f"{session.path.name} lacks the key or value of some layer")
    return tuple([entry[2] for entry in sorted(found[paired])] for paired in (False, True))  # type: ignore[return-value]


def expect_cache(cache: Any, paired: bool) -> None:
    """Raises where a cache is none that grows by the tokens of a file.

    Raises:
        UnsupportedInput: it is of another kind.
    """
    parts: tuple[Any, ...] = (cache,)
    wrong = isinstance(cache, EncoderDecoderCache) is not paired
    if paired and not wrong:
        parts = (cache.self_attention_cache, cache.cross_attention_cache)
    for part in parts:
        if wrong or type(part) is not DynamicCache or part.offloading:
            what = f"a {type(part).__name__}"
        elif (other := next((x for x in part.layers if type(x) is not DynamicLayer), None)) is None:
            continue
        else:
            what = f"a cache of {type(other).__name__}s"
        wanted = (
            "EncoderDecoderCache(DynamicCache(), DynamicCache())" if paired else "DynamicCache()"
        )
        raise UnsupportedInput(
            f"past_key_values is {what}",
            because="the cache of an exported file holds all tokens so far",
            help=f"pass a transformers {wanted}, or what the last call has returned",
        )


def new_cache(paired: bool) -> Any:
    """An empty cache."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if paired else DynamicCache()


def fill_cross(cache: Any, states: Sequence[torch.Tensor]) -> None:
    """Puts the encoder's keys and values into a cache of both."""
    fill(cache.cross_attention_cache, states)
    layers = range(len(cache.cross_attention_cache))
    cache.is_updated.update(dict.fromkeys(layers, True))
