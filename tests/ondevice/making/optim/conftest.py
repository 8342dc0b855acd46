"""Small tensors that are updated as large ones are."""

from __future__ import annotations

import pytest

from ortrain.ondevice.making.optim import blocks


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits by which the parameters ``FEW`` are updated in each form."""
    monkeypatch.setattr(blocks, "SMALL", 32)
    monkeypatch.setattr(blocks, "LARGE", 2000)
    monkeypatch.setattr(blocks, "ROW", 1000)
