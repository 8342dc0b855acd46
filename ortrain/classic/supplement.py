"""The functions of the BERT example of 2020, by their names: ``ort_supplement``.

::

    device = supplement.setup_onnxruntime_with_mpi(args)
    model = supplement.create_ort_trainer(args, device, model)
    loss, global_step = supplement.run_ort_training_step(
        args, global_step, training_steps, model, batch)
    model.save_as_onnx(path)

``args`` is an ``argparse.Namespace`` with what the example's command line has.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from ortrain.classic.first import IODescription, LossScaler, ModelDescription, ORTTrainer
from ortrain.classic.names import unknown
from ortrain.classic.ranks import join, place

NO_DECAY = ("bias", "gamma", "beta", "LayerNorm")
# Share of the learning rate at a share x of the run, behind the warm-up.
SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "warmup_cosine": lambda x, warmup: 0.5 * (1.0 + math.cos(math.pi * x)),
    "warmup_constant": lambda x, warmup: 1.0,
    "warmup_linear": lambda x, warmup: max((x - 1.0) / (warmup - 1.0), 0.0),
    "warmup_poly": lambda x, warmup: max(1.0 - x, 0.0) ** 0.5,
}


def setup_onnxruntime_with_mpi(args: Namespace) -> torch.device:
    """Joins the processes that a launcher has started, and seeds this one's random numbers.

    The launcher is torchrun, Open MPI, MPICH (and others with PMI) or Slurm; it is known by its
    variables, and no library of MPI is needed.

    Args:
        args: ``seed``, and ``init_method`` where the processes are to meet elsewhere than at
            ``MASTER_ADDR``. It is given ``world_rank``, ``world_size``, ``local_rank``,
            ``local_size`` and ``n_gpu``.

    Returns:
        The device of this process: the GPU of its local rank, or the CPU.

    Raises:
        InputError: the launcher's variables contradict each other.
    """
    own = place()
    if distributed.is_available() and distributed.is_initialized():  # by the script itself
        own = own._replace(rank=distributed.get_rank(), world=distributed.get_world_size())
    has_gpu = torch.cuda.is_available()
    # More processes than GPUs share them, as the example has it.
    index = own.local_rank % torch.cuda.device_count() if has_gpu else 0
    device = torch.device("cuda", index) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    join(own, device, getattr(args, "init_method", None))
    args.world_rank, args.world_size = own.rank, own.world
    args.local_rank, args.local_size = own.local_rank, own.local_world
    args.n_gpu = 1
    torch.manual_seed(getattr(args, "seed", 0) + own.rank)
    return device


def bert_model_description(args: Namespace) -> ModelDescription:
    """What BERT takes for pre-training, and its loss.

    Args:
        args: ``train_batch_size``, the samples of a step, and ``max_seq_length``.
    """
    tokens = [args.train_batch_size, args.max_seq_length]
    words = getattr(args, "vocab_size", 30528)
    rows = (
        ("input_ids", tokens, words),
        ("segment_ids", tokens, 2),
        ("input_mask", tokens, 2),
        ("masked_lm_labels", tokens, words),
        ("next_sentence_labels", tokens[:1], 2),
    )
    return ModelDescription(
        [IODescription(name, shape, torch.int64, classes) for name, shape, classes in rows],
        [IODescription("loss", [], torch.float32)],
    )


def map_optimizer_attributes(name: str) -> dict[str, float]:
    """LAMB's attributes of a weight: biases and normalizations do not decay."""
    decays = not any(part in name for part in NO_DECAY)
    return {"alpha": 0.9, "beta": 0.999, "lambda": 0.01 if decays else 0.0, "epsilon": 1e-6}


def create_ort_trainer(args: Namespace, device: torch.device, model: torch.nn.Module) -> ORTTrainer:
    """A trainer of BERT with LAMB.

    Args:
        args: what `setup_onnxruntime_with_mpi` and `bert_model_description` know, and
            ``gradient_accumulation_steps``, ``fp16``, ``allreduce_post_accumulation``,
            ``deepspeed_zero_stage`` or ``partition_optimizer``, ``postprocess_model``, all but the
            first with a default. With ``fp16`` it is given ``ort_loss_scale``.
        device: of this process.
        model: takes the five inputs in order, and returns the loss first.

    Raises:
        InputError: the model is not so.
    """
    fp16 = bool(getattr(args, "fp16", False))
    partitioned = getattr(args, "deepspeed_zero_stage", getattr(args, "partition_optimizer", 0))
    trainer = ORTTrainer(
        model,
        None,
        bert_model_description(args),
        "LambOptimizer",
        map_optimizer_attributes,
        IODescription("Learning_Rate", [1], torch.float32),
        device,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        world_rank=args.world_rank,
        world_size=args.world_size,
        use_mixed_precision=fp16,
        allreduce_post_accumulation=bool(getattr(args, "allreduce_post_accumulation", False)),
        deepspeed_zero_stage=1 if partitioned else 0,
        _extra_postprocess=getattr(args, "postprocess_model", None),
        options=getattr(args, "ortrain", None),
    )
    if fp16:
        args.ort_loss_scale = LossScaler(trainer.loss_scale_input_name, True, up_scale_window=2000)
    return trainer


def get_lr(args: Namespace, training_steps: int, schedule: str = "warmup_poly") -> float:
    """The learning rate after so many updates.

    Args:
        args: ``learning_rate``, ``max_steps`` (-1 for a constant rate) and ``warmup_proportion``.
        training_steps: updates that have been made.
        schedule: one of `SCHEDULES`.

    Raises:
        InputError: there is no such schedule.
    """
    if schedule not in SCHEDULES:
        raise unknown("the schedule", schedule, [*SCHEDULES])
    if args.max_steps == -1:
        return float(args.learning_rate)
    x, warmup = training_steps / args.max_steps, args.warmup_proportion
    share = x / warmup if x < warmup else SCHEDULES[schedule](x, warmup)
    return float(args.learning_rate * share)


def run_ort_training_step(
    args: Namespace,
    global_step: int,
    training_steps: int,
    model: ORTTrainer,
    batch: Sequence[torch.Tensor],
) -> tuple[Any, int]:
    """Trains on one batch.

    Args:
        args: what `get_lr` and `create_ort_trainer` know, and ``schedule``.
        global_step: updates that have been made.
        training_steps: steps that have been made, this one included.
        model: the trainer.
        batch: the five inputs.

    Returns:
        The loss, and the number of updates.
    """
    lr = torch.tensor([get_lr(args, global_step, getattr(args, "schedule", "warmup_poly"))])
    finite: Any = True
    if getattr(args, "fp16", False):
        scale = torch.tensor([args.ort_loss_scale.loss_scale_])
        loss = model.train_step(*batch, lr, scale)
        if isinstance(loss, list | tuple):
            loss, finite = loss
    else:
        loss = model.train_step(*batch, lr)
    if training_steps % args.gradient_accumulation_steps == 0:
        if getattr(args, "fp16", False):
            args.ort_loss_scale.update_loss_scale(finite)
        global_step += 1
    return loss, global_step


__all__ = [
    "bert_model_description",
    "create_ort_trainer",
    "get_lr",
    "map_optimizer_attributes",
    "run_ort_training_step",
    "setup_onnxruntime_with_mpi",
]
