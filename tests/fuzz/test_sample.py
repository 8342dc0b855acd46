"""A small part of ``make fuzz``: each kind of attack on each kind of file and command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.__main__ import attack, counted

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the attacks are made in forks")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_lost_and_nothing_damaged_is_accepted(tmp_path: Path) -> None:
    counts, bad = counted(attack(tmp_path, seed=1, share=0.06))
    assert not bad, "\n".join(bad)
    assert len(counts) > 40
