"""A pretrained text classifier: the model, its tokenizer and the names of its classes."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers

from ortrain.cli.text_classification.settings import Engine, SkipPadding
from ortrain.cli.text_classification.vocabulary import check_vocabulary
from ortrain.cli.text_classification.weights import (
    check_labels_of_config,
    check_size,
    new_weights,
)
from ortrain.cli.usage import UsageError, excerpt, one_line
from ortrain.errors import InputError
from ortrain.files import checksums

_TEXTS = ["The plot was thin, the music was not.", "Good."]


@dataclass(frozen=True)
class Classifier:
    """A model with all that is needed to feed it and to read its answers.

    Attributes:
        model: A Hugging Face model for sequence classification, in float32.
        tokenizer: The tokenizer that belongs to it.
        labels: The name of each class, in the order of the logits.
        new_weights: The names of the weights that are random: a head, or none.
    """

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    labels: tuple[str, ...]
    new_weights: tuple[str, ...] = ()

    @property
    def weights_summary(self) -> str:
        """Which weights are the pretrained ones, for people."""
        if not self.new_weights:
            return "all weights are pretrained"
        return f"all weights are pretrained but a new head: {', '.join(self.new_weights)}"

    def save(self, directory: Path) -> None:
        """Write model and tokenizer so that ``from_pretrained(directory)`` loads them."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def load_classifier(
    name: str,
    labels: Sequence[str],
    *,
    seed: int,
    dropout: float | None = None,
    trust_remote_code: bool = False,
) -> Classifier:
    """Load a pretrained model with a head for these labels.

    A model that already tells exactly these labels apart keeps its head and its order of classes;
    any other gets a new head if the number of classes differs.

    Args:
        name: A directory, or a name on the hub.
        labels: The names of the classes.
        seed: Decides the weights of a new head.
        dropout: Replaces every dropout probability of the model if given.
        trust_remote_code: Run the Python files that come with the model.

    Raises:
        UsageError: There is no such model, it cannot classify text, or its files do not belong
            together.
    """
    _check_name(name)
    try:
        checksums.check(Path(name))
    except InputError as error:
        raise UsageError(f"{error.what}: {error.because}; {error.help}") from error
    _quieten()
    check_labels_of_config(name)
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **trust)
        names = tuple(labels)
        own = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
        if len(own) == len(names) and set(own) == set(names):
            names = own
        config.id2label = dict(enumerate(names))
        config.label2id = {label: index for index, label in enumerate(names)}
        config.problem_type = "single_label_classification"
        if dropout is not None:
            _set_dropout(config, dropout)
        _check_kind(name, config)
        check_size(name, config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **trust)
        torch.manual_seed(seed)
        model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **trust,
        )
        new = new_weights(name, model, loading)
        check_vocabulary(name, tokenizer, model)
        _set_padding(name, tokenizer, model)
        classifier = Classifier(model, tokenizer, names, new)
        _rehearse(classifier)
    except UsageError:
        raise
    except Exception as error:
        # Loading runs the code of three libraries, each with errors of its own for a file that is
        # missing, cut short or of another kind.
        raise UsageError(_remedy_for_model(name, error)) from error
    return classifier


def check_length(classifier: Classifier, max_length: int) -> None:
    """Raise a UsageError if the model cannot read so many tokens, or so few hold no word."""
    most = _positions(classifier)
    if max_length > most:
        raise UsageError(
            f"--max-length {max_length}: the model reads at most {most} tokens; give {most} or less"
        )
    added = classifier.tokenizer.num_special_tokens_to_add()
    if max_length <= added:
        raise UsageError(
            f"--max-length {max_length}: the tokenizer adds {added} tokens of its own to each "
            f"text; give {added + 1} or more"
        )


def _positions(classifier: Classifier) -> int:
    """The number of tokens of a text that the model can read."""
    positions = getattr(classifier.model.config, "max_position_embeddings", None)
    # A model that computes its positions reads any number; tokenizers take no more than the last.
    limits = [int(classifier.tokenizer.model_max_length), 2**31 - 1]
    if isinstance(positions, int):
        limits.append(positions)
    for name, module in classifier.model.named_modules():
        if not name.endswith("position_embeddings") or not isinstance(module, torch.nn.Embedding):
            continue
        if module.padding_idx is not None:
            # RoBERTa and its like count the positions from the one after padding.
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min(limits)


def wrapped(
    model: torch.nn.Module, engine: Engine, skip_padding: SkipPadding = "auto"
) -> torch.nn.Module:
    """The module to train: the model itself, or the model behind ONNX."""
    if engine == "torch":
        return model
    from ortrain import Options, ORTModule

    if skip_padding == "auto":  # or as the environment has it
        return ORTModule(model)
    return ORTModule(model, options=Options(skip_padding=skip_padding == "on"))


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


def _check_name(name: str) -> None:
    """Refuse what is neither a directory nor can be a name on the hub."""
    if not name.strip():
        raise UsageError("--model is empty; give a directory, or a name on the hub")
    try:
        mode = os.stat(name).st_mode  # noqa: PTH116 - a name on the hub is no path
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UsageError(f"model '{excerpt(name)}': {reason}; check the path") from None
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{name}: is not a directory; give the one with config.json and weights")


def _set_padding(
    name: str, tokenizer: transformers.PreTrainedTokenizerBase, model: transformers.PreTrainedModel
) -> None:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise UsageError(
            f"{name}: the tokenizer has no token to pad with; name one as pad_token in its "
            "tokenizer_config.json"
        )
    model.config.pad_token_id = tokenizer.pad_token_id


def _rehearse(classifier: Classifier) -> None:
    """Ask once: a setting that the tokenizer or the model fails on shows in a call, not before."""
    encoded = classifier.tokenizer(
        _TEXTS,
        padding=True,
        truncation=True,
        max_length=min(32, _positions(classifier)),
        return_tensors="pt",
    )
    with torch.no_grad():
        logits = classifier.model(**encoded).logits
    if logits.shape != (len(_TEXTS), len(classifier.labels)):
        raise ValueError(f"its answer has the shape {tuple(logits.shape)}")
    if not logits.isfinite().all():
        raise ValueError("its answer is not finite")


def _check_kind(name: str, config: Any) -> None:
    """Refuse what transformers loads as something else than the weights of a model."""
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            f"{name}: its weights are quantized and cannot be trained; give the model that they "
            "were made of"
        )
    if Path(name, "adapter_config.json").exists():
        raise UsageError(
            f"{name}: holds an adapter beside the model; merge it into the weights, or remove it"
        )


def _remedy_for_model(name: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"{name}: needs Python files that come with it, and they are not run unasked; read "
            "them, then add --trust-remote-code"
        )
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
