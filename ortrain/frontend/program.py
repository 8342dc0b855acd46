"""From Dynamo's graph to a program, and what a call has to give it and to make of its outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from ortrain.capture.call import Leaf, free_name
from ortrain.capture.fx.complex_pairs import given_as_pairs
from ortrain.capture.fx.memory import memory
from ortrain.capture.fx.regions import mark_regions
from ortrain.capture.onnx import lift
from ortrain.capture.onnx.translations.base import SymbolicSize
from ortrain.capture.origin import IN_PYTORCH, captured_error
from ortrain.capture.traced import Traced
from ortrain.capture.translation import program_of
from ortrain.frontend.aten import aliases_of, aten_of
from ortrain.frontend.grids import grids_as_views
from ortrain.frontend.layouts import decide_layouts, stored
from ortrain.frontend.original import Original
from ortrain.frontend.views import Outside, all_inside, outside_of
from ortrain.frontend.writes import written
from ortrain.program import Program
from ortrain.pytorch import pytree
from ortrain.pytorch.autocast import active
from ortrain.pytorch.conditions import decide_bounds, decide_sizes
from ortrain.pytorch.layout import inverse
from ortrain.pytorch.sources import is_buffer, is_number, name_of
from ortrain.pytorch.tracing import apart, values_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Translated:
    """A program of one of Dynamo's graphs.

    Attributes:
        program: the forward.
        places: of its inputs among the graph's, by name.
        numbers: which of them are numbers, and tensors without axes in the program.
        fixed: places of all numbers, also of those that are handed over in tensors. A checkpoint's
            repetition does not change them.
        pairs: which stand for pairs of real numbers, and are complex tensors in the graph.
        copied: places of those that the graph takes copies of, which the caller's writes leave.
        unread: places of those that PyTorch's backward does not read, and that are not written to.
        outside: what becomes of the program's outputs.
        layouts: of results that lie in memory in another order than their axes, that order, and
            what undoes it.
        original: the graph as PyTorch runs it.
    """

    program: Program
    places: dict[str, int]
    numbers: list[int]
    fixed: list[int]
    pairs: list[int]
    copied: list[int]
    unread: set[int]
    outside: Outside
    layouts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    original: Original


def translated(
    module: fx.GraphModule, real: Sequence[Any], opset: int = 21, *, whole: bool = False
) -> Translated:
    """The program of a graph, made while Dynamo waits for it.

    Args:
        module: Dynamo's graph.
        real: its inputs at the call that is being compiled.
        opset: of the program.
        whole: whether the program has all tensors that the graph returns for outputs, views of
            inputs and of one another among them, and takes for granted what the code asks of
            values: one that runs beside PyTorch.

    Raises:
        CaptureError: it has no translation.
    """
    with apart():
        while True:
            try:
                return _translated(module, real, opset, whole)
            except SymbolicSize as error:
                values, error.values = error.values, ()
                if not decide_sizes(values):
                    raise


def _translated(module: fx.GraphModule, real: Sequence[Any], opset: int, whole: bool) -> Translated:
    holders = module.graph.find_nodes(op="placeholder")
    decide_bounds(node.meta.get("example_value") for node in module.graph.nodes)
    fakes = aliases_of([holder.meta["example_value"] for holder in holders], list(real))
    autocast = active()
    graph = aten_of(module, fakes)
    decide_layouts(graph.graph)
    inputs = graph.graph.find_nodes(op="placeholder")
    output = graph.graph.output_node()
    flat, _ = pytree.tree_flatten(output.args[0])
    outside = all_inside(flat) if whole else outside_of(graph, flat)
    # Where outputs are computed from views, what passes there is asked of PyTorch.
    output.args = ((*outside.roots, *(outside.viewed if outside.links else ())),)
    original = fx.GraphModule(graph, _copy(graph.graph))
    output.args = (tuple(outside.roots),)
    mark_regions(graph, autocast)
    grids_as_views(graph)
    names = _names(holders)
    _sizes_of_tensors(graph.graph, inputs)
    changed = written(graph.graph)
    copied = _cloned(graph.graph) - changed
    unread = {i for i in _unread(graph.graph, inputs, real) if inputs[i] not in changed}
    present = {*graph.graph.find_nodes(op="placeholder")}
    specs, leaves, held, places = [], [], {}, {}
    numbers: list[int] = []
    pairs: list[int] = []
    for i, (node, value) in enumerate(zip(inputs, real, strict=True)):
        if node not in present:
            continue
        places[names[i]] = i
        kind = InputKind.USER_INPUT if node in copied else _kind(holders[i], value, node in changed)
        if _is_pairs(node, value, changed):
            kind = InputKind.USER_INPUT
            pairs.append(i)
        persistent = True if kind is InputKind.BUFFER else None
        specs.append(InputSpec(kind, TensorArgument(node.name), names[i], persistent))
        if kind is InputKind.USER_INPUT:
            is_plain = not isinstance(node.meta["val"], Tensor)
            numbers += [i] if is_plain else []
            leaves.append(Leaf(i, names[i], torch.empty(()) if is_plain else node.meta["val"]))
        else:
            held[names[i]] = value
    constants = _lift_constants(graph, specs, set(names))
    outputs = [
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(root.name), None)
        for root in outside.roots
    ]
    traced = Traced(graph, specs, outputs, constants, held)
    # Before writes in place make new tensors.
    orders = {i: stored(root.meta["val"]) for i, root in enumerate(outside.roots)}
    turned = {i: axes for i, axes in orders.items() if axes != tuple(range(len(axes)))}
    layouts = {i: (axes, inverse(axes)) for i, axes in turned.items()}
    state = lift.State(
        tuple(n for n, t in held.items() if isinstance(t, nn.Parameter)),
        tuple(n for n, t in held.items() if not isinstance(t, nn.Parameter)),
        {name: name for name in held},
    )
    # Each operator is marked with its autocast by now: another one around all would replace that.
    program = program_of(traced, opset, leaves, state, checked=not whole)
    places_written = [i for i, node in enumerate(inputs) if node in changed]
    own = Original(original, places_written, autocast)
    copies = [i for i, node in enumerate(inputs) if node in copied]
    fixed = [i for i in places.values() if is_number(holders[i])]
    return Translated(program, places, numbers, fixed, pairs, copies, unread, outside, layouts, own)


def _is_pairs(node: fx.Node, value: Any, changed: Collection[fx.Node]) -> bool:
    """Whether an input is complex, and stands for pairs of real numbers from now on."""
    if not (isinstance(value, Tensor) and value.is_complex()) or value.requires_grad:
        return False
    return node not in changed and given_as_pairs(node)


def _cloned(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that the graph clones: a program has no copies."""
    clones = [node for node in graph.nodes if node.target is aten.clone.default]
    return {*graph.find_nodes(op="placeholder")} & {node.args[0] for node in clones}


def _unread(graph: fx.Graph, inputs: Sequence[fx.Node], real: Sequence[Any]) -> set[int]:
    """Places of inputs that PyTorch's backward does not read.

    What is made of them needs no gradient, and has memory of its own.
    """
    tensors = {i for i, value in enumerate(real) if isinstance(value, Tensor)}
    needing = {inputs[i] for i in tensors if real[i].requires_grad}
    read = {memory(node) for node in needing}
    for node in graph.nodes:
        if node.op != "output" and not needing.isdisjoint(node.all_input_nodes):
            needing.add(node)
            read |= {memory(each) for each in node.all_input_nodes}
    return {i for i in tensors if memory(inputs[i]) not in read}


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(graph, values))
    for node in copied.nodes:  # what a trace knows of each value is much, and PyTorch asks for none
        node.meta = {"custom": node.meta.get("custom")}
    return copied


def _names(holders: Sequence[fx.Node]) -> list[str]:
    taken: set[str] = {"seed"}
    found = []
    for holder in holders:
        taken.add(name := free_name(name_of(holder), taken))
        found.append(name)
    return found


def _kind(holder: fx.Node, value: Any, written: bool) -> InputKind:
    if isinstance(value, nn.Parameter):
        return InputKind.PARAMETER
    return InputKind.BUFFER if written or is_buffer(holder) else InputKind.USER_INPUT


def _sizes_of_tensors(graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    """Reads a size off a tensor that has it, where Dynamo hands it over as a number.

    A number that no tensor has as a size stays an input.
    """
    for node in inputs:
        if isinstance(node.meta["val"], Tensor):
            continue
        read = _size_of(graph, inputs, node.meta["val"]) if node.users else None
        if read is not None:
            node.replace_all_uses_with(read)
        if not node.users:
            graph.erase_node(node)


def _size_of(graph: fx.Graph, inputs: Sequence[fx.Node], size: Any) -> fx.Node | None:
    for node in inputs:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            continue
        for axis, each in enumerate(value.shape):
            if isinstance(each, torch.SymInt) and each.node.expr == size.node.expr:
                with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                    read = graph.call_function(aten.sym_size.int, (node, axis))
                read.meta["val"] = each
                return read
    return None


def _lift_constants(
    module: fx.GraphModule, specs: list[InputSpec], taken: set[str]
) -> dict[str, Tensor]:
    """Tensors that the trace has met outside of the inputs become inputs."""
    graph, constants = module.graph, {}
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        if not isinstance(value, Tensor):
            continue
        if (value := values_of(value)) is None:
            raise captured_error(
                node.next,
                "a tensor that the code makes has no values while it is traced",
                because="a graph would have it as a constant",
                help=IN_PYTORCH,
            )
        name = free_name(node.target, taken)
        taken.add(name)
        constants[name] = value
        with graph.inserting_before(next(iter(graph.nodes))):
            holder = graph.placeholder(name)
        holder.meta = {**node.meta}
        node.replace_all_uses_with(holder)
        graph.erase_node(node)
        specs.insert(0, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(holder.name), name))
    return constants
