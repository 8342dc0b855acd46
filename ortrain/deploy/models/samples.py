"""Calls of a model of transformers by which its export is captured, and compared in other sizes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ortrain.errors import NotServed

Sample = dict[str, Any]

# Rows and tokens. The first call is captured: no two of its sizes are alike, and none is 1.
_SIZES = ((2, 7), (3, 12), (1, 5), (1, 1))
_CHOICES = 3


def text_samples(model: Any, *, choices: bool = False) -> list[Sample]:
    """Calls with tokens, the first of several rows padded at its end."""
    config = model.config
    names = inspect.signature(model.forward).parameters
    samples = []
    for rows, length in _SIZES:
        ids, mask = tokens(config, (rows * _CHOICES if choices else rows), length)
        sample = {"input_ids": ids}
        if "attention_mask" in names:
            sample["attention_mask"] = mask
        kinds = getattr(config, "type_vocab_size", None) or 0
        if "token_type_ids" in names and kinds > 1:
            sample["token_type_ids"] = torch.randint(kinds, ids.shape, generator=_generator(length))
        if choices:
            sample = {name: t.view(rows, _CHOICES, length) for name, t in sample.items()}
        samples.append(sample)
    return samples


def tokens(config: Any, rows: int, length: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids and their mask; the first of several rows is padded at an end."""
    text = config.get_text_config()
    count, padding = int(text.vocab_size), getattr(text, "pad_token_id", None)
    ids = torch.randint(count, (rows, length), generator=_generator(rows * 100 + length))
    if padding is not None:
        ids[ids == padding] = (padding + 1) % count
    mask = torch.ones_like(ids)
    if rows > 1 and length > 2:
        end = slice(2) if left else slice(-2, None)
        mask[0, end] = 0
        if padding is not None:
            ids[0, end] = padding
    return ids, mask


def image_samples(model: Any) -> list[Sample]:
    """Calls with images of the size that the model has been made for."""
    config = getattr(model.config, "vision_config", None) or model.config
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(config, "num_channels", 3)
    shapes = [(rows, channels, height, width) for rows in (2, 1, 3)]
    return [{"pixel_values": _normal(shape)} for shape in shapes]


def sound_samples(model: Any) -> list[Sample]:
    """Calls with sound: samples of it, or features of its frames."""
    config, name = model.config, model.main_input_name
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    positions = getattr(config, "max_source_positions", None)
    if name == "input_features" and bins and positions:
        return [{name: _normal((rows, bins, 2 * positions))} for rows in (2, 1, 3)]
    if name == "input_values" and bins and frames:
        return [{name: _normal((rows, frames, bins))} for rows in (2, 1, 3)]
    if name != "input_values":
        raise NotServed(f"{type(model).__name__} reads {name}: its export is not known here")
    shortest = 1
    kernels, strides = (
        getattr(config, "conv_kernel", (400,)),
        getattr(config, "conv_stride", (320,)),
    )
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        shortest = (shortest - 1) * stride + kernel
    step = 1
    for stride in strides:
        step *= stride
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    samples: list[Sample] = []
    for rows, frame_count in ((2, 21), (3, 34), (1, 16)):
        length = shortest + step * frame_count + 1
        sample: Sample = {name: _normal((rows, length))}
        if masked:
            sample["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
            if rows > 1:
                sample["attention_mask"][0, -4 * step :] = 0
                sample[name][0, -4 * step :] = 0
        samples.append(sample)
    return samples


def first_samples(model: Any) -> list[Sample]:
    """Calls of a model by what it begins with."""
    if model.main_input_name == "pixel_values":
        return image_samples(model)
    if model.main_input_name in ("input_values", "input_features"):
        return sound_samples(model)
    if model.main_input_name != "input_ids":
        raise NotServed(
            f"{type(model).__name__} reads {model.main_input_name}: its export is not known here",
            help="export it with ortrain.deploy.export_onnx, which takes calls of your own",
        )
    return text_samples(model)


def copied(sample: Mapping[str, Any]) -> Sample:
    """The sample with tensors of its own: a cache grows in place."""
    return {
        name: copied(value) if isinstance(value, Mapping) else value.clone()
        for name, value in sample.items()
    }


def _normal(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=_generator(shape[0]))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
