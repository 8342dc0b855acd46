"""Autocast around a call: which devices it is on for, and with which dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

DEVICES = ("cpu", "cuda")
"""Types of the devices that graphs are made for."""

Autocast = tuple[tuple[str, torch.dtype], ...]
"""The devices that autocast is on for, each with the dtype that it casts to there."""


def active() -> Autocast:
    """What is on now."""
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in DEVICES
        if torch.is_autocast_enabled(device)
    )


@contextlib.contextmanager
def autocast_as(wanted: Autocast) -> Iterator[None]:
    """Autocast on for these devices and no others; nothing of it is cached."""
    dtypes = dict(wanted)
    with contextlib.ExitStack() as stack:
        for device in DEVICES:
            dtype = dtypes.get(device)
            if dtype is not None or torch.is_autocast_enabled(device):
                on = torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)
                stack.enter_context(on)
        yield


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast off: what runs inside has its casts written out, or is to have none."""
    return autocast_as(())


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Casts inside leave nothing behind: a trace's tensors have no contents."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def switched_back() -> Iterator[None]:
    """Gradients and autocast are as before where what is inside raises between two switches.

    A graph has calls that switch them on and off, and no ``with`` statement around them.
    """
    grad, depth = torch.is_grad_enabled(), autocast_depth()
    regions = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]
    cached = torch.is_autocast_cache_enabled()
    try:
        yield
    except BaseException:
        while autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for device, is_on, dtype in regions:
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)
        torch.set_grad_enabled(grad)
        raise


def autocast_depth() -> int:
    """How many regions of autocast there are around; casts are kept until none is."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
