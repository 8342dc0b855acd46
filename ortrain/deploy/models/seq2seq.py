"""``ORTModelForSeq2SeqLM`` and its sibling for speech: an encoder's file and a decoder's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers.modeling_outputs import Seq2SeqLMOutput

from ortrain.deploy.cache_name import cache_name, take_cache
from ortrain.deploy.cached_decoder import fill, states_of
from ortrain.deploy.models.cache import BRANCH, CacheNames, fill_cross
from ortrain.deploy.models.encoder import ORTEncoder
from ortrain.deploy.models.files import files_of_roles
from ortrain.deploy.models.generating import ORTGeneratingModel
from ortrain.deploy.models.inputs import Inputs, as_tensors
from ortrain.deploy.models.results import Results
from ortrain.deploy.models.session import Session, described
from ortrain.errors import InputError, listing

_ROLES = ("encoder_model", "decoder_model_merged", "decoder_model", "decoder_with_past_model")


class ORTModelForSeq2SeqLM(ORTGeneratingModel):
    """A text made of another: an encoder reads, a decoder writes."""

    auto_class = "AutoModelForSeq2SeqLM"
    form = "encoder and decoder"
    pipeline_names = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
    # Arguments that the encoder reads, and the decoder does not.
    reads: ClassVar[tuple[str, ...]] = ("input_ids",)

    @classmethod
    def _file_names(cls, file_name: str | None, config: dict[str, Any]) -> dict[str, str | None]:
        if file_name is not None:
            raise TypeError(
                f"{cls.__name__} has several files: say encoder_file_name=, decoder_file_name= and "
                "decoder_with_past_file_name="
            )
        first = config.pop("decoder_file_name", None)
        return {
            "encoder_model": config.pop("encoder_file_name", None),
            "decoder_model": first,
            "decoder_with_past_model": config.pop("decoder_with_past_file_name", None),
        }

    @classmethod
    def _files(cls, folder: Path, names: Mapping[str, str | None]) -> dict[str, Path]:
        given = names["decoder_model"] is not None
        roles = [role for role in _ROLES if not (given and role == "decoder_model_merged")]
        found = files_of_roles(folder, roles, names)
        if "decoder_model_merged" in found:
            found["decoder_model"] = found.pop("decoder_model_merged")
            found.pop("decoder_with_past_model", None)
        for role in ("encoder_model", "decoder_model"):
            if role not in found:
                there = sorted(path.name for path in folder.glob("**/*.onnx"))
                raise InputError(
                    f"there is no {role}.onnx in {folder}",
                    because=f"it has {listing(there, 8)}",
                    help="export=True makes encoder and decoder of a checkpoint of transformers",
                )
        order = ("encoder_model", "decoder_model", "decoder_with_past_model")
        return {role: found[role] for role in order if role in found}

    def _take(self, sessions: dict[str, Session]) -> None:
        super()._take(sessions)
        coding = sessions["encoder_model"]
        self._expect_outputs(coding, ("last_hidden_state",))
        self._expect_input(coding, self.reads)
        self.main_input_name = next(name for name in self.reads if name in coding.inputs)
        self.encoder = ORTEncoder(coding, self.config, self.main_input_name)
        text = self.config.get_text_config(decoder=True)
        self._steps = {
            role: _Step(session, self.config, CacheNames(session, text))
            for role, session in sessions.items()
            if role != "encoder_model"
        }
        for step in self._steps.values():
            self._expect_outputs(step.session, ("logits",))
        self._first = self._steps["decoder_model"]
        merged = self._first if self._first.names.branch else None
        self._next = self._steps.get("decoder_with_past_model", merged)
        if self._next is not None and not self._next.names.past:
            raise InputError(
                f"{self._next.session.path.name} takes no cache to go on from",
                because=described([self._next.session]),
            )
        if getattr(self.config, "model_type", "") == "whisper":
            self.model = SimpleNamespace(encoder=self.encoder, config=self.config)

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder, an `ORTEncoder`."""
        return self.encoder

    @property
    def _has_cache(self) -> bool:
        return self._next is not None

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits for each token of the decoder, and the cache with them.

        Args:
            input_ids: int64 tokens of the source, ``[batch, length]``.
            attention_mask: 1 for a token of the source and 0 for padding, of the same shape.
            decoder_input_ids: int64 tokens, ``[batch, length]``, of which the cache knows nothing
                yet.
            decoder_attention_mask: of the decoder's tokens; few files take one.
            encoder_outputs: what the encoder has returned, in place of the source.
            past_key_values: a transformers `EncoderDecoderCache`, which is filled in place;
                ``cache`` is another name of it.
            use_cache: whether the result has a cache; by default as the configuration says.
            kwargs: other inputs of the files, and ``return_dict``.

        Returns:
            A `Seq2SeqLMOutput` of torch tensors; its logits are a numpy array where all arguments
            are.

        Raises:
            TypeError: an argument is no array.
            InputError: there is nothing for the decoder to go on from.
            UnsupportedInput: the cache is of another kind, or a file cannot take an argument and
                that would change its answer.
            ExecutionError: onnxruntime refused the sizes, or failed.
        """
        return self._answer(
            {"input_ids": input_ids},
            attention_mask=attention_mask,
            decoder={
                "input_ids": decoder_input_ids,
                "decoder_attention_mask": decoder_attention_mask,
            },
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
            kwargs=kwargs,
        )

    def _answer(
        self,
        source: dict[str, Any],
        *,
        attention_mask: Any,
        decoder: dict[str, Any],
        encoder_outputs: Any,
        past_key_values: Any,
        use_cache: bool | None,
        kwargs: dict[str, Any],
    ) -> Any:
        past_key_values = take_cache(kwargs, past_key_values)
        cache = self._cache_for(past_key_values, use_cache)
        own = [] if cache is None else states_of(cache.self_attention_cache)
        cross = [] if cache is None else states_of(cache.cross_attention_cache)
        as_object = self._flags(kwargs, self._first.results.fields)
        if decoder["input_ids"] is None:
            raise InputError(
                "decoder_input_ids is missing: nothing tells the decoder what to go on from",
                help="pass decoder_input_ids=…, or call generate",
            )
        asked = {**source, "attention_mask": attention_mask, **decoder, **kwargs}
        _, arrays = as_tensors(asked, self.device)
        if encoder_outputs is None and not own:
            encoder_outputs = self.encoder(**source, attention_mask=attention_mask)
        states = None if encoder_outputs is None else _hidden(encoder_outputs)
        if attention_mask is None:
            attention_mask = self._all_of(source)
        given = {
            **decoder,
            **kwargs,
            "encoder_hidden_states": states,
            "encoder_attention_mask": attention_mask,
        }
        tensors, _ = as_tensors(given, self.device)
        step = self._first
        if own:
            if self._next is None:
                raise InputError(
                    f"{step.session.path.name} cannot go on from a cache",
                    help="pass all tokens and past_key_values=None, or export the model with "
                    "decoder_with_past_model.onnx",
                )
            step = self._next
        outputs = step.run(tensors, own, cross)
        if cache is not None and step.names.present:
            fill(cache.self_attention_cache, [outputs[index] for index in step.names.present])
            if step.names.computed and not cross:
                fill_cross(cache, [outputs[index] for index in step.names.computed])
        elif not step.names.present:
            cache = past_key_values
        more = {cache_name(): cache, "encoder_last_hidden_state": states}
        if arrays and states is not None:
            more["encoder_last_hidden_state"] = states.cpu().numpy()
        result: Any = step.results.of(outputs, arrays, **more)
        return result if as_object else result.to_tuple()

    def _all_of(self, source: dict[str, Any]) -> Any:
        """The mask of a source that has none; of tokens it is made of the encoder's states."""
        return None


class ORTModelForSpeechSeq2Seq(ORTModelForSeq2SeqLM):
    """A text made of speech: an encoder hears, a decoder writes."""

    auto_class = "AutoModelForSpeechSeq2Seq"
    pipeline_names = "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"
    reads: ClassVar[tuple[str, ...]] = ("input_features", "input_values")
    main_input_name = "input_features"
    input_modalities = ("audio", "text")

    def forward(  # type: ignore[override]
        self,
        input_features: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        input_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Logits for each token of the decoder, and the cache with them.

        Args:
            input_features: float32, ``[batch, features, frames]``.
            attention_mask: of the frames, where the encoder reads one.
            decoder_input_ids: as `ORTModelForSeq2SeqLM.forward` has it.
            decoder_attention_mask: likewise.
            encoder_outputs: likewise.
            past_key_values: likewise.
            use_cache: likewise.
            input_values: of models that begin with samples in place of features.
            kwargs: other inputs of the files, and ``return_dict``.

        Returns:
            A `Seq2SeqLMOutput`, as `ORTModelForSeq2SeqLM.forward` does.

        Raises:
            TypeError: an argument is no array.
            InputError: there is nothing for the decoder to go on from.
            UnsupportedInput: the cache is of another kind, or a file cannot take an argument and
                that would change its answer.
            ExecutionError: onnxruntime refused the sizes, or failed.
        """
        return self._answer(
            {"input_features": input_features, "input_values": input_values},
            attention_mask=attention_mask,
            decoder={
                "input_ids": decoder_input_ids,
                "decoder_attention_mask": decoder_attention_mask,
            },
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
            kwargs=kwargs,
        )

    def _all_of(self, source: dict[str, Any]) -> Any:
        """Of samples there are more than states, and how many, the source alone tells."""
        samples = source.get("input_values")
        masked = (s for s in self._steps.values() if "encoder_attention_mask" in s.session.inputs)
        if self.main_input_name != "input_values" or next(masked, None) is None:
            return None
        if samples is None:
            raise InputError(
                "attention_mask is missing: the decoder reads which samples of the sound are there",
                help="pass attention_mask=… beside encoder_outputs, ones for each sample",
            )
        return torch.ones(*samples.shape[:2], dtype=torch.int64, device=self.device)


def _hidden(outputs: Any) -> torch.Tensor:
    """The last hidden states of an encoder's result, an object or a tuple."""
    states = getattr(outputs, "last_hidden_state", None)
    return outputs[0] if states is None else states


class _Step:
    """One file of a decoder, run with a cache or without."""

    def __init__(self, session: Session, config: Any, names: CacheNames) -> None:
        self.session, self.names = session, names
        self.inputs = Inputs(session, config)
        self.results = Results(session, Seq2SeqLMOutput)
        # With a cache of the encoder's states, they themselves are of no use any more.
        self._drops = "encoder_hidden_states" not in session.inputs

    def run(
        self, tensors: dict[str, torch.Tensor], own: list[Any], cross: list[Any]
    ) -> list[torch.Tensor]:
        names = self.names
        if self._drops:
            if not cross:
                raise InputError(f"{self.session.path.name} reads a cache of the encoder's states")
            tensors = {n: t for n, t in tensors.items() if n != "encoder_hidden_states"}
        source = cross[0].shape[2] if cross else None
        feeds = self.inputs.feeds(tensors, own[0].shape[2] if own else 0, source)
        if names.branch:
            feeds[BRANCH] = torch.tensor([bool(own)], device=self.session.device)
        if names.past:
            rows = feeds["input_ids"].shape[0]
            own = own or names.empty(names.past, rows, self.session.device)
            cross = cross or names.empty(names.cross, rows, self.session.device)
            for values, states in ((names.past, own), (names.cross, cross)):
                if len(values) != len(states):
                    raise InputError(
                        f"the cache has {len(states) // 2} layers, {self.session.path.name} "
                        f"{len(values) // 2}"
                    )
                feeds.update((v.name, state) for v, state in zip(values, states, strict=True))
        return self.session.run(feeds)
