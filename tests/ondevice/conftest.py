"""Artifacts made once, for all tests of their training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ondevice import artifacts


@pytest.fixture(scope="session")
def adamw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.write(tmp_path_factory.mktemp("ondevice") / "adamw", "adamw")


@pytest.fixture(scope="session")
def sgd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.write(tmp_path_factory.mktemp("ondevice") / "sgd", "sgd")
