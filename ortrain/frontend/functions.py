"""Custom autograd functions: a graph keeps the gradients that the user's backward gives.

Dynamo hands over forward and backward as two graphs of one call. Here both are run in place, the
backward on what stands for the gradients of the results (:mod:`ortrain.ops.custom_gradient`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from ortrain.capture.fx.memory import memory
from ortrain.capture.onnx.custom_gradient import custom_gradient, upstream
from ortrain.capture.origin import IN_PYTORCH, captured_error
from ortrain.errors import CaptureError
from ortrain.frontend.writes import writes_of
from ortrain.pytorch.autocast import active
from ortrain.pytorch.operators import draws

BACKWARD = "ortrain.backward"
"""In ``meta["custom"]`` of an operator of a backward: the number of its call."""

APPLY = torch.ops.higher_order.autograd_function_apply

_KNOWN = {"non_differentiable_idx", "saved_for_backward_idx", "dirty_idx"}


def lowered(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inputs: Sequence[Any],
    number: int,
    **how: Any,
) -> Any:
    """Runs a custom function on the proxies of a trace.

    Args:
        forward: gives the results, and what it saves.
        backward: of the gradients of the results and of what is saved.
        inputs: of the function.
        number: of the call.
        how: what else PyTorch's operator is told.

    Returns:
        The results.

    Raises:
        ValueError: it does what a graph does not know.
    """
    if set(how) - _KNOWN or how.get("dirty_idx"):
        raise ValueError("the function does more than to give new tensors")
    with torch.no_grad():
        made, saved = forward(*inputs)
    results = [*made] if isinstance(made, tuple | list) else [made]
    if not all(isinstance(result, Tensor) for result in results):
        raise ValueError("the function returns something else than tensors")
    fixed = {*how.get("non_differentiable_idx", ())}
    moving = [i for i, t in enumerate(results) if t.is_floating_point() and i not in fixed]
    places = [i for i, each in enumerate(inputs) if isinstance(each, Tensor)]
    if not moving:
        return made
    with torch.no_grad(), _without_autocast():
        arriving = [
            upstream(t, number, moving.index(i)) if i in moving else torch.zeros_like(t)
            for i, t in enumerate(results)
        ]
        given = backward(*arriving, *saved)
        given = [*given] if isinstance(given, tuple | list) else [given]
        gradients = [_fitting(given[i], inputs[i]) for i in places]
    with_gradient = custom_gradient(
        [results[i] for i in moving], [inputs[i] for i in places], gradients, number
    )
    for i, result in zip(moving, with_gradient, strict=True):
        results[i] = result
    return tuple(results) if isinstance(made, tuple | list) else results[0]


def _fitting(gradient: Any, value: Tensor) -> Any:
    """A gradient in dtype and shape of what it is for, as autograd makes it."""
    if gradient is None or not value.is_floating_point():
        return None
    if gradient.shape != value.shape:
        gradient = gradient.sum_to_size(value.shape)
    return gradient.to(value.dtype)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """A backward is run outside of the autocast of the forward."""
    with contextlib.ExitStack() as stack:
        for device, _ in active():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def check_functions(graph: fx.Graph) -> None:
    """Raises where the functions of a graph of ATen operators do what it does not keep.

    Raises:
        CaptureError: naming the operator.
    """
    calls = [node for node in graph.nodes if node.target is custom_gradient]
    if not calls:
        return
    written: dict[int | None, fx.Node] = {}
    for node in graph.nodes:
        inside = BACKWARD in (node.meta.get("custom") or {})
        if inside and draws(node.target):
            raise _refusal(node, "draws random numbers in a backward")
        for each in writes_of(node):
            written.setdefault(memory(each), node)
            if inside and not _is_of_backward(each):
                raise _refusal(node, "changes in a backward what the forward has made")
    leaves = {memory(leaf) for leaf in graph.output_node().all_input_nodes}
    for call in calls:
        results, inputs, *_ = cast(tuple[Any, ...], call.args)
        for i, result in enumerate(results):
            if memory(result) not in {memory(each) for each in inputs}:
                continue  # a new tensor
            new = {memory(user) for user in call.users if user.args[1:] == (i,)}
            if ({memory(result)} | new) & {*written}:
                raise _refusal(call, "returns memory of an argument, which is written to")
            if new & leaves:
                raise _refusal(call, "returns memory of an argument, which the graph returns")


def _is_of_backward(node: fx.Node) -> bool:
    return node.target is upstream or BACKWARD in (node.meta.get("custom") or {})


def _refusal(node: fx.Node, what: str) -> CaptureError:
    return captured_error(
        node,
        f"a custom autograd function {what}",
        because="a graph keeps the gradients that it gives, and no more of it",
        help=IN_PYTORCH,
    )


def differentiable(module: fx.GraphModule) -> Callable[..., Any]:
    """Runs a graph of ATen operators in PyTorch, so that its functions have their own backward."""
    if not any(node.target is custom_gradient for node in module.graph.nodes):
        return module.forward
    return _Differentiable(module).run


class _Differentiable(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; results of custom functions lead to the user's backward."""
        if n.target is not custom_gradient:
            return super().run_node(n)
        (results, inputs, _, number), _ = self.fetch_args_kwargs_from_env(n)
        given, known = cast(list[Any], n.args[2]), dict(self.env)
        nodes = _backward_of(self.graph, number, [v for v in given if v is not None])

        def backward(arriving: Sequence[Tensor]) -> list[Tensor | None]:
            again = fx.Interpreter(self.module, garbage_collect_values=False)
            again.env = dict(known)
            for node in nodes:
                if node.target is upstream:
                    again.env[node] = arriving[cast(int, node.args[2])].clone()
                else:
                    again.env[node] = again.run_node(node)
            return [None if v is None else again.env[v] for v in given]

        return [*_Function.apply(backward, len(results), *results, *inputs)]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: Any, count: int, *tensors: Tensor) -> Any:
        ctx.backward, ctx.count = backward, count
        return tuple([result.clone() for result in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> Any:
        return (None, None, *[None] * ctx.count, *ctx.backward(arriving))


def _backward_of(graph: fx.Graph, number: int, gradients: Sequence[fx.Node]) -> list[fx.Node]:
    """The operators of the backward of a call, in order."""
    needed = set(gradients)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        own = (node.meta.get("custom") or {}).get(BACKWARD) == number
        arrives = node.target is upstream and node.args[1] == number
        written = any(each in found for each in writes_of(node))
        follows = any(each in found for each in node.all_input_nodes)
        if written or (node in needed and (own or arrives or follows)):
            found[node] = None
    return [*found]
