"""Scripts that run in several processes, which find each other through a file in a folder.

A test calls `launch`; the script calls `join`, and `leave` at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

ROOT = Path(__file__).parents[1]
# What launchers of several processes set. The libraries ask for an address although the group is
# there already.
ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


class Place(NamedTuple):
    """Where among the processes this one is, and what it is to do."""

    rank: int
    world: int
    folder: Path
    settings: Any


def launch(script: Path, folder: Path, world: int, settings: Any, timeout: float = 100) -> Any:
    """Runs a script in so many processes.

    Args:
        script: calls `join` and `leave`.
        folder: made for them.
        world: how many.
        settings: anything that JSON can hold.
        timeout: seconds.

    Returns:
        What the first of them left.

    Raises:
        AssertionError: one of them failed or took too long; with all that they wrote.
    """
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"output-{rank}.txt" for rank in range(world)]
    processes = []
    for rank, output in enumerate(outputs):
        command = [sys.executable, script, str(rank), str(world), folder, json.dumps(settings)]
        with output.open("w") as file:
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
    with ThreadPoolExecutor(world) as pool:
        ends = [pool.submit(process.wait, timeout) for process in processes]
        try:
            # As they come: where one fails, the others would wait for it.
            failed = next((e for e in as_completed(ends) if e.exception() or e.result()), None)
        finally:
            for process in processes:
                process.kill()
    if failed is not None:
        written = "\n".join(output.read_text() for output in outputs)
        raise AssertionError(f"{failed.exception() or f'ended with {failed.result()}'}\n{written}")
    return torch.load(folder / "result.pt", weights_only=False)


def join(alone: bool = False) -> Place:
    """Reads the command line and joins the others in a gloo group.

    Args:
        alone: whether a single process makes a group too.
    """
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if world > 1 or alone:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {**ADDRESS, **own, "LOCAL_WORLD_SIZE": str(world)}
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
        )
    return Place(rank, world, folder, json.loads(sys.argv[4]))


def leave(place: Place, result: Any) -> NoReturn:
    """Ends the process once all have come here; what the first of them has is the result."""
    if place.rank == 0:
        torch.save(result, place.folder / "result.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    # Without the clean-up of the interpreter: gloo's threads and the file's lock may wait for the
    # other process there.
    os._exit(0)
