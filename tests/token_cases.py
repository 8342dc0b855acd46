"""Models on padded batches, for the tests that leave out work on tokens which nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROWS, LENGTH, WORDS = 4, 11, 100
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
# How many tokens each row has.
LENGTHS = {
    "some": (11, 4, 7, 9),
    "one row of one": (11, 1, 5, 3),
    "one full row": (2, 3, 11, 2),
    "all full": (11, 11, 11, 11),
}
Batch = dict[str, Tensor]


def batch(lengths: tuple[int, ...], left: bool = False) -> Batch:
    """Ids and their mask, padded on the right, or on the left."""
    torch.manual_seed(3)
    ids = torch.randint(5, WORDS, (ROWS, LENGTH))
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    count = torch.tensor(lengths).unsqueeze(1)
    mask = (places >= LENGTH - count) if left else (places < count)
    return {"input_ids": ids, "attention_mask": mask.long()}


def of_rows(given: Batch) -> Batch:
    """A label for each row."""
    return {**given, "labels": torch.arange(ROWS) % 2}


def of_tokens(given: Batch, share: float = 0.4) -> Batch:
    """A label for some of the tokens."""
    ids, mask = given["input_ids"], given["attention_mask"].bool()
    chosen = mask & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) < share)
    chosen |= mask & (mask.cumsum(1) == 1)  # one of each row at least
    return {**given, "labels": torch.where(chosen, ids, -100)}


def of_some_tags(given: Batch) -> Batch:
    labelled = of_tokens(given)
    tags = labelled["labels"]
    return {**labelled, "labels": torch.where(tags < 0, tags, tags % 2)}


class Sentences(nn.Module):
    """Means of words, as sentence-transformers makes them, and a loss over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = transformers.BertModel(transformers.BertConfig(**SHAPE))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask.unsqueeze(-1).expand(hidden.size()).float()
        means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        scores = nn.functional.normalize(means) @ nn.functional.normalize(means).T
        return nn.functional.cross_entropy(20 * scores, torch.arange(len(means)))


@dataclass
class Case:
    """A model, what it is given, and what is read of its outputs."""

    make: Callable[[], nn.Module]
    given: Callable[[Batch], Batch]
    shown: Any = "all"
    left: bool = False


def of(architecture: str, **settings: Any) -> Callable[[], nn.Module]:
    """A small model by the name of its class."""

    def make() -> nn.Module:
        kind = getattr(transformers, architecture)
        shape = {name: size for name, size in SHAPE.items() if name not in settings}
        return kind(kind.config_class(**shape, **settings))  # type: ignore[no-any-return]

    return make


gpt2 = of("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2)
distilbert = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
t5 = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8}
t5["decoder_start_token_id"] = 0
bart = {
    f"{part}_{name}": number
    for part in ("encoder", "decoder")
    for name, number in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
} | {"d_model": 16}
CASES = {
    "bert": Case(of("BertForSequenceClassification"), of_rows),
    "roberta": Case(of("RobertaForSequenceClassification"), of_rows),
    "distilbert": Case(of("DistilBertForSequenceClassification", **distilbert), of_rows),
    "electra": Case(of("ElectraForSequenceClassification", embedding_size=8), of_rows),
    "albert": Case(of("AlbertForSequenceClassification", embedding_size=8), of_rows),
    "left-padded bert": Case(of("BertForSequenceClassification"), of_rows, left=True),
    "modernbert": Case(of("ModernBertForSequenceClassification", pad_token_id=0), of_rows),
    "mean of words": Case(Sentences, lambda given: given),
    "tags": Case(of("BertForTokenClassification"), of_some_tags, "tokens"),
    "masked words": Case(of("RobertaForMaskedLM"), of_tokens, "loss"),
    "shown words": Case(of("BertForMaskedLM"), of_tokens, "tokens"),
    "gpt2": Case(gpt2, of_tokens, "loss"),
    "llama": Case(of("LlamaForCausalLM"), of_tokens, "loss"),
    "llama with shared keys": Case(
        of("LlamaForCausalLM", num_key_value_heads=1), of_tokens, "loss"
    ),
    "t5": Case(of("T5ForConditionalGeneration", **t5), of_tokens, "loss"),
    "bart": Case(of("BartForConditionalGeneration", **bart), of_tokens, "loss"),
    "left-padded llama": Case(of("LlamaForCausalLM"), of_tokens, "loss", left=True),
}
