"""What a kept call is given and gives: tensors, and what is fixed around them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ortrain.errors import CaptureError, ExecutionError

_CONSTANT = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
             torch.memory_format)  # fmt: skip


class Arguments:
    """Arguments with holes where tensors and sizes stand; everything else is held as it is.

    Args:
        args: positional arguments of the call that was traced.
        kwargs: keyword arguments.

    Attributes:
        tensors: of the call, in the order of the holes.
        sizes: numbers of the call that are symbols, in the order of the holes.
        plain: of each tensor, whether it is an argument itself rather than inside of one.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        # A list of one is not what it holds.
        alike = len(self._leaves) == len(args) and all(map(operator.is_, self._leaves, args))
        self._is_flat = not kwargs and alike
        own = {id(value) for value in (*args, *kwargs.values())}
        of_tensors = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        of_sizes = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.SymInt)]
        for leaf in self._leaves:
            if isinstance(leaf, torch.SymFloat | torch.SymBool):
                raise CaptureError(
                    "a call that is to stay PyTorch's is given a number that the trace computes",
                    because="it is known at each call alone",
                    help="pass it as a tensor",
                )
        self.tensors: list[Any] = [self._leaves[i] for i in of_tensors]
        self.sizes: list[Any] = [self._leaves[i] for i in of_sizes]
        self.plain = [id(tensor) in own for tensor in self.tensors]
        self._holes = [*of_tensors, *of_sizes]
        for i in self._holes:
            self._leaves[i] = None

    @property
    def objects(self) -> list[Any]:
        """What is neither tensor nor size."""
        return [leaf for i, leaf in enumerate(self._leaves) if i not in self._holes]

    @property
    def fixed(self) -> tuple[Any, ...]:
        """How tensors and sizes make up the arguments, and what else is among these."""
        return (self._spec, self._holes, self._leaves)

    def release(self) -> None:
        """Forgets the tensors of the trace."""
        self.tensors, self.sizes = [], []

    def filled(self, given: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Arguments with tensors and then sizes in the holes."""
        leaves = self._leaves.copy()
        for i, value in zip(self._holes, given, strict=True):
            leaves[i] = value
        if self._is_flat:
            return leaves, {}
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs


class Result:
    """How the tensors of a result make it up.

    Args:
        output: what the call returned in its trace.

    Attributes:
        tensors: of the output, in order.

    Raises:
        CaptureError: something in it is neither a tensor nor a constant.
    """

    def __init__(self, output: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(output)
        self.tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_CONSTANT)):
                raise CaptureError(
                    f"a call that is to stay PyTorch's returns an object of type "
                    f"{type(leaf).__name__}",
                    because="a graph passes tensors on, and numbers, strings and None that no "
                    "input changes",
                    help="return tensors, in tuples, lists, dicts or dataclasses",
                )
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._dtypes = [tensor.dtype for tensor in self.tensors]
        self._ranks = [tensor.dim() for tensor in self.tensors]

    def release(self) -> None:
        """Forgets the tensors of the trace."""
        self.tensors = []

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The output with other tensors in it."""
        leaves = self._leaves.copy()
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._spec)

    def is_like(self, output: Any) -> bool:
        """Whether tensors, None and numbers stand in an output where they did in the call."""
        if type(output) is torch.Tensor:
            return self._spec.is_leaf()
        leaves, spec = pytree.tree_flatten(output)
        return spec == self._spec and all(
            isinstance(leaf, torch.Tensor) if i in self._places else leaf == known
            for i, (leaf, known) in enumerate(zip(leaves, self._leaves, strict=True))
        )

    @property
    def constants(self) -> list[Any]:
        """What is no tensor in it, None left out."""
        return [leaf for leaf in self._leaves if leaf is not None]

    def taken_apart(self, output: Any) -> list[torch.Tensor]:
        """The tensors of an output of a later call.

        Raises:
            ExecutionError: there are others than in the call that was traced.
        """
        leaves: list[Any]
        if type(output) is torch.Tensor:
            leaves = [output]
        elif type(output) is tuple:  # of tensors and None, as of most functions
            leaves = list(output)
        else:
            leaves = pytree.tree_leaves(output)
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(found) < len(leaves) and type(output) is tuple:
            found = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        dtypes, ranks = [t.dtype for t in found], [t.dim() for t in found]
        if dtypes != self._dtypes or ranks != self._ranks:
            raise ExecutionError(
                "a call that stays PyTorch's returns something else than when it was traced",
                because=f"its tensors were of {_shown(self._dtypes, self._ranks)}, and are of "
                f"{_shown(dtypes, ranks)}",
                help="return tensors of the same dtypes and ranks at each call",
            )
        return found


def _shown(dtypes: Sequence[torch.dtype], ranks: Sequence[int]) -> str:
    shown = [f"{dtype} with {rank} axes" for dtype, rank in zip(dtypes, ranks, strict=True)]
    return ", ".join(shown) or "none"
