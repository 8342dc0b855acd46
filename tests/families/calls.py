"""Calls of a model of any family: rows and lengths that an export has not seen, padded ones too."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ortrain.deploy.models.samples import first_samples
from tests.families.sizes import WORDS

Batch = dict[str, Tensor]
# Rows, tokens, and whether rows are padded at their ends or at their beginnings.
_SIZES = ((3, 7, "right"), (1, 1, ""), (2, 9, "left"), (4, 5, ""))


def text_batches(model: Any) -> list[Batch]:
    """Tokens with their mask, in several sizes; for an encoder's decoder some of its own."""
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    paired = bool(model.config.is_encoder_decoder)
    batches = []
    for rows, length, side in _SIZES:
        generator = torch.Generator().manual_seed(rows * 10 + length)
        ids = torch.randint(5, WORDS, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        if side:
            place = slice(length - 2, None) if side == "right" else slice(2)
            mask[0, place] = 0
            ids[0, place] = getattr(model.config, "pad_token_id", None) or 0
        batch = {"input_ids": ids}
        if masked:
            batch["attention_mask"] = mask
        if paired:
            own = (rows, max(length - 3, 1))
            batch["decoder_input_ids"] = torch.randint(5, WORDS, own, generator=generator)
        batches.append(batch)
    return batches


def batches_of(model: Any) -> list[Batch]:
    """Calls of a model by what it begins with.

    Raises:
        NotServed: it begins with something else than tokens, an image or sound.
    """
    if model.main_input_name == "input_ids":
        return text_batches(model)
    samples: list[Batch] = first_samples(model)
    if model.config.is_encoder_decoder:
        for sample in samples:
            rows = next(iter(sample.values())).shape[0]
            generator = torch.Generator().manual_seed(rows)
            own = (rows, rows + 1)
            sample["decoder_input_ids"] = torch.randint(5, WORDS, own, generator=generator)
    return samples
