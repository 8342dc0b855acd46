"""A graph as PyTorch runs it: for gradients that no step gives, and where there is no step."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from ortrain.frontend.functions import differentiable
from ortrain.pytorch.autocast import Autocast, autocast_as, switched_back, without_autocast
from ortrain.pytorch.operators import HigherOrderOperator
from ortrain.pytorch.sources import is_buffer
from ortrain.pytorch.switches import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS
from ortrain.step.draws import is_replaying, replayed_draws
from ortrain.step.replay import Repeated, instead_of, view_of

higher_order = torch.ops.higher_order
_SWITCHES = {SET_GRADIENTS, ENTER_AUTOCAST, EXIT_AUTOCAST}


class Original:
    """The operators of a graph, for the roots of its step.

    Args:
        module: a graph of ATen operators as traced, whose outputs are the roots.
        written: places of the inputs that it writes to.
        autocast: around the call.
    """

    def __init__(self, module: fx.GraphModule, written: Sequence[int], autocast: Autocast) -> None:
        self.written, self.autocast = written, autocast
        self.run = differentiable(module)

    @contextlib.contextmanager
    def around(self, call: Sequence[Any]) -> Iterator[None]:
        """What has to be around a forward and its backward."""
        with torch.enable_grad(), without_autocast():
            yield

    def forward(
        self,
        call: Sequence[Any],
        wrt: Sequence[Tensor],
        buffers: Mapping[int, Tensor],
        *,
        seed: int | None,
    ) -> Repeated:
        """The graph once more on a call's inputs, of which it changes none.

        Args:
            call: inputs of the graph.
            wrt: those that required a gradient.
            buffers: what the step has read, by the id of each input that it has changed.
            seed: of the random numbers that it drew; None where it drew none.
        """
        views = {id(tensor): view_of(tensor) for tensor in wrt}
        args = [instead_of(each, views) if isinstance(each, Tensor) else each for each in call]
        for place in self.written:
            before = buffers.get(id(call[place]), call[place])
            args[place] = before.detach().clone()
        draws = contextlib.nullcontext() if seed is None else replayed_draws(seed)
        with draws, autocast_as(self.autocast):
            outputs = self.run(*args)
        return Repeated(outputs, views, [id(tensor) for tensor in wrt])


def in_pytorch(module: fx.GraphModule) -> Callable[..., Any]:
    """Dynamo's graph, so that PyTorch's run of it is right.

    Its checkpoints draw other random numbers in their repetition than before: they are left to
    whoever lowers the graph. Here they are those of ``torch.utils.checkpoint``. And ``(-3) ** x``
    loses its parentheses where a graph becomes code.
    """
    if not any(
        node.target is higher_order.tag_activation_checkpoint or _is_misprinted(node)
        for node in all_nodes(module)
    ):
        return Code(module)
    return Code(module, _InPyTorch(module).run)


def all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph, and of those that it calls."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def higher_order_in(module: fx.GraphModule) -> Iterator[HigherOrderOperator]:
    """The operators of a graph that run a graph themselves, such as checkpoints."""
    found = (node.target for node in all_nodes(module))
    return (each for each in found if isinstance(each, HigherOrderOperator))


class Code:
    """A graph's code, and not its call as a module: hooks on all modules are none for it.

    Args:
        module: the graph.
        run: gives its outputs; its code by default.
    """

    def __init__(self, module: fx.GraphModule, run: Callable[..., Any] | None = None) -> None:
        self._module = module
        self._switches = any(node.target in _SWITCHES for node in all_nodes(module))
        if run is not None:
            self._code = run

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs for a call's inputs."""
        with switched_back() if self._switches else contextlib.nullcontext():
            return self._code(*args)

    @cached_property
    def _code(self) -> Callable[..., Any]:
        # Dynamo's own makes its code at its first call, which is one of a module.
        return fx.GraphModule(self._module, self._module.graph).forward


class _InPyTorch(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if n.target is not higher_order.tag_activation_checkpoint:
            return super().run_node(n)
        (body, *given), _ = self.fetch_args_kwargs_from_env(n)
        # What is handed to a checkpoint must not change: a buffer may, which eager code reads off
        # its module.
        read = [_is_buffer(node) for node in n.args[1:]]
        handed = [value for value, is_read in zip(given, read, strict=True) if not is_read]

        def run(*handed: Any) -> Any:
            rest = iter(handed)
            return inner(*[v if r else next(rest) for v, r in zip(given, read, strict=True)])

        if is_replaying():  # whose repetition would draw other numbers
            return _InPyTorch(body).run(*given)
        inner, chosen = _InPyTorch(body).run, body.meta.get("_checkpoint_context_fn")
        known = {} if chosen is None else {"context_fn": chosen}
        return checkpoint(run, *handed, use_reentrant=False, **known)


def _is_misprinted(node: fx.Node) -> bool:
    base = node.args[0] if node.target is operator.pow else None
    return isinstance(base, int | float) and base < 0


def _is_buffer(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and is_buffer(node)
