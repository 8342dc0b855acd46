"""A pretrained text classifier: the model, its tokenizer and the names of its classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers

from ortrain.cli.text_classification.settings import Engine
from ortrain.cli.usage import UsageError, one_line


@dataclass(frozen=True)
class Classifier:
    """A model with all that is needed to feed it and to read its answers.

    Attributes:
        model: A Hugging Face model for sequence classification, in float32.
        tokenizer: The tokenizer that belongs to it.
        labels: The name of each class, in the order of the logits.
    """

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    labels: tuple[str, ...]

    def save(self, directory: Path) -> None:
        """Write model and tokenizer so that ``from_pretrained(directory)`` loads them."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def load_classifier(
    name: str, labels: Sequence[str], *, seed: int, dropout: float | None = None
) -> Classifier:
    """Load a pretrained model with a head for these labels.

    A model that already tells exactly these labels apart keeps its head and its order of classes;
    any other gets a new head if the number of classes differs.

    Args:
        name: A directory, or a name on the hub.
        labels: The names of the classes.
        seed: Decides the weights of a new head.
        dropout: Replaces every dropout probability of the model if given.

    Raises:
        UsageError: There is no such model, or it cannot classify text.
    """
    _quieten()
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        names = tuple(labels)
        own = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
        if len(own) == len(names) and set(own) == set(names):
            names = own
        config.id2label = dict(enumerate(names))
        config.label2id = {label: index for index, label in enumerate(names)}
        config.problem_type = "single_label_classification"
        if dropout is not None:
            _set_dropout(config, dropout)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        torch.manual_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, config=config, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    except Exception as error:
        # Loading runs the code of three libraries, each with errors of its own for a file that is
        # missing, cut short or of another kind.
        raise UsageError(_remedy_for_model(name, error)) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return Classifier(model, tokenizer, names)


def check_length(classifier: Classifier, max_length: int) -> None:
    """Raise a UsageError if the model cannot read so many tokens."""
    limits = [classifier.tokenizer.model_max_length]
    positions = getattr(classifier.model.config, "max_position_embeddings", None)
    if isinstance(positions, int):
        limits.append(positions)
    if max_length > min(limits):
        raise UsageError(
            f"--max-length {max_length}: the model reads at most {min(limits)} tokens; "
            f"give {min(limits)} or less"
        )


def wrapped(model: torch.nn.Module, engine: Engine) -> torch.nn.Module:
    """The module to train: the model itself, or the model behind ONNX."""
    if engine == "torch":
        return model
    from ortrain import ORTModule

    return ORTModule(model)


def engine_report(model: torch.nn.Module) -> str:
    """What ran where, as the engine tells it."""
    report: object = getattr(model, "report", None)
    return "plain PyTorch, eager" if report is None else str(report)


def _set_dropout(config: Any, probability: float) -> None:
    # Set before the model is built: some models read the configuration in every forward pass, and
    # have no dropout module whose probability could be changed afterwards.
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and _is_number(value):
            setattr(config, key, probability)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quieten() -> None:
    # These write to stderr, where the progress line is, and say nothing about this run: that a
    # new head is new, how many files of weights have been read, that the hub is asked once more.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()


def _remedy_for_model(name: str, error: Exception) -> str:
    if Path(name).is_dir():
        return (
            f"{name}: cannot be loaded as a text classifier ({one_line(error)}); the directory "
            "needs config.json, the weights and the tokenizer of one pretrained model"
        )
    if name.startswith((".", "/", "~")):
        return f"model '{name}': no such directory; check the path"
    return (
        f"model '{name}': neither a directory here nor a model that the hub's cache or the hub "
        f"itself gives ({one_line(error)}); check the name, load it once while online, or give "
        "--model a directory"
    )
