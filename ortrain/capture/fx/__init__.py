"""Clean-up of a traced FX graph, before it is translated.

:func:`clean` leaves a graph without regions, without in-place operators and without mixed dtypes.
Each pass works on the graph in place; a node that it makes carries ``meta`` as a traced one does:
``val`` (the fake tensor that tells dtype and symbolic shape), the module path and the stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ortrain.capture.fx.autocast import explicit_casts
from ortrain.capture.fx.checks import (
    refuse_complex,
    refuse_mixed_products,
    refuse_random,
    refuse_rounded_gradients,
    refuse_second_device,
    remove_checks,
    violations,
)
from ortrain.capture.fx.complex_pairs import complex_as_pairs
from ortrain.capture.fx.decompose import Covered, decompose, missing
from ortrain.capture.fx.draws import number_draws
from ortrain.capture.fx.experts import recognise_experts
from ortrain.capture.fx.functional import functionalise
from ortrain.capture.fx.narrow import kernels_in_float32, norms_in_float32
from ortrain.capture.fx.pieces import open_pieces_as_slices, written_pieces_as_views
from ortrain.capture.fx.preconditions import assert_preconditions
from ortrain.capture.fx.promote import promote
from ortrain.capture.fx.scalars import scalars_as_vectors
from ortrain.capture.fx.selected import (
    assert_dimensions_to_squeeze,
    assert_selected_sizes,
    select_something,
)
from ortrain.capture.fx.settle import settle
from ortrain.capture.fx.squeezed import select_symbols_of_one
from ortrain.capture.fx.statistics import (
    explicit_statistics,
    may_update_statistics,
    without_needless_barriers,
)
from ortrain.capture.fx.strided import strided_as_rows
from ortrain.capture.traced import Traced
from ortrain.program import Check
from ortrain.pytorch.autocast import without_autocast

__all__ = ["Cleaned", "clean", "missing"]


@dataclass(frozen=True)
class Cleaned:
    """What a cleaned graph computes beside the module's outputs.

    Attributes:
        updated: the buffers that it updates, with the node of each one's new value.
        violations: bits of the checks that do not hold; None without any check.
        checks: by their bits.
    """

    updated: dict[str, fx.Node]
    violations: fx.Node | None
    checks: list[Check]


def clean(traced: Traced, covered: Covered, checked: bool) -> Cleaned:
    """Runs all passes on a program's graph.

    Args:
        traced: its graph is changed in place.
        covered: tells whether a call has a translation.
        checked: whether a call for which a check fails goes to the module.
    """
    with without_autocast():
        return _clean(traced, covered, checked)


def _clean(traced: Traced, covered: Covered, checked: bool) -> Cleaned:
    module = traced.module
    module.graph.eliminate_dead_code(lambda n: n.is_impure() or may_update_statistics(n))
    explicit_casts(module)
    refuse_mixed_products(module)
    refuse_rounded_gradients(module)
    number_draws(module)
    recognise_experts(module)
    if checked:
        select_something(module)
        assert_selected_sizes(module)
    remove_checks(module)
    select_symbols_of_one(module)
    assert_dimensions_to_squeeze(module, checked)
    assert_preconditions(module)
    norms_in_float32(module)
    explicit_statistics(module)
    refuse_second_device(traced)
    written_pieces_as_views(module)
    updated = functionalise(traced)
    settle(module)  # behind what tells views by the memory that they share
    # Among the outputs, so that a pass which replaces one of these nodes replaces it here too.
    output = module.graph.output_node()
    user: Any = output.args[0]
    output.args = ((*user, *updated.values()),)
    without_needless_barriers(module)
    complex_as_pairs(traced)
    refuse_complex(module)
    scalars_as_vectors(module)
    open_pieces_as_slices(module)
    strided_as_rows(module)
    decompose(module, covered)
    refuse_random(module)
    violated, checks = violations(module)
    if violated is not None:
        output.args = ((*output.args[0], violated),)
    kernels_in_float32(module)
    promote(module)
    returned: Any = output.args[0]
    output.args = (returned[: len(user)],)
    _name_outputs(traced)
    module.graph.lint()
    values = returned[len(user) :]
    buffers = dict(zip(updated, values, strict=False))
    return Cleaned(buffers, None if violated is None else values[-1], checks)


def _name_outputs(traced: Traced) -> None:
    """The signature names the nodes that are returned now; constants it has by value."""
    output = traced.graph.output_node()
    returned: Any = output.args[0]
    for spec, node in zip(traced.outputs, returned, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
    output.args = (tuple(node for node in returned if isinstance(node, fx.Node)),)
