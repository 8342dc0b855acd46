"""The models of an artifact: backward, accumulation, update, and the order of inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortrain.autodiff import differentiate
from ortrain.errors import GraphError, OrtrainWarning, listing
from ortrain.graph import shapes
from ortrain.graph.aliasing import check_aliases
from ortrain.graph.build import Builder
from ortrain.ondevice import contract
from ortrain.ondevice.making.accumulate import accumulate
from ortrain.ondevice.making.barrier import behind
from ortrain.ondevice.making.optim import Optimizer, Slot, State, emit
from ortrain.passes.pipeline import rewrite
from ortrain.program import Phase, Program, Role, role_of, set_role, target_of
from ortrain.runtime.onnxruntime.lowering import make_standard


def backward(
    program: Program, trainable: Iterable[str], inputs: Iterable[str] = ()
) -> tuple[Program, dict[str, ir.Value]]:
    """Adds the backward of the loss, and makes the program one of standard operators.

    Args:
        program: a forward with a loss; left as it is.
        trainable: names of parameters.
        inputs: names of the user's inputs whose gradients the program returns as ``<name>_grad``.

    Returns:
        The program, and the gradient of each trainable parameter that the loss depends on. They are
        outputs of the program. Without both there is no backward.

    Raises:
        GraphError: the loss is no float32 scalar, or depends on none of them.
        GradientError: a gradient does not exist.
    """
    trainable, inputs = list(trainable), list(inputs)
    loss = _loss_of(program)
    if not trainable and not inputs:
        result = program.clone()
        make_standard(result)
        result.name_values()
        return result, {}
    ones = np.ones(shapes.static(loss) or (), np.float32)
    for name in inputs:
        if (dtype := program.input(name).dtype) != ir.DataType.FLOAT:
            raise GraphError(
                f"the input {name!r} has no gradient", because=f"it is {dtype}, and not float32"
            )
    result = differentiate(program, [*trainable, *inputs], [loss.name or ""])
    for value in result.inputs(Role.OUTPUT_GRADIENT):
        seed = Builder(result.graph, opset=result.opset).constant(ones)
        result.graph.inputs.remove(value)
        ir.convenience.replace_all_uses_with(value, seed)
    rewrite(result, "training")
    make_standard(result)
    result.name_values()
    found = {target_of(v): v for v in result.outputs(Role.GRADIENT)}
    without = [name for name in (*trainable, *inputs) if name not in found]
    if not found:
        raise GraphError(
            "the loss depends on no parameter that is to be trained",
            because=f"asked for: {listing(without)}",
            help="name in requires_grad what the loss is computed from",
        )
    if without:
        warnings.warn(
            f"the loss does not depend on {listing(without)}: frozen instead of trained",
            OrtrainWarning,
            stacklevel=4,
        )
    for name in inputs:
        if name in found:  # for the user, as any result
            found[name].name = contract.gradient(name)
            set_role(found[name], Role.USER_OUTPUT)
    return result, {name: found[name] for name in trainable if name in found}


def _loss_of(program: Program) -> ir.Value:
    (loss,) = program.outputs(Role.LOSS)
    known = shapes.dims(loss)
    if loss.dtype != ir.DataType.FLOAT or (known is not None and shapes.size(loss) != 1):
        raise GraphError(
            f"the loss {loss.name!r} is {loss.dtype} {[*known] if known is not None else '?'}",
            because="what is trained on is a float32 scalar",
            help='reduce it: reduction="mean", or a loss= of your own',
        )
    return loss


def accumulating(program: Program, gradients: Mapping[str, ir.Value]) -> Program:
    """The training model: each gradient is added to what lies in its buffer.

    Args:
        program: of :func:`backward`; changed and returned.
        gradients: outputs of it, by parameter; without any it is the training model itself.
    """
    if not gradients:
        return program
    graph = program.graph
    kind = ir.TensorType(ir.DataType.BOOL)
    reset = ir.Value(name=contract.LAZY_RESET_GRAD, shape=ir.Shape([1]), type=kind)
    buffers = {
        name: ir.Value(name=contract.accumulation_buffer(name), shape=g.shape, type=g.type)
        for name, g in gradients.items()
    }
    graph.inputs.extend(set_role(v, Role.GRADIENT, name) for name, v in buffers.items())
    graph.inputs.append(set_role(reset, Role.HYPERPARAMETER))
    with Builder(graph, opset=program.opset, prefix="sum", phase=Phase.BACKWARD) as op:
        sums = accumulate(op, gradients, buffers, reset)
    _take_out(graph, gradients)
    graph.outputs.extend(set_role(value, Role.GRADIENT, name) for name, value in sums.items())
    program.aliases = {value.name or "": buffers[name].name or "" for name, value in sums.items()}
    check_aliases(graph, program.aliases)
    return program


def stepping(
    program: Program,
    gradients: Mapping[str, ir.Value],
    optimizer: Optimizer,
    states: Iterable[State],
) -> Program:
    """The train step model: forward, backward and update in one run.

    Args:
        program: of :func:`backward`; changed and returned.
        gradients: outputs of it, by parameter.
        optimizer: what an update is.
        states: of the parameters.
    """
    graph = program.graph
    _take_out(graph, gradients)

    def feed(name: str, dtype: ir.DataType, shape: Sequence[int], role: Role) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        graph.inputs.append(set_role(value, role))
        return value

    kept: dict[str, dict[str, ir.Value]] = {name: {} for name in gradients}
    for each in states:
        role = Role.OPTIMIZER_STATE
        kept[each.parameter][each.kind] = feed(each.name, each.dtype, each.shape, role)
    rate = feed(contract.LEARNING_RATE, ir.DataType.FLOAT, [1], Role.HYPERPARAMETER)
    step = feed(contract.STEP, ir.DataType.INT64, [1], Role.HYPERPARAMETER)
    slots = [Slot(n, program.input(n), g, kept[n]) for n, g in gradients.items()]
    with Builder(graph, opset=program.opset, prefix="update", phase=Phase.UPDATE) as op:
        rate = behind(op, rate, step, [*gradients.values(), *graph.outputs])
        program.aliases = emit(op, optimizer, slots, rate, step).add_outputs(graph)
    check_aliases(graph, program.aliases)
    return program


def _take_out(graph: ir.Graph, gradients: Mapping[str, ir.Value]) -> None:
    for value in gradients.values():
        graph.outputs.remove(value)


def select(program: Program, names: Sequence[str]) -> None:
    """Leaves the loss and the named outputs, in this order, and all that is no user output.

    Raises:
        GraphError: there is no value of such a name.
    """
    graph = program.graph
    values = {v.name: v for v in graph.inputs} | {v.name: v for n in graph for v in n.outputs}
    if missing := [name for name in names if name not in values]:
        raise GraphError(
            f"the model has no value {missing[0]!r}",
            help=f"its outputs are {listing([v.name or '' for v in program.outputs()])}",
        )
    others = [v for v in graph.outputs if role_of(v) not in (Role.LOSS, Role.USER_OUTPUT)]
    losses = program.outputs(Role.LOSS)
    chosen = [values[name] for name in names if values[name] not in losses]
    graph.outputs.clear()
    graph.outputs.extend([*losses, *chosen, *others])
    for value in chosen:
        set_role(value, Role.USER_OUTPUT)


def arrange(program: Program, trainable: Sequence[str], tensors: Sequence[str]) -> None:
    """Puts inputs into the contract's order, gives scalars its shapes, drops what nothing reads.

    Args:
        program: changed in place.
        trainable: the parameters that are trained, in order.
        tensors: all parameters and buffers, in order.

    Raises:
        GraphError: an input of the user's has a name that the contract reserves.
    """
    graph = program.graph
    for value in program.inputs(Role.USER_INPUT):
        if value.name in contract.RESERVED:
            raise GraphError(
                f"the model has an input {value.name!r}",
                because="in artifacts that name is taken for an input of the training itself",
                help="give the model's input another name",
            )
    _widen_seed(program)
    ranks = {Role.USER_INPUT: 0, Role.PARAMETER: 1, Role.BUFFER: 3, Role.SEED: 4}
    place = {name: i for i, name in enumerate((*trainable, *tensors))}

    def rank(value: ir.Value) -> tuple[int, int]:
        role = role_of(value)
        group = ranks.get(role, 5) if role is not None else 0
        if role is Role.PARAMETER and value.name not in trainable:
            group = 2
        within = place.get(value.name or "", 0) if group in (1, 2, 3) else 0
        return group, within

    inputs = sorted(graph.inputs, key=rank)
    graph.inputs.clear()
    graph.inputs.extend(v for v in inputs if v.uses() or v.is_graph_output())
    order = [Role.LOSS, Role.USER_OUTPUT, Role.UPDATED_BUFFER]
    outputs = sorted(
        graph.outputs, key=lambda v: order.index(r) if (r := role_of(v)) in order else len(order)
    )
    graph.outputs.clear()
    graph.outputs.extend(outputs)


def _widen_seed(program: Program) -> None:
    """The seed is a scalar where masks are drawn, and [1] in the contract."""
    for value in program.inputs(Role.SEED):
        wide = ir.Value(name=contract.SEED, shape=ir.Shape([1]), type=value.type)
        op = Builder.before(program.graph[0], opset=program.opset, prefix=contract.SEED)
        ir.convenience.replace_all_uses_with(value, op.Squeeze(wide, [0]))
        program.graph.inputs.remove(value)
        program.graph.inputs.append(set_role(wide, Role.SEED))
