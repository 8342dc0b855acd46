"""Models and data, made of a seed: nothing is downloaded."""

from __future__ import annotations

import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(500)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    tokens = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def llama(large: bool, kind: Any, **more: Any) -> Any:
    """A decoder of one narrow layer, or of four wider ones.

    Args:
        large: which.
        kind: its class.
        **more: of its configuration.
    """
    torch.manual_seed(0)
    width, layers = (448, 4) if large else (32, 1)
    return kind(
        LlamaConfig(
            vocab_size=len(WORDS) + 3,
            hidden_size=width,
            intermediate_size=width * 3,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            **more,
        )
    )


def texts(*columns: str, longest: int = 40, count: int = 256) -> Dataset:
    """Rows of texts of varied lengths; a column ``label`` is true or false."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, longest))) + " "

    return Dataset.from_list(
        [
            {name: bool(row % 2) if name == "label" else text() for name in columns}
            for row in range(count)
        ]
    )
