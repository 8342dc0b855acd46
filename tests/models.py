"""Small random models of the architectures that must work, and batches for them.

::

    case = MODELS["bert"]
    module = case.build()                      # train mode, dropout off, fixed seed
    kwargs = case.batch(batch=3, length=7, seed=0)

Everything is deterministic, needs no network, and has hidden size 32 and 2 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

VOCABULARY = 97
LABELS = 3
PAD = 1

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelCase:
    """One architecture.

    Attributes:
        name: as in :data:`MODELS`.
        make: builds the module with a dropout probability.
        make_batch: batch, length, generator → keyword arguments.
        has_length: whether the second dimension of the inputs can vary.
        buffers: whether a training forward updates buffers.
        shortest: the least length that the architecture takes.
    """

    name: str
    make: Callable[[float], nn.Module]
    make_batch: Callable[[int, int, torch.Generator], Batch]
    has_length: bool = True
    buffers: bool = False
    shortest: int = 1

    def build(self, *, dropout: float = 0.0, seed: int = 0, train: bool = True) -> nn.Module:
        """The module, with weights that depend on the seed only."""
        with _seeded(seed):
            module = self.make(dropout)
        return module.train(train)

    def batch(self, batch: int = 3, length: int = 7, seed: int = 0) -> Batch:
        """Keyword arguments of a call, labels among them."""
        return self.make_batch(batch, length, torch.Generator().manual_seed(seed))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


# -- batches -------------------------------------------------------------------------------------


def _tokens(batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def _padded(batch: int, length: int, generator: torch.Generator) -> Batch:
    """Tokens whose rows end in padding, the first row in none."""
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    lengths[0] = length
    mask = torch.arange(length)[None] < lengths
    tokens = _tokens(batch, length, generator).masked_fill(~mask, PAD)
    return {"input_ids": tokens, "attention_mask": mask.long()}


def _classified(batch: int, length: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(0, LABELS, (batch,), generator=generator)
    return {**_padded(batch, length, generator), "labels": labels}


def _language(batch: int, length: int, generator: torch.Generator) -> Batch:
    inputs = _padded(batch, length, generator)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return {**inputs, "labels": labels}


def _translated(batch: int, length: int, generator: torch.Generator) -> Batch:
    inputs = _padded(batch, length, generator)
    labels = _tokens(batch, length + 2, generator)
    labels[:, -1:] = -100
    return {**inputs, "labels": labels}


def _images(size: int) -> Callable[[int, int, torch.Generator], Batch]:
    def make(batch: int, length: int, generator: torch.Generator) -> Batch:
        return {
            "pixel_values": torch.randn(batch, 3, size, size, generator=generator),
            "labels": torch.randint(0, LABELS, (batch,), generator=generator),
        }

    return make


def _speech(batch: int, length: int, generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(batch, 8, 2 * 20, generator=generator),
        "labels": _tokens(batch, length, generator),
    }


def _rows(batch: int, length: int, generator: torch.Generator) -> Batch:
    return {
        "features": torch.randn(batch, 12, generator=generator),
        "labels": torch.randint(0, LABELS, (batch,), generator=generator),
    }


# -- models --------------------------------------------------------------------------------------

_ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_labels": LABELS,
    "pad_token_id": PAD,
}  # fmt: skip
_NO_TOKENS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}


def _bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(**_ENCODER, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


def _roberta(dropout: float) -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(
        RobertaConfig(
            **_ENCODER,
            type_vocab_size=1,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def _distilbert(dropout: float) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    return DistilBertForSequenceClassification(
        DistilBertConfig(
            dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=VOCABULARY,
            max_position_embeddings=64, num_labels=LABELS, pad_token_id=PAD,
            dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout,
        )
    )  # fmt: skip


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=64,
            use_cache=False, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            **_NO_TOKENS,
        )
    )  # fmt: skip


def _bloom(dropout: float) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(
        BloomConfig(
            hidden_size=32, n_layer=2, n_head=2, vocab_size=VOCABULARY, use_cache=False,
            hidden_dropout=dropout, attention_dropout=dropout, **_NO_TOKENS,
        )
    )  # fmt: skip


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, vocab_size=VOCABULARY, max_position_embeddings=64,
            use_cache=False, attention_dropout=dropout, **_NO_TOKENS,
        )
    )  # fmt: skip


def _bart(dropout: float) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
            vocab_size=VOCABULARY, max_position_embeddings=64, use_cache=False,
            dropout=dropout, attention_dropout=dropout, activation_dropout=dropout,
            decoder_start_token_id=2, forced_eos_token_id=2, **_NO_TOKENS,
        )
    )  # fmt: skip


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2,
            vocab_size=VOCABULARY, dropout_rate=dropout, use_cache=False,
            decoder_start_token_id=0, pad_token_id=PAD, eos_token_id=2,
        )
    )  # fmt: skip


def _vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            image_size=16, patch_size=8, num_labels=LABELS,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def _whisper(dropout: float) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
            vocab_size=VOCABULARY, num_mel_bins=8, max_source_positions=20,
            max_target_positions=64, use_cache=False, decoder_start_token_id=0,
            dropout=dropout, attention_dropout=dropout, activation_dropout=dropout,
            suppress_tokens=None, begin_suppress_tokens=None, **_NO_TOKENS,
        )
    )  # fmt: skip


def _resnet(dropout: float) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
            num_labels=LABELS,
        )
    )  # fmt: skip


class Mlp(nn.Module):
    """Three linear layers and a loss."""

    def __init__(self, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, LABELS),
        )  # fmt: skip

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.layers(features)
        return nn.functional.cross_entropy(logits, labels), logits


class Cnn(nn.Module):
    """Convolutions with batch normalization, pooling, a linear head and a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout),
        )  # fmt: skip
        self.head = nn.Linear(16, LABELS)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(pixel_values))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Recurrent(nn.Module):
    """A layer of each kind over padded tokens, the mean of the steps, a linear head and a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12, padding_idx=PAD)
        self.lstm = nn.LSTM(
            12, 8, num_layers=2, bidirectional=True, batch_first=True, dropout=dropout
        )
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.rnn = nn.RNN(8, 8, bias=False, batch_first=True)
        self.head = nn.Linear(16, LABELS)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        y, _ = self.lstm(self.embedding(input_ids))
        y, last = self.gru(y)
        y, _ = self.rnn(y, last)
        mask = attention_mask[..., None].to(y.dtype)
        mean = (y * mask).sum(1) / mask.sum(1)
        logits = self.head(torch.cat([mean, last[0]], -1))
        return nn.functional.cross_entropy(logits, labels), logits


SAMPLE = ("bert", "gpt2", "t5", "resnet", "recurrent", "mlp", "cnn")
"""Of the models, those that `make test` takes where each costs seconds."""

MODELS: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("bert", _bert, _classified),
        ModelCase("roberta", _roberta, _classified),
        ModelCase("distilbert", _distilbert, _classified),
        ModelCase("gpt2", _gpt2, _language, shortest=2),
        ModelCase("bloom", _bloom, _language, shortest=2),
        ModelCase("llama", _llama, _language, shortest=2),
        ModelCase("bart", _bart, _translated),
        ModelCase("t5", _t5, _translated),
        ModelCase("vit", _vit, _images(16), has_length=False),
        ModelCase("whisper", _whisper, _speech),
        ModelCase("resnet", _resnet, _images(32), has_length=False, buffers=True),
        ModelCase("recurrent", Recurrent, _classified),
        ModelCase("mlp", Mlp, _rows, has_length=False),
        ModelCase("cnn", Cnn, _images(16), has_length=False, buffers=True),
    )
}
