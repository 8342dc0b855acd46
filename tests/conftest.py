"""What holds for every test: fixed seeds, one thread, no hub."""

from __future__ import annotations

import os

# Before anything imports the hub's package, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import random

import numpy as np
import pytest
import torch

# The tests run in parallel, and sums over one thread are always in the same order.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds the global generators before each test; the seed, for generators of the test's own."""
    value = 20
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 - the global one is the point
    torch.manual_seed(value)
    return value
