"""Checkpoints of both generations: what a trainer holds, as files under the names of 2020.

The second generation wrote HDF5 (`save`, `load`, `aggregate_checkpoints`), the first one, and the
``experimental_`` functions of the second, a file of torch.
"""

from __future__ import annotations

import glob
import io
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortrain.classic.states import flat, joined, lacking, nested
from ortrain.errors import InputError, MissingPackage, OrtrainWarning, SaveError, listing
from ortrain.files.names import expect_name_part
from ortrain.files.regular import expect_regular
from ortrain.files.replacing import staged
from ortrain.kinds import shown

PREFIX = "ORT_checkpoint"
USER = "user_dict"


# -- HDF5 ------------------------------------------------------------------------------------------


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingPackage(
            "checkpoints of the second generation need the package 'h5py'",
            because="they are HDF5 files",
            help="pip install 'ortrain[classic]'; or write a file of torch with "
            "experimental_save_checkpoint",
        ) from error
    return h5py


def save(
    state: Mapping[str, Any], path: str | os.PathLike[str], user: Mapping[str, Any] | None = None
) -> None:
    """Writes nested dicts of arrays, numbers and strings as HDF5.

    Args:
        state: what a trainer's ``state_dict`` returns.
        path: of the file, which must not be there.
        user: what a script adds to it; it is pickled.

    Raises:
        MissingPackage: h5py is not installed.
        SaveError: there is such a file, or it could not be written.
    """
    h5py = _h5py()
    target = Path(path)
    for name in weights_of(state):
        if name.startswith("/"):  # HDF5 takes it for a path from the root
            raise SaveError(
                f"HDF5 has no name {name!r}",
                help="experimental_save_checkpoint writes a file of torch",
            )
    if target.exists():
        raise SaveError(f"there is a file {str(target)!r} already", help="take another name")
    added = {USER: pickle.dumps(dict(user)).hex()} if user else {}
    with (
        staged(target.parent, target.name, "checkpoint") as folder,
        h5py.File(folder / target.name, "w") as file,
    ):
        _write(file, {**state, **added})


def _write(group: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _write(group.create_group(name), value)
        else:
            group[name] = value


def load(paths: Sequence[str | os.PathLike[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a checkpoint.

    Args:
        paths: of its file, or of those of all processes.

    Returns:
        The nested state, and what the script had added to it.

    Raises:
        MissingPackage: h5py is not installed.
        InputError: a file is no checkpoint, or they are not those of all processes.
    """
    if not paths:
        raise InputError("load_checkpoint was given no file")
    states = [_read(path) for path in paths]
    user = next((own for state in states if (own := _unpickled(state.pop(USER, None)))), {})
    if len(states) == 1 and not states[0].get("trainer_options", {}).get("zero_stage", 0):
        return states[0], user
    return aggregated(states), user


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    h5py = _h5py()
    if not Path(path).is_file() or not h5py.is_hdf5(path):
        raise InputError(
            f"there is no checkpoint at {os.fspath(path)!r}",
            because="it is no HDF5 file",
            help="experimental_load_checkpoint reads files of torch",
        )

    def values(group: Any) -> dict[str, Any]:
        return {
            name: values(each) if isinstance(each, h5py.Group) else each[()]
            for name, each in group.items()
        }

    with h5py.File(path, "r") as file:
        state = values(file)
    # HDF5 makes a group of each part of a name between slashes.
    for key, tree in state.get("model", {}).items():
        state["model"][key] = _flat_names(tree, depth=0)
    if "optimizer" in state:
        state["optimizer"] = _flat_names(state["optimizer"], depth=1)
    return state


def _flat_names(tree: Mapping[str, Any], depth: int, name: str = "") -> dict[str, Any]:
    """A tree whose leaves lie so deep, under names with slashes."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        is_group = isinstance(value, dict)
        holds_groups = is_group and any(isinstance(each, dict) for each in value.values())
        if not is_group or (depth == 1 and not holds_groups):
            found[f"{name}{key}"] = value
        else:
            found |= _flat_names(value, depth, f"{name}{key}/")
    return found


class _Plain(pickle.Unpickler):
    """Reads containers, numbers, strings, arrays and tensors, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = {("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "complex")}
        root = module.partition(".")[0]
        arrays = root == "numpy" and name in ("ndarray", "dtype", "_reconstruct", "scalar")
        tensors = (module, name) in {
            ("torch._utils", "_rebuild_tensor_v2"),
            ("torch.storage", "_load_from_bytes"),
        }
        if name == "_load_from_bytes":
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) in known or arrays or tensors:
            return super().find_class(module, name)
        raise InputError(
            f"the checkpoint's user_dict holds {module}.{name}",
            because="reading it would run code that came with the file",
            help="save plain values: numbers, strings, lists, dicts, arrays and tensors",
        )


def _unpickled(text: Any) -> dict[str, Any]:
    """What a script has added; it is the pickle's bytes as hexadecimal text."""
    if text is None:
        return {}
    text = text.decode() if isinstance(text, bytes) else str(text)
    result = _Plain(io.BytesIO(bytes.fromhex(text))).load()
    return dict(result)


def aggregate_checkpoints(
    paths: Sequence[str | os.PathLike[str]], pytorch_format: bool = True
) -> dict[str, Any]:
    """The checkpoints of all processes as one.

    Args:
        paths: of their files, in any order.
        pytorch_format: whether weights alone, as tensors by name.

    Raises:
        MissingPackage: h5py is not installed.
        InputError: a file is no checkpoint, or they are not those of all processes.
    """
    states = [_read(path) for path in paths]
    for state in states:
        state.pop(USER, None)
    whole = aggregated(states)
    if not pytorch_format:
        return whole
    weights = weights_of(whole)
    return {name: torch.as_tensor(np.asarray(value)) for name, value in weights.items()}


def weights_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a nested state; the original's earlier versions called them ``fp32``."""
    model = state.get("model", {})
    return next((model[key] for key in ("full_precision", "fp32") if key in model), {})


def aggregated(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The nested states of all processes as one.

    What ``partition_info`` names was cut flat, in the order of the ranks; everything else is whole.

    Args:
        states: of all processes, in any order.

    Raises:
        InputError: a process is missing or there twice, processes disagree, or the model itself was
            cut.
    """
    by_rank: dict[int, Mapping[str, Any]] = {}
    for state in states:
        options = state.get("trainer_options", {})
        if int(options.get("horizontal_parallel_size", 1)) > 1:
            raise InputError(
                "the checkpoint is of a model that was cut between processes",
                help="only moments that were partitioned (ZeRO, stage 1) are put together",
            )
        by_rank[int(options.get("world_rank", 0))] = state
    world = max(int(s.get("trainer_options", {}).get("world_size", 1)) for s in states)
    if sorted(by_rank) != [*range(world)] or len(states) != world:
        raise InputError(
            f"the checkpoint was written by {world} processes, and the files are of "
            f"{listing([str(rank) for rank in sorted(by_rank)])}",
            help="give one file of each process",
        )
    ordered = [by_rank[rank] for rank in range(world)]
    first = dict(ordered[0])
    mixed = bool(first.get("trainer_options", {}).get("mixed_precision", False))
    cut: dict[str, Any] = {}
    for state in ordered:
        for name, row in state.get("partition_info", {}).items():
            cut[name] = np.asarray(row["original_dim"]).reshape(-1)
    weights: dict[str, list[Any]] = {}
    moments: dict[tuple[str, str], list[Any]] = {}
    for state in ordered:
        for name, value in weights_of(state).items():
            weights.setdefault(name, []).append(value)
        for name, row in state.get("optimizer", {}).items():
            for key, value in row.items():
                moments.setdefault((name, key), []).append(value)
    first["model"] = {
        "full_precision": {
            name: _one(name, values, cut.get(name) if mixed else None)
            for name, values in weights.items()
        }
    }
    first["optimizer"] = {}
    for (name, key), values in moments.items():
        shape = cut.get(name) if key.startswith("Moment") else None
        first["optimizer"].setdefault(name, {})[key] = _one(f"{key} of {name}", values, shape)
    options = dict(first.get("trainer_options", {}))
    first["trainer_options"] = {**options, "zero_stage": 0, "world_rank": 0, "world_size": 1}
    first.pop("partition_info", None)
    return first


def _one(name: str, values: Sequence[Any], shape: Any) -> Any:
    """The value that all processes have, or that their parts make up."""
    if shape is not None:
        parts = np.concatenate([np.asarray(value).reshape(-1) for value in values])
        if parts.size == int(np.prod(shape)):
            return parts.reshape([int(size) for size in shape])
    if any(not np.array_equal(values[0], value) for value in values[1:]):
        raise InputError(
            f"the processes of the checkpoint disagree on {name!r}",
            help="take the files of one and the same step",
        )
    return values[0]


# -- files of torch --------------------------------------------------------------------------------


def file_name(prefix: str, partitioned: bool, rank: int, world: int) -> str:
    """``ORT_checkpoint.ort.pt``; with the rank and the last one where each process has a file."""
    expect_name_part("checkpoint_prefix", prefix)
    return f"{prefix}.ZeRO.{rank}.{world - 1}.ort.pt" if partitioned else f"{prefix}.ort.pt"


def save_flat(
    training: Any,
    checkpoint_dir: str | os.PathLike[str],
    prefix: str,
    more: Mapping[str, Any] | None,
    *,
    include_optimizer_state: bool,
) -> None:
    """Writes a training in the flat form, with torch.

    Args:
        training: whose weights and states.
        checkpoint_dir: a folder that is there.
        prefix: start of the file's name.
        more: what a script adds to it, by keys of its own.
        include_optimizer_state: whether weights are not all.

    Raises:
        SaveError: there is no such folder, or the file could not be written.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise SaveError(f"there is no folder {str(folder)!r}", help="make it first")
    stepper = training.stepper
    states = training.states() if include_optimizer_state else {}
    rank = torch.distributed.get_rank() if stepper.world > 1 else 0
    name = file_name(prefix, training.partitioned, rank, stepper.world)
    content = {**(more or {}), "model": flat(training.weights, states)}
    with staged(folder, name, "checkpoint") as made:
        torch.save(content, made / name)


def load_flat(
    training: Any, checkpoint_dir: str | os.PathLike[str], prefix: str, *, strict: bool
) -> dict[str, Any]:
    """Takes over a checkpoint in the flat form.

    Args:
        training: that takes it.
        checkpoint_dir: its folder.
        prefix: start of its files' names.
        strict: whether names that the training does not have are an error.

    Returns:
        What the script had added to it.

    Raises:
        InputError: no checkpoint of that prefix, files of some processes only, or not one of this
            training.
    """
    folder = Path(checkpoint_dir)
    expect_name_part("checkpoint_prefix", prefix)
    single = folder / f"{prefix}.ort.pt"
    several = sorted(folder.glob(f"{glob.escape(prefix)}.ZeRO.*.ort.pt"))
    if single.is_file() and several:
        raise InputError(
            f"{str(folder)!r} has {single.name}, and {several[0].name} too",
            because="one is of a single process, the other of several",
            help="leave one of them in the folder",
        )
    if single.is_file():
        files = [single]
    elif several:
        files = _ranked(several)
    else:
        raise InputError(
            f"there is no checkpoint {prefix!r} in {str(folder)!r}",
            help=f"its file is {prefix}.ort.pt, or {prefix}.ZeRO.<rank>.<last rank>.ort.pt",
        )
    contents = [_of_torch(file) for file in files]
    load_model(training, [content.pop("model") for content in contents], strict=strict)
    return {key: value for content in contents for key, value in content.items()}


def load_model(training: Any, states: Sequence[Mapping[str, Any]], *, strict: bool) -> None:
    """Takes over flat states.

    Args:
        training: that takes them.
        states: of all processes, by rank.
        strict: whether names that the training does not have are an error.

    Raises:
        InputError: names that it does not have where they are checked, or other shapes.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in training.weights.items()}
    weights, optimizer, others = nested(joined(states, shapes), shapes)
    if others and strict:
        raise InputError(
            f"the checkpoint has {listing(others)}, which this model has not",
            help="strict=False leaves them out",
        )
    if others:
        warnings.warn(
            f"of the checkpoint {listing(others)} is left out: the model has no such weight",
            OrtrainWarning,
            stacklevel=3,
        )
    training.load(weights, optimizer, strict=False)
    if missing := lacking(training.weights, weights):
        warnings.warn(
            f"the checkpoint has no {listing(missing)}, which stay as they are",
            OrtrainWarning,
            stacklevel=3,
        )


def _ranked(files: Sequence[Path]) -> list[Path]:
    """The files of all processes by rank."""
    ranks = {}
    for file in files:
        rank, last = file.name.removesuffix(".ort.pt").rsplit(".", 2)[-2:]
        if not (rank.isdecimal() and last.isdecimal()):
            raise InputError(f"{file.name} has no ranks in its name")
        ranks[int(rank)] = (file, int(last))
    world = max(last for _, last in ranks.values()) + 1
    if len(ranks) < len(files) or len({last for _, last in ranks.values()}) > 1:
        raise InputError(
            f"{listing([file.name for file in files])} are not of one and the same run",
            help="leave the files of one run in the folder",
        )
    if sorted(ranks) != [*range(world)]:
        raise InputError(
            f"the checkpoint was written by {world} processes, and there are files of "
            f"{listing([str(rank) for rank in sorted(ranks)])}",
            help="copy the files of all processes into the folder",
        )
    return [ranks[rank][0] for rank in range(world)]


def _of_torch(path: Path) -> dict[str, Any]:
    expect_regular(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise InputError(
            f"cannot read the checkpoint {str(path)!r}",
            because=str(error).splitlines()[0] if str(error) else type(error).__name__,
            help="it is cut off, no file of torch, or holds objects of a script's own classes",
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), Mapping):
        raise InputError(
            f"{str(path)!r} is no checkpoint: it has {shown(content)}",
            help="a checkpoint is a dict with 'model'",
        )
    return dict(content)


# -- the experimental names of the second generation -----------------------------------------------


def experimental_state_dict(
    ort_trainer: Any, include_optimizer_state: bool = True
) -> dict[str, Any]:
    """Weights, and states unless they are left out, in the flat form.

    Args:
        ort_trainer: an `ORTTrainer` of the second generation.
        include_optimizer_state: whether weights are not all.
    """
    training = ort_trainer._training
    return dict(flat(training.weights, training.states() if include_optimizer_state else {}))


def experimental_load_state_dict(
    ort_trainer: Any, state_dict: Mapping[str, Any], strict: bool = False
) -> None:
    """Takes over what `experimental_state_dict` has returned.

    Args:
        ort_trainer: an `ORTTrainer` of the second generation.
        state_dict: in the flat form.
        strict: whether names that the model does not have are an error.

    Raises:
        InputError: names that it does not have where they are checked, or other shapes.
    """
    load_model(ort_trainer._training, [state_dict], strict=strict)


def experimental_save_checkpoint(
    ort_trainer: Any,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = PREFIX,
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Writes weights and states with torch.

    Args:
        ort_trainer: an `ORTTrainer` of the second generation.
        checkpoint_dir: a folder that is there.
        checkpoint_prefix: start of the file's name.
        checkpoint_state_dict: what a script adds to it.
        include_optimizer_state: whether weights are not all.

    Raises:
        SaveError: there is no such folder, or the file could not be written.
    """
    save_flat(
        ort_trainer._training,
        checkpoint_dir,
        checkpoint_prefix,
        checkpoint_state_dict,
        include_optimizer_state=include_optimizer_state,
    )


def experimental_load_checkpoint(
    ort_trainer: Any,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = PREFIX,
    strict: bool = False,
) -> dict[str, Any]:
    """Takes over what `experimental_save_checkpoint` has written, also of the original.

    Args:
        ort_trainer: an `ORTTrainer` of the second generation.
        checkpoint_dir: its folder.
        checkpoint_prefix: start of its files' names.
        strict: whether names that the model does not have are an error.

    Returns:
        What the script had added to it.

    Raises:
        InputError: no checkpoint, or not one of this training.
    """
    return load_flat(ort_trainer._training, checkpoint_dir, checkpoint_prefix, strict=strict)


__all__ = [
    "aggregate_checkpoints",
    "experimental_load_checkpoint",
    "experimental_load_state_dict",
    "experimental_save_checkpoint",
    "experimental_state_dict",
]
