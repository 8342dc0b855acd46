"""A pretrained model that is small enough to be trained in a second."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

WORDS = ("good", "fine", "great", "bad", "poor", "awful", "film", "plot", "the", "a", "was")


def make_model(directory: Path) -> None:
    """A two-layer BERT of width 16 with the dropout of the real ones, and its tokenizer."""
    directory.mkdir(parents=True)
    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    tokenizer = transformers.BertTokenizer(vocab=str(vocabulary), model_max_length=16)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    transformers.BertModel(config).save_pretrained(directory)
