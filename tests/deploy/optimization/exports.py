"""Small models of many families, exported in the ways that people export them."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn

from ortrain.deploy import export_onnx

WORDS, WIDTH, LAYERS, HEADS = 60, 64, 2, 4
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_BERT = {**_SIZES, "vocab_size": WORDS, "intermediate_size": 96, "max_position_embeddings": 40}
_LLAMA = {**_BERT, "num_key_value_heads": 2}
_PAIR = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2, "num_labels": 3,
}  # fmt: skip

TEXT: dict[str, Any] = {
    "bert": lambda: (hf.BertForSequenceClassification, hf.BertConfig(**_BERT)),
    "roberta": lambda: (hf.RobertaForSequenceClassification, hf.RobertaConfig(**_BERT)),
    "xlm-roberta": lambda: (hf.XLMRobertaForSequenceClassification, hf.XLMRobertaConfig(**_BERT)),
    "electra": lambda: (
        hf.ElectraForSequenceClassification, hf.ElectraConfig(**_BERT, embedding_size=WIDTH)
    ),
    "distilbert": lambda: (
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig(
            vocab_size=WORDS, dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=96,
            max_position_embeddings=40,
        ),
    ),
    "albert": lambda: (
        hf.AlbertForSequenceClassification, hf.AlbertConfig(**_BERT, embedding_size=32)
    ),
    "modernbert": lambda: (
        hf.ModernBertForSequenceClassification,
        hf.ModernBertConfig(
            **_BERT, pad_token_id=0, local_attention=8, global_attn_every_n_layers=2,
            bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        ),
    ),
    "mpnet": lambda: (hf.MPNetForSequenceClassification, hf.MPNetConfig(**_BERT)),
    "gpt2": lambda: (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=40,
            bos_token_id=1, eos_token_id=2,
        ),
    ),
    "gpt_neox": lambda: (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**_BERT, rotary_pct=0.5)),
    "bloom": lambda: (
        hf.BloomForCausalLM,
        hf.BloomConfig(vocab_size=WORDS, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    ),
    "mpt": lambda: (
        hf.MptForCausalLM,
        hf.MptConfig(
            vocab_size=WORDS, d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, max_seq_len=40,
            expansion_ratio=2,
        ),
    ),
    "falcon whose positions are added": lambda: (
        hf.FalconForCausalLM,
        hf.FalconConfig(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, alibi=True, multi_query=False, parallel_attn=False,
            new_decoder_architecture=False,
        ),
    ),
    # All heads of the query share one of key and value, without a copy of it for each.
    "falcon": lambda: (
        hf.FalconForCausalLM,
        hf.FalconConfig(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, multi_query=True,
        ),
    ),
    "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**_LLAMA)),
    "llama whose heads share nothing": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**_BERT)),
    "mistral": lambda: (
        hf.MistralForCausalLM, hf.MistralConfig(**_LLAMA, sliding_window=4, head_dim=16)
    ),
    "qwen3": lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config(**_LLAMA, head_dim=16)),
    "gemma": lambda: (hf.GemmaForCausalLM, hf.GemmaConfig(**_LLAMA, head_dim=16)),
    "phi": lambda: (hf.PhiForCausalLM, hf.PhiConfig(**_LLAMA)),
    "opt": lambda: (
        hf.OPTForCausalLM,
        hf.OPTConfig(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, ffn_dim=96,
            num_attention_heads=HEADS, max_position_embeddings=40, word_embed_proj_dim=WIDTH,
        ),
    ),
}  # fmt: skip
PAIRS: dict[str, Any] = {
    "t5": lambda: (
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_kv=16, d_ff=96, num_layers=LAYERS, num_heads=HEADS,
            decoder_start_token_id=0,
        ),
    ),
    "bart": lambda: (hf.BartForConditionalGeneration, hf.BartConfig(**_PAIR)),
    "marian": lambda: (hf.MarianMTModel, hf.MarianConfig(**_PAIR)),
    "whisper": lambda: (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            **_PAIR, num_mel_bins=8, max_source_positions=12, max_target_positions=40,
            suppress_tokens=None, begin_suppress_tokens=None,
        ),
    ),
}  # fmt: skip
_VISION = {**_SIZES, "intermediate_size": 96, "image_size": 16, "patch_size": 4, "num_labels": 3}
VISION: dict[str, Any] = {
    "vit": lambda: (hf.ViTForImageClassification, hf.ViTConfig(**_VISION)),
    "deit": lambda: (hf.DeiTForImageClassification, hf.DeiTConfig(**_VISION)),
    "dinov2": lambda: (hf.Dinov2ForImageClassification, hf.Dinov2Config(**_VISION)),
    # One stage, whose windows are shifted in its second layer: four axes in the first, five there.
    "swin": lambda: (
        hf.SwinForImageClassification,
        hf.SwinConfig(
            image_size=16,
            patch_size=2,
            embed_dim=WIDTH,
            depths=[LAYERS],
            num_heads=[HEADS],
            window_size=4,
            num_labels=3,
        ),
    ),
}


def _drawn(made: tuple[Any, Any], attention: str) -> nn.Module:
    kind, config = made
    if not getattr(kind, "_supports_sdpa", True):
        attention = "eager"
    config._attn_implementation = attention
    config.use_cache = False
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


class Named(nn.Module):
    """A model whose inputs are arguments in order, and whose output is one tensor."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str = "logits") -> None:
        super().__init__()
        self.model, self.names, self.output = model, names, output
        self.eval()  # an exporter puts back the mode in which it has found the whole

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.model(**dict(zip(self.names, inputs, strict=True))), self.output)


def tokens(rows: int, length: int, padding: str, seed: int = 0) -> dict[str, Tensor]:
    """Tokens of which the last rows have 2 and 3 of padding: ``left``, ``right`` or none of them.

    One row alone has no padding.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row, count in ((1, 2), (2, 3)):
        if padding and row < rows and count < length:
            part = slice(0, count) if padding == "left" else slice(length - count, length)
            mask[row, part], ids[row, part] = 0, 1
    return {"input_ids": ids, "attention_mask": mask}


BATCHES = [
    tokens(2, 7, "right"), tokens(1, 5, "", 1), tokens(3, 9, "left", 2), tokens(3, 6, "right", 3),
    tokens(1, 1, "", 4), tokens(4, 12, "", 5),
]  # fmt: skip


def dynamo(
    module: nn.Module,
    inputs: dict[str, Tensor],
    path: Path,
    opset: int,
    dimensions: dict[str, Any] | None = None,
) -> Path:
    """What ``torch.onnx.export`` writes today."""
    usual = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    shapes = (tuple((dimensions or {}).get(name, usual) for name in inputs),)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            path,
            dynamo=True,
            opset_version=opset,
            input_names=list(inputs),
            output_names=["logits"],
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )
    return path


def torchscript(
    module: nn.Module,
    inputs: dict[str, Tensor],
    path: Path,
    opset: int,
    dimensions: dict[str, dict[int, str]] | None = None,
) -> Path:
    """What ``torch.onnx.export`` wrote for years, by running the module once."""
    usual = {0: "batch", 1: "length"}
    axes = {name: (dimensions or {}).get(name, usual) for name in inputs}
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        # That it is deprecated, and that Python's own numbers become constants.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            path,
            dynamo=False,
            opset_version=opset,
            input_names=list(inputs),
            output_names=["logits"],
            dynamic_axes={**axes, "logits": {0: "batch"}},
        )
    return path


def exported(name: str, path: Path, *, exporter: str, attention: str = "sdpa", opset: int = 18,
             masked: bool = True) -> tuple[nn.Module, Path]:  # fmt: skip
    """A model of a family in a file, and the model as a module of its inputs in order."""
    model = _drawn(TEXT[name](), attention)
    chosen = ("input_ids", "attention_mask") if masked else ("input_ids",)
    module, sample = Named(model, chosen), {n: BATCHES[0][n] for n in chosen}
    if exporter == "dynamo":
        return module, dynamo(module, sample, path, opset)
    if exporter == "torchscript":
        return module, torchscript(module, sample, path, opset)
    samples = [{n: batch[n] for n in chosen} for batch in BATCHES]
    export_onnx(model, samples, path, opset=opset, outputs=["logits"])
    return module, path


def _pair_batches(name: str) -> list[dict[str, Tensor]]:
    if name != "whisper":
        return [
            {**batch, "decoder_input_ids": tokens(len(batch["input_ids"]), length, "")["input_ids"]}
            for batch, length in zip(BATCHES, (4, 3, 5, 2, 1, 6), strict=True)
        ]
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_features": torch.randn(rows, 8, 24, generator=generator),
            "decoder_input_ids": tokens(rows, length, "")["input_ids"],
        }
        for rows, length in ((2, 4), (1, 3), (3, 1))
    ]


def exported_other(
    name: str, path: Path, *, exporter: str, attention: str = "sdpa", opset: int = 18
) -> tuple[nn.Module, Path, list[dict[str, Tensor]]]:
    """The same of an encoder with a decoder, or of a model of pictures, and its batches."""
    model = _drawn((PAIRS | VISION)[name](), attention)
    if name in PAIRS:
        batches = _pair_batches(name)
    else:
        generator = torch.Generator().manual_seed(0)
        batches = [
            {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
            for rows in (2, 1, 5)
        ]
    module = Named(model, tuple(batches[0]))
    if exporter == "dynamo":
        batch = torch.export.Dim("batch")
        own = {"decoder_input_ids": {0: batch, 1: torch.export.Dim("target")}}
        own |= {"pixel_values": {0: batch}, "input_features": {0: batch}}
        own |= {
            n: {0: batch, 1: torch.export.Dim("source")} for n in ("input_ids", "attention_mask")
        }
        return module, dynamo(module, batches[0], path, opset, dimensions=own), batches
    if exporter == "torchscript":
        named = {
            "decoder_input_ids": {0: "batch", 1: "target"},
            "pixel_values": {0: "batch"},
            "input_features": {0: "batch"},
            "input_ids": {0: "batch", 1: "source"},
            "attention_mask": {0: "batch", 1: "source"},
        }
        return module, torchscript(module, batches[0], path, opset, dimensions=named), batches
    export_onnx(model, batches, path, opset=opset, outputs=["logits"])
    return module, path, batches


def arrays(batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in batch.items()}
