"""A torch module → its forward in both modes, with a loss written in Python inside or without."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortrain.aside import modes_kept
from ortrain.errors import GraphError
from ortrain.frontend.export import export
from ortrain.key_value_cache import without_cache
from ortrain.ondevice import contract
from ortrain.ondevice.making.forward import Forward
from ortrain.program import Program, Role, set_role, target_of


def from_module(
    module: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    targets: Sequence[Any],
    loss: Callable[..., torch.Tensor] | None,
    requires_grad: Collection[str] | None,
) -> Forward:
    """Exports a module in training mode and in evaluation mode.

    Parts of a module in training mode that are in evaluation mode stay so: a frozen normalization.
    Decoders answer without a key-value cache.

    Args:
        module: left as it is.
        inputs: example arguments of its ``forward``, by position or by name.
        targets: example arguments of ``loss`` after the first.
        loss: ``loss(outputs, *targets)`` of what the module returns; None leaves it to the graph.
        requires_grad: names of the parameters to train; by default those that require a gradient.

    Raises:
        ValueError: there are targets without a loss.
        GraphError: a name is no parameter, or an input and a tensor of the module share a name.
        CaptureError: the module or the loss cannot become one graph.
    """
    parameters = dict(module.named_parameters())
    if requires_grad is not None and (missing := [n for n in requires_grad if n not in parameters]):
        raise GraphError(
            f"{type(module).__name__} has no parameter {missing[0]!r}",
            help="name parameters as named_parameters() does",
        )
    trainable = tuple(
        name
        for name, parameter in parameters.items()
        if (parameter.requires_grad if requires_grad is None else name in requires_grad)
    )
    call = _by_name(module, inputs)
    whole: nn.Module = module
    if loss is None and targets:
        raise ValueError("example_targets are those of a loss function in PyTorch; leave them out")
    if loss is not None:
        names = _target_names(loss, len(targets), call)
        whole = _WithLoss(module, loss, names)
        call |= dict(zip(names, targets, strict=True))
    with modes_kept(module), without_cache(module):
        if not module.training:
            module.train()
        training = _exported(whole, call, loss is not None)
        module.eval()
        with torch.no_grad():
            evaluation = _exported(whole, call, loss is not None)
    used = {v.name for p in (training, evaluation) for v in p.inputs(Role.PARAMETER, Role.BUFFER)}
    held = {**parameters, **dict(module.named_buffers())}
    tensors = {
        name: tensor.detach().cpu().contiguous().numpy().copy()
        for name, tensor in held.items()
        if name in used
    }
    return Forward(training, evaluation, tensors, tuple(n for n in trainable if n in used))


class _WithLoss(nn.Module):
    """Returns the loss and the module's outputs."""

    def __init__(
        self, module: nn.Module, loss: Callable[..., torch.Tensor], targets: Sequence[str]
    ) -> None:
        super().__init__()
        self.module = module
        self.targets = targets
        self.__dict__["loss"] = loss

    def forward(self, **values: Any) -> Any:
        """The loss and the outputs."""
        targets = [values.pop(name) for name in self.targets]
        outputs = self.module(**values)
        return self.__dict__["loss"](outputs, *targets), outputs


def _by_name(module: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of forward, by name."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    signature = inspect.signature(module.forward)
    bound = signature.bind(*inputs)
    kinds = {p.kind for n, p in signature.parameters.items() if n in bound.arguments}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        raise GraphError(
            f"{type(module).__name__}.forward takes arguments without names",
            help="give it a forward with named parameters",
        )
    return dict(bound.arguments)


def _target_names(loss: Callable[..., Any], count: int, taken: Collection[str]) -> list[str]:
    """What the loss calls its arguments after the first; ``labels`` or ``target`` by default."""
    found = [
        name
        for name, parameter in inspect.signature(loss).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    names = found[1 : count + 1]
    if len(names) < count:
        raise GraphError(
            f"the loss takes {len(names)} arguments after the outputs, and there are {count} "
            "example targets",
            help="example_targets are the arguments of loss after the first",
        )
    if clash := [name for name in names if name in taken]:
        raise GraphError(
            f"{clash[0]!r} is an input of the module and an argument of the loss",
            help="give the loss's argument another name",
        )
    return names


def _exported(module: nn.Module, call: dict[str, Any], with_loss: bool) -> Program:
    program = export(module, (), call, opset=contract.OPSET).program
    if not with_loss:
        return program
    for value in program.inputs(Role.PARAMETER, Role.BUFFER):
        value.name = (value.name or "").removeprefix("module.")
    for value in program.outputs(Role.UPDATED_BUFFER):
        target = target_of(value).removeprefix("module.")
        value.name = f"{target}.updated"
        set_role(value, Role.UPDATED_BUFFER, target)
    loss, *others = program.outputs(Role.USER_OUTPUT)
    loss.name = contract.LOSS
    set_role(loss, Role.LOSS)
    for value in others:
        name = (value.name or "").removeprefix("output.1")
        value.name = f"output{name}" if not name or name[1:].isdigit() else name[1:]
    _refuse_clashes(program)
    return program


def _refuse_clashes(program: Program) -> None:
    seen: set[str] = set()
    for value in (*program.graph.inputs, *program.graph.outputs):
        name = value.name or ""
        if name in seen:
            raise GraphError(
                f"two inputs or outputs are named {name!r}",
                help="rename the argument of the module or of the loss",
            )
        seen.add(name)
