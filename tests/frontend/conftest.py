"""What these tests run on."""

import pytest


@pytest.fixture(autouse=True)
def new_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_FRONT_END", "new")
