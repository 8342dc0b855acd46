"""A small configuration of any family of transformers: its own fields, in small numbers."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

WORDS, WIDTH, LAYERS, HEADS = 60, 32, 2, 4
# Field of a configuration → its small value. Fields that a family has not are left out.
_SMALL: dict[str, int] = {
    "vocab_size": WORDS, "text_vocab_size": WORDS, "src_vocab_size": WORDS,
    "tgt_vocab_size": WORDS, "hidden_size": WIDTH, "d_model": WIDTH, "dim": WIDTH,
    "n_embd": WIDTH, "emb_dim": WIDTH, "embed_dim": WIDTH, "model_dim": WIDTH,
    "word_embed_proj_dim": WIDTH, "embedding_size": WIDTH, "input_embedding_size": WIDTH,
    "hidden_dim": 48, "projection_dim": 16, "n_inner": 48, "rotary_dim": 4,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS, "num_layers": LAYERS,
    "encoder_layers": LAYERS, "decoder_layers": LAYERS, "num_decoder_layers": LAYERS,
    "num_encoder_layers": LAYERS, "encoder_num_hidden_layers": LAYERS,
    "decoder_num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "n_head": HEADS,
    "n_heads": HEADS, "num_heads": HEADS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "num_encoder_attention_heads": HEADS,
    "num_decoder_attention_heads": HEADS, "encoder_num_attention_heads": HEADS,
    "decoder_num_attention_heads": HEADS, "num_key_value_heads": 2,
    "encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS,
    "intermediate_size": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "d_ff": 48, "d_inner": 48, "ffn_hidden_size": 48, "dim_ff": 48, "d_kv": 8, "d_head": 8,
    "head_dim": 8, "attention_head_size": 8, "dim_head": 8, "max_position_embeddings": 64,
    "max_seq_len": 64, "n_positions": 64, "n_ctx": 64, "max_source_positions": 16,
    "max_target_positions": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_num_experts": 4, "moe_k": 2, "sliding_window": 4, "local_attention": 8,
    "attention_window": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "qk_head_dim": 8, "image_size": 32, "patch_size": 8,
    "num_mel_bins": 8, "max_length": 24, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": WORDS, "conv_bias_size": 8, "classifier_proj_size": 16,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "output_hidden_size": WIDTH,
    "num_feat_extract_layers": 2, "state_size": 4, "ssm_state_size": 4, "mamba_d_state": 4,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "conv_kernel_size": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_buckets": 8, "num_hashes": 1,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "num_codebooks": 2,
    "attention_chunk_size": 8, "lru_width": WIDTH, "num_hidden_groups": 1,
    "max_2d_position_embeddings": 32, "bottleneck_size": WIDTH, "intra_bottleneck_size": WIDTH,
    "true_hidden_size": WIDTH, "num_labels": 3, "embedding_dim": WIDTH,
}  # fmt: skip
# Sound: two layers of convolutions in the place of seven.
_LISTS: dict[str, list[Any]] = {
    "conv_dim": [8, 8],
    "conv_kernel": [5, 3],
    "conv_stride": [3, 2],
}
_TOKENS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id",
    "mask_token_id", "decoder_start_token_id", "forced_eos_token_id", "forced_bos_token_id",
    "unk_token_id", "image_token_id", "audio_token_id", "boi_token_id", "eoi_token_id",
)  # fmt: skip

# What of a family cannot follow from its fields.
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4}
_WINDOWS = {
    "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32,
    "patch_size": 4,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "deepseek_v2": {"head_dim": 4},
    "deepseek_v3": {"head_dim": 4},
    "donut-swin": _WINDOWS,
    "efficientnet": {"hidden_dim": 2560},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "nemotron": {"num_key_value_heads": 2},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    # Its window is cut by the cache of generate alone: its tokens depend on whether there is one.
    "moshi": {"sliding_window": 64},
}


def small(name: str, **more: Any) -> PretrainedConfig:
    """The configuration of a family with two layers, four heads, 32 wide, of 60 words.

    Args:
        name: the family's ``model_type``.
        more: fields that take precedence.

    Raises:
        Exception: whatever the family's own class raises of such fields.
    """
    kind = CONFIG_MAPPING[name]
    return kind(**{**_fields(kind()), **OWN.get(name, {}), **more})


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    table = {new: old for old, new in config.attribute_map.items()}
    for field, value in config.to_dict().items():
        known = field if field in _SMALL else table.get(field, field)
        part = getattr(config, field, None)
        if isinstance(part, PretrainedConfig):
            found[field] = type(part)(**_fields(part)) if field not in ("text", "vision") else part
        elif field in _TOKENS and isinstance(value, int) and not isinstance(value, bool):
            found[field] = value if 0 <= value < WORDS else _TOKENS.index(field)
        elif field in _LISTS and isinstance(value, list | tuple):
            found[field] = _LISTS[field]
        elif field == "eos_token_id" and isinstance(value, list):
            found[field] = 2
        elif field == "depths" and isinstance(value, list | tuple):
            found[field] = [1] * len(value)
        elif field == "layer_types" and isinstance(value, list | tuple):
            found[field] = _types(list(value))
        elif known in _SMALL and isinstance(value, int) and not isinstance(value, bool):
            found[field] = min(_SMALL[known], value) if value > 0 else value
    return found


def _types(types: list[str]) -> list[str]:
    """Of each kind of layer one, as far as there are layers."""
    kinds = list(dict.fromkeys(types))
    return (kinds * LAYERS)[:LAYERS]
