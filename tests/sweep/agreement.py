"""One step of a module, and whether two steps agree."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain.testing import TOLERANCES

# Relative to the tensor's largest value, in roundings of the dtype. Where eager itself is further
# from float64, its own distance counts, times SLACK: two orders of summation differ from each other
# as much as each does from the truth. What it is in float64 is told by float32, in roundings.
RELATIVE = TOLERANCES["sums"].single / torch.finfo(torch.float32).eps
SLACK = 4.0
# A few roundings of a number near 1: a tensor of one small element, the tail of a sigmoid, has no
# larger value beside it that would tell the scale at which it was computed.
ROUNDINGS = 4


@dataclass
class Step:
    """What a forward and a backward leave.

    Attributes:
        outputs: the tensors of the output, and what else it holds, by place.
        structure: the pytree of the output.
        gradients: of every input and parameter that requires one; None where it got none.
        buffers: afterwards.
        drew: whether it took numbers from torch's generator.
    """

    outputs: dict[str, Any]
    structure: Any
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    drew: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the outputs."""
        return [value for value in self.outputs.values() if isinstance(value, torch.Tensor)]


def step(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """Calls a module on copies of the arguments and sends gradients back through its outputs.

    Args:
        module: whose gradients are empty.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    own = [_own(leaf) for leaf in leaves]
    given, named = pytree.tree_unflatten(own, spec)
    torch.manual_seed(22)
    before = torch.get_rng_state()
    output = module(*given, **named)
    drew = not torch.equal(torch.get_rng_state(), before)
    values, structure = pytree.tree_flatten(output)
    outputs = {f"output {i}": value for i, value in enumerate(values)}
    sent = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
    if sent:
        torch.autograd.backward(sent, [_cotangent(tensor) for tensor in sent])
    learning = {f"input {i}": t for i, t in enumerate(own) if _learns(t)}
    learning |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    return Step(
        {name: _settled(value) for name, value in outputs.items()},
        structure,
        {name: _settled(t.grad) for name, t in learning.items()},
        {name: buffer.clone() for name, buffer in module.named_buffers()},
        drew,
    )


def in_another_precision(value: Any, dtype: torch.dtype) -> Any:
    """A module, or arguments, in float32 if they are in float64, and else in that."""
    narrow = dtype in (torch.float64, torch.complex128)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(torch.float32 if narrow else torch.float64)

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            other = tensor.detach().to(torch.complex64 if narrow else torch.complex128)
        elif tensor.is_floating_point():
            other = tensor.detach().to(torch.float32 if narrow else torch.float64)
        else:
            return tensor
        return other.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, converted, value)


def difference(ours: Step, eager: Step, other: Step | None) -> str:
    """What of a step is wrong, in a few words; empty where all agrees.

    Of a step that drew random numbers only structure, dtypes, shapes and None are compared.

    Args:
        ours: of the graph.
        eager: of eager.
        other: of eager in another precision, as far as the module runs so.
    """
    values = not eager.drew
    if ours.structure != eager.structure:
        return f"the output is {ours.structure} instead of {eager.structure}"
    further = other or eager
    for kind in ("outputs", "gradients", "buffers"):
        mine, want, more = (getattr(s, kind) for s in (ours, eager, further))
        if mine.keys() != want.keys():
            return f"{kind} of {sorted(mine)} instead of {sorted(want)}"
        for name, value in mine.items():
            found = _different(value, want[name], more.get(name), values)
            if found:
                return f"{'gradient of ' if kind == 'gradients' else ''}{name}: {found}"
    return ""


def _different(ours: Any, eager: Any, other: Any, values: bool) -> str:
    if not isinstance(ours, torch.Tensor) or not isinstance(eager, torch.Tensor):
        same = type(ours) is type(eager) and (ours == eager or ours is None or ours != ours)
        return "" if same else f"{_word(ours)} instead of {_word(eager)}"
    if ours.dtype != eager.dtype:
        return f"{ours.dtype} instead of {eager.dtype}"
    if ours.shape != eager.shape:
        return f"shape {[*ours.shape]} instead of {[*eager.shape]}"
    if not values:
        return ""
    if not eager.is_floating_point() and not eager.is_complex():
        wrong = int((ours != eager).sum())
        return f"{wrong} of {eager.numel()} elements are wrong" if wrong else ""
    if not isinstance(other, torch.Tensor) or other.shape != eager.shape:
        other = eager
    if eager.is_complex():
        ours, eager, other = (torch.view_as_real(t.resolve_conj()) for t in (ours, eager, other))
    return _apart(ours.detach(), eager.detach(), other.detach())


def _apart(ours: torch.Tensor, eager: torch.Tensor, other: torch.Tensor) -> str:
    eps = torch.finfo(eager.dtype).eps
    lost = torch.finfo(other.dtype).eps / eps if other.is_floating_point() else 1.0
    truth = eager.double() if lost > 1 else other.double()
    same = (ours == eager) | (ours.isnan() & eager.isnan())
    wrong = ~same & ~(ours.isfinite() & eager.isfinite())
    if wrong.any():
        place = tuple(int(i) for i in wrong.nonzero()[0])
        return f"{float(ours[place]):.3g} instead of {float(eager[place]):.3g} at {place}"
    known = eager.isfinite() & other.isfinite()
    if not known.any():
        return ""
    error = (ours[known].double() - truth[known]).abs().max()
    own = (eager[known].double() - other[known].double()).abs().max() / max(lost, 1.0)
    scale = truth[known].abs().max()
    if error <= max(RELATIVE * eps * scale, SLACK * own, ROUNDINGS * eps):
        return ""
    return f"{float(error):.2e} from float64, eager {float(own):.2e}, of {float(scale):.2e}"


def _word(value: Any) -> str:
    return f"a {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)


def _own(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf) if isinstance(leaf, torch.Generator) else leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _learns(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _settled(value: Any) -> Any:
    """The value with nothing behind it that could change, or be kept alive."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        value = value.to_dense()
    return value.detach().clone()


def _cotangent(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent back into an output: the same numbers for float32 and float64."""
    generator = torch.Generator().manual_seed(23)
    shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
    drawn = torch.randn(shape, generator=generator)
    if tensor.is_complex():
        drawn = torch.view_as_complex(drawn)
    return drawn.to(tensor.dtype)
