"""Small models that generate, with weights of which no two batches give the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

WORDS, WIDTH = 60, 16
_BART = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
}
_TEXT = {**_BART, "max_position_embeddings": 64, "forced_eos_token_id": None}
_LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def restless(model: Any, seed: int = 0) -> Any:
    """The model with weights that make its tokens vary: as initialized, one repeats for ever.

    The output layer is no longer tied to the embedding, which favours the token that was read.
    """
    torch.manual_seed(seed)
    model.set_output_embeddings(nn.Linear(WIDTH, WORDS, bias=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                embedding = any(part in name for part in ("shared", "wte", "embed_tokens"))
                parameter.normal_(std=1.0 if embedding else 0.2)
    return model.eval()


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    config = T5Config(**sizes, num_heads=2, vocab_size=WORDS, decoder_start_token_id=0)
    return restless(T5ForConditionalGeneration(config), 5)


class Peeks(T5ForConditionalGeneration):
    """Whose forward reads its tokens as an array, so that no capture is possible."""

    @functools.wraps(T5ForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("decoder_input_ids")
        if tokens is not None and tokens.numpy().max() > 1000:
            return None
        return super().forward(*args, **kwargs)


class Branches(T5ForConditionalGeneration):
    """Whose forward goes another way at some of its tokens."""

    @functools.wraps(T5ForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        tokens = kwargs.get("decoder_input_ids")
        if tokens is not None and (tokens > 40).any():
            outputs.logits = -outputs.logits
        return outputs


def bart() -> Any:
    return restless(BartForConditionalGeneration(BartConfig(**_TEXT)), 4)


def marian() -> Any:
    return restless(MarianMTModel(MarianConfig(**_TEXT)), 1)


def gpt2() -> Any:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**sizes, vocab_size=WORDS, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return restless(GPT2LMHeadModel(config), 7)


def llama() -> Any:
    return restless(LlamaForCausalLM(LlamaConfig(**_LLAMA)))


def mistral() -> Any:
    """Whose layers see no further than eight tokens."""
    return restless(MistralForCausalLM(MistralConfig(**_LLAMA, sliding_window=8)))


def whisper() -> Any:
    frames = {"max_source_positions": 20, "max_target_positions": 32, "num_mel_bins": 8}
    starts = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = WhisperConfig(**_BART, **frames, **starts)
    return restless(WhisperForConditionalGeneration(config), 2)


TEXT_MODELS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "bart": bart,
    "marian": marian,
    "gpt2": gpt2,
    "llama": llama,
}


def batch(model: Any, rows: int, length: int, *, padded: bool = True) -> dict[str, Tensor]:
    """Token ids; the first of several rows is two tokens shorter, on the side that it has to be."""
    generator = torch.Generator().manual_seed(100 * rows + length)
    ids = torch.randint(3, WORDS, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded and rows > 1 and length > 2:
        end = slice(-2, None) if model.config.is_encoder_decoder else slice(2)
        mask[0, end] = 0
        ids[0, end] = model.config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}
