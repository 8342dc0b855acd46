"""On-device training: artifacts of standard ONNX operators that any stock onnxruntime trains.

Making artifacts needs the whole of ortrain's dependencies. Running them needs numpy, onnxruntime
and safetensors alone: neither torch nor onnx is imported. The names below load what they need when
they are first used.

::

    from ortrain.ondevice import CheckpointState, LinearLRScheduler, Module, Optimizer

    state = CheckpointState.load_checkpoint("checkpoint")
    module = Module("training_model.onnx", state, "eval_model.onnx")
    optimizer = Optimizer("optimizer_model.onnx", module)
    for x, labels in batches:
        loss = module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, "checkpoint", include_optimizer_state=True)
    module.export_model_for_inferencing("inference.onnx", ["logits"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortrain.lazy import attributes

if TYPE_CHECKING:
    from ortrain.ondevice.artifacts import LossType, OptimType, generate_artifacts
    from ortrain.ondevice.making.lora import LoRA
    from ortrain.ondevice.running.adapters import export_adapter
    from ortrain.ondevice.running.checkpoint import CheckpointState, Parameter
    from ortrain.ondevice.running.module import Module
    from ortrain.ondevice.running.optimizer import Optimizer
    from ortrain.ondevice.running.scheduler import LinearLRScheduler
    from ortrain.ondevice.running.train_step import TrainStep

_HOME = {
    "CheckpointState": "ortrain.ondevice.running.checkpoint",
    "LinearLRScheduler": "ortrain.ondevice.running.scheduler",
    "LoRA": "ortrain.ondevice.making.lora",
    "LossType": "ortrain.ondevice.artifacts",
    "Module": "ortrain.ondevice.running.module",
    "OptimType": "ortrain.ondevice.artifacts",
    "Optimizer": "ortrain.ondevice.running.optimizer",
    "Parameter": "ortrain.ondevice.running.checkpoint",
    "TrainStep": "ortrain.ondevice.running.train_step",
    "export_adapter": "ortrain.ondevice.running.adapters",
    "generate_artifacts": "ortrain.ondevice.artifacts",
}

__all__ = [
    "CheckpointState",
    "LinearLRScheduler",
    "LoRA",
    "LossType",
    "Module",
    "OptimType",
    "Optimizer",
    "Parameter",
    "TrainStep",
    "export_adapter",
    "generate_artifacts",
]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
