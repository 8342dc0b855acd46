"""``ORTTrainer`` of the second generation, as ``onnxruntime.training`` had it in 2020."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortrain.classic import checkpoint
from ortrain.classic.amp import DynamicLossScaler
from ortrain.classic.description import bound, of_tuples
from ortrain.classic.optim.config import _OptimizerConfig
from ortrain.classic.orttrainer_options import ORTTrainerOptions
from ortrain.classic.states import flat
from ortrain.classic.training import Training
from ortrain.errors import InputError, OrtrainWarning, listing
from ortrain.kinds import expect, expect_names, expect_whole
from ortrain.step.report import Report

_CONFIGS = "an optim.AdamConfig, optim.LambConfig or optim.SGDConfig"


class TrainStepInfo:
    """What schedules and scalers hear of a step.

    Args:
        optimizer_config: the optimizer's description.
        all_finite: whether all gradients of the last update were.
        fetches: names of the outputs that steps return; none for all.
        optimization_step: updates that have been made.
        step: training steps that have been made.

    Raises:
        InputError: a number below 0.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        optimizer_config: _OptimizerConfig,
        all_finite: bool = True,
        fetches: Sequence[str] = (),
        optimization_step: int = 0,
        step: int = 0,
    ) -> None:
        expect("optimizer_config", optimizer_config, _OptimizerConfig, _CONFIGS)
        expect("all_finite", all_finite, bool, "True or False")
        expect_names("fetches", fetches)
        for name, number in (("optimization_step", optimization_step), ("step", step)):
            expect_whole(name, number)
            if number < 0:
                raise InputError(f"{name}={number}: expected 0 or more")
        self.optimizer_config = optimizer_config
        self.all_finite = all_finite
        self.fetches = list(fetches)
        self.optimization_step = optimization_step
        self.step = step


class ORTTrainer:
    """Trains a model: each `train_step` is a forward, a backward and, where it is due, an update.

    Args:
        model: a torch module, which is trained in place, or an ONNX model that has its loss.
        model_desc: ``{"inputs": [(name, shape), …], "outputs": [(name, shape, is_loss), …]}``. A
            size is a number, or a name where it varies. Inputs have the names of ``forward``; one
            output is the loss.
        optim_config: an `optim.AdamConfig`, `optim.LambConfig` or `optim.SGDConfig`.
        loss_fn: takes the model's result and the label, which is the last described input; its loss
            is the first output.
        options: everything else.

    Raises:
        InputError: the description is not of this model, a name is not known, or something is
            asked for that is not served. Nothing has changed then.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        model: Any,
        model_desc: Mapping[str, Any],
        optim_config: _OptimizerConfig,
        loss_fn: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        expect("optim_config", optim_config, _OptimizerConfig, _CONFIGS)
        expect("options", options, (ORTTrainerOptions, type(None)), "an ORTTrainerOptions")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError("loss_fn: expected a function of a prediction and a label")
        self.options = options = ORTTrainerOptions() if options is None else options
        _refuse(options)
        self.model_desc = of_tuples(model_desc)
        self.optim_config, self.loss_fn = optim_config, loss_fn
        mixed, scaler = options.mixed_precision.enabled, options.mixed_precision.loss_scaler
        if scaler is not None and not mixed:
            raise InputError(
                "a loss scaler is given without mixed precision",
                help="set mixed_precision.enabled, or leave the scaler out",
            )
        if mixed and scaler is None:
            scaler = DynamicLossScaler()
        distributed = options.distributed
        inner = options._internal_use
        self._training = Training(
            model,
            loss_fn,
            self.model_desc,
            optim_config.name,
            optim_config.attributes_of,
            device=options.device.id,
            accumulation=options.batch.gradient_accumulation_steps,
            rank=distributed.world_rank,
            world=distributed.world_size,
            clip=options.utils.grad_norm_clip,
            mixed=mixed,
            zero=distributed.deepspeed_zero_optimization.stage,
            frozen=options.utils.frozen_weights,
            deterministic=options.debug.deterministic_compute,
            opset=inner.onnx_opset_version,
            postprocess=inner.extra_postprocess,
            options=options.ortrain,
        )
        _limit_memory(options.device.mem_limit, self._training.device)
        known = self._training.stepper.update.parameters
        named = [name for group in optim_config.params for name in group["params"]]
        if strange := [name for name in named if name not in self._training.weights]:
            raise InputError(
                f"a group of optim_config names {listing([repr(name) for name in strange])}, which "
                "the model does not have",
                help=f"parameters are {listing([*known], 10)}",
            )
        options.mixed_precision.loss_scaler = scaler
        self._train_step_info = TrainStepInfo(optim_config)
        _tell_unused(options)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on a batch.

        Args:
            args: inputs by position, in the order of the description, or one list of them.
            kwargs: inputs by name.

        Returns:
            The outputs as a list in the order of the description, or those that
            ``fetches`` of `TrainStepInfo` names; a single one as it is.

        Raises:
            InputError: inputs or outputs are not as they are described.
        """
        info, desc = self._train_step_info, self.model_desc
        inputs = bound(desc.names, args, kwargs)
        chosen = desc.select(info.fetches or desc.results)
        schedule, scaler = self.options.lr_scheduler, self.options.mixed_precision.loss_scaler
        info.step += 1
        try:
            lr = self.optim_config.lr if schedule is None else schedule._step(info)[0]
            self._expect_end(schedule)
            scale = 1.0 if scaler is None else scaler.loss_scale
            outcome = self._training.stepper.train(inputs, lr, scale)
        except BaseException:
            info.step -= 1
            raise
        if outcome.ends:
            info.all_finite = outcome.finite
            info.optimization_step += outcome.finite
            if scaler is not None and getattr(scaler, "automatic_update", True):
                scaler.update(info)
        return _several([outcome.outputs[i] for i in chosen])

    def _expect_end(self, schedule: Any) -> None:
        """Tells the pipeline how many steps are to come, where the schedule knows."""
        total = getattr(schedule, "total_steps", None)
        if total is not None and hasattr(self._training.module, "steps_to_come"):
            steps = total * self._training.stepper.accumulation
            self._training.module.steps_to_come = max(0, steps - self._train_step_info.step)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a batch in evaluation mode; takes and returns what `train_step` does.

        Without the label of a loss function, these are the model's own outputs.
        """
        desc = self.model_desc
        inputs = bound(desc.names, args, kwargs, len(desc.inputs) - (self.loss_fn is not None))
        return evaluated(self._training, inputs, self._train_step_info.fetches)

    @property
    def report(self) -> Report | None:
        """What ran where, and why, as of `ortrain.ORTModule`; None of a graph of the script's."""
        return self._training.report

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the model with its loss as an ONNX file, in evaluation mode.

        Args:
            path: of the file.

        Raises:
            StateError: no step has run.
            SaveError: it could not be written.
        """
        self._training.save_as_onnx(path, self.options._internal_use.onnx_opset_version)

    # -- states --------------------------------------------------------------------------------

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Weights, optimizer states, and what else a checkpoint has.

        Args:
            pytorch_format: whether weights alone, as `torch.nn.Module.state_dict` has them.

        Returns:
            Arrays in nested dicts (``"model"``, ``"optimizer"``, ``"trainer_options"``,
            ``"train_step_info"``), or tensors by name. With ZeRO, optimizer states of this
            process' share of the parameters.
        """
        weights = flat(self._training.weights, {})
        if pytorch_format:
            return weights
        states = self._training.states()
        distributed = self.options.distributed
        info = self._train_step_info
        return {
            "model": {"full_precision": {n: w.numpy() for n, w in weights.items()}},
            "optimizer": {n: {k: v.numpy() for k, v in r.items()} for n, r in states.items()},
            "trainer_options": {
                "mixed_precision": self._training.mixed,
                "zero_stage": distributed.deepspeed_zero_optimization.stage,
                "world_rank": distributed.world_rank,
                "world_size": distributed.world_size,
                "data_parallel_size": distributed.world_size,
                "horizontal_parallel_size": 1,
                "optimizer_name": self.optim_config.name,
            },
            "train_step_info": {"optimization_step": info.optimization_step, "step": info.step},
            **({"partition_info": {}} if self._training.partitioned else {}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes over what `state_dict` has returned, also of the original.

        Args:
            state_dict: in its nested form.
            strict: whether all names have to be there, and no others.

        Raises:
            InputError: other names where they are checked, another shape, or another optimizer.
                Nothing has changed then.
        """
        expect("state_dict", state_dict, Mapping, "what state_dict() has returned")
        if strict and "model" not in state_dict:
            raise InputError(
                "the state dict has no 'model'",
                help="give what ORTTrainer.state_dict() has returned; weights alone are loaded "
                "into the torch module, before the trainer is made",
            )
        options = state_dict.get("trainer_options", {})
        name = options.get("optimizer_name", self.optim_config.name)
        name = name.decode() if isinstance(name, bytes) else str(name)
        states = state_dict.get("optimizer", {})
        if states and name != self.optim_config.name:
            raise InputError(
                f"the state dict is of {name}, and this trainer has {self.optim_config.name}",
                help="leave its 'optimizer' out to load the weights alone",
            )
        weights = checkpoint.weights_of(state_dict)
        self._training.load(weights, states, strict=strict)
        info = state_dict.get("train_step_info", {})
        self._train_step_info.step = int(info.get("step", self._train_step_info.step))
        self._train_step_info.optimization_step = int(
            info.get("optimization_step", self._train_step_info.optimization_step)
        )

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
    ) -> None:
        """Writes `state_dict` and what a script adds to it, as HDF5.

        Args:
            path: of the file; with ZeRO, another one in each process.
            user_dict: anything of Python's own types, and arrays and tensors.
            include_optimizer_states: whether weights are not all.

        Raises:
            MissingPackage: h5py is not installed.
            SaveError: the file could not be written.
        """
        state = self.state_dict()
        if not include_optimizer_states:
            del state["optimizer"]
        checkpoint.save(state, path, user_dict)

    def load_checkpoint(
        self, *paths: str | os.PathLike[str], strict: bool = True
    ) -> dict[str, Any]:
        """Takes over a checkpoint, also of the original.

        Args:
            paths: of its file; of those of all processes where the moments were partitioned.
            strict: whether all names have to be there, and no others.

        Returns:
            What the script had added to it.

        Raises:
            MissingPackage: h5py is not installed.
            InputError: no checkpoint, or not one of this training.
        """
        state, user = checkpoint.load(paths)
        self.load_state_dict(state, strict=strict)
        return user


def evaluated(training: Training, inputs: Sequence[Any], fetches: Sequence[str]) -> Any:
    """The outputs of a batch in evaluation mode: those of some names, or all.

    Raises:
        InputError: an unknown name, or the loss without the label that it takes.
    """
    desc = training.descriptions
    chosen = desc.select(fetches or desc.results)
    if len(inputs) < len(desc.inputs):  # all but the label: nothing but the loss is missing
        if fetches and desc.loss in chosen:
            raise InputError(
                f"fetches names the loss {desc.results[desc.loss]!r}, which needs the label "
                f"{desc.names[-1]!r}"
            )
        chosen = [i for i in chosen if i != desc.loss]
        outputs = [None, *training.stepper.evaluate(inputs)]
        return _several([outputs[i] for i in chosen])
    outputs = [*training.stepper.evaluate(inputs)]
    return _several([outputs[i] for i in chosen])


def _several(outputs: list[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs


def _refuse(options: ORTTrainerOptions) -> None:
    """Raises where work is to be shared in another way, which would change numbers."""
    distributed = options.distributed
    for name, value in (
        ("horizontal_parallel_size", distributed.horizontal_parallel_size),
        (
            "pipeline_parallel.pipeline_parallel_size",
            distributed.pipeline_parallel.pipeline_parallel_size,
        ),
    ):
        if value > 1:
            raise InputError(
                f"the option distributed.{name} is {value}: processes share batches only",
                help="leave it 1; docs/distributed.md has what shares a model",
            )
    if distributed.enable_adasum:
        raise InputError(
            "the option distributed.enable_adasum is not served",
            because="gradients of several processes are averaged",
            help="leave it out",
        )
    if distributed.data_parallel_size not in (1, distributed.world_size):
        raise InputError(
            f"the option distributed.data_parallel_size is {distributed.data_parallel_size}, and "
            f"world_size is {distributed.world_size}",
            because="all processes share batches",
            help="leave it out",
        )


def _limit_memory(limit: int, device: torch.device) -> None:
    if limit and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    elif limit:
        _warn("device.mem_limit", "the memory of a CPU is the system's to limit")


def _tell_unused(options: ORTTrainerOptions) -> None:
    """One warning for all options that change nothing here."""
    for name, reason in options.unused():
        _warn(name, reason)
    version = options._internal_use.onnx_opset_version
    if version is not None and version < 18:
        _warn("_internal_use.onnx_opset_version", "graphs are of opset 18 and above")


def _warn(name: str, reason: str) -> None:
    warnings.warn(f"the option {name} changes nothing: {reason}", OrtrainWarning, stacklevel=4)


__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]
