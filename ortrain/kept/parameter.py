"""Parameters and buffers that a kept call reads of a module, and others in their places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ortrain.module_state.stand_in import bear_attributes

PARAMETERS, BUFFERS = "_parameters", "_buffers"


@dataclass(frozen=True)
class Parameter:
    """A parameter, or a buffer, that a kept call reads of a module.

    Attributes:
        tensor: the parameter.
        places: modules that hold it, with its name there.
        registry: of theirs in which it is: ``_parameters`` or ``_buffers``.
    """

    tensor: Tensor
    places: tuple[tuple[nn.Module, str], ...]
    registry: str = PARAMETERS

    @classmethod
    def all_of(cls, module: nn.Module, registry: str = PARAMETERS) -> list[Parameter]:
        """Those of a module, in the order of ``named_parameters()``."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        tensors: dict[int, Tensor] = {}
        for owner in module.modules():
            for name, tensor in owner.__dict__[registry].items():
                if tensor is not None:
                    tensors[id(tensor)] = tensor
                    places.setdefault(id(tensor), []).append((owner, name))
        return [cls(tensor, tuple(places[key]), registry) for key, tensor in tensors.items()]

    def now(self) -> Tensor:
        """What stands in its places."""
        owner, name = self.places[0]
        found: Tensor = owner.__dict__[self.registry][name]
        return found

    def again(self) -> Parameter:
        """The same places, with what stands there by now."""
        return Parameter(self.now(), self.places, self.registry)

    def is_everywhere(self, tensor: Tensor) -> bool:
        """Whether a tensor stands in all of its places."""
        return all(owner.__dict__[self.registry].get(name) is tensor for owner, name in self.places)

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor is the parameter to autograd and to the code: the same memory.

        Its hooks are for the gradient that the whole step gives.
        """
        own = self.tensor
        return (
            own.data_ptr() == tensor.data_ptr()
            and own.dtype == tensor.dtype
            and own.requires_grad >= tensor.requires_grad
            and not own._backward_hooks
        )


@contextlib.contextmanager
def instead(parameters: Sequence[Parameter], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Other tensors in the places of a module's parameters."""
    owners: dict[nn.Module, None] = {}
    for parameter, tensor in zip(parameters, tensors, strict=True):
        bear_attributes([(tensor, parameter.tensor)])
        for owner, name in parameter.places:
            owner.__dict__[parameter.registry][name] = tensor
            owners[owner] = None
    recurrent = [owner for owner in owners if isinstance(owner, nn.RNNBase)]
    for owner in recurrent:  # which reads a list of its own
        owner._init_flat_weights()
    try:
        yield
    finally:
        for parameter in parameters:
            for owner, name in parameter.places:
                owner.__dict__[parameter.registry][name] = parameter.tensor
        for owner in recurrent:
            owner._init_flat_weights()


def memory_of(tensor: Tensor) -> int:
    """The address of the memory that a tensor shows; one of its own where it has none."""
    return tensor.untyped_storage().data_ptr() or id(tensor)
