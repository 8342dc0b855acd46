"""Random draws are numbered in the order in which PyTorch executes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import arguments_of
from ortrain.capture.origin import captured_error
from ortrain.pytorch.operators import OpOverload, schema_of

aten = torch.ops.aten

_DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
# Random in name: what is in new memory is undefined.
_NONE = {"empty_like", "new_empty", "empty", "empty_strided", "new_empty_strided"}


def number_draws(module: fx.GraphModule) -> None:
    """Gives each node that draws random numbers its ``stream``, as one more keyword argument.

    The numbers count the draws that PyTorch executes, dead ones among them. So they are given
    before anything is removed or decomposed: whoever replaces the k-th draw of the module in eager
    by the graph's stream k has the graph's numbers.
    """
    count = 0
    for node in module.graph.nodes:
        draws = draws_of(node)
        if not draws:
            continue
        _refuse_generator(node)
        kwargs = {**node.kwargs, "stream": count}
        if any(argument.name == "dtype" for argument in schema_of(node.target).arguments):
            kwargs["dtype"] = kwargs.get("dtype") or node.meta["val"].dtype
        node.kwargs = kwargs
        count += draws


def draws_of(node: fx.Node) -> int:
    """How many times PyTorch draws a tensor of random numbers where it executes a node."""
    target = node.target
    if not (isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags):
        return 0
    name = schema_of(target).name.removeprefix("aten::")
    given = arguments_of(node)
    if name in _NONE:
        return 0
    if name.removesuffix("_") in _DROPOUTS:
        return int(given["train"] and 0 < given["p"] < 1 and not _is_empty(given["input"]))
    if name == "scaled_dot_product_attention":
        return int(0 < given["dropout_p"] < 1)
    if name in _RECURRENT:
        return given["num_layers"] - 1 if given["train"] and 0 < given["dropout"] < 1 else 0
    if name == "native_dropout":
        return int(given["train"] is not False)
    if name.removesuffix("_") == "rrelu":
        return int(given["training"])
    return 1


def _is_empty(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    # In words: comparing a symbolic size with a number would add a condition.
    return isinstance(value, torch.Tensor) and "0" in map(str, value.shape)


def _refuse_generator(node: fx.Node) -> None:
    if arguments_of(node).get("generator") is not None:
        raise captured_error(
            node,
            f"{node.target} draws from a generator of its own",
            because="a graph draws from the seed of the step, which comes from torch's default one",
            help="leave generator= out, or draw outside and pass the numbers in",
        )
