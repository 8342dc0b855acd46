"""Where the files of an exported model are, and what each of them is for.

A folder has its ONNX files at its root or under ``onnx/``, as models on the hub do::

    model.onnx                       a model of one file; a decoder with its cache
    decoder_model.onnx               a decoder without a cache to begin with
    decoder_with_past_model.onnx     a decoder that goes on from one
    decoder_model_merged.onnx        both, with a switch
    encoder_model.onnx

A name may have a suffix that tells one kind from another: ``model_quantized.onnx``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortrain.errors import InputError, listing
from ortrain.files.names import expect_within, leads_out

# Longer names first: one begins with another.
ROLES = (
    "decoder_model_merged",
    "decoder_with_past_model",
    "decoder_model",
    "encoder_model",
    "model",
)
# Arguments that say where on the hub a model is.
HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_PATTERNS = ["*.onnx", "*.onnx_data*", "*.onnx.data*", "*.json", "*.txt", "*.model"]


def located(model: str | os.PathLike[str], subfolder: str, hub: Mapping[str, Any]) -> Path:
    """The folder, or the ONNX file, that a name leads to.

    Args:
        model: of a folder, a file, or a model on the hub.
        subfolder: within it.
        hub: revision, token and the like.

    Raises:
        InputError: there is none.
    """
    path = Path(model)
    if not path.exists():
        path = _downloaded(os.fspath(model), hub)
    if subfolder:
        path = _within(path, subfolder)
        if not path.is_dir():
            raise InputError(f"there is no folder {path}")
    return path


def _downloaded(name: str, hub: Mapping[str, Any]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, **hub))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"there is no folder {name!r}, and no such model can be had from the hub",
            because=str(error).strip().splitlines()[0],
            help="pass the folder of an exported model; export=True makes one of a checkpoint",
        ) from error


def onnx_files(folder: Path) -> list[Path]:
    """The ONNX files of a folder: at its root, else under ``onnx/``.

    Raises:
        InputError: there is none.
    """
    for place in (folder, folder / "onnx"):
        found = sorted(path for path in place.glob("*.onnx") if path.is_file())
        if found:
            return found
    there = listing(sorted(path.name for path in folder.iterdir()), 8)
    raise InputError(
        f"there is no ONNX file in {folder}",
        because=f"it has {there}" if there else "it is empty",
        help="export=True makes one of a checkpoint of transformers",
    )


def named(folder: Path, name: str) -> Path:
    """One file of a folder.

    Raises:
        InputError: there is none of that name.
    """
    for place in (folder, folder / "onnx"):
        if _within(place, name).is_file():
            return place / name
    there = sorted(path.name for path in (*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")))
    raise InputError(
        f"there is no file {name!r} in {folder}",
        because=f"it has {listing(there, 8)}" if there else "it has no ONNX file",
    )


def only_file(folder: Path, file_name: str | None) -> Path:
    """The file of a model that has one.

    Raises:
        InputError: there is none, or there are several and the name is not given.
    """
    if file_name is not None:
        return named(folder, file_name)
    found = onnx_files(folder)
    if len(found) > 1:
        raise InputError(
            f"there are {len(found)} ONNX files in {folder}",
            because=f"they are {listing([path.name for path in found], 8)}",
            help=f"say which one: file_name={found[0].name!r}",
        )
    return found[0]


def files_of_roles(
    folder: Path, roles: Sequence[str], names: Mapping[str, str | None]
) -> dict[str, Path]:
    """Role → file, for those roles that there is a file for.

    Args:
        folder: of the model.
        roles: that the model may have; files of others are passed by.
        names: role → file name, where the caller has given one.

    Raises:
        InputError: there is no ONNX file; a given name is not there; several files of one role are,
            and none of their names is given.
    """
    found = {role: named(folder, name) for role, name in names.items() if name is not None}
    candidates: dict[str, list[Path]] = {}
    for path in onnx_files(folder):
        role = next((role for role in ROLES if path.stem.startswith(role)), "")
        if role in roles and role not in found:
            candidates.setdefault(role, []).append(path)
    for role, paths in candidates.items():
        if len(paths) > 1:
            argument = (
                "file_name" if role == "model" else f"{role.removesuffix('_model')}_file_name"
            )
            raise InputError(
                f"there are {len(paths)} ONNX files for the {role} in {folder}",
                because=f"they are {listing([path.name for path in paths], 8)}",
                help=f"say which one: {argument}={paths[0].name!r}",
            )
        found[role] = paths[0]
    return found


def external_files(path: Path) -> list[str]:
    """Names of the files beside an ONNX file that hold weights of it.

    Raises:
        InputError: a name leads out of the folder; onnxruntime looks at weights it reads alone.
    """
    import onnx

    from ortrain.graph.external_data import protos

    found = {
        entry.value
        for tensor in protos(onnx.load(path, load_external_data=False))
        for entry in tensor.external_data
        if entry.key == "location"
    }
    for name in found:
        if leads_out(name):
            raise InputError(
                f"{path} has weights in {name!r}",
                because="that leaves the folder of the model",
                help="do not use the file unless you know where it comes from",
            )
    return sorted(found)


def _within(folder: Path, name: str) -> Path:
    try:
        return expect_within(folder, name)
    except ValueError as error:
        raise InputError(str(error), help="give the folder that the file is in") from error
