"""Dynamo's graph as a graph of ATen operators, with the meaning that such a trace forgets.

A trace runs the graph on the fakes and symbols that Dynamo has made of the call's tensors. So what
an operator asks of a size becomes one of Dynamo's own guards. It forgets whatever is no operator,
which is kept here:

- ``no_grad`` and ``autocast`` between statements are calls among the operators, which then are
  marked (:mod:`ortrain.capture.fx.regions`);
- checkpoints: operators are marked with the number of theirs;
- custom functions: the gradients that their backward gives (:mod:`.functions`);
- lines of code: every operator has the stack of the statement that it comes from.

A higher-order operator that is not known is refused: what a trace makes of it may be less than what
it means. ``cond`` and ``while_loop`` are among them: no rule leads gradients through branches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ortrain.capture.origin import CHECKPOINT, IN_PYTORCH, captured_error
from ortrain.capture.refusal import first_line
from ortrain.errors import OrtrainError
from ortrain.frontend.functions import APPLY, BACKWARD, check_functions, lowered
from ortrain.frontend.layouts import laid_out
from ortrain.frontend.maps import without_maps
from ortrain.frontend.original import all_nodes, higher_order_in
from ortrain.frontend.repeats import Repeats
from ortrain.frontend.writes import check_checkpoints
from ortrain.pytorch.dynamo import NotFollowed
from ortrain.pytorch.operators import HigherOrderOperator
from ortrain.pytorch.switches import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS
from ortrain.pytorch.tracing import traced, with_number
from ortrain.runtime.engines import are_narrow

higher_order = torch.ops.higher_order

_CHECKPOINTS = {higher_order.tag_activation_checkpoint, higher_order.wrap_activation_checkpoint}


def has_reentrant(module: fx.GraphModule) -> bool:
    """Whether one of Dynamo's graphs has a checkpoint with ``use_reentrant=True``."""
    return any(
        node.target in _CHECKPOINTS and node.kwargs.get("use_reentrant", True)
        for node in all_nodes(module)
    )


def is_narrow(module: fx.GraphModule) -> bool:
    """Whether one of Dynamo's graphs computes in 16 bits."""
    values = [node.meta.get("example_value") for node in all_nodes(module)]
    return are_narrow({value.dtype for value in values if isinstance(value, Tensor)})


# Dynamo traces the code in any other higher-order operator aside (``speculate_subgraph``). It goes
# on with a copy of what it knows of attributes, and loses what the code assigns to them later. In
# torch 2.13 this holds for ``torch.cond`` and for hooks on tensors.
_KEEP_WRITES = {*_CHECKPOINTS, APPLY}


def loses_writes(module: fx.GraphModule) -> str:
    """Behind which function Dynamo may lose what its graph's code assigns; empty for none."""
    found = (each.name() for each in higher_order_in(module) if each not in _KEEP_WRITES)
    return next(found, "")


def packs_padding(module: fx.GraphModule) -> bool:
    """Whether one of Dynamo's graphs has an ``nn.TransformerEncoder`` that PyTorch runs otherwise.

    Evaluated, and without gradients, it leaves out padding, for which it gives zeros. It does so by
    the values of the mask, and not where it is compiled.
    """
    given = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
    wanted = any(isinstance(value, Tensor) and value.requires_grad for value in given)
    grad = torch.is_grad_enabled()
    for node in module.graph.nodes:
        if node.target is SET_GRADIENTS:
            grad = node.args[0]
        if node.target != "masked_fill_" or (grad and wanted):
            continue
        within = [kind for _, kind in node.meta.get("nn_module_stack", {}).values()]
        if within and issubclass(within[-1], nn.TransformerEncoder):
            return True
    return False


def check_followed(module: fx.GraphModule, *, packs: bool) -> None:
    """Raises where a graph of one of Dynamo's would be wrong.

    Args:
        module: the graph.
        packs: whether an encoder of the model may leave out padding.

    Raises:
        NotFollowed: saying about what.
    """
    if name := loses_writes(module):
        raise NotFollowed(f"behind {name} Dynamo forgets what is assigned to attributes")
    if packs and packs_padding(module):
        raise NotFollowed("TransformerEncoder gives zeros for padding where it is not compiled")


_SQUEEZES = {torch.squeeze, "squeeze", "squeeze_"}


def squeezes(module: fx.GraphModule) -> bool:
    """Whether one of Dynamo's graphs drops an axis where its size is one, and it may be so."""
    return any(node.target in _SQUEEZES and _may_drop(node) for node in all_nodes(module))


def _may_drop(node: fx.Node) -> bool:
    """Whether one of the axes that it drops where they are one has a symbol for a size."""
    value = node.all_input_nodes[0].meta.get("example_value") if node.all_input_nodes else None
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if axes is None:
        axes = range(value.dim())
    elif not isinstance(axes, tuple | list):
        axes = (axes,)
    return any(not isinstance(a, int) or isinstance(value.shape[a], torch.SymInt) for a in axes)


def aten_of(module: fx.GraphModule, fakes: list[Any]) -> fx.GraphModule:
    """The graph of ATen operators of one of Dynamo's.

    Args:
        module: Dynamo's graph.
        fakes: of its inputs, as they were before the graph has run on them.

    Raises:
        CaptureError: the graph has something that is not known.
    """
    lowering = _Lowering(without_maps(module))
    try:
        with contextlib.closing(lowering.trace):
            graph = traced(lowering.run, fakes)
    except OrtrainError:
        raise
    except Exception as error:
        if lowering.node is None:
            raise
        raise captured_error(
            lowering.node,
            f"{lowering.node.name} cannot be traced",
            because=f"{type(error).__name__}: {first_line(error)}",
            help=IN_PYTORCH,
        ) from error
    _check_switches(graph.graph)
    check_functions(graph.graph)
    check_checkpoints(graph.graph)
    return graph


def _check_switches(graph: fx.Graph) -> None:
    """A call without gradients runs a forward alone: no part of it may want some."""
    on = torch.is_grad_enabled()
    for node in graph.nodes if not on else ():
        if node.target is SET_GRADIENTS:
            on = bool(node.args[0])
        elif on and node.op == "call_function":
            raise captured_error(
                node,
                "gradients are switched on in a call without them",
                because="such a call runs no graph that leads to gradients",
                help=IN_PYTORCH,
            )


class _Trace:
    """What the graphs that are lowered into one trace have in common.

    Attributes:
        numbers: for the regions to come.
        repeats: statements so far.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.repeats = Repeats()
        self._inside: list[torch.autocast] = []

    def entered(self, region: torch.autocast) -> torch.autocast:
        """Enters autocast."""
        region.__enter__()
        self._inside.append(region)
        return region

    def left(self, region: torch.autocast) -> None:
        """Leaves autocast."""
        self._inside.remove(region)
        region.__exit__(None, None, None)

    def close(self) -> None:
        """Leaves what a trace that has failed is still inside of."""
        while self._inside:
            self.left(self._inside[-1])


class _Lowering(fx.Interpreter):
    """Runs a graph of Dynamo's on proxies.

    Args:
        module: the graph.
        trace: that it is lowered into; None for a new one.
        inside: what its operators are marked with: the checkpoint that it is the body of, or the
            custom function that it is the backward of.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        trace: _Trace | None = None,
        inside: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.trace = trace or _Trace()
        self.inside = inside or {}
        self.node: Any = None

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, its region noted where the trace hands meta on."""
        self.node = n
        if self.inside:
            n.meta["custom"] = {**(n.meta.get("custom") or {}), **self.inside}
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function; regions are run in place."""
        if target in _CHECKPOINTS:
            return self._checkpoint(*args)
        if target is APPLY:
            return self._apply(*args, **kwargs)
        if target is ENTER_AUTOCAST:  # which the trace notes, too
            return self.trace.entered(torch.autocast(*args))
        if target is EXIT_AUTOCAST:
            return self.trace.left(args[0])
        if isinstance(target, HigherOrderOperator):
            raise captured_error(
                self.node,
                f"{target.name()} is not known to graphs",
                because="what a trace makes of it may be less than what it means",
                help=IN_PYTORCH,
            )
        result = self._again(super().call_function, target, args, kwargs)
        return laid_out(target, args, result)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls a method of a tensor or a number."""
        return self._again(super().call_method, target, args, kwargs)

    def _again(self, compute: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        result = self.node.meta.get("example_value")
        return self.trace.repeats.run(compute, result, target, (args, kwargs))

    def _checkpoint(self, body: fx.GraphModule, *args: Any) -> Any:
        inside = self.inside
        if CHECKPOINT not in inside:  # of checkpoints inside one another, the outermost counts
            inside = {**inside, CHECKPOINT: str(next(self.trace.numbers))}
        return _Lowering(body, self.trace, inside).run(*args)

    def _apply(
        self, forward: fx.GraphModule, backward: fx.GraphModule, *args: Any, **how: Any
    ) -> Any:
        number = next(self.trace.numbers)
        inside = {**self.inside, BACKWARD: number}
        run = _Lowering(forward, self.trace, self.inside).run
        return lowered(run, _Lowering(backward, self.trace, inside).run, args, number, **how)


def aliases_of(values: list[Any], real: list[Any]) -> list[Any]:
    """Fakes that a trace may write to, with the memory that they share.

    Args:
        values: fakes of the inputs, on which Dynamo has run the code already.
        real: the tensors that they stand for.
    """
    found = []
    for value, known in zip(values, real, strict=True):
        if isinstance(value, Tensor):
            grad = isinstance(known, Tensor) and known.requires_grad
            value = with_number(value.detach(), value).requires_grad_(grad)
        found.append(value)
    return found
