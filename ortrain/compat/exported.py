"""Optimum's classes of exported models, by the arguments and attributes that scripts know.

They are those of ``ortrain.deploy``, which their instances also are. What an argument of then has
no meaning for any more is taken and told.
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ortrain.compat.parts import preprocessors
from ortrain.deploy import models
from ortrain.deploy.models.session import Session
from ortrain.errors import OrtrainWarning, listing

# Arguments that say what a file shows by itself, or how an exporter of then was to work.
_WITHOUT_EFFECT = ("task", "library_name", "framework", "resume_download", "proxies", "slim")


def _loaded(
    cls: Any,
    /,
    model_id: Any = None,
    *args: Any,
    from_transformers: bool | None = None,
    use_auth_token: str | bool | None = None,
    provider: str | Sequence[str] | None = None,
    providers: Sequence[str] | None = None,
    provider_options: Any = None,
    model_save_dir: str | os.PathLike[str] | None = None,
    use_merged: bool | None = None,
    **kwargs: Any,
) -> Any:
    """As `ortrain.deploy`'s, also with what Optimum took.

    Args:
        cls: one of the classes below.
        model_id: a folder, a file, or a name on the hub; of a checkpoint with ``export``.
        args: as ``ortrain.deploy`` has them.
        from_transformers: of old, ``export``.
        use_auth_token: of old, ``token``.
        provider: one, or several, the first of which is taken.
        providers: likewise.
        provider_options: of the provider; of several a list.
        model_save_dir: where an exported model is kept as well.
        use_merged: whether a decoder's two files are one; a file of ours is both in any case.
        kwargs: as ``ortrain.deploy`` has them.

    Raises:
        ValueError: an argument and its old name are both given.
    """
    if from_transformers is not None:
        _tell("from_transformers is export now")
        if kwargs.setdefault("export", from_transformers) != from_transformers:
            raise ValueError("from_transformers and export are one: give export")
    if use_auth_token is not None:
        _tell("use_auth_token is token now")
        if kwargs.setdefault("token", use_auth_token) != use_auth_token:
            raise ValueError("use_auth_token and token are one: give token")
    if isinstance(provider, Sequence) and not isinstance(provider, str):
        provider, providers = None, provider
    if provider is None and providers:
        provider = providers[0]
    if provider is not None:
        kwargs["provider"] = provider
    if isinstance(provider_options, Sequence):
        provider_options = next(iter(provider_options), None)
    if isinstance(provider_options, Mapping):
        kwargs["provider_options"] = provider_options
    for name in _WITHOUT_EFFECT:
        if kwargs.pop(name, None) is not None:
            _tell(f"{name} has no effect: a file shows by itself what it is")
    for name in ("config", "file_name", "use_cache"):
        if name in kwargs and kwargs[name] is None:
            del kwargs[name]
    if "subfolder" in kwargs and kwargs["subfolder"] is None:
        del kwargs["subfolder"]
    made = super(_AsThen, cls).from_pretrained(model_id, *args, **kwargs)
    if use_merged and not getattr(made, "use_merged", False):
        _tell("use_merged has no effect: a decoder's own file takes an empty cache, too")
    if model_save_dir is not None and kwargs.get("export"):
        made.save_pretrained(model_save_dir)
    return made


def _uploaded(self: Any, save_directory: Any, repository_id: str | None = None, **hub: Any) -> str:
    """Uploads the model to the hub.

    Args:
        self: the model.
        save_directory: a folder to write it to first; of one argument alone the repository.
        repository_id: of the repository.
        hub: as ``ortrain.deploy`` has it; ``use_auth_token`` is ``token``.
    """
    if "use_auth_token" in hub:
        _tell("use_auth_token is token now")
        hub["token"] = hub.pop("use_auth_token")
    done: str = super(_AsThen, self).push_to_hub(repository_id or os.fspath(save_directory), **hub)
    return done


class _AsThen:
    """Takes the arguments of then, and has the attributes."""

    folder: Path
    sessions: dict[str, Session]

    # Whose arguments are others than those of the classes beside it.
    from_pretrained: Any = classmethod(_loaded)
    push_to_hub: Any = _uploaded

    @classmethod
    def _files(cls, folder: Path, names: Mapping[str, str | None]) -> dict[str, Path]:
        """Of several files that may be meant, the one of the plain name."""
        base: Any = super()
        found: dict[str, Path] = base._files(folder, _plain(folder, names))
        return found

    @property
    def model_save_dir(self) -> Path:
        """The folder of its files."""
        return self.folder

    @property
    def model_path(self) -> Path:
        """Its first ONNX file."""
        return next(iter(self.sessions.values())).path

    @property
    def use_io_binding(self) -> bool:
        """Whether tensors are handed over by reference."""
        return next(iter(self.sessions.values())).binding

    @property
    def provider(self) -> str:
        """The execution provider that was asked for."""
        return next(iter(self.sessions.values())).provider

    @property
    def input_names(self) -> dict[str, int]:
        """Inputs of its first file, and their positions."""
        return {name: i for i, name in enumerate(next(iter(self.sessions.values())).inputs)}

    @property
    def output_names(self) -> dict[str, int]:
        """Outputs of its first file, and their positions."""
        return {name: i for i, name in enumerate(next(iter(self.sessions.values())).outputs)}

    @property
    def preprocessors(self) -> list[Any]:
        """Of its folder: the tokenizer, the feature extractor, the image processor."""
        return [*preprocessors(self.folder).values()]


class _OfOneFile(_AsThen):
    @property
    def model(self) -> Any:
        """Onnxruntime's session."""
        return self.sessions["model"].inference_session


class _WithCache(_AsThen):
    config: Any

    @property
    def use_cache(self) -> bool:
        """Whether it goes on from a cache."""
        here: Any = self
        return bool(here._has_cache) and getattr(self.config, "use_cache", True) is not False

    @property
    def use_merged(self) -> bool:
        """Whether one file is both of a decoder's, with a switch."""
        return any("use_cache_branch" in session.inputs for session in self.sessions.values())


class _Paired(_WithCache):
    @property
    def decoder(self) -> Any:
        """The decoder's first file: ``session``, ``device``."""
        return ORTDecoder(self.sessions["decoder_model"])

    @property
    def decoder_with_past(self) -> Any:
        """The file that goes on from a cache, None where there is none or it is the first."""
        found = self.sessions.get("decoder_with_past_model")
        return None if found is None else ORTDecoder(found)


class ORTDecoder:
    """One file of a decoder: what scripts look up of it.

    Attributes:
        session: onnxruntime's own.
        device: where its tensors are.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.session, self.device = session.inference_session, session.device

    def forward(self, **inputs: torch.Tensor) -> list[torch.Tensor]:
        """The file's outputs in its order, of a tensor for each of its inputs."""
        return self._session.run(inputs)

    __call__ = forward


class ORTModelForAudioClassification(_OfOneFile, models.ORTModelForAudioClassification):
    """As `ortrain.deploy`'s."""


class ORTModelForCTC(_OfOneFile, models.ORTModelForCTC):
    """As `ortrain.deploy`'s."""


class ORTModelForFeatureExtraction(_OfOneFile, models.ORTModelForFeatureExtraction):
    """As `ortrain.deploy`'s."""


class ORTModelForImageClassification(_OfOneFile, models.ORTModelForImageClassification):
    """As `ortrain.deploy`'s."""


class ORTModelForMaskedLM(_OfOneFile, models.ORTModelForMaskedLM):
    """As `ortrain.deploy`'s."""


class ORTModelForMultipleChoice(_OfOneFile, models.ORTModelForMultipleChoice):
    """As `ortrain.deploy`'s."""


class ORTModelForQuestionAnswering(_OfOneFile, models.ORTModelForQuestionAnswering):
    """As `ortrain.deploy`'s."""


class ORTModelForSequenceClassification(_OfOneFile, models.ORTModelForSequenceClassification):
    """As `ortrain.deploy`'s."""


class ORTModelForTokenClassification(_OfOneFile, models.ORTModelForTokenClassification):
    """As `ortrain.deploy`'s."""


class ORTModelForCausalLM(_WithCache, _OfOneFile, models.ORTModelForCausalLM):
    """As `ortrain.deploy`'s."""


class ORTModelForSeq2SeqLM(_Paired, models.ORTModelForSeq2SeqLM):
    """As `ortrain.deploy`'s."""


class ORTModelForSpeechSeq2Seq(_Paired, models.ORTModelForSpeechSeq2Seq):
    """As `ortrain.deploy`'s."""


def _plain(folder: Path, names: Mapping[str, str | None]) -> dict[str, str | None]:
    """The names, with ``model.onnx`` and the like where none is given and there are others."""
    chosen = dict(names)
    for place in (folder, folder / "onnx"):
        there = sorted(path.name for path in place.glob("*.onnx"))
        for role, name in names.items():
            plain = f"{role}.onnx"
            others = [n for n in there if n != plain and (role == "model" or n.startswith(role))]
            others = [n for n in others if not n.startswith("decoder_model_merged")]
            if name is None and chosen[role] is None and plain in there and others:
                _tell(f"{plain} is taken, and {listing(others)} not: say file_name=… for those")
                chosen[role] = plain
    return chosen


def _tell(what: str) -> None:
    warnings.warn(f"from_pretrained: {what}", OrtrainWarning, stacklevel=4)
