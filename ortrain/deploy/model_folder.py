"""``ModelFolder``: a folder of an exported model, which is read, and written anew elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortrain.errors import InputError, OrtrainError, SaveError, listing
from ortrain.files import seal
from ortrain.files.names import expect_name_part, leads_out
from ortrain.files.regular import expect_regular
from ortrain.files.replacing import staged
from ortrain.graph.external_data import initializers, locate, tensors
from ortrain.kinds import NONE, expect, expect_names, expect_path

# Weights of more bytes go beside the file. A protobuf holds at most 2 GiB, and onnxruntime maps
# what is beside it into memory instead of reading it.
EXTERNAL_ABOVE = 1 << 30
# The most that stays inside where it is asked for: the graph itself needs some room, too.
INSIDE_AT_MOST = (1 << 31) - (1 << 24)
# Smaller tensors stay in the file, as shapes and axes that onnxruntime wants to read early.
_SMALL = 1024

# The version of the format in which a weight need not be an input.
_WEIGHTS_ALONE = 4

_STAGING = re.compile(r"\.model\.[0-9a-f]{8}\.tmp")
_COMPANIONS = {".json", ".txt", ".model", ".spm", ".jinja", ".tiktoken", ".codes", ".vocab", ".py"}
# What a tool has written about the files that are there, not about those that it is going to write.
REPORTS = ("equivalence.json", "equivalence.html")
_NOT_COMPANIONS = {
    *REPORTS,
    "all_results.json",
    "eval_results.json",
    "fine_tuning.json",
    "ort_config.json",
    "sensitivity.json",
    "train_results.json",
    "trainer_state.json",
}


@dataclass(frozen=True)
class ModelFolder:
    """A folder with the ONNX files of a model and what goes along with them.

    Attributes:
        path: of the folder, which is never written to.
        files: names of its ONNX files, all of them or those that were asked for.
        config: what its ``config.json`` says; empty without one.
        beside: the folder of the configuration and the tokenizer, where that is another one.
        grows: whether new files may come into it, beside those that are there.
    """

    path: Path
    files: tuple[str, ...]
    config: Mapping[str, Any]
    beside: Path | None = None
    grows: bool = False

    @classmethod
    def open(
        cls, source: str | os.PathLike[str], file_names: Sequence[str] | None = None
    ) -> ModelFolder:
        """The folder of a model.

        Args:
            source: the folder, one ``.onnx`` file in it, or an `ORTModel` that was loaded from it.
            file_names: of its ONNX files; by default all of them, of a loaded model its own.

        Raises:
            TypeError: an argument is of another type.
            InputError: there is no ONNX file, or none of such a name, or ``config.json`` is not
                what its name says.
        """
        expect_path("source", source)
        expect_names("file_names", file_names, NONE)
        if (loaded := getattr(source, "onnx_files", None)) is not None:
            return cls._of_loaded(Path(source), loaded, file_names)
        path = Path(source)
        if path.is_file():
            if path.suffix != ".onnx":
                raise InputError(
                    f"{path} is no .onnx file", help="give the folder of the model, or the file"
                )
            if file_names is not None and list(file_names) != [path.name]:
                raise InputError(
                    f"{path} is one file, and file_names={list(file_names)} asks for others",
                    help="give its folder",
                )
            return cls(path.parent, (path.name,), _config(path.parent))
        if not path.is_dir():
            raise InputError(
                f"there is no model at {path}",
                help="give the folder that a model was exported to, or its .onnx file",
            )
        there = _names(path)
        wanted = tuple(there if file_names is None else dict.fromkeys(file_names))
        if missing := [name for name in wanted if name not in there]:
            raise InputError(
                f"{path} has no file {listing(missing)}",
                because=f"its ONNX files are {listing(there) or 'none'}",
                help="give a name that is there",
            )
        if not wanted:
            below = sorted(p.name for p in path.iterdir() if p.is_dir() and _names(p))
            raise InputError(
                f"{path} has no ONNX file",
                because=f"its folder {below[0]} has one" if below else "",
                help=f"give {path / below[0]}" if below else "export the model first",
            )
        return cls(path, wanted, _config(path))

    @classmethod
    def _of_loaded(
        cls, folder: Path, files: Sequence[Path], file_names: Sequence[str] | None
    ) -> ModelFolder:
        """That of a model whose files may lie in a folder of their own, as ``onnx`` on the hub."""
        own = files[0].parent
        names = [path.name for path in files] if file_names is None else file_names
        found = cls.open(own, names)
        if own == folder:
            return found
        return replace(found, config=found.config or _config(folder), beside=folder)

    def load(self, name: str) -> ir.Model:
        """One of the models; weights beside the file stay there and are mapped into memory.

        Args:
            name: of the ONNX file.

        Raises:
            InputError: there is no such file, it is no ONNX model, it is damaged, or its weights
                are not where it says.
        """
        path = self.path / name
        if leads_out(name) or not path.is_file():
            raise InputError(
                f"{self.path} has no file {name}",
                because=f"its ONNX files are {listing(self.files) or 'none'}",
                help="give a name that is there",
            )
        return load_model(path)

    def companions(self) -> tuple[Path, ...]:
        """What goes along as it is: configuration, tokenizer, preprocessor, code of the model."""
        return tuple(
            sorted(
                path
                for path in (self.beside or self.path).iterdir()
                if path.suffix in _COMPANIONS
                and path.name not in _NOT_COMPANIONS
                and not path.name.endswith(".index.json")  # of weights in shards
                and path.is_file()
            )
        )


class _OfTheTool(Exception):
    """Carries a ValueError past what would take it for a fault of the target."""

    def __init__(self, own: ValueError) -> None:
        super().__init__(str(own))
        self.own = own


def load_model(path: Path) -> ir.Model:
    """An ONNX file whose weights are all there; as :meth:`ModelFolder.load`.

    Raises:
        InputError: it is no ONNX model, it is damaged, or its weights are not where it says.
    """
    try:
        seal.is_model_whole(path, f"model {path}")
        model = ir.load(path)
        if not len(model.graph) and not model.graph.outputs:
            raise ValueError("it has no graph")  # nothing at all is a message, too
    except OrtrainError:
        raise
    except Exception as error:
        # Of protobuf, onnx or onnx_ir, by the place at which it is damaged.
        raise InputError(
            f"{path} cannot be read as an ONNX model",
            because=str(error) or type(error).__name__,
            help="take a whole copy of it, or export it anew",
        ) from error
    locate(model, path)
    for key in (seal.KEY, seal.DATA_KEY):
        model.metadata_props.pop(key, None)
    if model.ir_version < _WEIGHTS_ALONE:
        # Weights were inputs as well, and onnxruntime takes them for constants all the same; of
        # those that it rewrites, it leaves inputs without a weight.
        for value in [v for v in model.graph.inputs if v.is_initializer()]:
            model.graph.inputs.remove(value)
        model.ir_version = _WEIGHTS_ALONE
    return model


def external_files_of(model: ir.Model) -> tuple[Path, ...]:
    """The files that have weights of a model which :func:`load_model` has read."""
    found = {Path(t.path) for t in tensors(model) if isinstance(t, ir.ExternalTensor)}
    return tuple(sorted(found))


@contextmanager
def published(source: ModelFolder, target: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """A folder whose files come into the target as a whole, with what goes along, or not at all.

    Args:
        source: of the model; what goes along is copied from it.
        target: the folder to write to, made where it does not exist. Files that are there and have
            other names stay, an older report of equivalence aside.
        what: what the files are, for the error: ``"quantized model"``.

    Yields:
        A folder to write the files to; in it lie the companions of the source.

    Raises:
        TypeError: ``target`` is no path.
        ValueError: ``target`` is the folder of the source, which may not grow, or a name in it
            leads there.
        SaveError: the files could not be written; unless it says so, all are as they were.
    """
    expect_path("target", target)
    folder = Path(target)
    own = Path(os.path.realpath(source.path))
    places = {own, Path(os.path.realpath(source.beside or source.path))}
    inside = Path(os.path.realpath(folder)) in places
    if inside and not source.grows:
        raise ValueError(
            f"{folder} is the folder of the source: nothing is written there; give another one"
        )
    made = _missing(folder)
    try:
        with staged(folder, "model", what) as unfinished:
            for path in () if inside else source.companions():
                shutil.copyfile(path, unfinished / path.name)
            try:
                yield unfinished
            except ValueError as error:
                if isinstance(error, OrtrainError):
                    raise
                # `staged` takes it for a path that cannot be; here it is a tool's own.
                raise _OfTheTool(error) from error
            for path in unfinished.iterdir():
                there = folder / path.name
                if inside and path.name in source.files:
                    raise _OfTheTool(
                        ValueError(
                            f"{there} is a file of the source: it is not replaced; give a "
                            "file_suffix or another folder"
                        )
                    )
                # A file is written where a link leads.
                if there.is_symlink() and Path(os.path.realpath(there)).is_relative_to(own):
                    raise SaveError(
                        f"cannot save the {what} in {folder}",
                        because=f"{there} is a link to a file of the source",
                        help="remove the link, or give another folder",
                    )
            written = {path.name for path in unfinished.iterdir()}
    except BaseException as error:
        for each in made:
            with suppress(OSError):
                each.rmdir()  # which leaves one with files in it
        if isinstance(error, _OfTheTool):
            raise error.own from error.own.__cause__
        raise
    for name in set(REPORTS) - written:  # of the files that have just been replaced
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def published_at(folder: Path) -> Path:
    """Where the files of a folder are: those that :func:`published` yields, where they will be."""
    return folder.parent if _STAGING.fullmatch(folder.name) else folder


def save_model(
    model: ir.Model, path: Path, *, external: bool | None = None, one_file: bool = True
) -> None:
    """Writes an ONNX file with a seal, its weights inside or beside it.

    Args:
        model: stays as it is.
        path: of the file to write.
        external: whether weights go beside the file; by default where they are over 1 GiB. Where
            they are too large for the file, they go beside it in any case.
        one_file: whether what goes beside it is one file, ``<name>.onnx_data``; else each weight
            is a file named for it.

    Raises:
        OSError: it cannot be written.
    """
    size = sum(tensor.nbytes for tensor in tensors(model))
    beside = size > EXTERNAL_ABOVE if external is None else external
    beside = beside or size > INSIDE_AT_MOST
    metadata = model.metadata_props
    before = {key: metadata.pop(key, None) for key in (seal.KEY, seal.DATA_KEY)}
    kept: list[tuple[ir.Value, ir.TensorProtocol]] = []
    data = path.with_name(f"{path.stem}.onnx_data") if beside and one_file else None
    try:
        if data is not None:
            metadata[seal.DATA_KEY] = seal.unsealed_data(data.name)
            ir.save(model, path, external_data=data.name, size_threshold_bytes=_SMALL)
            if not data.is_file() or not data.stat().st_size:  # all weights are small
                data.unlink(missing_ok=True)
                del metadata[seal.DATA_KEY]
                data, beside = None, False
        if data is None:
            for index, value in enumerate(initializers(model)):
                tensor = value.const_value
                assert tensor is not None
                kept.append((value, tensor))
                if beside and tensor.nbytes > _SMALL:
                    name = f"{path.stem}.{index:05}.onnx_data"
                    value.const_value = ir.external_data.convert_tensors_to_external(
                        [tensor], path.parent, name
                    )[0]
                elif isinstance(tensor, ir.ExternalTensor):
                    # Not by onnx_ir's conversion: it closes the file, of which other weights may
                    # be views.
                    value.const_value = ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name)
            ir.save(model, path)
    finally:
        for value, tensor in kept:
            value.const_value = tensor
        metadata.pop(seal.DATA_KEY, None)
        metadata.update({key: text for key, text in before.items() if text is not None})
    seal.seal_model(path, data)


def expect_suffix(suffix: object) -> None:
    """Raises where a suffix of files' names is none.

    Raises:
        TypeError: it is neither a text nor None.
        ValueError: names cannot have it.
    """
    expect("file_suffix", suffix, (str, NONE), "a text or None")
    if isinstance(suffix, str):
        expect_name_part("file_suffix", suffix)


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix == ".onnx" and p.is_file())


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    expect_regular(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is no configuration of a model",
            because=str(error),
            help="put it right, or take a whole copy of the folder",
        ) from error
    return found


def _missing(folder: Path) -> list[Path]:
    """The folders that are going to be made for a path, from the innermost."""
    found = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        found.append(each)
    return found
