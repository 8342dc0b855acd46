"""From a translated model to a program: ordered inputs with roles, updated buffers as outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import onnx_ir as ir
import torch
from torch import fx
from torch.nn.parameter import is_lazy

from ortrain.capture.call import Leaf, free_name
from ortrain.capture.onnx.translations.base import numbered
from ortrain.capture.origin import checkpoint_of, origin
from ortrain.errors import CaptureError, listing
from ortrain.program import (
    ORIGIN,
    PHASE,
    REGION,
    Check,
    Phase,
    Program,
    Role,
    note_checks,
    role_of,
    set_role,
)


@dataclass(frozen=True)
class State:
    """The tensors that a module holds.

    Attributes:
        parameters: in the order of ``named_parameters()``.
        buffers: in the order of ``named_buffers()``.
        first: every name that a tensor goes by → the one that ``named_*()`` lists.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    first: dict[str, str]


def uninitialized(module: torch.nn.Module) -> list[str]:
    """The parameters and buffers of lazy modules that have not been called yet."""
    held = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in held if is_lazy(tensor)]


def state_of(module: torch.nn.Module) -> State:
    """Reads names and ties off a module.

    Raises:
        CaptureError: a lazy module has not been called yet.
    """
    if names := uninitialized(module):
        raise CaptureError(
            f"{listing(names)} have no size yet",
            because="lazy modules take their sizes from their first call",
            help="call the module once before",
        )
    first: dict[str, str] = {}
    seen: dict[int, str] = {}
    everything = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in everything:
        first[name] = seen.setdefault(id(tensor), name)
    return State(
        tuple(name for name, _ in module.named_parameters()),
        tuple(name for name, _ in module.named_buffers()),
        first,
    )


def finish_nodes(model: ir.Model) -> None:
    """Origin, phase and region on every node; nothing of upstream's bookkeeping."""
    for node in model.graph.all_nodes():
        source = node.meta.get("node")
        node.metadata_props.clear()
        node.metadata_props[PHASE] = Phase.FORWARD.value
        if isinstance(source, fx.Node):
            if where := origin(source):
                node.metadata_props[ORIGIN] = where
            if region := checkpoint_of(source):
                node.metadata_props[REGION] = region
        node.meta.clear()
        node.version = None
        node.name = None
        for value in node.outputs:
            value.shape = numbered(value.shape)
    for value in model.graph.inputs:
        value.shape = numbered(value.shape)
    model.graph.metadata_props.clear()


def lift(
    model: ir.Model,
    leaves: Sequence[Leaf],
    state: State,
    updated: dict[str, str],
    output_names: list[str],
    seed: ir.Value | None,
    violations: str | None = None,
    checks: Sequence[Check] = (),
    held: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """Gives inputs and outputs their order, names and roles.

    Args:
        model: as translated; changed in place.
        leaves: of the call; the model's inputs are its tensors in the same order.
        state: the module's tensors.
        updated: buffer → name of the value that updates it.
        output_names: of the user outputs, in order.
        seed: the seed value, where the graph draws random numbers.
        violations: name of the value with the bits of the checks that do not hold.
        checks: by their bits.
        held: constants of the trace that are inputs → names of these.
    """
    graph = model.graph
    values = {v.name: v for node in graph for v in node.outputs}
    values.update({v.name: v for v in graph.inputs})
    user = list(graph.inputs)
    first = {**state.first, **held}
    entered: dict[str, ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if name not in first:  # a constant of the trace
            value.name = name
            continue
        del graph.initializers[name]
        value.const_value = None
        kept = entered.setdefault(first[name], value)
        if kept is not value:  # tied: one input for all names
            ir.convenience.replace_all_uses_with(value, kept, replace_graph_outputs=True)
    new_buffers = {state.first[name]: values[value] for name, value in updated.items()}

    graph.inputs.clear()
    given = [leaf for leaf in leaves if leaf.is_tensor]
    for leaf, value in sorted(zip(given, user, strict=True), key=lambda pair: pair[0].position):
        _enter(graph, value, leaf.name, Role.USER_INPUT)
    if seed is not None:
        taken = {*state.first, *(leaf.name for leaf in leaves)}
        _enter(graph, seed, free_name("seed", taken), Role.SEED)
    buffers = (*state.buffers, *held.values())
    for names, role in ((buffers, Role.BUFFER), (state.parameters, Role.PARAMETER)):
        for name in names:
            if name in entered:
                _enter(graph, entered[name], name, role)

    outputs = [
        (v, name, Role.USER_OUTPUT, "") for v, name in zip(graph.outputs, output_names, strict=True)
    ]
    outputs += [(v, f"{n}.updated", Role.UPDATED_BUFFER, n) for n, v in new_buffers.items()]
    if violations is not None:
        outputs.append((values[violations], "violations", Role.CHECK, ""))
    graph.outputs.clear()
    set_outputs(graph, outputs)
    if violations is not None:
        note_checks(graph.outputs[-1], checks)
    program = Program(model)
    program.import_domains()
    return program


def _enter(graph: ir.Graph, value: ir.Value, name: str, role: Role) -> None:
    value.name = name
    value.metadata_props.clear()
    graph.inputs.append(set_role(value, role))


def set_outputs(graph: ir.Graph, outputs: Iterable[tuple[ir.Value, str, Role, str]]) -> None:
    """Has a graph return values, each of its own and computed by a node.

    Args:
        graph: without outputs.
        outputs: values, with names, roles and what they belong to.
    """
    used = {v.name for v in graph.inputs if v.name} | set(graph.initializers)
    seen: set[ir.Value] = set()
    final = []
    for value, name, role, target in outputs:
        producer = value.producer()
        if producer is None or value in seen:
            copy = ir.Node("", "Identity", [value], num_outputs=1)
            copy.metadata_props[PHASE] = Phase.FORWARD.value
            graph.append(copy)
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            value = copy.outputs[0]
        seen.add(value)
        value.metadata_props.clear()
        name = free_name(name, used)
        used.add(name)
        final.append((set_role(value, role, target), name))
    names = {name for _, name in final} | used
    for node in graph:
        for value in node.outputs:
            if value.name in names:
                value.name = free_name(value.name, names)
    for value, name in final:
        value.name = name
        graph.outputs.append(value)


def drop_unused_inputs(program: Program) -> list[str]:
    """Removes inputs that nothing reads; returns the names of the user inputs among them."""
    dropped = []
    for value in list(program.graph.inputs):
        if not value.uses() and not value.is_graph_output():
            program.graph.inputs.remove(value)
            if role_of(value) is Role.USER_INPUT:
                dropped.append(value.name or "")
    return dropped
