"""DeepSpeed on the CPU, in processes that tests launch."""

from __future__ import annotations

import importlib
import os


def prepare() -> None:
    """Makes DeepSpeed use the CPU, and gloo for everything.

    Otherwise its first group compiles an extension for shared memory, which needs a compiler and
    locks a folder of the user, for good where the process is killed meanwhile.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    importlib.import_module("deepspeed")
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
