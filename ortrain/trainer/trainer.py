"""ORTTrainer and ORTSeq2SeqTrainer: Hugging Face's trainers, training through ORTModule.

Two seams, and none of Trainer's methods copied:

- what goes into ``accelerator.prepare`` for training is wrapped by :class:`ORTModule`, below
  DistributedDataParallel and DeepSpeed. ``trainer.model`` stays the model itself, so that saving,
  callbacks, decay groups and everything else see what they know;
- ``accelerator.unwrap_model`` looks through the wrapper, because Trainer asks a model's class name
  which loss it has.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments

from ortrain.config import DebugOptions, Engine, Options
from ortrain.deploy.generation import ORTGenerator
from ortrain.errors import OrtrainWarning, StateError
from ortrain.key_value_cache import caching_configs
from ortrain.kinds import NONE, expect, refused
from ortrain.module import ORTModule, expect_options
from ortrain.trainer.arguments import (
    ORTSeq2SeqTrainingArguments,
    ORTTrainingArguments,
    debug_options_of,
    is_ours,
    options_of,
)
from ortrain.trainer.checks import ChecksInput, reads_only_loss
from ortrain.trainer.engine import EngineNote
from ortrain.trainer.loss import ModuleWithLoss, Prepared
from ortrain.trainer.report import TrainerReport


class ORTTrainerMixin(ChecksInput):
    """Has any subclass of `transformers.Trainer` train through an ONNX graph.

    ::

        class Preferences(ORTTrainerMixin, trl.DPOTrainer):
            pass

        trainer = Preferences(model=model, args=DPOConfig("out"), train_dataset=data, …)
        trainer.train()
        print(trainer.ort_report)

    It stands before the trainer, whose parameters are taken by that trainer's own names and order.
    Settings of the graph come as ``options=Options(…)``, or from arguments that derive from
    :class:`ORTTrainingArguments`.

    Args:
        positional: the trainer's arguments.
        options: settings of ORTModule beyond those in ``args``.
        tokenizer: old spelling of ``processing_class``, where the trainer has none of that name.
        feature: no longer needed.
        onnx_model_path: no longer needed.
        kwargs: the trainer's arguments; a model may also be an ORTModule, which is unwrapped.

    Attributes:
        ort_report: what ran where; ``print`` it.
    """

    arguments: type[TrainingArguments] = ORTTrainingArguments

    def __init__(
        self,
        *positional: Any,
        options: Options | None = None,
        tokenizer: Any = None,
        feature: str | None = None,
        onnx_model_path: Any = None,
        **kwargs: Any,
    ) -> None:
        init: Any = super().__init__
        own = inspect.signature(init).parameters
        expect_options(None, options)
        for name, value in (*(("options", each) for each in positional), *kwargs.items()):
            if isinstance(value, Options | DebugOptions):
                raise refused(name, value, "ortrain's own settings as options=Options(…)")
        if tokenizer is not None and "tokenizer" in own:
            kwargs["tokenizer"] = tokenizer
        elif tokenizer is not None:
            _deprecated("tokenizer=", "pass processing_class= instead")
            kwargs.setdefault("processing_class", tokenizer)
        if feature is not None:
            _deprecated("feature=", "leave it out: what is exported follows from the model")
        if onnx_model_path is not None:
            _deprecated("onnx_model_path=", "leave it out: no file is needed to evaluate")
        # By name, since trainers have other orders; what has no name, or two values, is refused by
        # the trainer itself.
        named = [n for n, p in own.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        given = dict(zip(named, positional, strict=False))
        if len(given) == len(positional) and not given.keys() & kwargs.keys():
            positional, kwargs = (), given | kwargs
        if init.__func__ in (Trainer.__init__, Seq2SeqTrainer.__init__):
            args = kwargs.get("args")
            expect(
                "model",
                kwargs.get("model"),
                (nn.Module, NONE),
                "a model, or None beside model_init",
            )
            expect("args", args, (TrainingArguments, NONE), "training arguments")
            if args is None and not positional:
                kwargs["args"] = self.arguments(output_dir="tmp_trainer")
        if isinstance(model := kwargs.get("model"), ORTModule):
            kwargs["model"] = model.module
        self.ort_options = options
        self.ort_report = TrainerReport()
        self._engine_note = EngineNote()
        self._evaluates_with_ort = False
        self._evaluator: ORTModule | None = None
        self._generator: ORTGenerator | None = None
        super().__init__(*positional, **kwargs)
        # On the instance, because a subclass may have a compute_loss of its own: then that is what
        # runs inside the graph.
        if getattr(self.args, "use_module_with_loss", False):
            self.__dict__["compute_loss"] = self._loss_of_module_with_loss
        if self.args.torch_compile:
            warnings.warn(
                "torch_compile=True does nothing in training: what ORTModule runs in PyTorch runs "
                "uncompiled; to compile it, train with transformers.Trainer",
                OrtrainWarning,
                stacklevel=2,
            )

    # -- seams ---------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator wrap what is trained; runs again for each trial of a search."""
        super().create_accelerator_and_postprocess()
        prepare, unwrap = self.accelerator.prepare, self.accelerator.unwrap_model

        def prepare_wrapped(*objects: Any, **kwargs: Any) -> Any:
            wraps = self.is_in_train
            return prepare(
                *[self._on_graph(o) if wraps and isinstance(o, nn.Module) else o for o in objects],
                **kwargs,
            )

        def unwrap_all(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            model = unwrap(model, *args, **kwargs)
            while isinstance(model, ORTModule | ModuleWithLoss | Prepared):
                model = model.module if isinstance(model, ORTModule) else model.model
            return model

        self.accelerator.prepare = prepare_wrapped
        self.accelerator.unwrap_model = unwrap_all

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        if training:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        if self._evaluates_with_ort:
            return self._as_evaluated(model)
        trained = _find(self.model_wrapped)
        if trained is not None and trained.module is model:
            # It runs in PyTorch without gradients, but under the autocast of the training.
            return trained
        plain: nn.Module = super()._wrap_model(model, training, dataloader)
        return plain

    def _on_graph(self, model: nn.Module) -> ORTModule:
        """The model as it is trained."""
        self._switch_caches_off(model)
        if isinstance(model, PreTrainedModel):
            # What the first checkpoint would note there; now it is not a change of the model.
            model.config.architectures = [type(model).__name__]
            model.config.dtype = str(model.dtype).removeprefix("torch.")
        module = model
        if getattr(self.args, "use_module_with_loss", False):
            compute_loss = partial(type(self).compute_loss, self)
            module = ModuleWithLoss(model, compute_loss, mixed=self.accelerator.native_amp)
        options = self.ort_options or options_of(self.args)
        options = replace(options, inference=options.inference or "torch")
        wrapped = ORTModule(module, debug_options_of(self.args), options=options)
        wrapped._runner.expect_training()  # an evaluation that comes first is none
        self._engine_note.decide(wrapped)
        self.ort_report.trainings.append(wrapped.report)
        return wrapped

    def _switch_caches_off(self, model: nn.Module) -> None:
        """As Trainer does in the model's own config; decoders have configs of their own."""
        if not self.args.use_cache:
            for config in caching_configs(model):
                config.use_cache = False

    def _as_evaluated(self, model: nn.Module) -> ORTModule:
        """The model as a graph that reads the weights where they are."""
        self._switch_caches_off(model)
        settings = self.ort_options or options_of(self.args)
        options = replace(settings, engine=self._evaluating_engine(model, settings), inference=None)
        if self._evaluator is None or self._evaluator.module is not model:
            self._evaluator = ORTModule(model, options=options)
            if self.accelerator.native_amp:
                self._evaluator = self.accelerator.prepare_model(
                    self._evaluator, evaluation_mode=True
                )
            self.ort_report.inference = self._evaluator.report
        elif self._evaluator.options != options:
            self._evaluator.options = options
        return self._evaluator

    def _evaluating_engine(self, model: nn.Module, settings: Options) -> Engine:
        """What evaluates: onnxruntime, and PyTorch's operators in 16 bits, which that lacks."""
        narrow = {p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize < 4}
        cast = not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval)
        reduced = self.accelerator.native_amp or settings.precision is not None
        return "aten" if reduced or cast or narrow else "onnxruntime"

    # -- training ------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model; as Trainer's.

        Raises:
            StateError: no forward of the training came to ORTModule, so that something replaced it.

        Ends with a line on what ran, which is :meth:`TrainerReport.line`.
        """
        before = self.ort_report.graph_calls + self.ort_report.fallback_calls
        result = super().train(*args, **kwargs)
        calls = self.ort_report.graph_calls + self.ort_report.fallback_calls - before
        if not calls and self._batch_came:
            unused = _find(self.model_wrapped)
            if unused is not None:
                unused.__dict__["_never_called"].detach()  # it would say the same
            raise StateError(
                "no step of this training ran through ORTModule",
                because="a subclass, a callback or a library called the model itself",
                help="call the model that training_step receives, not trainer.model",
            )
        if calls and self.is_world_process_zero():
            print(self.ort_report.line())
        return result

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """As Trainer's."""
        if isinstance(num_items_in_batch, int):
            # A number would be a constant of the graph, and another one another capture.
            num_items_in_batch = torch.tensor(num_items_in_batch, device=self.args.device)
        wrapped = _find(model)
        if wrapped is None:
            return super().training_step(model, inputs, num_items_in_batch)
        left = self.state.max_steps - self.state.global_step
        wrapped.steps_to_come = left * self.args.gradient_accumulation_steps
        wrapped.only_loss_is_read = reads_only_loss(self, wrapped)
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            wrapped.only_loss_is_read = False  # a callback that calls the model reads its logits

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._engine_note.in_state(self.state, _find(self.model_wrapped)):
            super()._save_checkpoint(*args, **kwargs)

    def _load_callback_state(self) -> None:
        self._engine_note.take_from(self.state)
        super()._load_callback_state()

    def _loss_of_module_with_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """``compute_loss`` where the loss is part of the module."""
        trained = _find(model)
        if trained is None or not isinstance(trained.module, ModuleWithLoss):  # evaluation
            return type(self).compute_loss(
                self,
                model,
                inputs,
                return_outputs=return_outputs,
                num_items_in_batch=num_items_in_batch,
            )
        loss, outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: PreTrainedModel | None = None
    ) -> tuple[Any, Any]:
        """As Trainer's; the old names of `optim` give :class:`ortrain.optim.FusedAdam`."""
        if not is_ours(args.optim):
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        from ortrain.optim import FusedAdam

        betas = (args.adam_beta1, args.adam_beta2)
        return FusedAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self, *args: Any, inference_with_ort: bool | None = None, **kwargs: Any
    ) -> dict[str, float]:
        """As Trainer's; as a graph with ``inference_with_ort=True``.

        It runs in onnxruntime, and in 16 bits (``bf16``, ``bf16_full_eval``) in PyTorch's own
        operators.

        Args:
            args: of Trainer's method.
            inference_with_ort: None goes by the training arguments.
            kwargs: of Trainer's method.
        """
        with self._evaluating(inference_with_ort):
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return metrics

    def predict(self, *args: Any, inference_with_ort: bool | None = None, **kwargs: Any) -> Any:
        """As Trainer's; as a graph with ``inference_with_ort=True``, as :meth:`evaluate`."""
        with self._evaluating(inference_with_ort):
            return super().predict(*args, **kwargs)

    def evaluation_loop_ort(self, *args: Any, **kwargs: Any) -> Any:
        """Optimum's name of Trainer's ``evaluation_loop`` as a graph, for trainers of scripts."""
        with self._evaluating(True):
            return self.evaluation_loop(*args, **kwargs)

    def prediction_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Another name of ``evaluation_loop``, which took its place in transformers."""
        return self.evaluation_loop(*args, **kwargs)

    def prediction_loop_ort(self, *args: Any, **kwargs: Any) -> Any:
        """Another name of ``evaluation_loop_ort``."""
        return self.evaluation_loop_ort(*args, **kwargs)

    # -- export --------------------------------------------------------------------------------

    def export_onnx(self, output_dir: str | os.PathLike[str], opset: int = 21) -> Path:
        """Writes the model in evaluation mode as ``model.onnx``, compared with PyTorch.

        What it is captured and compared with are batches of the evaluation data, or of the training
        data where there are none, without their labels; of one row as well.

        Args:
            output_dir: the folder, made where it does not exist.
            opset: of the standard ONNX domain, 18 to 23.

        Returns:
            The file's path.

        Raises:
            ValueError: there is no data.
            CaptureError: the model cannot become one graph.
            ParityError: the file answers otherwise than the model; nothing is written.
        """
        if self.eval_dataset is not None:
            loader = self.get_eval_dataloader(_first(self.eval_dataset))
        elif self.train_dataset is not None:
            loader = self.get_train_dataloader()
        else:
            raise ValueError("export_onnx needs a batch: give the trainer an eval_dataset")
        batch = self._prepare_inputs(next(iter(loader)))
        inputs = {name: value for name, value in batch.items() if name not in self.label_names}
        model: Any = self.model
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            start: Any = getattr(config, "decoder_start_token_id", 0)
            inputs.setdefault("decoder_input_ids", torch.full_like(inputs["input_ids"], start))
        one_row = {name: value[:1] for name, value in inputs.items()}
        from ortrain.deploy import export_onnx  # which loads all that captures

        path = Path(output_dir) / "model.onnx"
        export_onnx(model, [inputs, one_row], path, opset=opset)
        return path

    @contextmanager
    def _evaluating(self, with_ort: bool | None) -> Iterator[None]:
        # With several data sets, evaluate() calls itself for each and does not pass this on.
        before = self._evaluates_with_ort
        if with_ort is None:
            with_ort = before or getattr(self.args, "inference_with_ort", False)
        self._evaluates_with_ort = with_ort
        try:
            yield
        finally:
            self._evaluates_with_ort = before


class ORTTrainer(ORTTrainerMixin):
    """`transformers.Trainer` that trains through an ONNX graph.

    ::

        trainer = ORTTrainer(model=model, args=ORTTrainingArguments("out"), train_dataset=data)
        trainer.train()
        print(trainer.ort_report)

    Everything else is Trainer's: arguments, callbacks, checkpoints, metrics.

    Args:
        model: as for Trainer; also an ORTModule, which is unwrapped.
        args: `ORTTrainingArguments`, or transformers' own.
        positional: Trainer's further arguments.
        options: settings of ORTModule beyond those in ``args``.
        tokenizer: old spelling of ``processing_class``.
        feature: no longer needed.
        onnx_model_path: no longer needed.
        kwargs: Trainer's arguments.

    Attributes:
        ort_report: what ran where; ``print`` it.
    """


class ORTSeq2SeqTrainer(ORTTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` that trains through an ONNX graph: see :class:`ORTTrainer`."""

    arguments = ORTSeq2SeqTrainingArguments

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Seq2SeqTrainer's; generates through onnxruntime where it evaluates so."""
        if not getattr(self.args, "predict_with_generate", False):
            return super().evaluation_loop(*args, **kwargs)
        if not self._evaluates_with_ort:
            with _under_autocast(self.model, self.accelerator):
                return super().evaluation_loop(*args, **kwargs)
        model = _generative(self.model)
        if self._generator is None or self._generator.model is not model:
            options = self.ort_options or options_of(self.args)
            self._generator = _Generator(model, self, options)
            self.ort_report.generation = self._generator.report
        with self._generator.in_place():
            return super().evaluation_loop(*args, **kwargs)


class _Generator(ORTGenerator):
    """Generates under the autocast that Trainer has around the forward, not around the encoder."""

    def __init__(self, model: Any, trainer: Trainer, options: Options) -> None:
        super().__init__(model, options=options)
        self.trainer = trainer

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.trainer.accelerator.autocast():
            return super()._forward(*args, **kwargs)


@contextmanager
def _under_autocast(model: Any, accelerator: Any) -> Iterator[None]:
    """Gives a model the forward that it has under Trainer, whose accelerator prepared it itself.

    Under ORTTrainer the wrapper is prepared; but it is the model that generates.
    """
    if not accelerator.native_amp or "_original_forward" in model.__dict__:
        yield
        return
    forward, own = model.forward, model.__dict__.get("forward")

    @functools.wraps(forward)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return convert_to_fp32(forward(*args, **kwargs))

    model.forward = prepared
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _find(model: nn.Module | None) -> ORTModule | None:
    """The ORTModule inside what accelerate has made of it."""
    while model is not None and not isinstance(model, ORTModule):
        model = getattr(model, "module", None)
    return model


def _generative(model: Any) -> Any:
    """What generates for a model: itself, or the model that has its adapters inside."""
    if hasattr(model, "get_base_model") and not model.active_peft_config.is_prompt_learning:
        return model.get_base_model()
    return model


def _first(data: Any) -> Any:
    """The data set, or the first of several."""
    return next(iter(data.values())) if isinstance(data, dict) else data


def _deprecated(what: str, remedy: str) -> None:
    warnings.warn(f"{what} is an old spelling; {remedy}", FutureWarning, stacklevel=4)
