"""Models of speech mask their features by numpy's numbers, and are graphs with that in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.breadth import sampled

transformers = pytest.importorskip("transformers")

_AUDIO: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "vocab_size": 20, "layerdrop": 0.0, "mask_time_prob": 0.3,
    "mask_time_length": 3, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
    "ctc_zero_infinity": True,
}  # fmt: skip
_WHISPER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 60,
    "num_mel_bins": 16, "max_source_positions": 40, "max_target_positions": 20,
    "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 4,
    "mask_feature_prob": 0.2, "mask_feature_length": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "use_cache": False, "begin_suppress_tokens": None,
    "suppress_tokens": None,
}  # fmt: skip


def audio(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"input_values": torch.randn(3, 600 + 100 * (step % 2), generator=generator)}


def masked_audio(step: int) -> dict[str, Tensor]:
    found = audio(step)
    mask = torch.ones_like(found["input_values"], dtype=torch.long)
    mask[0, 500:] = 0
    return {**found, "attention_mask": mask}


def spoken(step: int) -> dict[str, Tensor]:
    labels = torch.randint(1, 20, (3, 6), generator=torch.Generator().manual_seed(step))
    labels[0, 4:] = -100
    return {**audio(step), "labels": labels}


def features(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "input_features": torch.randn(2, 16, 80, generator=generator),
        "labels": torch.randint(3, 60, (2, 7), generator=generator),
    }


# The model, its batches, and what of it stays PyTorch's.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "Wav2Vec2ForCTC": (
        lambda: transformers.Wav2Vec2ForCTC(
            transformers.Wav2Vec2Config(**_AUDIO, mask_feature_prob=0.2, mask_feature_length=4)
        ),
        spoken,
    ),
    "Wav2Vec2Model": (
        lambda: transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**_AUDIO)),
        masked_audio,
    ),
    "HubertForCTC": (
        lambda: transformers.HubertForCTC(transformers.HubertConfig(**_AUDIO)),
        spoken,
    ),
    "WavLMModel": (
        lambda: transformers.WavLMModel(transformers.WavLMConfig(**_AUDIO)),
        audio,
    ),
    "Whisper": (
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**_WHISPER)
        ),
        features,
    ),
}


@pytest.mark.parametrize("name", sampled(MODELS, ["Wav2Vec2ForCTC"]))
def test_under_the_same_seeds_losses_and_gradients_are_those_of_pytorch(name: str) -> None:
    made, batch = MODELS[name]
    torch.manual_seed(0)
    module = made().train()
    eager = copy.deepcopy(module)
    graph = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    found: list[list[Any]] = []
    for model, inner in ((eager, eager), (graph, module)):
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)
        rows: list[Any] = []
        for step in range(4):
            given = batch(step)
            output = model(**given)
            loss = getattr(output, "loss", None)
            if loss is None:
                hidden = output.last_hidden_state
                loss = (hidden * torch.arange(hidden.shape[-1]).sin()).mean()
            loss.backward()
            gradients = {
                n: p.grad.clone() for n, p in inner.named_parameters() if p.grad is not None
            }
            inner.zero_grad()
            rows += [loss.detach(), gradients, given]
        found.append([*rows, np.random.rand()])  # noqa: NPY002
    assert graph.report.graph_calls == 4
    *wanted, drawn = found[0]
    *got, drawn_too = found[1]
    assert drawn == drawn_too
    for one, other in zip(wanted[::3], got[::3], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=0)
    for one, other in zip(wanted[1::3], got[1::3], strict=True):
        assert one.keys() == other.keys()
        largest = max(float(g.abs().max()) for g in one.values())
        for key in one:
            torch.testing.assert_close(
                other[key], one[key], rtol=1e-4, atol=1e-5 * largest, msg=lambda m, k=key: k + m
            )
    for one, other in zip(wanted[2::3], got[2::3], strict=True):
        for key in one:  # Whisper masks the batch that it is given
            assert torch.equal(one[key], other[key])
