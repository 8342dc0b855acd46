"""The trainer of the first generation, as ``onnxruntime.capi.ort_trainer`` had it in 2020."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortrain.classic.checkpoint import PREFIX, load_flat, load_model, save_flat
from ortrain.classic.description import Descriptions, bound, described
from ortrain.classic.graphs import Postprocess
from ortrain.classic.orttrainer import evaluated
from ortrain.classic.states import flat
from ortrain.classic.training import Training
from ortrain.config import Options
from ortrain.errors import InputError, OrtrainWarning
from ortrain.kinds import expect, expect_flag, expect_number, expect_whole
from ortrain.step.report import Report

_EXTERNAL = "default_loss_scale_input_name"


class IODescription:
    """A tensor that a model takes or returns.

    Args:
        name: of the input or output.
        shape: a number for each fixed size, a name for each that varies.
        dtype: of its elements; None leaves it open.
        num_classes: above the largest value of an input of whole numbers. Graphs are made of the
            first call's values here, so that none have to be invented.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int | str],
        dtype: torch.dtype | None = None,
        num_classes: int | None = None,
    ) -> None:
        self.name_, self.shape_ = name, shape
        self.dtype_, self.num_classes_ = dtype, num_classes


class ModelDescription:
    """What a model takes and returns.

    Args:
        inputs: in the order in which a step is given them; the label of a loss function is last.
        outputs: in the order in which the model returns them, with the loss first.
    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_, self.outputs_ = inputs, outputs


class LossScaler:
    """By how much a loss is multiplied, so that its gradients are not lost in 16 bits.

    Args:
        loss_scale_input_name: name under which a step is given the scale.
        is_dynamic_scale: whether it moves: doubled after so many good steps, halved where a
            gradient overflows.
        loss_scale: the first scale.
        up_scale_window: good steps in a row after which it is doubled.
        min_loss_scale: lower bound.
        max_loss_scale: upper bound.
    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        expect_flag("is_dynamic_scale", is_dynamic_scale)
        expect_number("loss_scale", loss_scale)
        if not 0 < min_loss_scale <= max_loss_scale or not 0 < loss_scale < float("inf"):
            raise InputError(
                f"loss_scale={loss_scale}, min_loss_scale={min_loss_scale}, "
                f"max_loss_scale={max_loss_scale}: expected numbers above 0, in order"
            )
        self.loss_scale_input_name_ = loss_scale_input_name
        self.is_dynamic_scale_ = is_dynamic_scale
        self.initial_loss_scale_ = self.loss_scale_ = float(loss_scale)
        self.up_scale_window_ = up_scale_window
        self.min_loss_scale_, self.max_loss_scale_ = min_loss_scale, max_loss_scale
        self.stable_steps_ = 0

    def update_loss_scale(self, is_all_finite: Any) -> None:
        """Learns whether all gradients of a step were finite."""
        if not self.is_dynamic_scale_:
            return
        if not bool(is_all_finite):
            self.loss_scale_ = max(self.min_loss_scale_, self.loss_scale_ / 2)
            self.stable_steps_ = 0
            return
        self.stable_steps_ += 1
        if self.stable_steps_ >= self.up_scale_window_:
            self.loss_scale_ = min(self.max_loss_scale_, self.loss_scale_ * 2)
            self.stable_steps_ = 0

    def reset(self) -> None:
        """Goes back to the first scale."""
        self.loss_scale_ = self.initial_loss_scale_
        self.stable_steps_ = 0


class ORTTrainer:
    """Trains a model: each `train_step` is a forward, a backward and, where it is due, an update.

    Args:
        model: a torch module, which is trained in place, or an ONNX model; its first output is the
            loss, unless there is a loss function.
        loss_fn: takes the model's result and the label, which is the last described input.
        model_desc: what the model takes and returns.
        training_optimizer_name: ``"SGDOptimizer"``, ``"AdamOptimizer"`` or ``"LambOptimizer"``.
        map_optimizer_attributes: attributes of a weight by its name: ``alpha``, ``beta``,
            ``lambda``, ``epsilon``, ``max_norm_clip``, ``do_bias_correction``,
            ``weight_decay_mode`` (Adam), ``ratio_min``, ``ratio_max`` (LAMB). None for the
            defaults.
        learning_rate_description: name under which a step is given the learning rate, behind the
            inputs.
        device: to train on.
        gradient_accumulation_steps: steps for each update, whose gradients are averaged.
        world_rank: of this process.
        world_size: how many processes train together.
        use_mixed_precision: float16 on a GPU, bfloat16 on a CPU.
        allreduce_post_accumulation: gradients travel once for each update in either case.
        global_step: updates that have been made before, for ``get_lr_this_step``.
        get_lr_this_step: learning rate by the number of updates; a step is not given one then.
        loss_scaler: gives the scale, and learns of overflows; a step is not given one then.
        deepspeed_zero_stage: 1 has each process keep the moments of its share of the parameters.
        enable_grad_norm_clip: whether Adam and LAMB scale gradients down by their norm.
        frozen_weights: names of weights that are not trained.
        _opset_version: of graphs, from 18 on.
        _enable_internal_postprocess: changes nothing here.
        _extra_postprocess: changes the ONNX model of the steps in place, or returns another one.
        _use_deterministic_compute: whether two runs are to be equal.
        use_memory_efficient_gradient: as little memory as can be:
            ``Options(memory_budget="least")``.
        run_symbolic_shape_infer: changes nothing here.
        enable_adasum: is not served.
        optimized_model_filepath: changes nothing here.
        postprocess_model: the earlier name of ``_extra_postprocess``.
        partition_optimizer: the earlier way to write ``deepspeed_zero_stage=1``.
        options: of the pipeline; the original had none.

    Raises:
        InputError: the description is not of this model, a name is not known, or something is
            asked for that is not served. Nothing has changed then.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[Any, torch.Tensor], torch.Tensor] | None,
        model_desc: ModelDescription,
        training_optimizer_name: str,
        map_optimizer_attributes: Callable[[str], Mapping[str, float]] | None,
        learning_rate_description: IODescription,
        device: str | torch.device,
        gradient_accumulation_steps: int = 1,
        world_rank: int = 0,
        world_size: int = 1,
        use_mixed_precision: bool = False,
        allreduce_post_accumulation: bool = False,
        global_step: int = 0,
        get_lr_this_step: Callable[[int], float] | None = None,
        loss_scaler: LossScaler | None = None,
        deepspeed_zero_stage: int = 0,
        enable_grad_norm_clip: bool = True,
        frozen_weights: Sequence[str] = (),
        _opset_version: int | None = None,
        _enable_internal_postprocess: bool = True,
        _extra_postprocess: Postprocess | None = None,
        _use_deterministic_compute: bool = False,
        use_memory_efficient_gradient: bool = False,
        run_symbolic_shape_infer: bool = False,
        enable_adasum: bool = False,
        optimized_model_filepath: str = "",
        *,
        postprocess_model: Postprocess | None = None,
        partition_optimizer: bool = False,
        options: Options | None = None,
    ) -> None:
        expect("model_desc", model_desc, ModelDescription, "a ModelDescription")
        expect(
            "learning_rate_description",
            learning_rate_description,
            IODescription,
            "an IODescription: IODescription('Learning_Rate', [1], torch.float32)",
        )
        expect_whole("gradient_accumulation_steps", gradient_accumulation_steps)
        if gradient_accumulation_steps < 1:
            raise InputError(
                f"gradient_accumulation_steps={gradient_accumulation_steps}: expected 1 or more"
            )
        if enable_adasum:
            raise InputError(
                "enable_adasum is not served",
                because="gradients of several processes are averaged",
                help="leave it out",
            )
        if loss_scaler is not None and not use_mixed_precision:
            raise InputError(
                "a loss scaler is given without mixed precision",
                help="set use_mixed_precision, or leave the scaler out",
            )
        if postprocess_model is not None and _extra_postprocess is not None:
            raise InputError("postprocess_model and _extra_postprocess are the same: give one")
        descriptions = Descriptions(
            tuple(_of(each) for each in model_desc.inputs_),
            tuple(_of(each) for each in model_desc.outputs_),
            0,
        )
        rate = learning_rate_description.name_
        if rate in descriptions.names:
            raise InputError(
                f"the learning rate is described as {rate!r}, which is an input of the model",
                help="give it another name",
            )
        if use_memory_efficient_gradient and options is None:
            options = Options(memory_budget="least")
        attributes = map_optimizer_attributes
        self._training = Training(
            model,
            loss_fn,
            descriptions,
            training_optimizer_name,
            (lambda name: {}) if attributes is None else attributes,
            device=device,
            accumulation=gradient_accumulation_steps,
            rank=world_rank,
            world=world_size,
            clip=enable_grad_norm_clip,
            mixed=use_mixed_precision,
            zero=1 if partition_optimizer else deepspeed_zero_stage,
            frozen=frozen_weights,
            deterministic=_use_deterministic_compute,
            opset=_opset_version,
            postprocess=_extra_postprocess or postprocess_model,
            strict_names=False,
            options=options,
        )
        unused = (
            (
                "_opset_version",
                _opset_version is not None and _opset_version < 18,
                "graphs are of opset 18 and above",
            ),
            (
                "_enable_internal_postprocess",
                not _enable_internal_postprocess,
                "graphs come from ortrain's own capture, which needs no mending",
            ),
            (
                "run_symbolic_shape_infer",
                run_symbolic_shape_infer,
                "sizes are symbolic from the capture on",
            ),
            (
                "optimized_model_filepath",
                bool(optimized_model_filepath),
                "graphs are written by ORTModule's DebugOptions(save_onnx=True)",
            ),
        )
        for name, given, reason in unused:
            if given:
                warnings.warn(f"{name} changes nothing: {reason}", OrtrainWarning, stacklevel=2)
        self.is_train = True
        self.model_desc_, self.loss_fn_ = model_desc, loss_fn
        self.world_rank, self.world_size = world_rank, world_size
        self.use_mixed_precision = use_mixed_precision
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.current_step, self.global_step_ = 0, global_step
        self.get_lr_this_step_, self.loss_scaler_ = get_lr_this_step, loss_scaler
        self.loss_scale_input_name = (
            _EXTERNAL if loss_scaler is None else loss_scaler.loss_scale_input_name_
        )
        self._opset, self._rate = _opset_version, rate

    def train(self) -> None:
        """Has calls be training steps."""
        self.is_train = True

    def eval(self) -> None:
        """Has calls be evaluation steps."""
        self.is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A step, of training or of evaluation."""
        return (
            self.train_step(*args, **kwargs) if self.is_train else self.eval_step(*args, **kwargs)
        )

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on a batch.

        Args:
            args: inputs, then the learning rate unless there is ``get_lr_this_step``, then in mixed
                precision the loss scale unless there is a scaler; or one list of them.
            kwargs: the same by name, the loss scale as ``loss_scale_input_name``; ``fetches``,
                names of the outputs to return.

        Returns:
            The outputs as a list in the order of the description, a single one as it is. In mixed
            precision without a scaler, the last step of an accumulation gives one more: whether all
            gradients were finite, of the shape (1,), bool.

        Raises:
            InputError: something is missing, or not as it is described.
        """
        desc = self._training.descriptions
        fetches = kwargs.pop("fetches", None)
        chosen = desc.select(desc.results if fetches is None else fetches)
        names = [*desc.names]
        if self.get_lr_this_step_ is None:
            names.append(self._rate)
        asks_scale = self.use_mixed_precision and self.loss_scaler_ is None
        if asks_scale:
            names.append(self.loss_scale_input_name)
        values = dict(zip(names, bound(names, args, kwargs), strict=True))
        if self.get_lr_this_step_ is None:
            lr = _number(self._rate, values.pop(self._rate))
        else:
            lr = _number("get_lr_this_step", self.get_lr_this_step_(self.global_step_))
        scale = 1.0
        if asks_scale:
            scale = _number("the loss scale", values.pop(self.loss_scale_input_name))
        elif self.loss_scaler_ is not None:
            scale = self.loss_scaler_.loss_scale_
        outcome = self._training.stepper.train([*values.values()], lr, scale)
        self.current_step += 1
        if outcome.ends:
            self.global_step_ += outcome.finite
            if self.loss_scaler_ is not None:
                self.loss_scaler_.update_loss_scale(outcome.finite)
        results = [outcome.outputs[i] for i in chosen]
        if outcome.ends and asks_scale and fetches is None:
            results.append(torch.tensor([outcome.finite]))
        return results[0] if len(results) == 1 else results

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a batch in evaluation mode, without any update.

        Args:
            args: inputs; the label of a loss function may be left out, and its loss with it.
            kwargs: the same by name; ``fetches``, names of the outputs to return.
        """
        desc = self._training.descriptions
        fetches = kwargs.pop("fetches", None) or ()
        least = len(desc.inputs) - (self.loss_fn_ is not None)
        return evaluated(self._training, bound(desc.names, args, kwargs, least), fetches)

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
        self._training.save_as_onnx(path, self._opset)

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        """Weights by name, and ``Moment_1_<weight>`` and so on, on the CPU.

        Args:
            include_optimizer_state: whether weights are not all.
        """
        states = self._training.states() if include_optimizer_state else {}
        return flat(self._training.weights, states)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = False) -> None:
        """Takes over what `state_dict` has returned, also of the original.

        Args:
            state_dict: tensors by name.
            strict: whether names that the model does not have are an error; else a warning.

        Raises:
            InputError: such names, or other shapes. Nothing has changed then.
        """
        load_model(self._training, [state_dict], strict=strict)


def save_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = PREFIX,
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Writes ``<prefix>.ort.pt``, or with ZeRO a file for each process.

    Args:
        model: the trainer.
        checkpoint_dir: a folder that is there.
        checkpoint_prefix: start of the file's name.
        checkpoint_state_dict: what a script adds to it.
        include_optimizer_state: whether weights are not all.

    Raises:
        SaveError: there is no such folder, or the file could not be written.
    """
    save_flat(
        model._training,
        checkpoint_dir,
        checkpoint_prefix,
        checkpoint_state_dict,
        include_optimizer_state=include_optimizer_state,
    )


def load_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = PREFIX,
    strict: bool = False,
) -> dict[str, Any]:
    """Takes over a checkpoint, also of the original; files of several processes are put together.

    Args:
        model: the trainer.
        checkpoint_dir: its folder.
        checkpoint_prefix: start of its files' names.
        strict: whether names that the model does not have are an error.

    Returns:
        What the script had added to it.

    Raises:
        InputError: no checkpoint, files of some processes only, or not one of this model.
    """
    return load_flat(model._training, checkpoint_dir, checkpoint_prefix, strict=strict)


def _of(description: object) -> Any:
    expect("model_desc", description, IODescription, "lists of IODescription")
    assert isinstance(description, IODescription)
    return described(description.name_, description.shape_, description.dtype_)


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise InputError(f"{name} has the shape {list(value.shape)}: expected one number")
        return float(value)
    expect_number(name, value)
    return float(value)


__all__ = [
    "IODescription",
    "LossScaler",
    "ModelDescription",
    "ORTTrainer",
    "load_checkpoint",
    "save_checkpoint",
]
