"""One update of all parameters, emitted into a graph: the optimizer's own, or a whole step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ondevice import contract
from ortrain.ondevice.making.optim.base import Optimizer
from ortrain.ondevice.making.optim.blocks import Block, Slot, Updated, blocks
from ortrain.program import Phase, Role, set_role


@dataclass(frozen=True)
class Update:
    """The results of one update, under the names that the contract has for them.

    Attributes:
        parameters: name → next value.
        states: name of the state → next value.
        step: int64 [1].
        grad_norm: float32 [1], before clipping; None where nothing is clipped.
    """

    parameters: dict[str, ir.Value]
    states: dict[str, ir.Value]
    step: ir.Value
    grad_norm: ir.Value | None

    def add_outputs(self, graph: ir.Graph) -> dict[str, str]:
        """Appends the results to a graph's outputs, in the contract's order, with their roles.

        Args:
            graph: that the update was emitted into.

        Returns:
            Output name → name of the input whose memory it may take.
        """
        aliases = {}
        for role, values in (
            (Role.UPDATED_PARAMETER, self.parameters),
            (Role.UPDATED_STATE, self.states),
        ):
            for name, value in values.items():
                graph.outputs.append(set_role(value, role, name))
                aliases[contract.updated(name)] = name
        graph.outputs.append(set_role(self.step, Role.UPDATED_STATE, contract.STEP))
        if self.grad_norm is not None:
            graph.outputs.append(set_role(self.grad_norm, Role.USER_OUTPUT))
        return aliases


def emit(
    op: Builder,
    optimizer: Optimizer,
    slots: Sequence[Slot],
    learning_rate: ir.Value,
    step: ir.Value,
) -> Update:
    """Emits one update of all parameters.

    Where updated values take the memory of the old ones and parameters are read for more than the
    update, ``learning_rate`` is one behind :func:`ortrain.ondevice.making.barrier.behind`.

    Args:
        op: emits nodes of the update's phase into the graph.
        optimizer: what an update is.
        slots: the parameters that are trained, with what belongs to them.
        learning_rate: float32 [1].
        step: int64 [1]; updates done before this one.
    """
    assert op.phase is Phase.UPDATE
    members: dict[tuple[float, float], list[Slot]] = {}
    for slot in slots:
        if shapes.static(slot.gradient) is None:
            slot.gradient.shape = slot.parameter.shape
        own = optimizer.group(slot.name)
        members.setdefault((own.weight_decay or 0.0, own.lr_scale), []).append(slot)
    updated: dict[str, Updated] = {}
    with op:
        by_group = {key: blocks(op, group) for key, group in members.items()}
        norm = clip = None
        if optimizer.max_norm is not None:
            norm = _norm(op, [block for group in by_group.values() for block in group])
            clip = op.Min(optimizer.max_norm / (norm + 1e-6), 1.0)
            norm.name = contract.GRAD_NORM
        for (weight_decay, lr_scale), group in by_group.items():
            rate = learning_rate if lr_scale == 1.0 else learning_rate * lr_scale
            rule = optimizer.rule(op, rate, step, weight_decay)
            for block in group:
                names = [slot.name for slot in block.slots]
                updated |= zip(names, block.update(rule, clip), strict=True)
        next_step = step + 1
    parameters = {slot.name: updated[slot.name].parameter for slot in slots}
    states = {
        contract.state(slot.name, kind): value
        for slot in slots
        for kind, value in updated[slot.name].states.items()
    }
    for name, value in (parameters | states | {contract.STEP: next_step}).items():
        value.name = contract.updated(name)
    return Update(parameters, states, next_step, norm)


def _norm(op: Builder, blocks: Sequence[Block]) -> ir.Value:
    """The 2-norm of all gradients, [1]."""
    squares = op.Concat(*(block.squares() for block in blocks), axis=0)
    return op.Sqrt(op.ReduceSum(squares, [0], keepdims=1))
