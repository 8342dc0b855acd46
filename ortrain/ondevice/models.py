"""The models of an artifact as programs: loss, backward, accumulation, and the order of inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from ortrain.autodiff import differentiate
from ortrain.errors import GraphError, OrtrainWarning, listing
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ondevice import contract
from ortrain.passes.pipeline import rewrite
from ortrain.program import Phase, Program, Role, role_of, set_role
from ortrain.runtime.onnxruntime.lowering import make_standard


def backward(program: Program, trainable: Iterable[str]) -> tuple[Program, dict[str, ir.Value]]:
    """Adds the backward of the loss, and makes the program one of standard operators.

    Args:
        program: a forward with a loss; left as it is.
        trainable: names of parameters.

    Returns:
        The program, and the gradient of each trainable parameter that the loss depends on. They are
        outputs of the program.

    Raises:
        GraphError: the loss is no float32 scalar, or depends on none of them.
        GradientError: a gradient does not exist.
    """
    trainable = list(trainable)
    loss = _loss_of(program)
    result = differentiate(program, trainable, [loss.name or ""])
    for value in result.inputs(Role.OUTPUT_GRADIENT):
        one = Builder(result.graph, opset=result.opset).constant(1.0, ir.DataType.FLOAT)
        result.graph.inputs.remove(value)
        ir.convenience.replace_all_uses_with(value, one)
    rewrite(result, "training")
    make_standard(result)
    result.name_values()
    found = {v.metadata_props["ortrain.target"]: v for v in result.outputs(Role.GRADIENT)}
    without = [name for name in trainable if name not in found]
    if not found:
        raise GraphError(
            "the loss depends on no parameter that is to be trained",
            because=f"asked for: {listing(without)}" if without else "requires_grad is empty",
            help="name in requires_grad what the loss is computed from",
        )
    if without:
        warnings.warn(
            f"the loss does not depend on {listing(without)}: frozen instead of trained",
            OrtrainWarning,
            stacklevel=4,
        )
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


def accumulating(program: Program, gradients: dict[str, ir.Value]) -> Program:
    """The training model: each gradient is added to what lies in its buffer.

    One ``If`` holds both ways, so that a reset reads no buffer: 0.12 ms for a million elements,
    where ``Where`` takes 0.29 ms, and a product with zero would keep a NaN.

    Args:
        program: of :func:`backward`; changed and returned.
        gradients: outputs of it.
    """
    graph = program.graph
    kind = ir.TensorType(ir.DataType.BOOL)
    flag = ir.Value(name=contract.LAZY_RESET_GRAD, shape=ir.Shape([1]), type=kind)
    buffers = [_like(g, contract.accumulation_buffer(name)) for name, g in gradients.items()]
    branches = []
    for added in (False, True):
        nodes = []
        for gradient, buffer in zip(gradients.values(), buffers, strict=True):
            inputs = [gradient, buffer] if added else [gradient]
            node = ir.Node("", "Add" if added else "Identity", inputs, num_outputs=1)
            result = node.outputs[0]
            shapes.assign(result, gradient.dtype, gradient.shape)
            result.name = f"{gradient.name}/{'sum' if added else 'alone'}"
            nodes.append(node)
        outputs = [node.outputs[0] for node in nodes]
        branches.append(ir.Graph([], outputs, nodes=nodes, name="add" if added else "reset"))
    alone, total = branches
    with Builder(graph, opset=program.opset, phase=Phase.BACKWARD) as op:
        results = op.node("If", [flag], outputs=len(buffers), then_branch=alone, else_branch=total)
    for value in gradients.values():
        graph.outputs.remove(value)
    results = (results,) if isinstance(results, ir.Value) else results
    for (name, gradient), result in zip(gradients.items(), results, strict=True):
        shapes.assign(result, gradient.dtype, gradient.shape)
        result.name = contract.accumulation_out(name)
        graph.outputs.append(set_role(result, Role.GRADIENT, name))
        program.aliases[result.name] = contract.accumulation_buffer(name)
    graph.inputs.extend(set_role(buffer, Role.GRADIENT) for buffer in buffers)
    graph.inputs.append(set_role(flag, Role.HYPERPARAMETER))
    return program


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=value.type)


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
    """
    graph = program.graph
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
