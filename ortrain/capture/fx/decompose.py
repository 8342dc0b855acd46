"""Operators without a translation, replaced by those that PyTorch composes them of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ortrain.capture.fx.checks import remove_checks
from ortrain.capture.fx.functional import functionalise_composed
from ortrain.capture.fx.pieces import written_pieces_as_views
from ortrain.capture.fx.splice import from_same_place, splice, substitute
from ortrain.capture.onnx.translations.base import symbolic
from ortrain.capture.origin import captured_error, located, operator_name, own_reason
from ortrain.errors import CaptureError
from ortrain.pytorch.operators import (
    OpOverload,
    decomposition_of,
    is_composite,
    is_mutable,
    schema_of,
)
from ortrain.pytorch.tracing import enable_python_dispatcher, fake_mode_of

Covered = Callable[[fx.Node], bool]


def decompose(module: fx.GraphModule, covered: Covered) -> None:
    """Replaces operators without a translation by those that PyTorch composes them of.

    One by one: decomposing the whole program, as upstream does, costs as much as exporting it, and
    takes apart what should stay whole.
    """
    for _ in range(8):  # a decomposition may need another
        replaced = [decompose_call(module, node, covered) for node in missing(module, covered)]
        if not any(replaced):
            return


def missing(module: fx.GraphModule, covered: Covered) -> list[fx.Node]:
    """The calls of the graph that have no translation; ``getitem`` needs none."""
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return [n for n in calls if n.target is not operator.getitem and not covered(n)]


def decompose_call(module: fx.GraphModule, node: fx.Node, covered: Covered | None = None) -> bool:
    """Replaces one call by what PyTorch composes it of; whether it could.

    Args:
        module: whose graph is changed in place.
        node: the call.
        covered: tells what has a translation. Primitives that have none (``prims::lgamma``) are
            nothing to compose of: autograd knows no derivative of them, as it does of the call.
    """
    target = node.target
    if not isinstance(target, OpOverload) or is_mutable(target):
        return False
    if "stream" in node.kwargs:  # what it draws would be numbered anew
        return False
    if schema_of(target).name.endswith("_backward"):  # what it does not depend on gets zeros
        return False
    composed = is_composite(target)
    rule = None if composed else decomposition_of(target)
    if not composed and rule is None:
        return False
    tensors = list(node.all_input_nodes)
    values = [n.meta["val"] for n in tensors]

    def call(*replaced: Any) -> Any:
        given = dict(zip(tensors, replaced, strict=True))
        args: Any = fx.node.map_arg(node.args, lambda n: given[n])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: given[n])
        result = rule(*args, **kwargs) if rule else target.decompose(*args, **kwargs)
        # Named tuples of torch's own would be calls of their classes in the graph.
        return tuple(result) if isinstance(result, tuple | list) else result

    mode = fake_mode_of(values)
    fixed = count_of_fixed_sizes(mode)
    try:
        with mode if mode is not None else torch.no_grad(), enable_python_dispatcher():
            inner = make_fx(call, tracing_mode="real")(*values)
            written_pieces_as_views(inner)
            functionalise_composed(inner.graph)  # many work in place on what they have just made
    except CaptureError:
        raise
    except Exception as error:
        raise captured_error(
            node,
            f"no translation to ONNX for {target}",
            because=own_reason(error, "taking it apart")
            or "it is composed of others in a way that depends on sizes or values "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0][:200]})",
            help="replace the operator, or leave this module to eager",
        ) from error
    if count_of_fixed_sizes(mode) != fixed:  # of which the conditions on the sizes know nothing
        raise located(node, symbolic(operator_name(target)))
    remove_checks(inner)
    if covered is not None and any(_is_primitive(each) for each in missing(inner, covered)):
        return False
    with module.graph.inserting_before(node):
        results, made = splice(module, inner, tensors, prefix=f"_decomposed_{node.name}")
    for copied in made:
        from_same_place(copied, node)
    _note_values(results, node.meta["val"])
    substitute(node, results)
    return True


def _is_primitive(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "prims"


def count_of_fixed_sizes(mode: Any) -> int:
    """How many sizes that were symbols are numbers by now."""
    environment = getattr(mode, "shape_env", None)
    if environment is None:
        return 0
    return sum(bool(value.is_number) for value in environment.replacements.values())


def _note_values(results: Any, values: Any) -> None:
    """Results hold what the operator held: a trace of ``squeeze_`` notes the shape before it."""
    if isinstance(results, fx.Node):
        results.meta["val"] = values
    elif isinstance(results, list | tuple):
        for result, value in zip(results, values, strict=True):
            _note_values(result, value)
