"""Names in artifacts, by which a training loop goes: see docs/ondevice-contract.md."""

from __future__ import annotations

# Of the models, where nothing newer is needed; and the version of the format that its time reads.
OPSET = 18
IR_VERSION = 8

# Files in the artifact folder, each after the prefix.
TRAINING_MODEL = "training_model.onnx"
EVAL_MODEL = "eval_model.onnx"
OPTIMIZER_MODEL = "optimizer_model.onnx"
TRAIN_STEP_MODEL = "train_step_model.onnx"
CHECKPOINT = "checkpoint"
NOMINAL_CHECKPOINT = "nominal_checkpoint"

# Inputs that are neither the user's nor in the checkpoint.
LAZY_RESET_GRAD = "lazy_reset_grad"
LEARNING_RATE = "learning_rate"
STEP = "step"
SEED = "seed"
RESERVED = frozenset({LAZY_RESET_GRAD, LEARNING_RATE, STEP, SEED})

# In the models' metadata: the checkpoint's `model`, of those made together.
MODEL_HASH = "ortrain.model"

LOSS = "loss"
GRAD_NORM = "grad_norm"

_BUFFER, _OUT, _UPDATED = "_grad.accumulation.buffer", "_grad.accumulation.out", ".updated"


def gradient(parameter: str) -> str:
    """The optimizer's input for a parameter's gradient."""
    return f"{parameter}_grad"


def accumulation_buffer(parameter: str) -> str:
    """The training model's input for the gradient accumulated so far."""
    return f"{parameter}{_BUFFER}"


def accumulation_out(parameter: str) -> str:
    """The training model's output for the gradient accumulated so far and in this run."""
    return f"{parameter}{_OUT}"


def updated(name: str) -> str:
    """The output that holds a parameter's, buffer's or state's next value."""
    return f"{name}{_UPDATED}"


def state(parameter: str, kind: str) -> str:
    """An optimizer state of a parameter: ``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``."""
    return f"{parameter}.{kind}"
