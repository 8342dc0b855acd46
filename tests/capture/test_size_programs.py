"""A sample of the random programs of sizes; ``python -m tests.capture.size_programs`` runs more."""

from __future__ import annotations

import pytest

from ortrain import Options
from ortrain.errors import CaptureError
from tests.capture.size_programs import SizeProgram, difference, misjudged, programs

SEED = 3
EXPORTED = 20  # programs whose export is judged at the sizes that it accepts
RUN = 4  # programs that run at all sizes, converted anew where they have to be
SAMPLE = list(programs(EXPORTED + RUN, SEED))


def _number(program: SizeProgram) -> str:
    return str(SAMPLE.index(program))


@pytest.mark.parametrize("program", SAMPLE[:EXPORTED], ids=_number)
def test_what_an_export_accepts_it_computes(program: SizeProgram) -> None:
    try:
        told = misjudged(program)
    except CaptureError:
        return  # what is refused is not wrong
    assert not told, f"{told}\n{program.source}"


@pytest.mark.parametrize("program", SAMPLE[EXPORTED:], ids=_number)
def test_a_module_gives_what_eager_gives_at_all_sizes(program: SizeProgram) -> None:
    told, _ = difference(program, Options(engine="onnxruntime", fallback="torch"))
    assert not told, f"{told}\n{program.source}"
