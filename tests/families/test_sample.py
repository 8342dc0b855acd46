"""A sample of the families in each run of the tests; the whole is `make families`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.breadth import sampled
from tests.families import results
from tests.families.models import families
from tests.families.page import page
from tests.families.verdict import EXPORTERS, Outcome, distance, of_file

DOCS = Path(__file__).parents[2] / "docs"
# Masks of -1e10 in float16, one key for all heads, what a model's preparation of a step asks for.
SAMPLE = [("longt5", "torchscript 17"), ("falcon", "torchscript 17"), ("trocr", "ortrain")]
ROWS = [(name, exporter) for name in families() for exporter in EXPORTERS]


def rows() -> list[Any]:
    """Those of the sample, and all that are kept as the same."""
    kept = results.load()
    chosen = [row for row in ROWS if kept.get(row[0], {}).get(row[1])]
    same = [row for row in chosen if kept[row[0]][row[1]].outcome is Outcome.SAME]
    return sampled(same, SAMPLE)


# What PyTorch tells who builds MobileBERT and WavLM.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
@pytest.mark.parametrize("row", rows(), ids=", ".join)
def test_a_file_is_what_the_kept_results_say(row: tuple[str, str]) -> None:
    name, exporter = row
    verdict = of_file(families()[name], exporter)
    assert verdict.outcome is Outcome.SAME, verdict.reason
    kept = results.load()[name][exporter]
    assert (verdict.attention, verdict.softmax) == (kept.attention, kept.softmax)


def test_a_wrong_number_and_a_lost_one_are_told() -> None:
    right = [np.asarray([1.0, 100.0]), np.asarray([np.nan, 1.0])]
    assert distance(right, right) == 0
    assert distance([np.asarray([2.0, 100.0]), right[1]], right) == pytest.approx(0.01)
    assert distance([right[0], np.asarray([0.0, 1.0])], right) == float("inf")
    assert distance([None, right[1]], right) == float("inf")
    assert distance([right[0][:1], right[1]], right) == float("inf")


def test_the_page_is_that_of_the_kept_results_of_which_none_is_wrong() -> None:
    assert (DOCS / "families.md").read_text() == page()
    kept = [(n, e, v) for n, row in results.load().items() for e, v in row.items()]
    assert not [(n, e) for n, e, v in kept if v.outcome is Outcome.WRONG]
    # Those begin with tokens where an image or speech is expected, give something else than
    # logits, or have a mask that they do not read.
    refused = {n for n, _, v in kept if v.outcome is Outcome.REFUSED}
    assert refused <= {"imagegpt", "mra", "pop2piano", "pp_lcnet"}
