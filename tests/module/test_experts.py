"""Experts of transformers train as graphs."""

from __future__ import annotations

import pytest
import torch
import transformers

from ortrain import Options, ORTModule
from tests.breadth import table

CERTIFIED = Options(engine="onnxruntime", fallback="raise", certificate="first")
SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "use_cache": False,
}


@pytest.mark.parametrize(
    ("config", "sizes"),
    table([
        (transformers.MixtralConfig, {"num_local_experts": 4}),
        (
            transformers.Qwen3MoeConfig,
            {"num_experts": 4, "head_dim": 8, "moe_intermediate_size": 12},
        ),
        (
            transformers.DeepseekV3Config,
            {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12,
             "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
             "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        ),
    ], one_in=3),
    ids=["Mixtral", "Qwen3-MoE", "DeepSeek-V3"],
)  # fmt: skip
def test_a_mixture_of_experts_is_one_graph_at_any_batch_and_length(config, sizes) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, **sizes)).train()
    graph = ORTModule(model, options=CERTIFIED)
    for batch, length in ((2, 8), (3, 5)):
        ids = torch.randint(3, 50, (batch, length))
        plain = model(input_ids=ids, labels=ids).loss
        wanted = torch.autograd.grad(plain, list(model.parameters()), allow_unused=True)
        model.zero_grad()
        loss = graph(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert graph.report.captures == 1
    assert graph.report.certificate.startswith("loss")
