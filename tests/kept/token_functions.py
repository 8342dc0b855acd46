"""Custom functions of words ``[rows, length, 8]`` that treat each alone, and near neighbours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

Body = Callable[..., Any]


def function(forward: Body, backward: Body | None = None, name: str = "Made") -> Any:
    """A custom function of a forward and a backward, whose gradient is halved by default."""
    return type(
        name,
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward or halved)},
    )


def halved(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * 0.5


def same(ctx: Any, x: Tensor) -> Tensor:
    return x.view_as(x)


def kept_in_context(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x * 2


def copied_in_context(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x.clone())
    return x * 2


# -- each token alone ------------------------------------------------------------------------------

_SCALE = 0.25


def quantized(ctx: Any, x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    ctx.save_for_backward(x, scale)
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def straight_through(ctx: Any, gradient: Tensor) -> Tensor:
    x, scale = ctx.saved_tensors
    return torch.where((x / scale).abs() <= 127, gradient, torch.zeros_like(gradient))


def root_mean_square(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    ctx.save_for_backward(x, weight, factor)
    return x * factor * weight


def of_root_mean_square(ctx: Any, gradient: Tensor) -> Any:
    x, weight, factor = ctx.saved_tensors
    y = x * factor
    of_weight = (gradient * y).sum((0, 1))
    gradient = gradient * weight
    return factor * (gradient - y * (gradient * y).mean(-1, keepdim=True)), of_weight


def product(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    ctx.save_for_backward(x, weight)
    return x.reshape(-1, x.shape[-1]).mul(weight).view(x.shape)


def of_product(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    flat = gradient.reshape(-1, gradient.shape[-1])
    of_weight = (flat.t() @ x.reshape(-1, x.shape[-1])).sum(1)
    return gradient * weight * 2, of_weight


def rectified(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x.clamp(min=0)


def of_rectified(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    found = gradient.clone()
    found[x < 0] = 0
    return found


def heads(ctx: Any, x: Tensor) -> Tensor:
    rows, length, width = x.shape
    apart = x.view(rows, length, 2, width // 2).transpose(1, 2)
    ctx.shape = x.shape
    return functional.normalize(apart, dim=-1).transpose(1, 2).reshape(rows, length, width)


def of_heads(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient.view(ctx.shape).clamp(-0.1, 0.1)


def gated(ctx: Any, x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    ctx.save_for_backward(left, right)
    return torch.cat([left * torch.sigmoid(right), right], dim=-1)


def of_gated(ctx: Any, gradient: Tensor) -> Tensor:
    left, right = ctx.saved_tensors
    first, second = gradient.split(left.shape[-1], dim=-1)
    return torch.cat([first * torch.sigmoid(right) * 2, second + first * left], dim=-1)


def chances(ctx: Any, x: Tensor) -> Tensor:
    y = torch.softmax(x, dim=-1)
    ctx.save_for_backward(y)
    return y


def of_chances(ctx: Any, gradient: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return y * (gradient - (gradient * y).sum(-1, keepdim=True)) * 3


def normed(ctx: Any, x: Tensor) -> Tensor:
    return functional.layer_norm(x, (8,))


def scaled(ctx: Any, x: Tensor) -> Tensor:
    return _twice(x) * _SCALE


def _twice(x: Tensor) -> Tensor:
    return x + x


@once_differentiable
def once(ctx: Any, gradient: Tensor) -> Tensor:
    return torch.tanh(gradient)


def lying_across(ctx: Any, x: Tensor) -> Tensor:
    return (x * 2).transpose(0, 1).contiguous().transpose(0, 1)


def in_doubles(ctx: Any, x: Tensor) -> Tensor:
    return torch.log1p(x.double().exp()).float()


def filled(ctx: Any, x: Tensor) -> Tensor:
    return x.masked_fill(x > 1, 1.0) + torch.zeros(x.shape[0], x.shape[1], 1) + x.new_ones(8)


def _closed(factor: float) -> Body:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * factor

    return forward


class Apart(torch.autograd.Function):
    """Makes its context apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradient * torch.cos(x) + gradient.sign() * y * 0.1


# Of words alone, or of words and a weight [8].
ALONE: dict[str, Any] = {
    "half of the gradient": function(same),
    "its input": function(kept_in_context),
    "numbers of eight bits": function(quantized, straight_through),
    "a norm with a weight": function(root_mean_square, of_root_mean_square),
    "a product of rows": function(product, of_product),
    "a write where a mask is": function(rectified, of_rectified),
    "heads": function(heads, of_heads),
    "parts": function(gated, of_gated),
    "a softmax of features": function(chances, of_chances),
    "a norm of torch": function(normed),
    "a number of the module's": function(scaled),
    "once differentiable": function(same, once),
    "other dtypes": function(in_doubles),
    "new tensors": function(filled),
    "a number around it": function(_closed(0.75)),
    "setup_context": Apart,
}
WEIGHTED = {"a norm with a weight", "a product of rows"}


# -- not quite -------------------------------------------------------------------------------------

_PLACES = torch.linspace(0, 1, 11)
_CALLS: list[int] = []


def counted(ctx: Any, x: Tensor) -> Tensor:
    _CALLS.append(1)
    return x * 2


def drawn(ctx: Any, x: Tensor) -> Tensor:
    return x * random.random()


def caught(ctx: Any, x: Tensor) -> Tensor:
    try:
        return x * 2 if x.sum() > 0 else x
    except RuntimeError:
        return x * 2


def single(ctx: Any, x: Tensor) -> Tensor:
    return x * 3 if x.shape[0] == 1 else x * 2


def single_and_long(ctx: Any, x: Tensor) -> Tensor:
    return x * 3 if x.shape[0] == 1 and x.shape[1] > 12 else x * 2


def long(ctx: Any, x: Tensor) -> Tensor:
    return x * 3 if x.shape[1] > 12 else x * 2


def by_batch_statistics(ctx: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return (x - flat.mean(0)) / (flat.std(0) + 1e-5)


def with_positions(ctx: Any, x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1)


def with_counted_positions(ctx: Any, x: Tensor) -> Tensor:
    return x + x.new_ones(x.shape[1], 1).cumsum(0)


def by_sum_of_ones(ctx: Any, x: Tensor) -> Tensor:
    return x / x.new_ones(x.shape[1]).sum()


def by_position_buffer(ctx: Any, x: Tensor) -> Tensor:
    return x * _PLACES.unsqueeze(-1)


def written_after(ctx: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] = x[:, :1]
    return y


def attends(ctx: Any, x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)) @ x


def of_value(ctx: Any, x: Tensor) -> Tensor:
    return x * x.sum().item()


def like_the_layout(ctx: Any, x: Tensor) -> Tensor:
    return x * 2 if x.is_contiguous() else x * 3


def when_learning(ctx: Any, x: Tensor) -> Tensor:
    return x * 2 if torch.is_inference_mode_enabled() else x * 3


def _mixing(body: Callable[[Tensor], Tensor]) -> Any:
    """A function whose forward is a few operators."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        return body(x)

    return function(forward)


def plus_a_number(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient + 0.01


def at_least(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient.clamp(min=0.001)


def what_was_saved(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return x


def with_decay(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return gradient + x * 0.01


def of_a_norm(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def of_the_mean(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(1, keepdim=True)


def of_a_count(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient / gradient.shape[1]


def turned(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient.flip(1)


def summed(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * gradient.sum()


def cosine(ctx: Any, gradient: Tensor) -> Tensor:
    return torch.cos(gradient) * 0.01


def written_into(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    x.mul_(0.5)
    return gradient * x


def mean_weight(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    ctx.save_for_backward(x, weight)
    return x * weight


def of_mean_weight(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return gradient * weight, (gradient * x).mean((0, 1))


def of_all_words(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return gradient * weight, gradient.sum((0, 1)) + x.sum((0, 1))


# Each with a part of what is said of it.
MIXING: dict[str, tuple[Any, str]] = {
    "a mean over tokens": (_mixing(lambda x: x - x.mean(1, keepdim=True)), "mean goes over tokens"),
    "a softmax over tokens": (_mixing(lambda x: torch.softmax(x, 1)), "_softmax goes over tokens"),
    "a sum up to each token": (_mixing(lambda x: x.cumsum(1)), "cumsum goes over tokens"),
    "a sum of all": (_mixing(lambda x: x * x.sum()), "a sum goes over tokens"),
    "the number of tokens": (_mixing(lambda x: x / x.size(1)), "div is given a number of tokens"),
    "the number of elements": (_mixing(lambda x: x / x.numel()), "div is given a number of tokens"),
    "the order turned": (_mixing(lambda x: x.flip(1)), "flip goes over tokens"),
    "the order shifted": (_mixing(lambda x: x.roll(1, 1)), "roll goes over tokens"),
    "the greatest of each row": (
        _mixing(lambda x: x - x.amax(1, keepdim=True)),
        "amax goes over tokens",
    ),
    "the first of each row": (_mixing(lambda x: x + x[:, :1]), "slice goes over tokens"),
    "in the order of values": (_mixing(lambda x: x.sort(1).values), "'values'"),
    "a triangle": (_mixing(lambda x: x.tril()), "tril may mix"),
    "squeezed": (_mixing(lambda x: x.squeeze() * 2), "squeeze goes over all"),
    "a length and features in one axis": (
        _mixing(lambda x: torch.softmax(x.view(x.shape[0], -1), -1).view(x.shape)),
        "put together with something else",
    ),
    "each row with each other": (function(attends), "pairs of tokens"),
    "positions": (function(with_positions), "'arange'"),
    "positions that are counted": (function(with_counted_positions), "cumsum goes over tokens"),
    "a count of ones": (function(by_sum_of_ones), "some axes of tokens"),
    "a buffer of positions": (function(by_position_buffer), "type Tensor"),
    "statistics of the batch": (function(by_batch_statistics), "mean goes over tokens"),
    "a write to some tokens": (function(written_after), "another tensor shows"),
    "dropout": (_mixing(lambda x: functional.dropout(x, 0.5)), "'dropout'"),
    "Python's random numbers": (function(drawn), "module random"),
    "a list outside": (function(counted), "type list"),
    "an exception that is caught": (function(caught), "catches exceptions"),
    "a single row": (function(single), "something else with a single token"),
    "a single row that is long": (function(single_and_long), "a number of tokens decides"),
    "a long row": (function(long), "a number of tokens decides"),
    "a value": (function(of_value), "'item'"),
    "other strides, of which a single row has none": (
        function(lying_across),
        "something else with a single token",
    ),
    "the layout": (function(like_the_layout), "'is_contiguous'"),
    "a mode": (function(when_learning), "'is_inference_mode_enabled'"),
    "a gradient for all": (function(same, plus_a_number), "without a gradient"),
    "a gradient of some size": (function(same, at_least), "without a gradient"),
    "what was saved as the gradient": (
        function(kept_in_context, what_was_saved),
        "without a gradient",
    ),
    "decay in the backward": (function(kept_in_context, with_decay), "without a gradient"),
    "a norm of all gradients": (function(same, of_a_norm), "linalg_vector_norm goes over tokens"),
    "a mean of gradients": (function(same, of_the_mean), "mean goes over tokens"),
    "a count in the backward": (function(same, of_a_count), "div is given a number"),
    "gradients turned": (function(same, turned), "flip goes over tokens"),
    "a sum of gradients": (function(same, summed), "a sum over tokens to each"),
    "a cosine of the gradient": (function(same, cosine), "without a gradient"),
    "a write to what was saved": (
        function(copied_in_context, written_into),
        "writes to what it was given",
    ),
    "a mean for the weight": (function(mean_weight, of_mean_weight), "mean goes over tokens"),
    "all words for the weight": (function(mean_weight, of_all_words), "a sum goes over tokens"),
}
WEIGHTED |= {"a mean for the weight", "all words for the weight"}
