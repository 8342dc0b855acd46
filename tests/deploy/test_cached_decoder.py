"""A decoder whose cache goes in and out as tensors."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ortrain.deploy.cached_decoder import CachedDecoder, fill, states_of
from ortrain.frontend.export import export
from ortrain.program import Role
from tests.deploy.decoders import batch, gpt2, t5


def steps(model: Any, tokens: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Arguments of the decoder at the first token and at the second, with an encoder."""
    inputs = batch(model, 2, 5)
    encoded = model.get_encoder()(**inputs, return_dict=True)
    named = {
        "encoder_outputs": encoded,
        "attention_mask": inputs["attention_mask"],
        "use_cache": True,
        "return_dict": True,
    }
    with torch.no_grad():
        first = [[], [], {**named, "decoder_input_ids": tokens[:, :1]}]
        _, past, cross = CachedDecoder(model)(first[0], first[1], **first[2])
    return first, [past, cross, {**named, "decoder_input_ids": tokens[:, 1:]}]


@torch.no_grad()
def test_two_tokens_one_by_one_are_two_at_once() -> None:
    model, tokens = t5(), torch.tensor([[0, 7], [0, 9]])
    decoder = CachedDecoder(model)
    first, second = steps(model, tokens)
    logits, past, cross = decoder(second[0], second[1], **second[2])
    whole, whole_past, whole_cross = decoder([], [], **{**first[2], "decoder_input_ids": tokens})
    torch.testing.assert_close(logits[:, -1], whole[:, -1])
    torch.testing.assert_close(past, whole_past)
    assert cross == []
    torch.testing.assert_close(second[1], whole_cross)


@torch.no_grad()
def test_the_encoders_keys_are_computed_for_the_first_token_only() -> None:
    model = t5()
    first, second = steps(model, torch.tensor([[0, 7], [0, 9]]))
    keys = "model.decoder.block.0.layer.1.EncDecAttention.k.weight"
    for (past, cross, named), computed in ((first, True), (second, False)):
        program = export(CachedDecoder(model), (past, cross), named).program
        assert (keys in [v.name for v in program.inputs(Role.PARAMETER)]) is computed
        lengths = {v.shape[2] for v in program.outputs(Role.USER_OUTPUT)[1:]}
        assert len(lengths) == (2 if computed else 1)


@torch.no_grad()
def test_a_cache_is_filled_without_a_copy() -> None:
    states = [torch.randn(1, 2, 3, 4) for _ in range(4)]
    for cache in (DynamicCache(), DynamicCache(config=gpt2().config)):
        assert states_of(cache) == []
        fill(cache, states)
        assert all(a is b for a, b in zip(states_of(cache), states, strict=True))
        assert cache.get_seq_length() == 3
        cache.reorder_cache(torch.tensor([0, 0]))
        assert cache.layers[1].values.shape == (2, 2, 3, 4)
    assert EncoderDecoderCache(cache, cache).is_updated == {0: True, 1: True}


def test_an_example_has_no_size_of_one_but_the_new_token() -> None:
    def shapes(tree: Any) -> list[tuple[int, ...]]:
        return [tuple(t.shape) for t in torch.utils._pytree.tree_leaves(tree)]

    decoder = CachedDecoder(t5())
    state, one = torch.randn(1, 2, 1, 8), torch.ones(1, 1, dtype=torch.int64)
    named = {"decoder_input_ids": one, "attention_mask": one, "use_cache": True}
    named["decoder_attention_mask"] = torch.ones(1, 2)
    assert decoder.example_for_capture([], [], **named) is None
    found = decoder.example_for_capture([state, state], [state, state], **named)
    assert found is not None
    (past, cross), larger = found
    assert shapes(past) == [(3, 2, 5, 8)] * 2
    assert shapes(cross) == [(3, 2, 7, 8)] * 2
    assert shapes(larger["decoder_input_ids"]) == [(3, 1)]
    assert shapes(larger["attention_mask"]) == [(3, 7)]
    assert shapes(larger["decoder_attention_mask"]) == [(3, 6)]
    assert larger["use_cache"] is True

    # Sizes that are larger stay.
    states = [torch.randn(2, 2, 3, 8)] * 2
    found = decoder.example_for_capture(states, states, attention_mask=torch.ones(2, 3))
    assert found is not None
    assert shapes(found) == [(2, 2, 3, 8)] * 4 + [(2, 3)]
