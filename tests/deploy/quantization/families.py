"""Small models of many families in files by several exporters, for quantizers.

Those whose fusions are tested are in ``tests/deploy/optimization/exports.py``; here are the others:
pictures, sounds, two towers, recurrent layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from ortrain.deploy import export_onnx
from tests.deploy.optimization import exports
from tests.deploy.optimization.exports import HEADS, LAYERS, WIDTH, WORDS, Named

_SIZES = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 96,
}  # fmt: skip
_BERT = {**_SIZES, "vocab_size": WORDS, "max_position_embeddings": 40, "num_labels": 3}


class Tagger(nn.Module):
    """Words, an LSTM in both directions and a class for each word."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers: Any = kind(WIDTH, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.classes = nn.Linear(48, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.layers(self.words(input_ids))[0])
        return logits


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, groups=4, stride=2), nn.GELU(), nn.ConvTranspose2d(32, 8, 2, stride=2),
        nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 96), nn.SiLU(), nn.LayerNorm(96), nn.Linear(96, 48, bias=False),
        nn.Tanh(), nn.Linear(48, 3),
    )  # fmt: skip


class Bag(nn.Module):
    """Takes the output of a plain module for logits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        (value,) = inputs.values()
        return _Result(self.module(value))


class _Result:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def _conv(kind: str, **given: Any) -> tuple[Any, Any]:
    classes = {
        "resnet": (hf.ResNetForImageClassification, hf.ResNetConfig),
        "mobilenet": (hf.MobileNetV2ForImageClassification, hf.MobileNetV2Config),
        "convnext": (hf.ConvNextForImageClassification, hf.ConvNextConfig),
    }
    model, config = classes[kind]
    return model, config(num_labels=3, **given)


# Family → how it is made, its inputs, the output that is compared.
OTHERS: dict[str, tuple[Any, str, str]] = {
    "deberta": (
        lambda: (hf.DebertaV2ForSequenceClassification, hf.DebertaV2Config(
            **_BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
            type_vocab_size=0,
        )), "text", "logits",
    ),
    "resnet": (
        lambda: _conv("resnet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
                      layer_type="basic"), "picture", "logits",
    ),
    "mobilenet": (
        lambda: _conv("mobilenet", depth_multiplier=0.35, image_size=32), "picture", "logits",
    ),
    "convnext": (
        lambda: _conv("convnext", hidden_sizes=[16, 32], depths=[1, 1]), "picture", "logits",
    ),
    "wav2vec2": (
        lambda: (hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config(
            **_SIZES, vocab_size=20, conv_dim=[16, 16], conv_kernel=[5, 3], conv_stride=[4, 2],
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, num_feat_extract_layers=2,
            feat_extract_norm="group",
        )), "sound", "logits",
    ),
    "clip": (
        lambda: (hf.CLIPVisionModelWithProjection, hf.CLIPVisionConfig(
            **_SIZES, image_size=16, patch_size=4, projection_dim=24,
        )), "picture", "image_embeds",
    ),
    "clip of texts": (
        lambda: (hf.CLIPTextModelWithProjection, hf.CLIPTextConfig(
            **_SIZES, vocab_size=WORDS, max_position_embeddings=40, projection_dim=24,
            eos_token_id=2, bos_token_id=0, pad_token_id=1,
        )), "text", "text_embeds",
    ),
    "lstm": (Tagger, "words", "logits"),
    "gru": (lambda: Tagger(nn.GRU), "words", "logits"),
    "cnn": (_cnn, "picture", "logits"),
    "mlp": (_mlp, "features", "logits"),
}  # fmt: skip


def batches(kind: str) -> list[dict[str, Tensor]]:
    """Batches of a kind of input, of several sizes."""
    random = torch.Generator().manual_seed(0)
    if kind == "text":
        return exports.BATCHES
    if kind == "words":
        return [{"input_ids": batch["input_ids"]} for batch in exports.BATCHES]
    if kind == "sound":
        return [{"input_values": torch.randn(b, n, generator=random)} for b, n in
                ((2, 400), (1, 333), (3, 480))]  # fmt: skip
    if kind == "features":
        return [{"features": torch.randn(b, WIDTH, generator=random)} for b in (2, 1, 7)]
    return [{"pixel_values": torch.randn(b, 3, 16, 16, generator=random)} for b in (2, 1, 5)]


def exported(
    name: str, path: Path, *, exporter: str, opset: int = 18
) -> tuple[nn.Module, Path, list[dict[str, Tensor]]]:
    """A model of a family in a file, the model as a module of its inputs in order, and batches."""
    if name in exports.TEXT:
        module, path = exports.exported(name, path, exporter=exporter, opset=opset)
        return module, path, exports.BATCHES
    if name in exports.PAIRS or name in exports.VISION:
        return exports.exported_other(name, path, exporter=exporter, opset=opset)
    make, kind, output = OTHERS[name]
    given = batches(kind)
    torch.manual_seed(0)
    made = make()
    if isinstance(made, tuple):
        model = exports._drawn(made, "eager" if name == "deberta" else "sdpa")
    else:
        model = Bag(made).eval()
    module = Named(model, tuple(given[0]), output)
    if exporter == "ortrain":
        export_onnx(model, given, path, opset=opset)
        return module, path, given
    rows = {0: "batch"} if kind in ("picture", "features") else {0: "batch", 1: "length"}
    axes: dict[str, Any] = dict.fromkeys(given[0], rows)
    if exporter == "dynamo":
        axes = {
            key: {axis: torch.export.Dim(dim) for axis, dim in rows.items()} for key in given[0]
        }
        first = {**axes}
        return module, exports.dynamo(module, given[0], path, opset, dimensions=first), given
    return module, exports.torchscript(module, given[0], path, opset, dimensions=axes), given
