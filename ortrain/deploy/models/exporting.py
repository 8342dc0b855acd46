"""A model of transformers as the folder of ONNX files that its ``ORTModel`` loads."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ortrain.aside import modes_kept
from ortrain.deploy.cached_decoder import CachedDecoder, Encoder, States
from ortrain.deploy.export import export_onnx
from ortrain.deploy.models.samples import Sample, first_samples, sound_samples, text_samples, tokens
from ortrain.errors import NotServed, listing
from ortrain.module import unwrap

FORMS = ("one file", "choices", "decoder", "encoder and decoder")
_DIMENSIONS = ("batch", "sequence")
# Tokens in the cache, and new ones. The first pair is captured; a prompt and single tokens follow.
_STEPS = ((2, 4, 3), (2, 0, 5), (3, 6, 1), (1, 0, 1), (1, 1, 1))


def export_folder(model: nn.Module, folder: str | os.PathLike[str], form: str = "one file") -> None:
    """Writes a model's ONNX files, each compared with PyTorch in several sizes, and its config.

    Args:
        model: of transformers, in float32 on the CPU; also an ORTModule around one. Its mode stays.
        folder: made where it does not exist.
        form: ``"one file"``, ``"choices"`` for one that reads several texts at once, ``"decoder"``
            for one file with a cache, ``"encoder and decoder"`` for three files.

    Raises:
        ValueError: the form is none of these.
        NotServed: the model is none of transformers, or on another device, or in another precision.
        CaptureError: it cannot become one graph.
        ParityError: a file answers otherwise than the model.
        SaveError: a file could not be written.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r}: expected one of {listing(FORMS)}")
    source: Any = unwrap(model)
    _expect_exportable(source, form)
    target = Path(folder)
    with modes_kept(source), torch.no_grad():
        source.eval()
        if form == "decoder":
            _causal(source, target)
        elif form == "encoder and decoder":
            _paired(source, target)
        else:
            choices = form == "choices"
            samples = text_samples(source, choices=True) if choices else first_samples(source)
            names = ("batch", "choice", "sequence") if choices else _DIMENSIONS
            outputs = _outputs(source, samples[0])
            export_onnx(source, samples, target / "model.onnx", outputs=outputs, dimensions=names)
    config = copy.deepcopy(source.config)
    config.architectures = [type(source).__name__]
    config.save_pretrained(target)
    if source.can_generate() and source.generation_config is not None:
        source.generation_config.save_pretrained(target)


def _expect_exportable(source: Any, form: str) -> None:
    if not isinstance(source, PreTrainedModel):
        raise NotServed(
            f"{type(source).__name__} is no model of transformers",
            help="ortrain.deploy.export_onnx writes any module",
        )
    if source.device.type != "cpu":
        raise NotServed(
            f"{type(source).__name__} is on {source.device}, and is exported on the CPU",
            help="pass model.cpu(); ortrain.ORTModule runs and trains it where it is",
        )
    if source.dtype is not torch.float32:
        raise NotServed(
            f"{type(source).__name__} is in {source.dtype}, and is exported in float32",
            help="pass model.float(), and convert the exported file",
        )
    paired = bool(source.config.is_encoder_decoder)
    generates = form in ("decoder", "encoder and decoder")
    if generates and (form == "encoder and decoder") is not paired:
        what = "an encoder and a decoder" if paired else "no encoder and decoder"
        raise NotServed(
            f"{type(source).__name__} has {what}",
            help="export it with the class of its task",
        )


def _outputs(model: Any, sample: Sample) -> list[str] | None:
    """What is of use: a state that no caller asks for, such as a cache, is left out."""
    result = model(**sample)
    known = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
    return [name for name in known if isinstance(result.get(name), Tensor)] or None


# -- decoders ------------------------------------------------------------------------------------


class _Decoder(nn.Module):
    """A decoder whose cache goes in and out by the names that exported files have."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = CachedDecoder(model)

    def forward(self, past_key_values: dict[str, dict[str, Tensor]], **kwargs: Any) -> Any:
        """Logits, and the cache with the new tokens."""
        logits, past, _ = self.decoder(_flat(past_key_values), [], **kwargs, use_cache=True)
        return {"logits": logits, "present": _named(past)}


class _PairedDecoder(nn.Module):
    """The decoder of an encoder-decoder, likewise, with what it needs of the encoder."""

    def __init__(self, model: Any, encoded: Any) -> None:
        super().__init__()
        self.decoder = CachedDecoder(model)
        # What the encoder gives may have fields of its own, which the model's code looks up.
        self.kind: type[Any] = type(encoded)
        self.width = int(encoded.last_hidden_state.shape[-1])

    def forward(
        self,
        input_ids: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: dict[str, dict[str, dict[str, Tensor]]] | None = None,
    ) -> Any:
        """Logits, and the cache: of both where it is computed here, else with the new tokens."""
        past: States = []
        cross: States = []
        if past_key_values is not None:
            past = _flat({layer: both["decoder"] for layer, both in past_key_values.items()})
            cross = _flat({layer: both["encoder"] for layer, both in past_key_values.items()})
            keys = cross[0]
            assert keys is not None
            # Read for their sizes alone.
            encoder_hidden_states = keys.new_zeros(keys.shape[0], keys.shape[2], self.width)
        kwargs: dict[str, Any] = {
            "encoder_outputs": self.kind(last_hidden_state=encoder_hidden_states)
        }
        if encoder_attention_mask is not None:
            kwargs["attention_mask"] = encoder_attention_mask
        logits, own, computed = self.decoder(
            past, cross, decoder_input_ids=input_ids, use_cache=True, **kwargs
        )
        present: dict[str, Any] = {}
        for layer, states in _named(own).items():
            present[layer] = {"decoder": states}
            if computed:
                present[layer]["encoder"] = _named(computed)[layer]
        return {"logits": logits, "present": present}


def _flat(layers: dict[str, dict[str, Tensor]]) -> States:
    return [layer[part] for layer in layers.values() for part in ("key", "value")]


def _named(states: Sequence[Tensor | None]) -> dict[str, dict[str, Tensor]]:
    pairs = zip(states[::2], states[1::2], strict=True)
    return {str(i): {"key": k, "value": v} for i, (k, v) in enumerate(pairs)}  # type: ignore[dict-item]


def _causal(model: Any, target: Path) -> None:
    decoder = _Decoder(model)
    names = inspect.signature(model.forward).parameters
    samples: list[Sample] = []
    for rows, before, new in _STEPS:
        ids, mask = tokens(model.config, rows, before + new, left=True)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        whole: Sample = {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in names:
            whole["position_ids"] = positions
        # A prompt of one token more, so that there are sizes to take nothing of.
        read = max(before, 1)
        prompt = {name: value[:, :read] for name, value in whole.items()}
        try:
            _, states, _ = CachedDecoder(model)([], [], **prompt, use_cache=True)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise NotServed(
                f"{type(model).__name__} has a cache of another kind than keys and values",
                because=f"{type(error).__name__}: {error}",
                help="ortrain.deploy.export_onnx writes it without a cache",
            ) from error
        past = [state[:, :, :before] for state in states]
        sample = {name: value[:, before:] for name, value in whole.items()}
        samples.append({**sample, "attention_mask": mask, "past_key_values": _named(past)})
    export_onnx(decoder, samples, target / "model.onnx", dimensions=_DIMENSIONS)


def _paired(model: Any, target: Path) -> None:
    speech = model.main_input_name != "input_ids"
    sources = sound_samples(model) if speech else text_samples(model)
    sources = [{n: v for n, v in source.items() if n != "token_type_ids"} for source in sources]
    coding = Encoder(model)
    export_onnx(
        coding,
        sources,
        target / "encoder_model.onnx",
        outputs=["last_hidden_state"],
        dimensions=_DIMENSIONS,
    )
    first: list[Sample] = []
    after: list[Sample] = []
    decoder = _PairedDecoder(model, coding(**sources[0]))
    for source, (length, new) in zip(sources, ((4, 2), (1, 1), (2, 1), (1, 3)), strict=False):
        states = coding(**source).last_hidden_state
        # Of sounds a mask is of samples, which the decoder's side counts in frames by itself.
        masked = "attention_mask" in source
        mask = {"encoder_attention_mask": source["attention_mask"]} if masked else {}
        ids, _ = tokens(model.config, states.shape[0], length + new)
        first.append({"input_ids": ids[:, :length], "encoder_hidden_states": states, **mask})
        past = decoder(**first[-1])["present"]
        after.append({"input_ids": ids[:, length:], **mask, "past_key_values": past})
    for name, samples in (("decoder_model", first), ("decoder_with_past_model", after)):
        export_onnx(decoder, samples, target / f"{name}.onnx", dimensions=_DIMENSIONS)
