"""Branches and loops: each sub-graph is a function inside the function, which reads around it."""

from __future__ import annotations

from ortrain.graph import shapes
from ortrain.runtime.aten.operands import Host, Size, Tensor
from ortrain.runtime.aten.table import kernel


@kernel("If")
def branch(t, cond, *, then_branch, else_branch, node):
    cond = _condition(t, cond)
    if isinstance(cond, bool):
        graph = then_branch if cond else else_branch
        t.nodes(graph)
        return [t.operand(value) for value in graph.outputs]
    blocks = [t.function(then_branch, "then"), t.function(else_branch, "otherwise")]
    count = len(node.outputs)
    results = t.call("control.choose", cond, *blocks, outputs=count, is_tuple=True)
    _share(results, *(block.results for block in blocks))
    return results


@kernel("Loop")
def loop(t, M=None, cond=None, *v_initial, body, node):
    """Inside, the condition holds, and the number of the step is a Python int."""
    number, condition, *entries = body.inputs
    step = Size(t.name("step"))
    states = [t.tensor(v) for v in v_initial]
    asks = True

    def results(found):
        nonlocal asks
        goes_on, *rest = found
        goes_on = _condition(t, goes_on)
        asks = goes_on is not True
        return [*([goes_on] if asks else []), *map(t.tensor, rest)]

    block = t.function(
        body,
        "body",
        results,
        {number: Host([step], shapes.rank(number) != 1), condition: t.constant(True)},
        # A step may change sizes; that it keeps the rank is seen at run time.
        {v: s.dims and (None,) * s.rank for v, s in zip(entries, states, strict=True)},
    )
    block.numbers.append(step)
    cond = None if cond is None else _condition(t, cond)
    made = t.call(
        "control.loop",
        block,
        None if M is None else t.ints(M)[0],
        None if cond is True else cond,
        states,
        len(node.outputs) - len(states),
        asks=asks,
        outputs=len(node.outputs),
        is_tuple=True,
    )
    _share(made[: len(states)], states, block.results)
    return made


def _has_no_batch(node):
    """Before opset 9 the first input, absent mostly, gives the lengths of the batch's rows."""
    return None not in node.inputs


@kernel("Scan", when=_has_no_batch)
def scan(
    t, *operands, body, num_scan_inputs, scan_input_axes=None, scan_input_directions=None,
    scan_output_axes=None, scan_output_directions=None,
):  # fmt: skip
    tensors = [t.tensor(operand) for operand in operands]
    count = len(tensors) - num_scan_inputs
    states, slices = tensors[:count], tensors[count:]
    dims = [state.dims for state in states]
    for x, axis in zip(slices, scan_input_axes or [0] * len(slices), strict=True):
        dims.append(x.dims and tuple(d for i, d in enumerate(x.dims) if i != axis % x.rank))
    block = t.function(body, "body", dims=dict(zip(body.inputs, dims, strict=True)))
    options = {
        "axes": scan_input_axes,
        "backwards": scan_input_directions,
        "collected_axes": scan_output_axes,
        "collected_backwards": scan_output_directions,
    }
    made = t.call(
        "control.scan",
        block,
        states,
        slices,
        len(body.outputs) - count,
        **{name: value for name, value in options.items() if any(value or ())},
        outputs=len(body.outputs),
        is_tuple=True,
    )
    _share(made[:count], states, block.results)
    return made


def _condition(t, operand):
    """One truth value: known, a Python number of the running function, or a tensor."""
    if isinstance(operand, Host):
        (item,) = operand.items
        return item if isinstance(item, Size) else bool(item)
    known = t.number(operand)
    return operand if known is operand else bool(known)


def _share(results, *operands):
    """Notes that the results may lie in the memory of one another and of these."""
    every = [*results, *(operand for row in operands for operand in row)]
    roots = frozenset().union(*(o.roots for o in every if isinstance(o, Tensor)))
    for result in results:
        result.roots = roots
