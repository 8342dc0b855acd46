"""Pipelines of passes, and the runner that checks the graph after each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ortrain.graph.check import check
from ortrain.passes.clean import clean
from ortrain.passes.precision import place_casts
from ortrain.program import Program

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass:
    """A rewrite that keeps a program's signature.

    Attributes:
        name: by which it can be disabled.
        run: changes the program in place; tells whether it did.
        safe: the results stay equal in exact arithmetic, to rounding; a pass that is not safe runs
            only where it is asked for.
    """

    name: str
    run: Callable[[Program], bool]
    safe: bool = True


PIPELINES: dict[str, tuple[Pass, ...]] = {
    # before autodiff: what is done here has its backward for free
    "forward": (Pass("clean", clean), Pass("precision", place_casts)),
    # over forward and backward together, before they are cut
    "training": (Pass("clean", clean), Pass("precision", place_casts)),
}


def rewrite(program: Program, pipeline: str, disabled: Collection[str] = ()) -> Program:
    """Runs a pipeline on a program, in place.

    Args:
        program: changed and returned.
        pipeline: a key of :data:`PIPELINES`.
        disabled: names of passes to leave out.

    Raises:
        GraphError: a pass broke the graph; the message names it.
    """
    for step in PIPELINES[pipeline]:
        if step.name in disabled:
            continue
        before = program.operators() if logger.isEnabledFor(logging.DEBUG) else Counter[str]()
        changed = step.run(program)
        check(program.graph, f"pass {step.name!r}")
        if changed and logger.isEnabledFor(logging.DEBUG):
            after = program.operators()
            logger.debug("%s: removed %s, added %s", step.name, before - after, after - before)
    return program
