"""Calls aside: nobody notices that they were made."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def random_states() -> Iterator[None]:
    """Restores the random states of Python, numpy and PyTorch."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpys = np.random.get_state()  # noqa: NPY002 - what scripts seed that are not new
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(devices)


@contextlib.contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Gives each part of a module the mode back that it has now: training or evaluation."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def copied(module: nn.Module) -> nn.Module:
    """A module with the same parameters, whose buffers and attributes are its own.

    Raises:
        Exception: whatever ``copy.deepcopy`` raises of it.
    """
    memo: dict[int, Any] = {id(each): each for each in module.parameters()}
    return copy.deepcopy(module, memo)
