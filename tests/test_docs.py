"""The examples in the docs run as they stand, each by itself."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
LEAST = {"generation": 1, "ondevice": 2, "ondevice-contract": 1, "optim": 4, "trainer": 2}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = {page: BLOCK.findall((DOCS / f"{page}.md").read_text()) for page in LEAST}
ALL = [(page, number) for page, blocks in BLOCKS.items() for number in range(len(blocks))]


@pytest.mark.parametrize("page", LEAST)
def test_the_page_has_examples(page: str) -> None:
    assert len(BLOCKS[page]) >= LEAST[page]


# Trainer pins memory by default, also where there is no accelerator.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize(("page", "number"), ALL)
def test_an_example_runs_by_itself(page: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[page][number])
    runpy.run_path(str(script))
