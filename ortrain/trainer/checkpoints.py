"""Checkpoints of Trainer: whether one is complete, and whether it fits a model.

Trainer writes ``trainer_state.json`` last, so that where it is, the rest is there too. Nothing here
reads more of a file than its names and shapes.
"""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.peft_utils import ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME

from ortrain.errors import InputError, OrtrainWarning, listing
from ortrain.files.names import leads_out

Shapes = dict[str, tuple[int, ...]]

# Names and shapes that an error tells.
MOST_NAMED = 3


def last_complete(output_dir: Path, *, whole: bool) -> Path | None:
    """The newest checkpoint that training can go on from; None where there is none at all.

    Warns of newer ones that are incomplete.

    Args:
        output_dir: the folder with the checkpoints.
        whole: whether Trainer itself writes weights and optimizer, not FSDP or DeepSpeed.

    Raises:
        InputError: there are checkpoints, and none is complete.
    """
    numbered = {
        int(match[1]): path
        for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name))
    }
    faults: list[str] = []
    for _, path in sorted(numbered.items(), reverse=True):
        fault = unfinished(path, whole=whole)
        if not fault:
            if faults:
                warnings.warn(
                    f"training goes on from {path.name}: {'; '.join(faults)}",
                    OrtrainWarning,
                    stacklevel=4,
                )
            return path
        faults.append(f"in {path.name} {fault}")
    if faults:
        raise InputError(
            f"no checkpoint in {output_dir} is complete",
            because="; ".join(faults),
            help="train without resume_from_checkpoint to start anew",
        )
    return None


def check_complete(folder: Path, *, whole: bool) -> None:
    """Raises where training cannot go on from a checkpoint.

    Args:
        folder: the checkpoint.
        whole: whether Trainer itself writes weights and optimizer, not FSDP or DeepSpeed.

    Raises:
        InputError: a file is missing or cut off.
    """
    if fault := unfinished(folder, whole=whole):
        raise InputError(
            f"training cannot go on from {folder}",
            because=fault,
            help="resume_from_checkpoint=True takes the last checkpoint that is complete; weights "
            "alone are for from_pretrained, and a training that starts anew",
        )


def check_fits(folder: Path, model: Any) -> None:
    """Raises where a checkpoint has other weights than a model, as another model's has.

    Args:
        folder: the checkpoint.
        model: as it is trained.

    Raises:
        InputError: names or shapes differ.
    """
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return  # its own code decides what fits: a buffer that grows, an old name
    if _full_weights(folder) or _shards(folder):
        differences = _differences(_stored(folder), model)
    elif hasattr(model, "peft_config") and not isinstance(model, PreTrainedModel):
        differences = []
        for file in _adapter_files(folder):
            adapter = file.parent.name if file.parent != folder else model.active_adapters[0]
            if adapter in model.peft_config:
                differences += _adapter_differences(_shapes(file), model, adapter)
    else:
        differences = ["it holds adapters, and the model has none"]
    if differences:
        name = type(model).__name__
        made_of = _made_of(folder)
        raise InputError(
            f"the checkpoint {folder} does not fit this {name}"
            + (f": it is of a {made_of}" if made_of not in ("", name) else ""),
            because="; ".join(differences),
            help="give the trainer the model that the checkpoint was made of, or train without "
            "resume_from_checkpoint to start anew",
        )


def unfinished(folder: Path, *, whole: bool) -> str:
    """What keeps training from going on from a checkpoint; empty where it is complete.

    Args:
        folder: the checkpoint.
        whole: whether Trainer itself writes weights and optimizer, not FSDP or DeepSpeed.
    """
    needed = [TRAINER_STATE_NAME, *([OPTIMIZER_NAME, SCHEDULER_NAME] if whole else [])]
    missing = [name for name in needed if not (folder / name).is_file()]
    weights = _weight_files(folder) if whole else []
    if whole and not weights:
        missing.append(SAFE_WEIGHTS_NAME)
    missing += [file.name for file in weights if not file.is_file()]
    if missing:
        return f"{listing(missing)} {_be(missing)} missing"
    optional = [CONFIG_NAME, SCALER_NAME, *(path.name for path in folder.glob("rng_state*.pth"))]
    files = [*weights, *(folder / name for name in (*needed, *optional))]
    broken = [file.name for file in files if file.is_file() and not _is_whole(file)]
    return f"{listing(broken)} {_be(broken)} cut off" if broken else ""


def _be(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _is_whole(file: Path) -> bool:
    """Whether a file's end is there, by what its format keeps at the end or knows of its length."""
    if file.suffix == ".json":
        return _json(file) is not None
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                return True
        except SafetensorError:
            return False
    with file.open("rb") as content:
        start = content.read(2)
    # torch.save writes a zip archive, whose directory is at its end; long ago it wrote pickles.
    return zipfile.is_zipfile(file) if start == b"PK" else bool(start)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None


# -- weights -------------------------------------------------------------------------------------


def _first(folder: Path, names: Iterable[str]) -> list[Path]:
    """The first of several files that exists, in a list of one or none."""
    return [path for name in names if (path := folder / name).is_file()][:1]


def _full_weights(folder: Path) -> list[Path]:
    return _first(folder, (SAFE_WEIGHTS_NAME, WEIGHTS_NAME))


def _shards(folder: Path) -> list[Path]:
    """The index of a checkpoint in several files, and these."""
    index = _first(folder, (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME))
    found = _json(index[0]) if index else None
    names = sorted(set(found["weight_map"].values())) if found else []
    if out := [name for name in names if leads_out(name)]:
        raise InputError(f"{index[0]} names {out[0]!r}, which is not in its folder")
    return [*index, *(folder / name for name in names)]


def _adapter_files(folder: Path) -> list[Path]:
    """The adapters of a checkpoint; all but the first are in folders of their own."""
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    names = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
    return [file for place in folders for file in _first(place, names)]


def _weight_files(folder: Path) -> list[Path]:
    return _full_weights(folder) or _shards(folder) or _adapter_files(folder)


def _stored(folder: Path) -> Shapes:
    """The weights that Trainer loads for a model without adapters."""
    files = _full_weights(folder) or _shards(folder)[1:]
    return {name: shape for file in files for name, shape in _shapes(file).items()}


def _shapes(file: Path) -> Shapes:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as content:
            return {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    tensors = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _differences(stored: Shapes, model: nn.Module) -> list[str]:
    own = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    # A tensor with several names is stored under one of them.
    kept = {tensor.data_ptr() for name, tensor in own.items() if name in stored}
    missing = [
        name
        for name, tensor in own.items()
        if name not in stored
        and (tensor.data_ptr() not in kept or not tensor.numel())
        and not _matches(name, getattr(model, "_keys_to_ignore_on_save", None))
    ]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    unexpected = [name for name in stored if name not in own and not _matches(name, ignored)]
    return _described(stored, own, missing, unexpected)


def _adapter_differences(stored: Shapes, model: Any, adapter: str) -> list[str]:
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    base = model.state_dict()  # of which an adapter's file may hold the embeddings
    missing = [name for name in own if name not in stored]
    unexpected = [name for name in stored if name not in own and name not in base]
    return _described(stored, own, missing, unexpected)


def _described(
    stored: Shapes, own: dict[str, torch.Tensor], missing: list[str], unexpected: list[str]
) -> list[str]:
    shapes = [
        f"{name} is {list(stored[name])} there and {list(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in stored and stored[name] != tuple(tensor.shape)
    ]
    rows = (
        ("", shapes),
        ("only the model has ", missing),
        ("only the checkpoint has ", unexpected),
    )
    return [title + listing(names, MOST_NAMED) for title, names in rows if names]


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _made_of(folder: Path) -> str:
    """The class of the model that a checkpoint was made of; empty where it does not say."""
    config = folder / CONFIG_NAME
    found = _json(config) if config.is_file() else None
    classes = found.get("architectures") if found else None
    return str(classes[0]) if classes else ""
