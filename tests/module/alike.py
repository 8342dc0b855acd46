"""A script's steps in PyTorch and through ORTModule, under the settings that most people use."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ortrain import Options, ORTModule, OrtrainWarning

ENGINES = {
    "default": Options(),
    "aten": Options(engine="aten"),
    "onnxruntime": Options(engine="onnxruntime"),
}

Step = Callable[[nn.Module, int], Any]
"""One step of a script: what it returns is compared."""


def history(
    make: Callable[[], nn.Module],
    step: Step,
    steps: int = 5,
    options: Options | None = None,
    left: Callable[[nn.Module], Sequence[Any]] = lambda _: (),
) -> tuple[list[Any], nn.Module]:
    """What each step gives, and what it leaves in the module and its gradients.

    Args:
        make: the module.
        step: what is done with it; an error that it raises is noted by its class.
        steps: how many.
        options: of ORTModule; None runs the module itself.
        left: tensors, numbers and lists of these that the module holds besides, to be compared.

    Returns:
        The steps, and what they were taken with.
    """
    torch.manual_seed(7)
    module = make()
    model = module if options is None else ORTModule(module, options=options)
    found = []
    for number in range(steps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OrtrainWarning)
            try:
                given: Any = step(model, number)
            except RuntimeError as error:
                given = type(error).__name__
        gradients = {n: p.grad for n, p in module.named_parameters()}
        buffers = dict(module.named_buffers())
        found.append(plain([given, gradients, buffers, list(left(module))]))
        module.zero_grad()
    return found, model


def plain(value: Any) -> Any:
    """A copy without histories, in which tensors can be compared; there is no fake one among it."""
    if isinstance(value, torch.Tensor):
        assert not isinstance(value, FakeTensor)
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return copy.copy(value)


def assert_alike(found: Any, expected: Any) -> None:
    """Raises where a step has given or left something else than PyTorch's."""
    ours, others = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert ours[1] == others[1], f"{found}\nand not\n{expected}"
    for one, other in zip(ours[0], others[0], strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        else:
            assert one == other, f"{found}\nand not\n{expected}"
