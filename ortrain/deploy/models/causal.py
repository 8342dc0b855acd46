"""``ORTModelForCausalLM``: text generation, token by token, with a key-value cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ortrain.deploy.cache_name import cache_name, take_cache
from ortrain.deploy.cached_decoder import fill, states_of
from ortrain.deploy.models.cache import BRANCH, CacheNames
from ortrain.deploy.models.files import files_of_roles
from ortrain.deploy.models.generating import ORTGeneratingModel
from ortrain.deploy.models.inputs import Inputs, as_tensors
from ortrain.deploy.models.results import Results
from ortrain.deploy.models.session import Session, described
from ortrain.errors import InputError

_ROLES = ("model", "decoder_model_merged", "decoder_model", "decoder_with_past_model")


class ORTModelForCausalLM(ORTGeneratingModel):
    """A decoder that writes on.

    One file with a cache that may be empty, or one to begin and one to go on; a file without a
    cache reads all tokens anew at each step.
    """

    auto_class = "AutoModelForCausalLM"
    form = "decoder"
    pipeline_names = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"

    @classmethod
    def _file_names(cls, file_name: str | None, config: dict[str, Any]) -> dict[str, str | None]:
        after = config.pop("decoder_with_past_file_name", None)
        first = file_name or config.pop("decoder_file_name", None)
        return {"model": first, "decoder_with_past_model": after}

    @classmethod
    def _files(cls, folder: Path, names: Mapping[str, str | None]) -> dict[str, Path]:
        if names["model"] is not None:  # which may have any name
            return files_of_roles(folder, (), names)
        found = files_of_roles(folder, _ROLES, names)
        for role in ("model", "decoder_model_merged"):
            if role in found:
                return {"model": found[role]}
        if "decoder_model" not in found:
            if "decoder_with_past_model" not in found:
                raise InputError(f"there is no ONNX file of a decoder in {folder}")
            return {"model": found["decoder_with_past_model"]}
        after = found.get("decoder_with_past_model")
        files = {"model": found["decoder_model"]}
        return files if after is None else {**files, "decoder_with_past_model": after}

    def _take(self, sessions: dict[str, Session]) -> None:
        super()._take(sessions)
        text = self.config.get_text_config(decoder=True)
        self._steps = {}
        for role, session in sessions.items():
            self._expect_outputs(session, ("logits",))
            self._expect_input(session, ("input_ids",))
            step = _Step(session, self.config, CacheNames(session, text))
            self._steps[role] = step
        first, *_ = self._steps.values()
        self._first, self._next = first, self._steps.get("decoder_with_past_model", first)
        if self._next is not first and not self._next.names.past:
            raise InputError(
                f"{self._next.session.path.name} takes no cache to go on from",
                because=described([self._next.session]),
            )
        if any(step.names.cross for step in self._steps.values()):
            raise InputError(
                f"{first.session.path.name} reads the states of an encoder",
                help="load it with ORTModelForSeq2SeqLM or ORTModelForSpeechSeq2Seq",
            )

    @property
    def _has_cache(self) -> bool:
        return bool(self._next.names.past)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits for each token of a text, and the cache with them.

        Args:
            input_ids: int64 tokens, ``[batch, length]``, of which the cache knows nothing yet.
            attention_mask: 1 for a token and 0 for padding, ``[batch, past + length]``; without it
                all are tokens.
            position_ids: ``[batch, length]``; without them tokens are counted from the cache's on.
            past_key_values: a transformers `DynamicCache`, which is filled in place; ``cache`` is
                another name of it.
            use_cache: whether the result has a cache; by default as the configuration says.
            kwargs: other inputs of the file, ``return_dict``, and ``logits_to_keep``: of how many
                tokens at the end, or of which, logits are wanted; 0 for all.

        Returns:
            A `CausalLMOutputWithPast` of torch tensors; its logits are a numpy array where all
            arguments are.

        Raises:
            TypeError: an argument is no array.
            UnsupportedInput: the cache is of another kind, or the file cannot take an argument and
                that would change its answer.
            ExecutionError: onnxruntime refused the sizes, or failed.
        """
        past_key_values = take_cache(kwargs, past_key_values)
        cache = self._cache_for(past_key_values, use_cache)
        states = [] if cache is None else states_of(cache)
        wanted = kwargs.pop("logits_to_keep", 0)
        step = self._next if states else self._first
        as_object = self._flags(kwargs, step.results.fields)
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **kwargs,
        }
        tensors, arrays = as_tensors(given, self.device)
        outputs = step.run(tensors, states)
        if not step.names.present:
            cache = past_key_values
        elif cache is not None:
            fill(cache, [outputs[index] for index in step.names.present])
        result: Any = step.results.of(outputs, arrays, **{cache_name(): cache})
        if not isinstance(wanted, int) or wanted:
            chosen = slice(-wanted, None) if isinstance(wanted, int) else wanted
            result.logits = result.logits[:, chosen]
        return result if as_object else result.to_tuple()


class _Step:
    """One file of a decoder, run with a cache or without."""

    def __init__(self, session: Session, config: Any, names: CacheNames) -> None:
        self.session, self.names = session, names
        self.inputs = Inputs(session, config)
        self.results = Results(session, CausalLMOutputWithPast)

    def run(self, tensors: dict[str, torch.Tensor], states: list[Any]) -> list[torch.Tensor]:
        names = self.names
        if states and not names.past:
            raise InputError(
                f"{self.session.path.name} takes no cache",
                help="pass all tokens and past_key_values=None, or export the model with a cache",
            )
        if states and len(states) != len(names.past):
            raise InputError(
                f"the cache has {len(states) // 2} layers, {self.session.path.name} "
                f"{len(names.past) // 2}"
            )
        feeds = self.inputs.feeds(tensors, states[0].shape[2] if states else 0)
        if names.branch:
            feeds[BRANCH] = torch.tensor([bool(states)], device=self.session.device)
        if names.past and not states:
            rows = feeds["input_ids"].shape[0]
            states = names.empty(names.past, rows, self.session.device)
        for value, state in zip(names.past, states, strict=True):
            feeds[value.name] = state
        return self.session.run(feeds)
