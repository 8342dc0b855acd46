"""Which of several processes this one is, as the program that started it says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import distributed

from ortrain.errors import InputError


class Place(NamedTuple):
    """Where a process stands.

    Attributes:
        rank: among all processes.
        world: how many there are.
        local_rank: among those of this machine.
        local_world: how many there are of this machine.
        launcher: who has said so.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launcher: str = "nobody"


# Variables for rank, world, local rank and local world. The innermost launcher first: Slurm may
# start torchrun or mpirun, and its own variables are there as well then. Of Slurm, those of the
# step: a script of sbatch itself has SLURM_NTASKS too, and is alone.
LAUNCHERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "torchrun": (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "Open MPI": tuple(
        (f"OMPI_COMM_WORLD_{part}",) for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    "MPICH": (
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
    ),
    "Slurm": (
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    ),
}
# Where the first process listens, as these set-ups name its machine.
_MASTERS = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE", "SLURM_LAUNCH_NODE_IPADDR")
PORT = "29500"


def place(environment: Mapping[str, str] | None = None) -> Place:
    """The place of this process; alone where no launcher says otherwise.

    Args:
        environment: variables; None for those of the process.

    Raises:
        InputError: a variable is no number, one is missing, or the rank is not below the size.
    """
    variables = os.environ if environment is None else environment
    for launcher, ((rank,), *others) in LAUNCHERS.items():
        if rank not in variables:
            continue
        sizes = [name for name in others[0] if name in variables]
        if not sizes:
            if launcher == "Slurm":  # of an allocation in which nothing was started yet
                continue
            raise InputError(
                f"{rank} is set, and {others[0][0]} is not",
                because=f"{launcher} sets both where it starts several processes",
                help=f"set {others[0][0]}, or unset {rank}",
            )
        own, world = _number(variables, rank), _number(variables, sizes[0])
        if not 0 <= own < world:
            raise InputError(
                f"{rank}={own} and {sizes[0]}={world}: a rank is below the number of processes"
            )
        local, around = (
            next((_number(variables, name) for name in names if name in variables), None)
            for names in others[1:]
        )
        around = world if around is None else around
        local = own % max(1, around) if local is None else local
        return Place(own, world, local, around, launcher)
    return Place()


def _number(variables: Mapping[str, str], name: str) -> int:
    # Slurm writes "2(x3),1" for three machines of two tasks and one of one.
    text = variables[name].split("(")[0].split(",")[0].strip()
    if not text.isdecimal():
        raise InputError(f"{name}={variables[name]!r}: expected a whole number")
    return int(text)


def join(own: Place, device: torch.device, init_method: str | None = None) -> None:
    """Joins the group of all processes, unless this one is alone or has joined.

    Args:
        own: the place of this process.
        device: that it trains on; decides how tensors travel.
        init_method: where the processes meet, as torch names it; None goes by ``MASTER_ADDR`` and
            ``MASTER_PORT``, or by what Azure and Slurm say of the first machine.

    Raises:
        InputError: the processes are on several machines, and nothing says where they meet.
    """
    if own.world == 1 or distributed.is_initialized():
        return
    if init_method is None and "MASTER_ADDR" not in os.environ:
        named = next((os.environ[name] for name in _MASTERS if name in os.environ), None)
        if named is None and own.local_world < own.world:
            raise InputError(
                f"{own.launcher} has started {own.world} processes on several machines, and "
                "nothing says where they meet",
                help="set MASTER_ADDR to the name of the first machine, and MASTER_PORT",
            )
        address, _, port = (named or "localhost").partition(":")
        os.environ["MASTER_ADDR"] = address
        os.environ.setdefault("MASTER_PORT", port or PORT)
    os.environ.setdefault("MASTER_PORT", PORT)
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=init_method or "env://", rank=own.rank, world_size=own.world
    )


def expect_group(rank: int, world: int) -> None:
    """Raises where what a script says of the processes is not so.

    Args:
        rank: of this process, as the script says.
        world: how many there are, as the script says.

    Raises:
        InputError: the rank is not below the size, there is no group of several processes, or
            another one.
    """
    if not 0 <= rank < world:
        raise InputError(f"world_rank={rank} and world_size={world}: a rank is below the size")
    if not distributed.is_available() or not distributed.is_initialized():
        if world > 1:
            raise InputError(
                f"world_size={world}, and this process has joined no group",
                help="call ortrain.classic.supplement.setup_onnxruntime_with_mpi(args), or "
                "torch.distributed.init_process_group(…), before the trainer is made",
            )
        return
    own = distributed.get_rank(), distributed.get_world_size()
    if own != (rank, world):
        raise InputError(
            f"world_rank={rank} and world_size={world}, and this process is {own[0]} of {own[1]}",
            help="give torch.distributed.get_rank() and get_world_size()",
        )


__all__ = ["LAUNCHERS", "Place", "expect_group", "join", "place"]
