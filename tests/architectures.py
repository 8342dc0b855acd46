"""More kinds of models than :mod:`tests.models` has, one small module of each.

They differ in what their forward is made of: relative positions, rotary embeddings, windows,
experts, convolutions, statistics of batches, stochastic depth, pictures beside text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.models import (
    LABELS,
    PAD,
    VOCABULARY,
    Batch,
    ModelCase,
    _classified,
    _images,
    _language,
    _padded,
    _translated,
)

_WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD}
_ENDS: dict[str, Any] = {**_WORDS, "bos_token_id": 0, "eos_token_id": 2, "use_cache": False}
_LAYERS: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
_ENCODER = {**_LAYERS, **_WORDS, "max_position_embeddings": 64, "num_labels": LABELS}
_DECODER = {**_LAYERS, **_ENDS, "num_attention_heads": 4, "max_position_embeddings": 64}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, **_ENDS}
_PAIR: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, **_ENDS,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1,
    "num_heads": 2, "decoder_start_token_id": 0, **_WORDS, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_PATCHES = {**_LAYERS, "image_size": 32, "patch_size": 8, "num_labels": LABELS}
_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": LABELS}
_WINDOWS: dict[str, Any] = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2],
    "window_size": 4, "num_labels": LABELS,
}  # fmt: skip
_SOUND: dict[str, Any] = {
    **_LAYERS, "vocab_size": 32, "num_labels": LABELS, "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
    "classifier_proj_size": 16, "layerdrop": 0.0,
}  # fmt: skip
_HIDDEN = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_EACH = ("dropout", "attention_dropout", "activation_dropout")
_RESID = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_PATHS = (*_HIDDEN, "drop_path_rate")


def _sounds(batch: int, length: int, generator: torch.Generator) -> Batch:
    samples = torch.randn(batch, 400 + 40 * length, generator=generator)
    return {
        "input_values": samples,
        "labels": torch.randint(0, LABELS, (batch,), generator=generator),
    }


def _boxes(batch: int, length: int, generator: torch.Generator) -> Batch:
    corner = torch.randint(0, 30, (batch, length, 2), generator=generator)
    return {**_classified(batch, length, generator), "bbox": torch.cat([corner, corner + 5], -1)}


def _without_mask(make: Callable[..., Batch]) -> Callable[..., Batch]:
    def batch(batch: int, length: int, generator: torch.Generator) -> Batch:
        return {k: v for k, v in make(batch, length, generator).items() if k != "attention_mask"}

    return batch


def _pictures_of_words(batch: int, length: int, generator: torch.Generator) -> Batch:
    return {
        **_padded(batch, length, generator),
        "pixel_values": torch.randn(batch, 3, 32, 32, generator=generator),
    }


class Contrasted(nn.Module):
    """CLIP, which returns its loss where it is asked to."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        words = {**_LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
                 "eos_token_id": 2, "attention_dropout": dropout}  # fmt: skip
        pictures = {**_LAYERS, "image_size": 32, "patch_size": 8, "attention_dropout": dropout}
        self.model = transformers.CLIPModel(
            transformers.CLIPConfig(text_config=words, vision_config=pictures, projection_dim=16)  # type: ignore[call-arg]
        )

    def forward(self, **inputs: torch.Tensor) -> Any:
        output = self.model(**inputs, return_loss=True)
        return output.loss, output.logits_per_image


def _kind(
    name: str,
    model: str,
    config: str,
    settings: dict[str, Any],
    drops: tuple[str, ...],
    batch: Callable[..., Batch],
    **more: Any,
) -> ModelCase:
    """A model of transformers by the names of its classes, with some dropouts in its settings."""
    case = {k: more.pop(k) for k in ("has_length", "buffers", "shortest") if k in more}

    def make(dropout: float) -> nn.Module:
        given = {**settings, **more, **dict.fromkeys(drops, dropout)}
        module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**given))
        return module

    return ModelCase(name, make, batch, **case)


def _encoder(name: str, prefix: str, **more: Any) -> ModelCase:
    model, drops = f"{prefix}ForSequenceClassification", more.pop("drops", _HIDDEN)
    batch = more.pop("batch", _classified)
    return _kind(name, model, f"{prefix}Config", _ENCODER, drops, batch, **more)


def _decoder(name: str, prefix: str, settings: dict[str, Any] = _GROUPED, **more: Any) -> ModelCase:
    drops, config = more.pop("drops", ("attention_dropout",)), more.pop("config", prefix)
    model, batch = f"{prefix}ForCausalLM", more.pop("batch", _language)
    return _kind(name, model, f"{config}Config", settings, drops, batch, shortest=2, **more)


def _vision(name: str, prefix: str, settings: dict[str, Any], **more: Any) -> ModelCase:
    model, drops = f"{prefix}ForImageClassification", more.pop("drops", _HIDDEN)
    config = f"{prefix}Config"
    return _kind(name, model, config, settings, drops, _images(32), has_length=False, **more)


def _paired(name: str, prefix: str) -> ModelCase:
    model = f"{prefix}ForConditionalGeneration"
    return _kind(name, model, f"{prefix}Config", _PAIR, _EACH, _translated)


_POSITIONS = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"],
              "max_relative_positions": 16, "type_vocab_size": 0}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ALTERNATING = {"num_hidden_layers": 2, "sliding_window": 4}

ARCHITECTURES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        _encoder("deberta-v2", "DebertaV2", **_POSITIONS, position_buckets=8,
                 position_biased_input=False, norm_rel_ebd="layer_norm", share_att_key=True),
        _encoder("albert", "Albert", embedding_size=16),
        _encoder("electra", "Electra", embedding_size=16),
        _encoder("mpnet", "MPNet"),
        _encoder("modernbert", "ModernBert", num_hidden_layers=2, global_attn_every_n_layers=2,
                 local_attention=8, cls_token_id=0, sep_token_id=2,
                 drops=("embedding_dropout", "mlp_dropout", "attention_dropout")),
        _encoder("roformer", "RoFormer", embedding_size=32),
        _encoder("convbert", "ConvBert", embedding_size=32, head_ratio=2, conv_kernel_size=3),
        _encoder("squeezebert", "SqueezeBert", embedding_size=32, q_groups=2, k_groups=2,
                 v_groups=2, post_attention_groups=1, intermediate_groups=2, output_groups=2),
        _encoder("layoutlm", "LayoutLM", max_2d_position_embeddings=64, batch=_boxes),
        _kind("xlnet", "XLNetForSequenceClassification", "XLNetConfig",
              {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64, "vocab_size": VOCABULARY,
               "num_labels": LABELS}, ("dropout", "summary_last_dropout"), _classified),
        _decoder("mistral", "Mistral", sliding_window=4),
        _decoder("qwen2", "Qwen2"),
        _decoder("qwen3", "Qwen3", head_dim=8),
        _decoder("gemma", "Gemma", head_dim=8),
        # Whose attention is NaN in PyTorch where a window holds nothing but padding.
        _decoder("gemma2", "Gemma2", head_dim=8, **_ALTERNATING, batch=_without_mask(_language)),
        _decoder("gemma3", "Gemma3", config="Gemma3Text", head_dim=8, **_ALTERNATING,
                 layer_types=["sliding_attention", "full_attention"]),
        _decoder("phi", "Phi", drops=("resid_pdrop", "embd_pdrop", "attention_dropout")),
        _decoder("opt", "OPT", _DECODER, ffn_dim=64, word_embed_proj_dim=32, drops=_EACH),
        _decoder("falcon", "Falcon", _DECODER, drops=("hidden_dropout", "attention_dropout")),
        _decoder("gpt-neox", "GPTNeoX", _DECODER, drops=("hidden_dropout", "attention_dropout")),
        _decoder("gpt-bigcode", "GPTBigCode", _GPT, drops=_RESID),
        _decoder("codegen", "CodeGen", {**_GPT, "n_head": 4}, rotary_dim=4, drops=_RESID),
        _decoder("olmo2", "Olmo2"),
        _decoder("cohere", "Cohere"),
        _decoder("glm", "Glm", head_dim=8),
        _decoder("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
        _decoder("qwen2-moe", "Qwen2Moe", **_EXPERTS, shared_expert_intermediate_size=16),
        _decoder("gpt-oss", "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8,
                 **_ALTERNATING),
        _paired("mbart", "MBart"),
        _paired("pegasus", "Pegasus"),
        _paired("m2m100", "M2M100"),
        _kind("mt5", "MT5ForConditionalGeneration", "MT5Config", _T5, ("dropout_rate",),
              _translated, feed_forward_proj="gated-gelu"),
        _kind("longt5", "LongT5ForConditionalGeneration", "LongT5Config", _T5, ("dropout_rate",),
              _translated, local_radius=3, encoder_attention_type="local"),
        _vision("deit", "DeiT", _PATCHES),
        _vision("beit", "Beit", _PATCHES, use_relative_position_bias=True, drops=_PATHS),
        _vision("dinov2", "Dinov2", _PATCHES),
        _vision("swin", "Swin", _WINDOWS, drops=_PATHS),
        _vision("swinv2", "Swinv2", _WINDOWS, drops=_PATHS),
        _vision("convnext", "ConvNext", _STAGES, num_stages=2, drops=("drop_path_rate",)),
        _vision("convnextv2", "ConvNextV2", _STAGES, num_stages=2, drops=("drop_path_rate",)),
        _vision("segformer", "Segformer", _STAGES, num_encoder_blocks=2, sr_ratios=[2, 1],
                patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                decoder_hidden_size=16, drops=_PATHS),
        _vision("regnet", "RegNet", _STAGES, embedding_size=8, groups_width=8, drops=(),
                buffers=True),
        _kind("wav2vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _SOUND,
              ("hidden_dropout", *_EACH[1:], "feat_proj_dropout"), _sounds),
        _kind("hubert", "HubertForSequenceClassification", "HubertConfig", _SOUND,
              ("hidden_dropout", *_EACH[1:], "feat_proj_dropout"), _sounds),
        ModelCase("clip", Contrasted, _pictures_of_words),
        _kind("mamba", "MambaForCausalLM", "MambaConfig",
              {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, **_WORDS,
               "use_cache": False}, (), _without_mask(_language), shortest=2),
    )
}  # fmt: skip
