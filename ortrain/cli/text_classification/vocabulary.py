"""Whether a tokenizer has words at all, and whether the model has a vector for each of them.

Where a tokenizer's files are missing, transformers makes one that knows nothing but the special
tokens: every word of every text is the unknown one, and a run on it ends well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import transformers

from ortrain.cli.usage import UsageError

_SAMPLE = 1000
"""Texts that are looked at for a word that the tokenizer knows."""

_MARKS = "▁Ġ#"
"""What tokenizers write for a space, or for the rest of a word."""


def check_vocabulary(
    name: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    model: transformers.PreTrainedModel,
) -> None:
    """Raise a UsageError if the tokenizer has no words, or more than the model has vectors.

    Args:
        name: The directory or the name that both were loaded from.
        tokenizer: The tokenizer.
        model: The model.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    if not any(token.strip(_MARKS) for token, id in vocabulary.items() if id not in special):
        raise UsageError(
            f"{name}: the tokenizer has nothing but special tokens, its files are missing; put the "
            "model's own tokenizer.json, or vocab.txt and its like, beside config.json"
        )
    try:
        vectors = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        # A model that hashes characters has no table with a row for each.
        return
    largest = max(vocabulary.values())
    if isinstance(vectors, torch.nn.Embedding) and largest >= vectors.num_embeddings:
        raise UsageError(
            f"{name}: the tokenizer's largest token is {largest}, and the model's vocabulary has "
            f"{vectors.num_embeddings}, a vocabulary below the tokenizer's; give a directory with "
            "the tokenizer and the weights of one model"
        )


def check_words(
    tokenizer: transformers.PreTrainedTokenizerBase, encoded: Sequence[Iterable[int]]
) -> None:
    """Raise a UsageError if the tokenizer knows no word of the texts.

    Args:
        tokenizer: The tokenizer.
        encoded: The tokens of each text, of which a sample is looked at.
    """
    sample = encoded[:_SAMPLE]
    tokens = set().union(*sample) - set(tokenizer.all_special_ids)
    known = tokenizer.convert_ids_to_tokens(sorted(tokens))
    if not any(token.strip(_MARKS) for token in known):
        raise UsageError(
            f"the model's tokenizer knows no word of {len(sample)} texts; give a --model of their "
            "language and script, with its own tokenizer"
        )
