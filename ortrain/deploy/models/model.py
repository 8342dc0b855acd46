"""``ORTModel``: what the models of all tasks have in common."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import nn
from transformers import GenerationConfig

from ortrain.deploy.models.configuration import config_of
from ortrain.deploy.models.exporting import export_folder
from ortrain.deploy.models.files import HUB, located
from ortrain.deploy.models.frozen import Frozen
from ortrain.deploy.models.saving import Saved, preprocessor_files
from ortrain.deploy.models.session import CPU, Session, described, expect_session_options
from ortrain.errors import InputError, NotServed, UnsupportedInput, listing
from ortrain.kinds import NONE, expect, expect_flag, expect_path

# Arguments of a call that ask for more than an exported file may give.
_RETURNED = ("output_attentions", "output_hidden_states", "use_cache", "interpolate_pos_encoding")


class ORTModel(Frozen, Saved):
    """An exported model of transformers, in onnxruntime.

    Made by `from_pretrained`. It is called as the model of transformers is, with torch tensors or
    numpy arrays, and returns the same results of the same kind of arrays. It computes no gradients.

    Attributes:
        config: of the model.
        generation_config: of models that generate.
        main_input_name: of the argument that a call begins with.
        training: False.
    """

    # Of transformers: the class that loads a checkpoint of the task, and its table of names.
    auto_class: ClassVar[str] = ""
    pipeline_names: ClassVar[str] = ""
    # In which it is exported, and the outputs that a file of the task has, any of them.
    form: ClassVar[str] = "one file"
    gives: ClassVar[tuple[str, ...]] = ("logits",)

    main_input_name = "input_ids"
    input_modalities: Any = "text"
    base_model_prefix = "ort_model"
    training = False

    generation_config: GenerationConfig | None = None

    def __init__(self, config: Any, sessions: Mapping[str, Session], folder: Path) -> None:
        if isinstance(self, nn.Module):
            nn.Module.__init__(self)
            self.__dict__["training"] = False
        self.config = config
        self.folder = folder
        self._take(dict(sessions))
        _register(type(self))

    # -- loading ---------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | nn.Module,
        file_name: str | None = None,
        provider: str = CPU,
        session_options: Any = None,
        provider_options: Mapping[str, Any] | None = None,
        use_io_binding: bool | None = None,
        export: bool = False,
        *,
        subfolder: str = "",
        trust_remote_code: bool = False,
        **config: Any,
    ) -> Self:
        """Loads an exported model.

        Args:
            model: a folder, an ONNX file in one, or a name on the hub; with ``export`` that of a
                checkpoint of transformers, or a model of it.
            file_name: of the ONNX file, where there are several.
            provider: name of onnxruntime's execution provider.
            session_options: `onnxruntime.SessionOptions`.
            provider_options: of the provider, such as ``{"device_id": 1}``.
            use_io_binding: False copies tensors of a GPU through the CPU; on the CPU no tensor is
                copied either way.
            export: makes the ONNX files, in a folder that lives as long as the model; files that
                are there already are passed by. `save_pretrained` keeps them.
            subfolder: of the model's folder.
            trust_remote_code: whether code that lies beside a checkpoint may be run.
            config: attributes of the configuration to replace; ``config`` itself; and ``revision``,
                ``token``, ``cache_dir``, ``local_files_only`` and ``force_download`` for the hub.

        Raises:
            TypeError: an argument is of another type, or of a name that nothing has.
            ValueError: the installed onnxruntime has no such provider.
            InputError: no ONNX file, several and no name, one that is damaged or of another task.
            NotServed: the installed onnxruntime has no kernels for the model.
        """
        module = model if isinstance(model, nn.Module) else None
        if module is None:
            hint = "export=True takes a model of PyTorch too"
            expect_path("model", model, expected=f"a folder, a file or a name on the hub; {hint}")
        expect("file_name", file_name, (str, NONE), "the name of an ONNX file")
        expect("provider", provider, str, "the name of an execution provider")
        expect_session_options(session_options)
        expect("provider_options", provider_options, (Mapping, NONE), "a dict")
        expect_flag("export", export)
        expect_flag("trust_remote_code", trust_remote_code)
        if use_io_binding is not None:
            expect_flag("use_io_binding", use_io_binding)
        hub = {name: config.pop(name) for name in HUB if name in config}
        names = cls._file_names(file_name, config)
        made: Path | None = None
        try:
            if module is not None or export:
                made = Path(tempfile.mkdtemp(prefix="ortrain-"))
                source = module if module is not None else located(str(model), subfolder, hub)
                cls._export(source, made, config, trusted=trust_remote_code)
                folder = made
            else:
                folder = located(str(model), subfolder, hub)
                if folder.is_file():
                    folder, names = folder.parent, cls._file_names(folder.name, {})
            files = cls._files(folder, names)
            loaded = config_of(folder, config, trusted=trust_remote_code)
            sessions = {
                role: Session(
                    path,
                    provider=provider,
                    options=session_options,
                    provider_options=provider_options,
                    binding=use_io_binding is not False,
                    grows=cls.can_generate(),
                )
                for role, path in files.items()
            }
            instance = cls._kind(loaded)(loaded, sessions, folder)
        except BaseException:
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            raise
        if made is not None:
            weakref.finalize(instance, shutil.rmtree, made, ignore_errors=True)
        return instance

    @classmethod
    def _export(
        cls, source: nn.Module | Path, folder: Path, config: dict[str, Any], *, trusted: bool
    ) -> None:
        """Writes the files of a checkpoint, for which it takes what ``config`` has."""
        if isinstance(source, Path):
            if not (source / "config.json").is_file():
                raise InputError(f"there is no config.json in {source}")
            given = {"dtype": torch.float32, "trust_remote_code": trusted, **config}
            config.clear()
            loaded = getattr(transformers, cls.auto_class).from_pretrained(source, **given)
        else:
            loaded = source
        export_folder(loaded, folder, cls.form)
        if isinstance(source, Path):
            for path in preprocessor_files(source):
                shutil.copyfile(path, folder / path.name)

    @classmethod
    def _file_names(cls, file_name: str | None, config: dict[str, Any]) -> dict[str, str | None]:
        """Role → name, as the caller gave it; takes what it reads out of ``config``."""
        return {"model": file_name}

    @classmethod
    def _files(cls, folder: Path, names: Mapping[str, str | None]) -> dict[str, Path]:
        """Role → file."""
        raise TypeError(
            f"{cls.__name__} is what models of all tasks are: call from_pretrained of the class of "
            "its task, such as ORTModelForFeatureExtraction"
        )

    @classmethod
    def _kind(cls, config: Any) -> type[Self]:
        """The class of the instance."""
        return cls

    def _take(self, sessions: dict[str, Session]) -> None:
        """Makes these the model's sessions."""
        self.sessions = sessions

    # -- calls -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, as ``forward`` does."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        raise NotImplementedError

    def _flags(self, kwargs: dict[str, Any], fields: Iterable[str]) -> bool:
        """Takes the arguments that are no tensors; whether the result is to be an object.

        Raises:
            UnsupportedInput: something is to be returned that the file does not give.
        """
        wanted = kwargs.pop("return_dict", None)
        for name in _RETURNED:
            if kwargs.pop(name, None):
                field = name.removeprefix("output_")
                if not any(has.endswith(field) for has in fields):
                    raise UnsupportedInput(
                        f"{name}=True, which the file does not have",
                        because=described([*self.sessions.values()]),
                        help="leave it out, or export the model again with it",
                    )
        if wanted is None:
            wanted = getattr(self.config, "return_dict", True)
        return bool(wanted)

    def _expect_outputs(self, session: Session, names: Iterable[str]) -> None:
        """Raises where a file has none of these outputs."""
        if not any(name in session.outputs for name in names):
            raise InputError(
                f"{session.path.name} is no file for {type(self).__name__}",
                where=str(session.path),
                because=f"it gives {listing([*session.outputs], 12)} of "
                f"{listing([*session.inputs], 12)}; expected {' or '.join(names)}",
                help="load it with the class of its task",
            )

    def _expect_input(self, session: Session, names: Iterable[str]) -> None:
        """Raises where a file takes none of these inputs."""
        if not any(name in session.inputs for name in names):
            raise InputError(
                f"{session.path.name} is no file for {type(self).__name__}",
                where=str(session.path),
                because=f"it takes {listing([*session.inputs], 12)}; expected {' or '.join(names)}",
                help="load it with the class of its task",
            )

    # -- where, and in which mode ----------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(iter(self.sessions.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the floating-point results."""
        session = [*self.sessions.values()][-1]
        kinds = [value.dtype for value in session.outputs.values()]
        return next((kind for kind in kinds if kind.is_floating_point), torch.float32)

    @property
    def onnx_files(self) -> tuple[Path, ...]:
        """The files that it runs."""
        return tuple(session.path for session in self.sessions.values())

    @property
    def providers(self) -> list[str]:
        """The execution providers that run it, in the order of preference."""
        return next(iter(self.sessions.values())).providers

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Moves the model to another device, where the installed onnxruntime has its provider.

        Raises:
            NotServed: it has not, or another dtype is asked for.
        """
        asked = [*args, *(kwargs.get(name) for name in ("device", "dtype"))]
        for value in asked:
            if value is None or isinstance(value, bool):
                continue
            if isinstance(value, torch.dtype):
                if value is not self.dtype:
                    raise NotServed(
                        f"{type(self).__name__} cannot be made {value}",
                        because=f"its file computes in {self.dtype}",
                        help="convert the file, or export the model in that precision",
                    )
            else:
                self._move(torch.device(value))
        return self

    def _move(self, device: torch.device) -> None:
        here = self.device
        if device.type == here.type and device.index in (None, here.index):
            return
        provider = {"cpu": CPU, "cuda": "CUDAExecutionProvider"}.get(device.type)
        try:
            if provider is None:
                raise ValueError(f"onnxruntime has no tensors on {device.type}")
            options = {"device_id": device.index or 0} if device.type == "cuda" else {}
            moved = {n: s.on(provider, options) for n, s in self.sessions.items()}
        except ValueError as error:
            raise NotServed(
                f"{type(self).__name__} cannot be moved to {device}",
                because=str(error).splitlines()[0],
                help="install the onnxruntime of that device, or pass device='cpu' to a pipeline; "
                "ortrain.ORTModule runs and trains a PyTorch model on the model's device",
            ) from error
        self._take(moved)

    def cpu(self) -> Self:
        """Moves it to the CPU."""
        return self.to("cpu")

    def half(self) -> Self:
        """Itself, if its file computes in float16; see `to`."""
        return self.to(torch.float16)

    def float(self) -> Self:
        """Itself, if its file computes in float32; see `to`."""
        return self.to(torch.float32)

    def cuda(self, device: int | None = None) -> Self:
        """Moves it to a GPU."""
        return self.to(torch.device("cuda", device or 0))

    @classmethod
    def can_generate(cls) -> bool:
        """Whether it has a method ``generate``."""
        return False

    def __repr__(self) -> str:
        names = ", ".join(session.path.name for session in self.sessions.values())
        return f"{type(self).__name__}({names}, {self.providers[0]})"

    def __fspath__(self) -> str:
        """The folder of its files, which what takes a folder may be given the model for."""
        return os.fspath(self.folder)


def _register(kind: type[ORTModel]) -> None:
    """Lets pipelines know the class, which would warn of it else."""
    from transformers.models.auto import modeling_auto

    table = getattr(modeling_auto, kind.pipeline_names, None)
    if table is not None:
        table.setdefault(f"ortrain-{kind.__name__}", kind.__name__)
