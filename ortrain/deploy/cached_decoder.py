"""A transformers model's encoder and decoder as modules of tensors alone, as a graph takes them."""

from __future__ import annotations

from ortrain.extras import require

require("hf", __name__)

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from ortrain.deploy.cache_name import cache_name
from ortrain.pytorch import pytree

States = list[Tensor | None]
"""Keys and values in turn, layer by layer, ``[batch, heads, length, size]``; None for no layer's.
"""


class Encoder(nn.Module):
    """The encoder of a model.

    Args:
        model: with all of its parts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        """The encoder's own, whose arguments it takes by name."""
        return self.model.get_encoder()(**kwargs)


class CachedDecoder(nn.Module):
    """A model's forward with its key-value cache as tensors that come in and go out.

    Positions and masks are the model's own work: it takes them from a cache made of the tensors.

    Args:
        model: of an encoder and a decoder, or of a decoder alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._cache = cache_name()  # Dynamo does not follow how it is found

    def forward(self, past: States, cross: States, **kwargs: Any) -> tuple[Tensor, States, States]:
        """Logits for new tokens.

        Args:
            past: of the tokens before them; empty at the first call.
            cross: of the encoder's output; empty at the first call, which computes them, and
                without an encoder.
            kwargs: of the model's forward.

        Returns:
            The logits, the states of all tokens so far, and those of the encoder's output where
            this call has computed them.
        """
        own, other = _cache(past), _cache(cross)
        paired = self.model.config.is_encoder_decoder
        cache = EncoderDecoderCache(own, other) if paired else own
        logits = self.model(**{self._cache: cache}, **kwargs).logits
        return logits, _contiguous(own), [] if cross else _contiguous(other)

    def example_for_capture(
        self, past: States, cross: States, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The call with a batch, a past and a source longer than 1, so that one capture serves all.

        The length of the new tokens stays: after the first call it is 1, nearly always. At the
        first call all lengths are those of tokens and their features, which capture knows.
        """
        if not past:
            return None
        rows, before = _more(past, 0, 2), _more(past, 2, 4)
        source = _more(cross, 2, 6)
        paired = self.model.config.is_encoder_decoder
        lengths = {
            "attention_mask": source if paired else before,
            "decoder_attention_mask": before,
            "encoder_outputs": source,
        }

        def longer(tree: Any, axis: int, more: int) -> Any:
            def grown(tensor: Tensor) -> Tensor:
                tensor = _repeated(tensor, axis, more)
                return _repeated(tensor, 0, rows if tensor.shape[:1] == (1,) else 0)

            return pytree.tree_map_only(Tensor, grown, tree)

        args = longer(past, 2, before), longer(cross, 2, source)
        return args, {name: longer(kwargs[name], 1, lengths.get(name, 0)) for name in kwargs}


def states_of(cache: Any) -> States:
    """The tensors of a `DynamicCache`; none before it is used."""
    if not any(layer.is_initialized for layer in cache.layers):
        return []
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _contiguous(cache: Any) -> States:
    """The same without gaps, so that the next call, whose cache they are, needs no other capture.

    The first call leaves views of what is in the order of tokens, and later calls concatenations.
    """
    return [state if state is None else state.contiguous() for state in states_of(cache)]


def fill(cache: Any, states: Sequence[Tensor | None]) -> None:
    """Puts tensors into a cache, without a copy and in the place of what it holds."""
    for index, (keys, values) in enumerate(zip(states[::2], states[1::2], strict=True)):
        if index == len(cache.layers):
            cache.layers.append(cache.layer_class_to_replicate())
        if keys is not None and values is not None:
            _set(cache.layers[index], keys, values)


def _set(layer: Any, keys: Tensor, values: Tensor) -> None:
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values, layer.is_initialized = keys, values, True


class _Layer(DynamicLayer):
    """Takes its first states as they are, where its base appends them to an empty tensor."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            both: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return both
        _set(self, key_states, value_states)
        return key_states, value_states


def _cache(states: States) -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = _Layer
    fill(cache, states)
    given = [state for state in states if state is not None]
    for state in given:
        bool(state.shape[2] == given[0].shape[2])  # one symbol for the length of all layers
    return cache


def _more(states: States, axis: int, count: int) -> int:
    """By how much an axis should be longer: by the count where its size is 1."""
    return next((count for state in states if state is not None and state.shape[axis] == 1), 0)


def _repeated(tensor: Tensor, axis: int, more: int) -> Tensor:
    """The tensor with what is last along an axis there so often again."""
    if not more or tensor.ndim <= axis:
        return tensor
    return torch.cat([tensor, *[tensor.narrow(axis, tensor.shape[axis] - 1, 1)] * more], axis)
