"""What decoders of both kinds have in common: the search is transformers' own ``generate``.

The instance is of a class that also derives from the model of transformers that the file was made
of, without any of its parts: so it is prepared for each step, and searched, by that model's code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import transformers
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.models.auto import modeling_auto

from ortrain.deploy.cache_name import cache_name
from ortrain.deploy.models.cache import expect_cache, new_cache
from ortrain.deploy.models.model import ORTModel
from ortrain.errors import InputError, UnsupportedInput


class ORTGeneratingModel(ORTModel):
    """A model with a method ``generate``."""

    generation_config: GenerationConfig

    @classmethod
    def can_generate(cls) -> bool:
        """True."""
        return True

    @classmethod
    def _kind(cls, config: Any) -> type[Self]:
        return cast(type[Self], _joined(cast(Any, cls), _source(config, cls.pipeline_names)))

    def __init__(self, config: Any, sessions: Any, folder: Path) -> None:
        super().__init__(config, sessions, folder)
        self.generation_config = _generation_config(folder, config)

    def _cache_for(self, cache: Any, use_cache: bool | None) -> Any:
        """The cache of a call: the given one, a new one, or None.

        Raises:
            UnsupportedInput: it is of another kind.
        """
        paired = bool(self.config.is_encoder_decoder)
        if cache is not None:
            expect_cache(cache, paired)
            return cache
        wanted = getattr(self.config, "use_cache", True) if use_cache is None else use_cache
        return new_cache(paired) if wanted else None

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Called by ``generate``: a cache that grows, whatever windows the layers look through."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full"):
            raise UnsupportedInput(
                f"cache_implementation={kind!r} is of no use to an exported file",
                because="its cache holds all tokens so far, as tensors that grow",
                help="leave cache_implementation out",
            )
        given = model_kwargs.get(cache_name())
        if given is not None:
            expect_cache(given, bool(self.config.is_encoder_decoder))
            given._is_user_defined = True
        elif generation_config.use_cache is not False and self._has_cache:
            model_kwargs[cache_name()] = new_cache(bool(self.config.is_encoder_decoder))
        else:
            generation_config.use_cache = False
            model_kwargs["use_cache"] = False

    @property
    def _has_cache(self) -> bool:
        """Whether the files can go on from a cache."""
        raise NotImplementedError


class _Unknown(PreTrainedModel, GenerationMixin):
    """In the place of a model that transformers does not have."""


def _source(config: Any, names: str) -> Any:
    """The class of transformers that the file was made of."""
    table = getattr(modeling_auto, names)
    found = [*(getattr(config, "architectures", None) or ()), table.get(config.model_type)]
    for name in found:
        kind = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, GenerationMixin):
            return kind
    return _Unknown


@functools.cache
def _joined(kind: type[Any], source: type[Any]) -> type[Any]:
    """A class of both, which goes by the name of the first."""
    attributes: dict[str, Any] = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    if not _takes_positions(source):
        attributes["prepare_inputs_for_generation"] = _without_positions(source)
    return type(kind.__name__, (kind, source), attributes)


def _without_positions(source: type[Any]) -> Callable[..., dict[str, Any]]:
    """What prepares the inputs of a source, without positions, which its forward does not take.

    They are made where ``forward`` takes them, and ours always does.
    """
    own = source.prepare_inputs_for_generation

    @functools.wraps(own)  # generate looks at the arguments
    def prepare(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        given: dict[str, Any] = own(self, *args, **kwargs)
        given.pop("position_ids", None)
        return given

    return prepare


def _takes_positions(kind: type[Any]) -> bool:
    """Whether the forward of the model of transformers knows positions."""
    for each in kind.__mro__:
        own = vars(each).get("forward")
        if own is not None and each is not nn.Module:
            return "position_ids" in inspect.signature(own).parameters
    return True


def _generation_config(folder: Path, config: Any) -> GenerationConfig:
    for place in (folder, folder.parent):
        if (place / "generation_config.json").is_file():
            try:
                return GenerationConfig.from_pretrained(place)
            except (OSError, ValueError) as error:
                raise InputError(
                    f"transformers cannot read {place / 'generation_config.json'}",
                    because=str(error).strip().splitlines()[0],
                ) from error
    return GenerationConfig.from_model_config(config)
