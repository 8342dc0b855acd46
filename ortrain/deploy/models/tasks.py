"""Models of one file: classifiers, taggers, encoders of text, images and sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPooling,
    CausalLMOutput,
    ImageClassifierOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import ModelOutput

from ortrain.deploy.models.files import only_file
from ortrain.deploy.models.inputs import Inputs, as_tensors
from ortrain.deploy.models.model import ORTModel
from ortrain.deploy.models.results import Results
from ortrain.deploy.models.session import Session

Array = Any
"""A torch.Tensor or a numpy array."""


class ORTSingleFileModel(ORTModel):
    """A model of one ONNX file.

    Attributes:
        result: the class of a call's result.
        aliases: other names that a file may have for the result's fields.
    """

    result: ClassVar[type[ModelOutput]] = BaseModelOutput
    aliases: ClassVar[dict[str, str]] = {}

    @classmethod
    def _files(cls, folder: Path, names: Mapping[str, str | None]) -> dict[str, Path]:
        return {"model": only_file(folder, names["model"])}

    def _take(self, sessions: dict[str, Session]) -> None:
        super()._take(sessions)
        self.session = sessions["model"]
        self._expect_outputs(self.session, self.gives)
        self._inputs = Inputs(self.session, self.config)
        self._results = self._results_of(self.session)
        self._expect_inputs()

    def _results_of(self, session: Session) -> Results:
        return Results(session, self.result, self.aliases)

    def _expect_inputs(self) -> None:
        """Raises where the file takes nothing that a call begins with."""
        self._expect_input(self.session, (self.main_input_name,))

    def _answer(self, given: Mapping[str, Any], more: dict[str, Any]) -> Any:
        """A call's result; ``more`` are the arguments that have no name of their own."""
        as_object = self._flags(more, self._results.fields) if more else self._as_object
        tensors, arrays = as_tensors({**given, **more}, self.session.device)
        outputs = self.session.run(self._inputs.feeds(tensors))
        result = self._results.of(outputs, arrays)
        return result if as_object else result.to_tuple()

    @property
    def _as_object(self) -> bool:
        return bool(getattr(self.config, "return_dict", True))


class _TextModel(ORTSingleFileModel):
    def forward(
        self,
        input_ids: Array | None = None,
        attention_mask: Array | None = None,
        token_type_ids: Array | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the model.

        Args:
            input_ids: int64 tokens, ``[batch, length]``.
            attention_mask: 1 for a token and 0 for padding, of the same shape; without it all are
                tokens.
            token_type_ids: of the same shape; without them 0.
            kwargs: other inputs of the file, and ``return_dict``.

        Returns:
            The result that the model of transformers gives, of torch tensors, or of numpy arrays
            where all arguments are.

        Raises:
            TypeError: an argument is no array.
            InputError: the file needs another input.
            UnsupportedInput: the file cannot take an argument, and that would change its answer.
            ExecutionError: onnxruntime refused the sizes, or failed.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
        }
        return self._answer(given, kwargs)


class ORTModelForFeatureExtraction(_TextModel):
    """Hidden states of an encoder."""

    auto_class = "AutoModel"
    pipeline_names = "MODEL_MAPPING_NAMES"
    gives = ("last_hidden_state", "token_embeddings")
    aliases: ClassVar[dict[str, str]] = {"token_embeddings": "last_hidden_state"}

    def _results_of(self, session: Session) -> Results:
        pooled = "pooler_output" in session.outputs
        kind = BaseModelOutputWithPooling if pooled else BaseModelOutput
        return Results(session, kind, self.aliases)

    def _expect_inputs(self) -> None:
        names = ("input_ids", "pixel_values", "input_values", "input_features")
        self._expect_input(self.session, names)
        self.main_input_name = next(name for name in names if name in self.session.inputs)


class ORTModelForSequenceClassification(_TextModel):
    """Classes of a text, or a number for it."""

    auto_class = "AutoModelForSequenceClassification"
    pipeline_names = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    result = SequenceClassifierOutput


class ORTModelForMaskedLM(_TextModel):
    """Words for the masked tokens of a text."""

    auto_class = "AutoModelForMaskedLM"
    pipeline_names = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
    result = MaskedLMOutput


class ORTModelForTokenClassification(_TextModel):
    """A class for each token of a text."""

    auto_class = "AutoModelForTokenClassification"
    pipeline_names = "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"
    result = TokenClassifierOutput


class ORTModelForQuestionAnswering(_TextModel):
    """Where the answer to a question begins and ends in a text."""

    auto_class = "AutoModelForQuestionAnswering"
    pipeline_names = "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"
    result = QuestionAnsweringModelOutput
    gives = ("start_logits",)


class ORTModelForMultipleChoice(_TextModel):
    """Which of several texts fits best: arguments are ``[batch, choices, length]``."""

    auto_class = "AutoModelForMultipleChoice"
    form = "choices"
    pipeline_names = "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"
    result = MultipleChoiceModelOutput


class ORTModelForImageClassification(ORTSingleFileModel):
    """Classes of an image."""

    auto_class = "AutoModelForImageClassification"
    pipeline_names = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    result = ImageClassifierOutput
    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def forward(self, pixel_values: Array | None = None, **kwargs: Any) -> Any:
        """Calls the model.

        Args:
            pixel_values: float32, ``[batch, channels, height, width]``.
            kwargs: other inputs of the file, and ``return_dict``.

        Returns:
            An `ImageClassifierOutput` of torch tensors, or of numpy arrays where the image is one.

        Raises:
            TypeError: an argument is no array.
            UnsupportedInput: the file cannot take an argument, and that would change its answer.
            ExecutionError: onnxruntime refused the sizes, or failed.
        """
        return self._answer({"pixel_values": pixel_values}, kwargs)


class _SoundModel(ORTSingleFileModel):
    main_input_name = "input_values"
    input_modalities = ("audio",)

    def _expect_inputs(self) -> None:
        names = ("input_values", "input_features")
        self._expect_input(self.session, names)
        self.main_input_name = next(name for name in names if name in self.session.inputs)

    def forward(
        self,
        input_values: Array | None = None,
        attention_mask: Array | None = None,
        input_features: Array | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the model.

        Args:
            input_values: float32 samples of the sound, ``[batch, time]``.
            attention_mask: 1 for a sample and 0 for padding, of the same shape.
            input_features: of models that begin with features in place of samples.
            kwargs: other inputs of the file, and ``return_dict``.

        Returns:
            The result that the model of transformers gives, of torch tensors, or of numpy arrays
            where all arguments are.

        Raises:
            TypeError: an argument is no array.
            UnsupportedInput: the file cannot take an argument, and that would change its answer.
            ExecutionError: onnxruntime refused the sizes, or failed.
        """
        given = {
            "input_values": input_values,
            "attention_mask": attention_mask,
            "input_features": input_features,
        }
        return self._answer(given, kwargs)


class ORTModelForAudioClassification(_SoundModel):
    """Classes of a sound."""

    auto_class = "AutoModelForAudioClassification"
    pipeline_names = "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"
    result = SequenceClassifierOutput


class ORTModelForCTC(_SoundModel):
    """Letters for the frames of speech."""

    auto_class = "AutoModelForCTC"
    pipeline_names = "MODEL_FOR_CTC_MAPPING_NAMES"
    result = CausalLMOutput
