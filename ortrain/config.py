"""Settings. The only place that reads environment variables that act; `variables` has the rest."""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ortrain import errors
from ortrain.errors import (
    CaptureError,
    ExecutionError,
    GradientError,
    GraphError,
    NotServed,
    OrtrainError,
    OrtrainWarning,
    ParityError,
    UnsupportedInput,
    UnsupportedOutput,
)
from ortrain.files.names import leads_out
from ortrain.kinds import expect, refused, shown

Engine = Literal["auto", "onnxruntime", "aten", "reference", "torch"]
# Those that run graphs; of the others one chooses, and one runs none.
EXECUTORS = frozenset({"onnxruntime", "aten", "reference"})
Fallback = Literal["torch", "raise"]
Precision = Literal["bf16", "fp16", "bf16-products"]
Budget = int | float | Literal["least"]

# A BERT-base has 2.2 MB of entries: so much keeps hundreds of models, and a disk is not filled by
# the graphs of versions and shapes that nobody trains any more.
CACHE_BYTES = 1 << 30

# The opset of graphs where nothing else is asked for, and the least one.
OPSET, _LEAST_OPSET = 21, 18

# Of the options of ORTModule: names, types, and these in words.
_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("engine fallback", (str,), "a string"),
    ("inference provider precision", (str, type(None)), "a string or None"),
    ("opset threads backward_pieces", (int,), "a whole number"),
    ("cache_bytes", (int, type(None)), "a number of bytes, or None"),
    ("arena retry custom_autograd parts deterministic", (bool,), "True or False"),
    ("skip_padding cuda_graphs", (bool, type(None)), "True, False or None"),
    ("memory_budget", (int, float, str, type(None)), "bytes, a share up to 1.0, 'least' or None"),
    ("cache_dir", (str, os.PathLike, type(None)), "the path of a folder, or None"),
    ("policy", (tuple,), "a tuple of errors of ortrain.errors"),
    ("keep_in_torch", (tuple, list), "a list of names of sub-modules"),
)


class LogLevel(enum.IntEnum):
    """How much ORTModule says; the values are those of ONNX Runtime Training."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """How ORTModule works.

    Attributes:
        engine: ``"auto"`` times the graph against eager on the first steps and keeps the faster;
            ``"onnxruntime"`` always runs the graph in sessions of onnxruntime, ``"aten"`` as a
            generated function of PyTorch's own operators, ``"reference"`` on ``onnx.reference``
            (slow, for debugging); ``"torch"`` never runs it.
        inference: the same for calls without gradients; None goes by ``engine``.
        fallback: what happens where the module cannot become a graph: ``"torch"`` runs it eagerly
            with one warning, ``"raise"`` raises the error.
        provider: execution provider of onnxruntime; None picks the one of the module's device.
        precision: ``"bf16"`` or ``"fp16"`` has every call run as if it were made under
            ``torch.autocast`` with that dtype, in graphs and in PyTorch alike; None leaves that to
            the caller, whose autocast is followed. ``"bf16-products"`` keeps tensors in float32
            and lets graphs of ``"aten"`` round the operands of products and convolutions to
            bfloat16, where the CPU has instructions for it (AMX).
        opset: of the captured graph.
        threads: threads inside an operator; 0 takes torch's number.
        arena: keep the memory of a run for the next ones; False gives it back, which takes time
            and suits calls that are each larger than the one before, or a machine that is full.
        cuda_graphs: record the programs of ``"aten"`` on a GPU as CUDA graphs, one for each size of
            the inputs that comes again, and replay them; ``"auto"`` has them meet eager there. None
            does so where it pays, on any GPU; False never, so that ``"auto"`` runs PyTorch there.
            Elsewhere it changes nothing.
        skip_padding: whether graphs leave out work on tokens whose results nobody reads; None does
            where no output shows them, True also where one does, with zeros at padded places, and
            False never. Logits that the loss itself makes are of labelled rows in any case.
        memory_budget: what a training step of a graph may hold beyond weights and inputs: results
            that are kept for the backward, gradients and temporaries. A whole number is bytes, at
            every size of the inputs; a float up to 1.0 is a share of what the first call would
            take; ``"least"`` is as little as can be. What is not kept is computed again in the
            backward. Eager PyTorch knows no budget: ``"auto"`` stands for ``"aten"`` then.
        backward_pieces: how many programs the backward is cut into; 0 decides by what is saved.
        cache_dir: folder in which graphs, and what contests have found, are kept between processes;
            None keeps nothing.
        cache_bytes: what they may take there; those used longest ago make way. None is no bound.
        policy: the errors to which ``fallback="torch"`` applies; the rest are raised.
        retry: try to capture again at each step after a fallback, instead of once.
        certificate: when a graph is compared with the module on the call at hand, outputs and
            gradients: ``"first"`` before a capture is used, ``"each size"`` also at every new size
            of the inputs, a number N also at every N-th step, ``"off"`` never.
        keep_in_torch: sub-modules that PyTorch runs, between graphs: names as of
            ``named_modules()``, or patterns such as ``"*.router"``.
        custom_autograd: of no effect any more: a ``torch.autograd.Function`` is part of a graph,
            with its own backward, or PyTorch runs it between graphs. False warns.
        parts: of no effect any more: where PyTorch runs some of the module's code, graphs lie
            before and behind it. False warns.
        deterministic: whether no clock decides what runs a step, so that equal runs are equal to
            the bit: ``"auto"`` runs the graph from the first step on. So it is under
            ``torch.use_deterministic_algorithms(True)``.

    Raises:
        TypeError: a value of another type.
        ValueError: a value that is not served.
    """

    engine: Engine = "auto"
    inference: Engine | None = None
    fallback: Fallback = field(default_factory=lambda: fallback_from_environment())
    provider: str | None = None
    precision: Precision | None = None
    opset: int = field(default_factory=lambda: _opset())
    threads: int = 0
    arena: bool = True
    cuda_graphs: bool | None = None
    skip_padding: bool | None = field(default_factory=lambda: skip_padding_from_environment())
    memory_budget: Budget | None = field(default_factory=lambda: _memory_level())
    backward_pieces: int = 0
    cache_dir: Path | str | None = field(default_factory=lambda: _path("ORTMODULE_CACHE_DIR"))
    cache_bytes: int | None = field(default_factory=lambda: _bytes("ORTMODULE_CACHE_BYTES"))
    policy: tuple[type[OrtrainError], ...] = field(
        default_factory=lambda: policy_from_environment() or _ALL
    )
    retry: bool = field(default_factory=lambda: bool(_switch("ORTMODULE_FALLBACK_RETRY")))
    certificate: Literal["first", "each size", "off"] | int = "first"
    keep_in_torch: Sequence[str] = ()
    custom_autograd: bool = field(default_factory=lambda: custom_autograd_from_environment())
    parts: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        for name in self.keep_in_torch:
            expect("keep_in_torch", name, (str,), "a list of names of sub-modules")
        object.__setattr__(self, "keep_in_torch", tuple(self.keep_in_torch))
        if self.cache_dir is not None:
            if not os.fspath(self.cache_dir):
                raise ValueError("cache_dir='': expected the path of a folder; None keeps no files")
            if "\0" in os.fspath(self.cache_dir):
                raise ValueError(f"cache_dir={self.cache_dir!r}: no path has a null character")
            object.__setattr__(self, "cache_dir", Path(self.cache_dir))
        for name in ("threads", "backward_pieces"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected 0 or more")
        if self.cache_bytes is not None and self.cache_bytes < 1:
            raise ValueError(f"cache_bytes={self.cache_bytes}: expected 1 or more, or None")
        for name, engine in (("engine", self.engine), ("inference", self.engine_for(False))):
            if engine not in get_args(Engine):
                raise ValueError(f"{name}={engine!r}: expected {_either(get_args(Engine))}")
        if self.precision not in (None, *get_args(Precision)):
            raise ValueError(
                f"precision={self.precision!r}: expected {_either(get_args(Precision))}, or None"
            )
        exact = {self.engine, self.inference} & {"onnxruntime", "reference"}
        if self.precision == "bf16-products" and exact:
            raise ValueError(
                f"precision='bf16-products' with the engine {exact.pop()!r}, which multiplies "
                "float32 as it is: take engine='aten' or 'auto'"
            )
        self._check_budget()
        if self.fallback not in ("torch", "raise"):
            raise ValueError(f"fallback={self.fallback!r}: expected 'torch' or 'raise'")
        every = type(self.certificate) is int and self.certificate > 0
        named = isinstance(self.certificate, str)
        if not every and not (named and self.certificate in ("first", "each size", "off")):
            raise ValueError(
                f"certificate={shown(self.certificate)}: expected 'first', 'each size', 'off' or a "
                "number of steps"
            )
        if not 18 <= self.opset <= 23:
            raise ValueError(f"opset={self.opset}: expected 18 to 23")

    def _check_types(self) -> None:
        """Raises where a value is of a type that its option never has."""
        for names, kinds, expected in _TYPES:
            for name in names.split():
                expect(name, getattr(self, name), kinds, expected)
        policy: tuple[Any, ...] = self.policy
        if not all(isinstance(kind, type) and issubclass(kind, OrtrainError) for kind in policy):
            raise refused("policy", policy, "a tuple of errors of ortrain.errors")

    def _check_budget(self) -> None:
        budget = self.memory_budget
        if budget is None:
            return
        if isinstance(budget, str):
            fits = budget == "least"
        else:
            fits = budget >= 1 if isinstance(budget, int) else 0 < budget <= 1
        if not fits:
            raise ValueError(
                f"memory_budget={budget!r}: expected a whole number of bytes, a share above 0.0 "
                "and up to 1.0, or 'least'"
            )
        if self.engine in ("torch", "reference"):
            source = " of ORTMODULE_MEMORY_OPT_LEVEL" if budget == _memory_level() else ""
            raise ValueError(
                f"memory_budget={budget!r}{source} with engine={self.engine!r}, which keeps no "
                "budget: take engine='aten' or 'onnxruntime', or memory_budget=None"
            )

    def plain(self) -> dict[str, Any]:
        """The settings in types that every file format has."""
        kinds = [kind.__name__ for kind in self.policy]
        folder = None if self.cache_dir is None else str(self.cache_dir)
        return {**vars(self), "policy": kinds, "cache_dir": folder}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Options:
        """The settings that :meth:`plain` has written; names that are not known are left out."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in plain.items() if name in known}
        given["policy"] = tuple(getattr(errors, name) for name in given.get("policy", ()))
        return cls(**given)

    def engine_for(self, grad: bool) -> Engine:
        """What runs calls with or without gradients."""
        if grad and self.engine == "auto" and self.memory_budget is not None:
            return "aten"
        return self.engine if grad or self.inference is None else self.inference

    def falls_back(self, error: OrtrainError) -> bool:
        """Whether a call that fails so runs in PyTorch."""
        return self.fallback == "torch" and isinstance(error, self.policy)


@dataclass(frozen=True)
class DebugOptions:
    """What ORTModule shows of its work, as in ONNX Runtime Training.

    Attributes:
        log_level: the environment variable ``ORTMODULE_LOG_LEVEL`` wins over it.
        save_onnx: write the graphs as ONNX files; with ``engine="auto"`` behind the first call.
        onnx_prefix: start of their names; required with ``save_onnx``. It may name folders within
            theirs.
        save_path: their folder; ``ORTMODULE_SAVE_ONNX_PATH`` wins, the working folder otherwise.
        print_input_density: print at each training step of a graph how many tokens have a label and
            how many are no padding; ``ORTMODULE_PRINT_INPUT_DENSITY`` wins.
        print_memory_stats: print what a training step of a graph keeps and holds at most, and what
            the process takes: of the first steps, and of those that are powers of two;
            ``ORTMODULE_PRINT_MEMORY_STATS`` wins.

    Raises:
        TypeError: a value of another type.
        ValueError: ``save_onnx`` without ``onnx_prefix`` or into a folder that cannot be written,
            a prefix that leads out of ``save_path``, or a level that does not exist.
    """

    log_level: LogLevel = LogLevel.WARNING
    save_onnx: bool = False
    onnx_prefix: str = ""
    save_path: str | os.PathLike[str] = ""
    print_input_density: bool = False
    print_memory_stats: bool = False

    def __post_init__(self) -> None:
        level: Any = self.log_level
        if isinstance(level, bool) or not isinstance(level, int):
            raise refused("log_level", level, "a LogLevel")
        try:
            object.__setattr__(self, "log_level", LogLevel(level))
        except ValueError:
            raise ValueError(
                f"log_level={self.log_level!r}: expected one of "
                f"{', '.join(f'{level.name} ({level.value})' for level in LogLevel)}"
            ) from None
        expect("save_onnx", self.save_onnx, bool, "True or False")
        expect("onnx_prefix", self.onnx_prefix, str, "a string")
        expect("save_path", self.save_path, (str, os.PathLike), "the path of a folder")
        expect("print_input_density", self.print_input_density, bool, "True or False")
        expect("print_memory_stats", self.print_memory_stats, bool, "True or False")
        if self.save_onnx and not self.onnx_prefix:
            raise ValueError("save_onnx=True needs an onnx_prefix: the start of the files' names")
        if self.onnx_prefix and leads_out(self.onnx_prefix):
            raise ValueError(
                f"onnx_prefix={self.onnx_prefix!r} leads out of the folder of the files: name the "
                "folder with save_path"
            )
        folder = (self.folder / f"{self.onnx_prefix}_").parent  # the prefix may name one as well
        if self.save_onnx and (fault := _cannot_write(folder)):
            raise ValueError(f"save_onnx=True cannot write into {str(folder)!r}: {fault}")
        for name in ("print_input_density", "print_memory_stats"):
            if (asked := _switch(f"ORTMODULE_{name.upper()}")) is not None:
                object.__setattr__(self, name, asked)
        named = _variable("ORTMODULE_LOG_LEVEL", "")
        if named:
            try:
                object.__setattr__(self, "log_level", LogLevel[named.upper()])
            except KeyError:
                raise ValueError(
                    f"ORTMODULE_LOG_LEVEL={named!r}: expected one of "
                    f"{', '.join(level.name for level in LogLevel)}"
                ) from None

    def plain(self) -> dict[str, Any]:
        """The settings in types that every file format has."""
        return {**vars(self), "log_level": int(self.log_level), "save_path": str(self.save_path)}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> DebugOptions:
        """The settings that :meth:`plain` has written."""
        return cls(**{**plain, "log_level": LogLevel(plain["log_level"])})

    @property
    def folder(self) -> Path:
        """Where graphs are written."""
        return _path("ORTMODULE_SAVE_ONNX_PATH") or Path(self.save_path or ".")


_ALL: tuple[type[OrtrainError], ...] = (
    CaptureError,
    GradientError,
    GraphError,
    ExecutionError,
    ParityError,
)
# Each policy of ONNX Runtime Training, and the errors that under it run in PyTorch.
_POLICIES: dict[str, tuple[type[OrtrainError], ...]] = {
    "FALLBACK_DISABLE": (),
    "FALLBACK_FORCE_TORCH_FORWARD": _ALL,
    "FALLBACK_FORCE_TORCH_BACKWARD": _ALL,
    "FALLBACK_UNSUPPORTED_DEVICE": (NotServed,),
    "FALLBACK_UNSUPPORTED_DATA": (UnsupportedInput, UnsupportedOutput),
    "FALLBACK_UNSUPPORTED_TORCH_MODEL": (CaptureError,),
    "FALLBACK_UNSUPPORTED_ONNX_MODEL": (GradientError, GraphError, ExecutionError, ParityError),
    "FALLBACK_BAD_INITIALIZATION": _ALL,
}


def policy_from_environment() -> tuple[type[OrtrainError], ...]:
    """The errors that fall back to PyTorch as ``ORTMODULE_FALLBACK_POLICY`` asks for it; else all.

    Raises:
        ValueError: an unknown policy.
    """
    named = _variable("ORTMODULE_FALLBACK_POLICY", "")
    if not named:
        return _ALL
    policies = [part.strip() for part in named.split("|")]
    return errors_under(policies, "ORTMODULE_FALLBACK_POLICY")


def errors_under(policies: Iterable[str], source: str) -> tuple[type[OrtrainError], ...]:
    """The errors that fall back to PyTorch under policies of ONNX Runtime Training.

    Args:
        policies: their names.
        source: what has them, for the error.

    Raises:
        ValueError: an unknown policy.
    """
    policies = list(policies)
    unknown = [p for p in policies if p not in _POLICIES]
    if unknown:
        raise ValueError(f"{source}={unknown[0]!r}: expected one of {', '.join(_POLICIES)}")
    return tuple(kind for p in policies for kind in _POLICIES[p])


def fallback_from_environment() -> Fallback:
    """``"raise"`` where ``ORTMODULE_FALLBACK_POLICY`` lets nothing fall back."""
    return "torch" if policy_from_environment() else "raise"


# What ONNX Runtime Training calls the two parts of what `skip_padding` is here, and their switch.
_SPARSE = tuple(f"ORTMODULE_ENABLE_{part}_SPARSE_OPTIMIZER" for part in ("LABEL", "EMBEDDING"))
_COMPUTE = "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER"


def custom_autograd_from_environment() -> bool:
    """Whether custom autograd functions may be nodes of a graph, as they may unless switched off.

    The variable is that of ONNX Runtime Training.

    Raises:
        ValueError: a value that is neither on nor off.
    """
    return _is_on("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD")


def skip_padding_from_environment() -> bool | None:
    """False where the environment switches off all that leaves tokens out; else None.

    The variables are those of ONNX Runtime Training. Tokens without a label and padding are left
    out by one rewrite: where only one of the two is switched off, a warning says that it stays.

    Raises:
        ValueError: a value that is neither on nor off.
    """
    off = [name for name in _SPARSE if not _is_on(name)]
    if not _is_on(_COMPUTE) or len(off) == len(_SPARSE):
        return False
    for name in off:
        warnings.warn(
            f"{name}=0 changes nothing by itself: tokens without a label and padding are left out "
            f"together; set {_COMPUTE}=0 or Options(skip_padding=False) to have both computed",
            OrtrainWarning,
            stacklevel=4,
        )
    return None


def _is_on(name: str) -> bool:
    """Whether a switch of the environment is on, as all are that are not set."""
    return _switch(name) is not False


def _switch(name: str) -> bool | None:
    """What a switch of the environment asks for; None where it is not set."""
    value = _variable(name, "").lower()
    if not value:
        return None
    if value not in ("0", "false", "no", "1", "true", "yes"):
        raise ValueError(f"{name}={value!r}: expected 0 or 1")
    return value in ("1", "true", "yes")


def _either(words: tuple[str, ...]) -> str:
    quoted = [repr(word) for word in words]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _cannot_write(folder: Path) -> str:
    """Why no file can be made in a folder, which need not be there yet; empty where one can."""
    there = next((p for p in (folder, *folder.absolute().parents) if p.exists()), folder)
    if not there.is_dir():
        return f"{str(there)!r} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else "no permission"


def _variable(name: str, default: str) -> str:
    """What a variable says; scripts of shells also leave one empty that they do not mean to set."""
    return os.environ.get(name, "").strip() or default


def user_cache() -> Path:
    """The folder for what is measured or made once for a user of this host."""
    return Path(_variable("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "ortrain"


def _opset() -> int:
    """The opset that ``ORTMODULE_ONNX_OPSET_VERSION`` asks for."""
    name = "ORTMODULE_ONNX_OPSET_VERSION"
    value = _variable(name, str(OPSET))
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r}: expected 18 to 23")
    return served_opset(int(value), name)


def served_opset(opset: int, source: str) -> int:
    """An opset that an old script asks for: 18 in place of a lower one, with a warning.

    Args:
        opset: what is asked for.
        source: who asks.

    Raises:
        ValueError: no opset, or one above 23.
    """
    if not 1 <= opset <= 23:
        raise ValueError(f"{source}={opset}: expected 18 to 23")
    if opset >= _LEAST_OPSET:
        return opset
    warnings.warn(
        f"{source}={opset}: graphs are made at opset {_LEAST_OPSET}, the least that ortrain has",
        OrtrainWarning,
        stacklevel=4,
    )
    return _LEAST_OPSET


def json_config_path() -> Path | None:
    """The file in ``ORTMODULE_JSON_CONFIG_PATH``."""
    return _path("ORTMODULE_JSON_CONFIG_PATH")


def _path(name: str) -> Path | None:
    value = os.environ.get(name, "")  # as it stands: a path may begin and end with spaces
    return Path(value) if value.strip() else None


def _bytes(name: str) -> int:
    value = _variable(name, str(CACHE_BYTES))
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name}={value!r}: expected a number of bytes, 1 or more")
    return int(value)


def budget_of(given: Budget | str) -> Budget:
    """A memory budget from what a command line gives: bytes, a share or ``"least"``.

    Raises:
        ValueError: the text is none of them.
    """
    if not isinstance(given, str) or given == "least":
        return given  # type: ignore[return-value]
    try:
        return int(given) if given.strip().isdecimal() else float(given)
    except ValueError:
        raise ValueError(
            f"memory_budget={given!r}: expected a whole number of bytes, a share up to 1.0, or "
            "'least'"
        ) from None


def _memory_level() -> Budget | None:
    """The budget that ``ORTMODULE_MEMORY_OPT_LEVEL`` asks for."""
    value = _variable("ORTMODULE_MEMORY_OPT_LEVEL", "0")
    if value not in ("0", "1", "2"):
        raise ValueError(f"ORTMODULE_MEMORY_OPT_LEVEL={value!r}: expected 0, 1 or 2")
    return None if value == "0" else "least"
