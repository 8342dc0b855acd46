"""Decoders that return their key-value cache train as a graph, and return the same cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from ortrain import ORTModule
from tests.breadth import sampled
from tests.module.agreement import GRAPH, SAME

SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "vocab_size": 32, "max_position_embeddings": 32,
}  # fmt: skip


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=32, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=5)
    return transformers.MistralForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(  # type: ignore[call-arg]
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32, dropout_rate=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def parts(cache: Any) -> list[Any]:
    """What a cache holds, in order: tensors, and what its attributes say."""
    found: list[Any] = [type(cache)]
    for name, value in vars(cache).items():
        found.append(name)
        for each in value if isinstance(value, list) else [value]:
            deeper = type(each).__module__ == "transformers.cache_utils"
            found += parts(each) if deeper else [each]
    return found


MODELS = {"gpt2": gpt2, "llama": llama, "mistral": mistral, "t5": t5}


@pytest.mark.parametrize("name", sampled(MODELS, ["llama", "t5"]))
def test_the_cache_is_eagers_in_training(name: str) -> None:
    assert_the_cache_is_eagers(MODELS[name](), grad=True)


@pytest.mark.parametrize("name", sampled(MODELS, ["gpt2"]))
def test_the_cache_is_eagers_without_gradients(name: str) -> None:
    assert_the_cache_is_eagers(MODELS[name](), grad=False)


def assert_the_cache_is_eagers(eager: nn.Module, *, grad: bool) -> None:
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for length in (6, 4, 6):
        batch = {"input_ids": torch.randint(1, 32, (2, length))}
        batch["labels"] = batch["input_ids"]
        with torch.set_grad_enabled(grad):
            ours, theirs = model(**batch), eager(**batch)
        pairs = zip(parts(ours.past_key_values), parts(theirs.past_key_values), strict=True)
        for mine, own in pairs:
            if isinstance(own, Tensor):
                torch.testing.assert_close(mine, own, rtol=SAME, atol=SAME)
                assert mine.requires_grad == own.requires_grad
            else:
                assert mine == own
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=SAME, atol=SAME)
    assert model.report.mode == "graph"
    assert ours.past_key_values is not model(**batch).past_key_values


@pytest.mark.parametrize("name", sampled(MODELS, ["mistral", "t5"]))
def test_gradients_go_through_every_tensor_of_a_cache(name: str) -> None:
    eager = MODELS[name]()
    eager = getattr(eager, "model", getattr(eager, "transformer", eager))
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    tokens = torch.randint(1, 32, (2, 7))
    both = {"input_ids": tokens, "decoder_input_ids": tokens[:, :4]}
    batch = both if eager.config.is_encoder_decoder else {"input_ids": tokens}
    for module in (model, eager):
        outputs = parts(module(**batch))
        sum(
            each.sin().sum() for each in outputs if getattr(each, "requires_grad", False)
        ).backward()
    assert model.report.mode == "graph"
    for (at, mine), own in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (own.grad is None), at
        if own.grad is not None:
            torch.testing.assert_close(mine.grad, own.grad, rtol=1e-4, atol=1e-5)


def test_a_gradient_goes_through_the_cache() -> None:
    eager = llama()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    tokens = torch.randint(0, 32, (2, 5))
    for module in (model, eager):
        output = module(input_ids=tokens)
        (output.logits.mean() + output.past_key_values.layers[1].keys.square().sum()).backward()
    for (name, mine), own in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (own.grad is None), name
        if own.grad is not None:
            torch.testing.assert_close(mine.grad, own.grad, rtol=1e-4, atol=1e-5)
