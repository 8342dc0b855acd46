"""The models that the benchmarks train, with random weights and random batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Made = tuple[nn.Module, list[Batch]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model and its batches.

    Attributes:
        title: for the tables; other batches have another title.
        make: returns the module and the keyword arguments of its calls, which are called in turn.
        optimizer: whether a fused AdamW step is part of what is timed.
        precisions: in which it is measured.
        only_loss: whether nobody reads more of the outputs than their loss, which ours is told.
    """

    title: str
    make: Callable[[], Made]
    optimizer: bool = True
    precisions: tuple[str, ...] = ("fp32", "bf16")
    only_loss: bool = False


# --- text ---------------------------------------------------------------------------------------


def text_batch(vocabulary: int, batch: int, length: int, padded: bool = True) -> Batch:
    """Random token ids and binary labels; a quarter to all of the length is no padding."""
    lengths = torch.randint(length // 4 if padded else length, length + 1, (batch, 1))
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return {
        "input_ids": torch.randint(1000, vocabulary, (batch, length)) * mask,
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (batch,)),
    }


def bert_model(**sizes: Any) -> nn.Module:
    """A BERT with a classifier, of BERT-base's width where nothing else is said, dropout on."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config: Any = BertConfig(**sizes)
    config.num_labels = 2
    return BertForSequenceClassification(config).train()


def minilm_model() -> nn.Module:
    """The shape of all-MiniLM-L6-v2 (22 M parameters)."""
    return bert_model(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )


def bert(
    batch: int = 8, length: int = 128, layers: int = 4, padded: bool = True, **more: Any
) -> Made:
    """The first layers of BERT-base."""
    return bert_model(num_hidden_layers=layers, **more), [text_batch(30522, batch, length, padded)]


def bert_checkpointed() -> Made:
    """The same with checkpointed layers and four times the batch."""
    module: Any
    module, batches = bert(batch=32)
    module.activation_checkpointing_enable()
    return module, batches


def minilm(padded: bool = True) -> Made:
    """MiniLM's shape on a batch of 32 x 48."""
    return minilm_model(), [text_batch(30522, 32, 48, padded)]


def minilm_of_lengths(lengths: list[int], batch: int = 16) -> Made:
    """MiniLM's shape on batches of these lengths."""
    return minilm_model(), [text_batch(30522, batch, length) for length in lengths]


def gpt2(batch: int = 4, prompt: int = 0) -> Made:
    """The first layers of GPT-2 small with its head of 50257 words.

    Args:
        batch: rows of 128 words.
        prompt: how many of them have no label.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(n_layer=4, use_cache=False)).train()
    ids = torch.randint(0, 50257, (batch, 128))
    labels = torch.where(torch.arange(128) < prompt, -100, ids)
    return module, [{"input_ids": ids, "labels": labels}]


def masked_words() -> Made:
    """The first layers of RoBERTa-base with its head of 50265 words; 15 % of them have a label."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    config: Any = RobertaConfig(vocab_size=50265, num_hidden_layers=4)
    ids = torch.randint(5, 50265, (8, 128))
    labels = torch.where(torch.rand(8, 128) < 0.15, ids, -100)
    mask = torch.ones_like(ids)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return RobertaForMaskedLM(config).train(), [batch]


def deberta() -> Made:
    """The first layers of DeBERTa-v3-base, whose attention goes by relative positions."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12,
        "intermediate_size": 3072, "relative_attention": True,
        "position_buckets": 256, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "position_biased_input": False,
    }  # fmt: skip
    config: Any = DebertaV2Config(**sizes)
    config.num_labels = 2
    return DebertaV2ForSequenceClassification(config).train(), [text_batch(30522, 8, 128)]


def experts() -> Made:
    """A decoder of two layers with eight experts each, of which a word has two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=8000, hidden_size=384, intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    batch = text_batch(8000, 8, 128)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = torch.where(mask > 0, ids, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return MixtralForCausalLM(config).train(), [batch]


# --- speech -------------------------------------------------------------------------------------


def wav2vec2() -> Made:
    """The first layers of wav2vec 2.0 base on sounds of a quarter of a second to one."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    config: Any = Wav2Vec2Config(num_hidden_layers=4, mask_time_prob=0.0, layerdrop=0.0)
    config.feat_extract_norm = "layer"  # those of the base model are trained without a mask
    lengths = torch.randint(4000, 16001, (4, 1))
    lengths[0] = 16000
    mask = (torch.arange(16000) < lengths).long()
    batch = {
        "input_values": torch.randn(4, 16000) * mask,
        "attention_mask": mask,
        "labels": torch.randint(1, 32, (4, 8)),
    }
    return Wav2Vec2ForCTC(config).train(), [batch]


def whisper() -> Made:
    """Whisper tiny on windows of three seconds."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config: Any = WhisperConfig(max_source_positions=150, use_cache=False)
    batch = {
        "input_features": torch.randn(8, 80, 300),
        "labels": torch.where(torch.rand(8, 32) < 0.3, -100, torch.randint(0, 50000, (8, 32))),
    }
    return WhisperForConditionalGeneration(config).train(), [batch]


class Tagger(nn.Module):
    """Two layers of a bidirectional LSTM that give each word a tag; returns the loss."""

    def __init__(self, words: int = 10000, tags: int = 17) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 100)
        self.dropout = nn.Dropout(0.3)
        self.recurrent = nn.LSTM(100, 200, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(400, tags)

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        """Of words and tags, both [batch, length]."""
        hidden, _ = self.recurrent(self.dropout(self.embedding(words)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tags.flatten())


def tagger() -> Made:
    """The tagger on a batch of 32 x 40."""
    torch.manual_seed(0)
    batch = {"words": torch.randint(0, 10000, (32, 40)), "tags": torch.randint(0, 17, (32, 40))}
    return Tagger().train(), [batch]


# --- images and vectors -------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al., Deep Residual Learning, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of images [batch, inputs, height, width]."""
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """The network of 18 layers of the same paper's table 1; returns the loss."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        widths = (64, 64, 128, 256, 512)
        self.blocks = nn.Sequential()
        for inputs, outputs in pairwise(widths):
            self.blocks.append(Block(inputs, outputs, 1 if inputs == outputs else 2))
            self.blocks.append(Block(outputs, outputs, 1))
        self.head = nn.Linear(512, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of images [batch, 3, height, width] and labels [batch]."""
        features = self.blocks(self.stem(images)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), labels)


def resnet() -> Made:
    """ResNet-18 on 16 images of 224 x 224."""
    torch.manual_seed(0)
    batch = {"images": torch.randn(16, 3, 224, 224), "labels": torch.randint(0, 1000, (16,))}
    return ResNet18().train(), [batch]


def mobilenet() -> Made:
    """MobileNetV2 on 16 images of 224 x 224."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    torch.manual_seed(0)
    config: Any = MobileNetV2Config()
    config.num_labels = 10
    batch = {"pixel_values": torch.randn(16, 3, 224, 224), "labels": torch.randint(0, 10, (16,))}
    return MobileNetV2ForImageClassification(config).train(), [batch]


class Perceptron(nn.Module):
    """Three layers of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of vectors [batch, 64]."""
        result: torch.Tensor = self.layers(x)
        return result


def perceptron() -> Made:
    """A perceptron at batch 32."""
    torch.manual_seed(0)
    return Perceptron(), [{"x": torch.randn(32, 64)}]


WORKLOADS = {
    "bert": Workload(
        title="4 layers of BERT-base, batch 8 x 128 padded, dropout, AdamW", make=bert
    ),
    "minilm": Workload(title="MiniLM-L6 shape, batch 32 x 48 padded, dropout, AdamW", make=minilm),
    "bert-full": Workload(
        title="4 layers of BERT-base, batch 8 x 128, dropout, AdamW",
        make=partial(bert, padded=False),
    ),
    "minilm-full": Workload(
        title="MiniLM-L6 shape, batch 32 x 48, dropout, AdamW", make=partial(minilm, padded=False)
    ),
    "mlp": Workload(
        title="3-layer perceptron of width 64, batch 32, no optimizer",
        make=perceptron,
        optimizer=False,
    ),
    "gpt2": Workload(title="4 layers of GPT-2 small, batch 4 x 128, dropout, AdamW", make=gpt2),
    "masked-words": Workload(
        title="4 layers of RoBERTa-base, batch 8 x 128, 15 % of 50k words masked, AdamW",
        make=masked_words,
        only_loss=True,
    ),
    "prompts": Workload(
        title="4 layers of GPT-2 small, batch 8 x 128, half of it a prompt, dropout, AdamW",
        make=partial(gpt2, batch=8, prompt=64),
        only_loss=True,
    ),
    "resnet": Workload(title="ResNet-18, 16 images of 224 x 224, AdamW", make=resnet),
    "mobilenet": Workload(title="MobileNetV2, 16 images of 224 x 224, AdamW", make=mobilenet),
    "lstm": Workload(title="LSTM tagger, batch 32 x 40, dropout, AdamW", make=tagger),
    "longtext": Workload(
        title="4 layers of BERT-base, batch 2 x 512 padded, dropout, AdamW",
        make=partial(bert, batch=2, length=512),
        precisions=("bf16",),
    ),
}
"""What is timed by default; `step.py` and `memory.py` have more."""
BESIDE = {
    "deberta": Workload(
        title="4 layers of DeBERTa-v3-base, batch 8 x 128 padded, dropout, AdamW", make=deberta
    ),
    "experts": Workload(
        title="Mixtral, 2 layers of 8 experts, batch 8 x 128 padded, AdamW",
        make=experts,
        only_loss=True,
    ),
    "wav2vec2": Workload(
        title="4 layers of wav2vec 2.0 base, 4 sounds of a second padded, dropout, AdamW",
        make=wav2vec2,
        only_loss=True,
    ),
    "whisper": Workload(
        title="Whisper tiny, 8 windows of 3 s, 32 words, AdamW", make=whisper, only_loss=True
    ),
    "bert-checkpointed": Workload(
        title="4 layers of BERT-base, checkpointed, batch 32 x 128 padded, dropout, AdamW",
        make=bert_checkpointed,
    ),
    "longtext-spelled": Workload(
        title="4 layers of BERT-base, attention spelled out, batch 2 x 512 padded, dropout, AdamW",
        make=partial(bert, batch=2, length=512, attn_implementation="eager"),
    ),
}
MODELS = WORKLOADS | BESIDE


def loss_of(output: Any) -> torch.Tensor:
    """The scalar that a step goes backward from."""
    loss = getattr(output, "loss", None)
    result: torch.Tensor = output if loss is None else loss
    return result.sum() if result.dim() else result
