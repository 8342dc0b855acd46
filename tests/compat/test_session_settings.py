"""Settings of 2020 for all sessions say what they do, and processes are numbered by launchers."""

from __future__ import annotations

import warnings

import pytest
from onnxruntime.capi import _pybind_state

from ortrain.compat import session_settings
from ortrain.errors import OrtrainWarning


def test_what_is_so_in_any_case_says_nothing_and_the_rest_what_to_use() -> None:
    strategies = _pybind_state.ArenaExtendStrategy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session_settings.set_arena_extend_strategy(strategies.kSameAsRequested)
    for call, told in (
        (lambda: session_settings.set_arena_extend_strategy(strategies.kNextPowerOfTwo), "arena="),
        (lambda: session_settings.set_cuda_mem_limit(1 << 30), "memory_budget="),
        (lambda: session_settings.set_cuda_device_id(1), r"model\.to"),
    ):
        with pytest.warns(OrtrainWarning, match=rf"does nothing here: .*{told}"):
            call()


def test_places_are_those_that_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def places() -> list[int]:
        names = ("local_rank", "local_size", "world_rank", "world_size")
        return [getattr(session_settings, f"get_mpi_context_{name}")() for name in names]

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert places() == [0, 1, 0, 1]
    for part, value in {"RANK": 5, "SIZE": 8, "LOCAL_RANK": 1, "LOCAL_SIZE": 4}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{part}", str(value))
    assert places() == [1, 4, 5, 8]
