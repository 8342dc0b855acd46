"""Names of values that quantizers would make again: moved out of their way beforehand.

A quantizer calls what it makes of ``w`` ``w_quantized``, and takes what is there under such a name
for its own: a model with both had the one's numbers in the place of the other's, and answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

# What the names of made values go on with behind a value's or a node's: onnxruntime's, then ours.
_ENDS = (
    "_Abs_Max", "_DequantizeLinear", "_QuantizeLinear", "_ReduceM", "_bias_reshape", "_convert",
    "_output_quantized", "_quant", "_scale", "_zero_point",
    "_Q4", "_Q8", "_before", "_bfloat16", "_by_rows", "_columns", "_float16", "_folded", "_for_n",
    "_for_t", "_of_", "_narrow", "_product", "_qkv", "_rows", "_table", "_times_", "_wide",
    "/float", "/high", "/low", "/size", "/sum",
)  # fmt: skip
# Those that a quantizer makes once in a model.
_FIXED = ("fixed_quantization_range", "fixed_zero")
_DONE = "names that quantizers make have been moved"


def unused(model: ir.Model, name: str, *, among: Collection[str] | None = None) -> str:
    """The name, or one like it that no value of the model has.

    Args:
        model: whose values are looked at.
        name: to begin with.
        among: the names that there are, where they are known.
    """
    taken = {value.name for value in _values(model)} if among is None else among
    number, found = 1, name
    while found in taken:
        found = f"{name}.{number}"
        number += 1
    return found


def set_apart(model: ir.Model) -> None:
    """Gives values other names, in place, where a quantizer would make the same; only once.

    Inputs and outputs keep theirs: where one has such a name, what it would be made of is renamed.
    """
    if _DONE in model.meta:
        return
    model.meta[_DONE] = True
    values = {value.name: value for value in _values(model) if value.name}
    nodes = (node.name for graph in model.graphs() for node in graph if node.name)
    stems = {*values, *nodes}
    shown = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    for name, value in list(values.items()):
        if not (found := _stems(name, stems)):
            continue
        if id(value) not in shown:
            _rename(model, value, values)
            continue
        for stem in found:
            if stem == name or stem not in values:
                continue
            if id(values[stem]) in shown:
                _step_aside(model, values[stem], values)
            else:
                _rename(model, values[stem], values)


def _stems(name: str, stems: Collection[str]) -> list[str]:
    """Of what a quantizer would make the name; the name itself where it is made of nothing."""
    if name.startswith(_FIXED):
        return [name]
    found = []
    for end in _ENDS:
        place = name.find(end, 1)
        while place > 0:
            if name[:place] in stems:
                found.append(name[:place])
            place = name.find(end, place + 1)
    return found


def _rename(model: ir.Model, value: ir.Value, values: dict[str, ir.Value]) -> None:
    name = unused(model, f"{value.name}.own", among=values)
    values[name] = value
    value.name = name


def _step_aside(model: ir.Model, value: ir.Value, values: dict[str, ir.Value]) -> None:
    """Lets nodes read and make another value than an input or output, joined by an Identity."""
    name = unused(model, f"{value.name}.own", among=values)
    joined = ir.node("Identity", [value], name=f"{name}.joined")
    made = joined.outputs[0]
    made.type, made.shape = value.type, value.shape
    if value.producer() is not None:
        place = list(model.graph.outputs).index(value)
        made.name, value.name = value.name, name
        model.graph.append(joined)
        model.graph.outputs[place] = made
        values[name] = value
        return
    made.name = name
    for use in list(value.uses()):
        if use.node is not joined:
            use.node.replace_input_with(use.idx, made)
    model.graph.insert_before(next(iter(model.graph)), joined)
    values[name] = made


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.inputs
        yield from graph.initializers.values()
        for node in graph:
            yield from node.outputs
