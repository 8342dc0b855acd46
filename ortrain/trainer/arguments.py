"""Training arguments: those of transformers, and what ortrain adds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations import deepspeed
from transformers.training_args import OptimizerNames

from ortrain.config import DebugOptions, LogLevel, Options, budget_of
from ortrain.kinds import NONE, expect, expect_flag
from ortrain.trainer.checks import check_deepspeed_config

# Optimizers by names that transformers does not have, or no longer.
OPTIMIZERS = {
    "adamw_ort_fused": "ortrain.optim.FusedAdam",
    "adamw_hf": "ortrain.optim.FusedAdam, whose default mode has the maths of the old AdamW of "
    "transformers",
}


@dataclass
class ORTTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the settings of ortrain.

    Attributes:
        optim: a name of transformers, or one of the old ``adamw_ort_fused`` and ``adamw_hf``.
        use_module_with_loss: compute the loss inside the graph, also where it is Trainer's own
            (label smoothing, ``compute_loss_func``).
        inference_with_ort: evaluate and predict through a graph, in onnxruntime or, in 16 bits, in
            PyTorch's own operators; PyTorch does it otherwise.
        save_onnx: write the training graphs as ONNX files, into ``output_dir`` or the folder in
            ``ORTMODULE_SAVE_ONNX_PATH``.
        onnx_prefix: start of their names; required with ``save_onnx``.
        onnx_log_level: VERBOSE, INFO, WARNING, ERROR or FATAL.
        ort_engine: ``"auto"`` times the graph against PyTorch on the first steps and keeps the
            faster; ``"onnxruntime"`` always runs the graph in onnxruntime, ``"aten"`` in
            PyTorch's own operators, which have 16 bits, ``"torch"`` never runs it.
        ort_fallback: what happens where the model cannot become a graph: ``"torch"`` trains it in
            PyTorch with one warning, ``"raise"`` raises the error.
        skip_padding: whether graphs leave out work on tokens whose results nobody reads, padding
            and words without a label; None does where no output shows them, True also where one
            does, with zeros at padded places, False never.
        memory_budget: what a step may hold beyond weights and inputs: bytes, a share up to 1.0 of
            what it would, or ``"least"``; on a command line as text.

    Raises:
        TypeError: a setting of ortrain's of another type.
        ValueError: ``save_onnx`` without ``onnx_prefix``, a value that does not exist, or a
            configuration of DeepSpeed that cannot be read.
        ImportError: ``deepspeed`` is given and not installed.
    """

    # A plain string: what reads command lines takes the choices of an enumeration from its type.
    optim: str = field(
        default=TrainingArguments.optim,
        metadata={"help": "The optimizer to use: a name of transformers, or adamw_ort_fused."},
    )
    use_module_with_loss: bool = field(
        default=False, metadata={"help": "Compute the loss inside the graph."}
    )
    inference_with_ort: bool = field(
        default=False, metadata={"help": "Evaluate and predict through onnxruntime."}
    )
    save_onnx: bool = field(
        default=False, metadata={"help": "Write the training graphs as ONNX files."}
    )
    onnx_prefix: str | None = field(
        default=None, metadata={"help": "Start of the names of these files."}
    )
    onnx_log_level: str = field(
        default="WARNING", metadata={"help": "VERBOSE, INFO, WARNING, ERROR or FATAL."}
    )
    ort_engine: str = field(default="auto", metadata={"help": "auto, onnxruntime, aten or torch."})
    ort_fallback: str = field(default="torch", metadata={"help": "torch or raise."})
    skip_padding: bool | None = field(
        default=None, metadata={"help": "Leave out work on tokens that nobody reads."}
    )
    memory_budget: str | None = field(
        default=None, metadata={"help": "Of a step: bytes, a share up to 1.0, or least."}
    )

    def __post_init__(self) -> None:
        for name in ("use_module_with_loss", "inference_with_ort", "save_onnx"):
            expect_flag(name, getattr(self, name))
        for name in ("onnx_log_level", "ort_engine", "ort_fallback"):
            expect(name, getattr(self, name), str, "a string")
        expect("onnx_prefix", self.onnx_prefix, (str, NONE), "a string")
        DebugOptions(onnx_prefix=self.onnx_prefix or "")  # which refuses what leads elsewhere
        expect("skip_padding", self.skip_padding, (bool, NONE), "True, False or None")
        if self.memory_budget is not None:
            Options(memory_budget=budget_of(self.memory_budget))  # which refuses what is none
        check_deepspeed_config(self.deepspeed)
        if self.deepspeed and not deepspeed.is_deepspeed_available():
            raise ImportError(
                "the training argument deepspeed needs the package deepspeed, which is not "
                "installed: pip install 'ortrain[deepspeed]'"
            )
        asked, self.optim = self.optim, TrainingArguments.optim
        if not is_ours(asked):
            self.optim = asked
        super().__post_init__()
        if is_ours(asked):
            warn_of_name(asked)
            self.optim = asked
        options_of(self)
        debug_options_of(self)

    def set_optimizer(self, name: str | OptimizerNames = "adamw_torch", *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        """As in transformers; the old names of `optim` as well."""
        if not is_ours(name):
            return super().set_optimizer(name, *args, **kwargs)
        super().set_optimizer("adamw_torch", *args, **kwargs)
        warn_of_name(name)
        self.optim = str(name)
        return self


@dataclass
class ORTSeq2SeqTrainingArguments(ORTTrainingArguments, Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with the settings of ortrain."""


def is_ours(name: object) -> bool:
    """Whether an optimizer has a name that transformers does not know."""
    return not isinstance(name, OptimizerNames) and name in OPTIMIZERS


def warn_of_name(name: object) -> None:
    """Says what an old name of an optimizer stands for."""
    warnings.warn(
        f"optim={str(name)!r} is an old name: it runs {OPTIMIZERS[str(name)]}; the new way is "
        "optimizer_cls_and_kwargs=(ortrain.optim.FusedAdam, {...})",
        FutureWarning,
        stacklevel=4,
    )


def options_of(args: TrainingArguments) -> Options:
    """How ORTModule works in training; also for arguments of transformers' own class.

    Raises:
        ValueError: an engine or fallback that does not exist.
    """
    engine: Any = getattr(args, "ort_engine", "auto")
    fallback: Any = getattr(args, "ort_fallback", "torch")
    given: dict[str, Any] = {}  # the rest is as the environment has it
    if (skips := getattr(args, "skip_padding", None)) is not None:
        given["skip_padding"] = skips
    if (budget := getattr(args, "memory_budget", None)) is not None:
        given["memory_budget"] = budget_of(budget)
    return Options(engine=engine, fallback=fallback, **given)


def debug_options_of(args: TrainingArguments) -> DebugOptions:
    """What ORTModule shows of its work.

    Raises:
        ValueError: ``save_onnx`` without ``onnx_prefix``, or a level that does not exist.
    """
    name = str(getattr(args, "onnx_log_level", "WARNING")).upper()
    if name not in LogLevel.__members__:
        raise ValueError(
            f"onnx_log_level={name!r}: expected one of {', '.join(LogLevel.__members__)}"
        )
    if not getattr(args, "save_onnx", False):
        return DebugOptions()
    return DebugOptions(
        log_level=LogLevel[name],
        save_onnx=True,
        onnx_prefix=getattr(args, "onnx_prefix", None) or "",
        save_path=str(args.output_dir or ""),
    )
