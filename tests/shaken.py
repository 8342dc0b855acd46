"""A plugin that runs the tests in another order, and small examples the way of large ones.

The order of the files, and of the tests in each, is drawn from a seed, which is printed. Where two
implementations of one thing share the work by size, the tests see what the large sizes have.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

# What a size is compared with, by module, and what it is here. Left out is what decides on threads
# or on memory alone, what limits how much is folded, tried or remembered, and what is not of sizes.
SIZES: dict[str, dict[str, float]] = {
    # Tokens that nobody reads are left out of every call; no saving is too small.
    "ortrain.step.tokens": {"LEAST": 0, "ENOUGH": 0},
    "ortrain.passes.tokens.places": {"LARGE": 0},
    # A comparison takes the first rows of a batch, and a backward runs in pieces.
    "ortrain.frontend.proof": {"ENOUGH": 0},
    "ortrain.step.build": {"PIECE_BYTES": 1, "MESSAGE_BYTES": 1},
    # Gradients are sent to other processes one by one.
    "ortrain.classic.exchange": {"MESSAGE_BYTES": 1},
    # Attention is computed again in the backward, head by head.
    "ortrain.autodiff.attention": {"_RATIO": 0},
    "ortrain.runtime.aten.strips": {"STRIP": 1},
    # Windows are read by indices, and convolutions differentiated as convolutions.
    "ortrain.autodiff.rules.pool": {"MOST_PLACES": 0},
    "ortrain.ops.gradients.pool": {"MOST_ONES": 0},
    "ortrain.ops.gradients.conv": {"MOST_TAPS": 0},
    # Gradients of tables are added up in small ones.
    "ortrain.graph.scatter": {"LARGE": 0},
    # Logits are made in blocks, each of a few rows.
    "ortrain.passes.linear_loss": {"CLASSES": 0, "BLOCK": 0, "NARROW_BLOCK": 0, "ROWS": 3},
    "ortrain.runtime.aten.linear_loss": {"_CLASSES": 2},
    # Tensors are large, rows are copied whole, and ranges made by the step.
    "ortrain.runtime.aten.executor": {"_LARGE": 0},
    "ortrain.runtime.aten.kernels.index": {"ROW": 0},
    "ortrain.runtime.aten.kernels.shape": {"MOST": 0},
    "ortrain.runtime.aten.kernels.create": {"MOST": 0, "MOST_ENTRIES": 0},
    # Channels are added up in parts, and random numbers mixed stream by stream.
    "ortrain.runtime.aten.norms": {"LENGTH": 2},
    "ortrain.runtime.aten.hash": {"_TOGETHER": 0},
    # Small products are called as large ones. Which library then computes one is measured, and the
    # other one's sums would be none that a test compares to the bit.
    "ortrain.runtime.aten.kernels.linear": {"_WIDE": 0},
    "ortrain.runtime.aten.blas": {"COPIED": 1},
    # onnxruntime transposes in a pass of its own, and adds rows up as a product.
    "ortrain.runtime.onnxruntime.lowering": {"LONG": 1},
    # An optimizer updates one tensor at a time.
    "ortrain.optim.adam": {"PART": 1},
    "ortrain.optim.lamb": {"PART": 1},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shaken")
    group.addoption("--shake-seed", type=int, help="the order of the tests; drawn by default")
    group.addoption("--keep-order", action="store_true", help="the order is that of the files")
    group.addoption("--keep-sizes", action="store_true", help="small examples stay small")


def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed where none is given, and sets the sizes."""
    if config.option.shake_seed is None:
        drawn = random.SystemRandom().randrange(10**6)
        config.option.shake_seed = getattr(config, "workerinput", {}).get("shake_seed", drawn)
    if not config.option.keep_sizes:
        as_if_large()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers have the order of the process that starts them."""
    node.workerinput["shake_seed"] = node.config.option.shake_seed


def as_if_large() -> None:
    """Sets what sizes are compared with."""
    for name, sizes in SIZES.items():
        module = importlib.import_module(name)
        for size, value in sizes.items():
            assert hasattr(module, size), f"{name} has no {size}"
            setattr(module, size, value)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before pytest puts tests together that share a fixture."""
    if not config.option.keep_order:
        items[:] = shuffled(items, [item.path for item in items], config.option.shake_seed)


def shuffled(items: Sequence[T], groups: Iterable[Any], seed: int) -> list[T]:
    """The items in another order, those of a group still one after another.

    Args:
        items: in any order.
        groups: of each item.
        seed: the same one gives the same order.
    """
    draw = random.Random(seed)
    members: dict[Any, list[T]] = {}
    for item, group in zip(items, groups, strict=True):
        members.setdefault(group, []).append(item)
    order = draw.sample([*members.values()], len(members))
    return [item for group in order for item in draw.sample(group, len(group))]


def pytest_report_header(config: pytest.Config) -> str:
    """The command that repeats the run."""
    return f"shaken: make test-shaken SEED={config.option.shake_seed}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Once more where it is looked for."""
    terminalreporter.write_line(pytest_report_header(config))
