"""Whether the weights of a loaded model are those of its files, all of them and as they are.

transformers makes random weights where the files hold none that fit, and leaves out what the model
has no place for. A run on such a model ends well and has learned from nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers

from ortrain.cli.usage import UsageError
from ortrain.files.regular import expect_regular

_REMEDY = "give a directory whose config.json and weights are of one model, as it was saved"
_FILES = ("*.safetensors", "*.bin")
# Buffers that older versions of transformers saved and newer ones do without. No weight lies at the
# attention itself: its weights are those of its projections.
_BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|version|(attn|attention)\.(masked_)?bias)$"
)


def check_size(name: str, config: Any) -> None:
    """Refuse a configuration of more weights than the directory's files can hold.

    Every weight takes a byte or more of a file. Where one digit of config.json is wrong, the model
    that it describes may fill all of the memory before any shape is compared.

    Args:
        name: A directory; for a name on the hub there is nothing to compare with.
        config: The configuration that the model is going to be made of.

    Raises:
        UsageError: The files are too small.
    """
    held = _bytes_of_weights(name)
    if not held:
        return
    described = _weights_of(config, held)
    if described > held:
        raise UsageError(
            f"{name}: config.json describes a model of {described:.3g} weights, and the files of "
            f"weights have {held:.3g} bytes; {_REMEDY}"
        )


def check_labels_of_config(name: str) -> None:
    """Refuse a config.json of more classes than its files of weights have bytes.

    transformers makes a name for each of them as soon as it reads the file.

    Raises:
        UsageError: There are too many.
    """
    held = _bytes_of_weights(name)
    try:
        classes = json.loads(expect_regular(Path(name, "config.json")).read_bytes())["num_labels"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        # Who loads the model says what is wrong with the file.
        return
    if isinstance(classes, int) and classes > max(held, 1_000_000):
        raise UsageError(f"{name}: config.json has {classes:.3g} for num_labels; {_REMEDY}")


def new_weights(
    name: str, model: transformers.PreTrainedModel, loading: dict[str, Any]
) -> tuple[str, ...]:
    """The weights of a model that are new; anything else that did not come as it is, is refused.

    Only a classification head may be new, and the pooler below it, which models that were trained
    to fill in words lack.

    Args:
        name: The directory or the name that the model was loaded from.
        model: The model.
        loading: What ``from_pretrained(…, output_loading_info=True)`` returned beside it.

    Returns:
        The names of the new weights, in the order of the model.

    Raises:
        UsageError: The files lack weights, have others, hold them in other shapes, or hold numbers
            that are not finite.
    """
    base = f"{model.base_model_prefix}."
    mismatched = {key: (held, wanted) for key, held, wanted in loading["mismatched_keys"]}
    in_order = list(model.state_dict())
    new = set(loading["missing_keys"]) | set(mismatched)

    lacking = [key for key in in_order if key in new and key.startswith(base)]
    wrong = [key for key in lacking if key in mismatched]
    if wrong:
        held, wanted = mismatched[wrong[0]]
        raise UsageError(
            f"{name}: {_count(wrong)} in the files in another shape than in config.json: "
            f"{_listed(wrong)} ({_shape(held)} in the files, {_shape(wanted)} by config.json); "
            f"{_REMEDY}"
        )
    lacking = [key for key in lacking if "pooler" not in key.split(".")]
    if lacking:
        raise UsageError(
            f"{name}: {_count(lacking)} not in the files: {_listed(lacking)}; {_REMEDY}"
        )
    dropped = sorted(key for key in loading["unexpected_keys"] if _belongs(model, key))
    if dropped:
        raise UsageError(
            f"{name}: {_count(dropped)} in the files and not in the model of config.json: "
            f"{_listed(dropped)}; {_REMEDY}"
        )
    broken = [key for key, value in model.state_dict().items() if not torch.isfinite(value).all()]
    if broken:
        raise UsageError(
            f"{name}: {_count(broken)} not finite: {_listed(broken)}; the files are damaged, get "
            "them again"
        )
    return tuple(key for key in in_order if key in new)


def _bytes_of_weights(name: str) -> int:
    try:
        return sum(path.stat().st_size for pattern in _FILES for path in Path(name).glob(pattern))
    except (OSError, ValueError):
        return 0


def _weights_of(config: Any, most: int) -> int:
    """The number of weights that a configuration describes, or any larger number than ``most``."""
    width = getattr(config, "hidden_size", None)
    layers = (getattr(config, name, None) for name in ("num_hidden_layers", "decoder_layers"))
    # A layer maps its width to itself at least once. Said before any of them is made: making them
    # takes a millisecond for each.
    least = 0
    if isinstance(width, int):
        least = sum(number * width**2 for number in layers if isinstance(number, int))
    if least > most:
        return least
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=False
            )
    except Exception:
        # Not every model can be made without memory. Who loads it says what is wrong.
        return least
    return sum(weight.numel() for weight in model.parameters())


def _belongs(model: transformers.PreTrainedModel, key: str) -> bool:
    """Whether a weight that the model has no place for belongs into a part that it does have.

    What lies in no part of the base model belongs to another head, or to a pooler that this
    classifier does without.
    """
    prefix = model.base_model_prefix
    # A buffer that the model has and does not take from files is computed.
    buffers = dict(model.named_buffers())
    if _BUFFERS.search(key) or key in buffers or f"{prefix}.{key}" in buffers:
        return False
    # The files of a base model alone do not have its prefix.
    for path in (key.split("."), [prefix, *key.split(".")]):
        if path[0] != prefix:
            continue
        part: torch.nn.Module = model
        depth = 0
        for step in path[:-1]:
            children = dict(part.named_children())
            if step not in children:
                break
            part, depth = children[step], depth + 1
        if depth > 1:
            return True
    return False


def _count(keys: Collection[str]) -> str:
    return "1 weight is" if len(keys) == 1 else f"{len(keys)} weights are"


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")


def _shape(shape: torch.Size) -> str:
    return "x".join(map(str, shape)) or "a number"
