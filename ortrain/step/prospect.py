"""What a graph is likely to cost and to save, as :mod:`ortrain.frontend.policy` goes by it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from ortrain.cpuinfo import cpuinfo
from ortrain.runtime.engines import are_narrow

# Seconds of a capture and of building, which Python takes: of a process's first capture, and for
# each layer (a module without children). On an EPYC of the fifth generation four layers of
# BERT-base, 57 layers in this sense, take 1.8 s, six of MiniLM's shape, 81, 2.1, MobileNetV2, 142,
# 2.2; a perceptron 0.1. Slower processors take up to twice as long.
FIRST, LAYER = 0.2, 0.05
# Steps of eager's that a certificate takes: 0.5 to 1 of transformers in float32, 2 in bfloat16,
# where a third run is the truth, and 6 of convolutions.
CERTIFICATE = 2
# The share of eager's time that engines have saved where they were kept.
GAIN = 0.25
# That of floating-point numbers of 16 bits, padding aside: on EPYCs 0.1 of GPT-2 and Llama, 0.3 of
# BERT and MiniLM.
GAIN_OF_NARROW = 0.25
# That of float32, padding aside, by the processor's maker and family: on EPYCs of the fifth
# generation, where MKL is slow, 0.54 of MiniLM and 0.58 of BERT; on those before 0.15 of MiniLM,
# 0.2 to 0.4 of GPT-2, 0.2 of BERT and Whisper, 0.1 or nothing of DeBERTa, wav2vec 2.0 and a small
# Llama; on a Xeon without AMX 0.11 of GPT-2, 0.24 of BERT.
GAIN_OF_WIDE = {"AuthenticAMD": 0.2, "GenuineIntel": 0.2}
GAIN_ON_ZEN5, ZEN5 = 0.5, 26
# The share of that which a graph saves of layers that run the same kernels in it: of a ResNet-18 a
# tenth of the time was saved, of a UNet and of an LSTM nothing.
OF_CONVOLUTIONS, OF_RECURRENT = 0.1, 0.02
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
# They compute nothing, and are there by the dozen in adapters.
_NOTHING = (nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)

CPU = torch.device("cpu")


def gain_of(dtypes: Collection[torch.dtype], device: torch.device = CPU) -> float:
    """The share of eager's time that a graph is likely to save.

    Args:
        dtypes: of the tensors, and that autocast casts them to.
        device: that they are on; this processor by default.
    """
    if device.type != "cpu":  # of an H100's, recorded, 0.23 to 0.73
        return GAIN
    if are_narrow(dtypes):
        return GAIN_OF_NARROW
    known = cpuinfo()
    maker, family = known.get("vendor_id", ""), known.get("cpu family", "")
    if maker == "AuthenticAMD" and family.isdigit() and int(family) >= ZEN5:
        return GAIN_ON_ZEN5
    return GAIN_OF_WIDE.get(maker, GAIN)


def layers_in(module: nn.Module) -> int:
    """How many modules without children there are that compute something."""
    return sum(
        not [*layer.children()] and not isinstance(layer, _NOTHING) for layer in module.modules()
    )


def share_of(module: nn.Module) -> float:
    """The share of :func:`gain_of` that is likely on a CPU, by which layers have the weights.

    Tables of embeddings are not counted: they take no time.
    """
    total = likely = 0.0
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        share = 1.0
        if isinstance(layer, _CONVOLUTIONS):
            share = OF_CONVOLUTIONS
        elif isinstance(layer, nn.RNNBase):
            share = OF_RECURRENT
        weights = sum(p.numel() for p in layer.parameters(recurse=False))
        total += weights
        likely += share * weights
    return likely / total if total else 1.0


@dataclass
class Prospect:
    """What is known of a run.

    Attributes:
        steps: that are to come, where somebody knows.
    """

    steps: int | None = None
