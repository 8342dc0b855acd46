"""Attention: PyTorch's own, where it computes the same."""

from __future__ import annotations

from ortrain.runtime.aten.table import kernel


def _drops_nothing(node):
    ratio = node.attributes.get("ratio")
    return ratio is None or ratio.as_float() == 0


@kernel("ortrain::Attention", when=_drops_nothing)
def attention(
    t, query, key, value, mask=None, seed=None, index=None, *, scale, causal=0, ratio=0.0, stream=0
):  # fmt: skip
    """With dropout its body draws the mask that the gradient draws again."""
    return t.call(
        "attention.attend", query, key, value, mask, scale=scale, causal=bool(causal)
    )  # fmt: skip


def _is_plain(node):
    """Without a mask, a past and a softcap, in one output, in the query's own precision."""
    given = node.attributes
    softcap = given["softcap"].as_float() if "softcap" in given else 0.0
    return (
        not any(node.inputs[3:])
        and len([v for v in node.outputs if v.name]) == 1
        and softcap == 0
        and "softmax_precision" not in given
    )


@kernel("Attention", when=_is_plain)
def standard_attention(
    t, query, key, value, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *,
    is_causal=0, kv_num_heads=None, q_num_heads=None, qk_matmul_output_mode=0, scale=None,
    softcap=0.0, softmax_precision=None,
):  # fmt: skip
    """What a mask shuts out from every key is not zero here: with one, the operator's body runs."""
    heads = query.rank == 3
    if heads:
        query, key, value = (
            x.unflatten(2, [count, -1]).transpose(1, 2)
            for x, count in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads))
        )
        grouped = q_num_heads != kv_num_heads
    else:
        grouped = query.dims[1] != key.dims[1] or query.dims[1] is None
    result = t.call(
        "torch.nn.functional.scaled_dot_product_attention", query, key, value,
        is_causal=bool(is_causal), scale=scale, enable_gqa=grouped,
    )  # fmt: skip
    return result.transpose(1, 2).flatten(2) if heads else result
