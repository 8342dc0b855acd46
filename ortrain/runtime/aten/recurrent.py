"""Recurrent layers of running functions: PyTorch's own where they fit, else step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ortrain.pytorch.kernels import flatten_rnn_weights

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State], State]
Function = Callable[[Tensor], Tensor]

# torch's order of the gates in ONNX's.
_ORDERS = {"lstm": (0, 2, 3, 1), "gru": (1, 0, 2)}


def fused(
    kind: str,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    states: Sequence[Tensor | None],
    *,
    reverse: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """A layer by PyTorch's own function.

    Args:
        kind: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``.
        x: [T, B, I], or [B, T, I].
        w: [D, gates * H, I], D directions.
        r: [D, gates * H, H].
        b: [D, 2 * gates * H], or None.
        states: before the first step, [D, B, H] or [B, D, H], None for zeros.
        reverse: from the last step to the first.
        batch_first: whether the batch comes before the steps and the directions.

    Returns:
        The output of every step, [T, D, B, H] or [B, T, D, H], then the last states.
    """
    directions, hidden = r.shape[0], r.shape[2]
    steps, batch = x.shape[1::-1] if batch_first else x.shape[:2]
    before = [_start(state, x, (directions, batch, hidden), batch_first) for state in states]
    order = _ORDERS.get(kind, (0,))
    weights = [*_weights(w, r, b, order)]
    if x.is_cuda and torch.backends.cudnn.is_acceptable(x):
        _lay_out(kind, weights, x, hidden, directions, batch_first, biases=b is not None)
    if reverse:
        x = x.flip(int(batch_first))
    y, *last = getattr(torch, kind)(
        x,
        before if kind == "lstm" else before[0],
        weights,
        b is not None,
        1,
        0.0,
        False,
        directions == 2,
        batch_first,
    )
    if reverse:
        y = y.flip(int(batch_first))
    if batch_first:
        return y.view(batch, steps, directions, hidden), *(s.transpose(0, 1) for s in last)
    return y.view(steps, batch, directions, hidden).transpose(1, 2), *last


def _start(state: Tensor | None, x: Tensor, shape: Sequence[int], batch_first: bool) -> Tensor:
    if state is None:
        return x.new_zeros(shape)
    return (state.transpose(0, 1) if batch_first else state).contiguous()


def _weights(w: Tensor, r: Tensor, b: Tensor | None, order: Sequence[int]) -> list[Tensor]:
    """Of each direction those of the input, of the recurrence, and the biases of both."""
    wide = [w, r, *([] if b is None else b.chunk(2, 1))]
    if len(order) > 1:
        gates = [value.chunk(len(order), 1) for value in wide]
        wide = [torch.cat([row[i] for i in order], 1) for row in gates]
    return [value for each in zip(*(v.unbind() for v in wide), strict=True) for value in each]


def _lay_out(
    kind: str,
    weights: list[Tensor],
    x: Tensor,
    hidden: int,
    directions: int,
    batch_first: bool,
    *,
    biases: bool,
) -> None:
    """Moves the weights into the one piece of memory that cuDNN reads them from."""
    mode = ("rnn_relu", "rnn_tanh", "lstm", "gru").index(kind)
    weights[:] = [value.clone() for value in weights]  # this points them elsewhere
    flatten_rnn_weights(
        weights,
        4 if biases else 2,
        x.shape[2],
        mode,
        hidden,
        0,
        1,
        batch_first,
        directions == 2,
    )


def layer(
    kind: str,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    states: Sequence[Tensor | None],
    p: Tensor | None = None,
    *,
    activations: Sequence[tuple[str, float, float]],
    reverse: bool,
    batch_first: bool,
    clip: float = 0.0,
    variant: bool = False,
) -> tuple[Tensor, ...]:
    """A layer step by step, in every form of ONNX's.

    Args:
        kind: ``lstm``, ``gru`` or ``rnn``.
        x: as of :func:`fused`, like w, r, b, the states, ``reverse`` and ``batch_first``.
        w: of the input.
        r: of the recurrence.
        b: both biases.
        lengths: of each sequence, [B], or None where all have every step.
        states: before the first step.
        p: weights of an LSTM's peepholes, [D, 3 * H], or None.
        activations: of each direction in turn, with their alpha and beta.
        reverse: from the last step to the first.
        batch_first: whether the batch comes before the steps and the directions.
        clip: bounds what activations are given; 0 for no bound.
        variant: of an LSTM: the forget gate is 1 - the input gate; of a GRU: the reset gate acts on
            the product with R.

    Returns:
        As :func:`fused` does. Past the end of a sequence the output is 0, and the states stay.
    """
    if batch_first:
        x = x.transpose(0, 1)
    directions, hidden = r.shape[0], r.shape[2]
    shape = (directions, x.shape[1], hidden)
    before = [_start(state, x, shape, batch_first) for state in states]
    valid = None
    if lengths is not None:
        steps = torch.arange(x.shape[0], device=x.device)
        valid = (steps[:, None] < lengths).unsqueeze(2)
    each = len(activations) // directions
    ys, lasts = [], []
    for d in range(directions):
        chosen = [_bounded(*row, clip) for row in activations[d * each : (d + 1) * each]]
        share, step = _STEPS[kind](
            x, w[d], r[d], None if b is None else b[d], None if p is None else p[d], chosen, variant
        )
        y, last = _run(
            step, share, tuple(state[d] for state in before), valid, reverse=reverse or d == 1
        )
        ys.append(y)
        lasts.append(last)
    finals = [torch.stack(parts) for parts in zip(*lasts, strict=True)]
    if batch_first:
        return torch.stack(ys, 2).transpose(0, 1), *(s.transpose(0, 1) for s in finals)
    return torch.stack(ys, 1), *finals


def _run(
    step: Step, share: Tensor, state: State, valid: Tensor | None, *, reverse: bool
) -> tuple[Tensor, State]:
    """All steps of one direction: the output of each, [T, B, H], and the last states."""
    order = range(share.shape[0])[:: -1 if reverse else 1]
    ys = [share] * len(order)
    for t in order:
        new = step(share[t], state)
        if valid is not None:
            new = tuple(torch.where(valid[t], a, b) for a, b in zip(new, state, strict=True))
        state, ys[t] = new, new[0]
    y = torch.stack(ys)
    return y if valid is None else y.masked_fill_(~valid, 0.0), state


def _bounded(name: str, alpha: float, beta: float, clip: float) -> Function:
    function = _ACTIVATIONS[name](alpha, beta)
    return (lambda x: function(x.clamp(-clip, clip))) if clip else function


def _share(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The input's share of the gates, of all steps, with a bias."""
    product = torch.matmul(x, w.t())
    return product if b is None else product.add_(b)


def _lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    p: Tensor | None,
    activations: Sequence[Function],
    coupled: bool,
) -> tuple[Tensor, Step]:
    gate, to_cell, to_output = activations
    transposed = r.t()
    p_i, p_o, p_f = (None, None, None) if p is None else p.chunk(3)

    def seen(z: Tensor, weight: Tensor | None, c: Tensor) -> Tensor:
        return z if weight is None else torch.addcmul(z, weight, c)

    def step(share: Tensor, state: State) -> State:
        h, c = state
        z_i, z_o, z_f, z_g = torch.addmm(share, h, transposed).chunk(4, 1)
        i = gate(seen(z_i, p_i, c))
        f = 1 - i if coupled else gate(seen(z_f, p_f, c))
        new = torch.addcmul(f * c, i, to_cell(z_g))
        return gate(seen(z_o, p_o, new)) * to_output(new), new

    return _share(x, w, None if b is None else torch.add(*b.chunk(2))), step


def _gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    p: Tensor | None,
    activations: Sequence[Function],
    reset_last: bool,
) -> tuple[Tensor, Step]:
    gate, to_new = activations
    hidden = r.shape[1]
    ours, theirs = (None, None) if b is None else b.chunk(2)
    transposed = r.t()
    into_gates, into_new = transposed[:, : 2 * hidden], transposed[:, 2 * hidden :]

    def reset_product(share: Tensor, state: State) -> State:
        (h,) = state
        sums = torch.matmul(h, transposed) if theirs is None else torch.addmm(theirs, h, transposed)
        z, reset = gate(share[:, : 2 * hidden] + sums[:, : 2 * hidden]).chunk(2, 1)
        new = to_new(torch.addcmul(share[:, 2 * hidden :], reset, sums[:, 2 * hidden :]))
        return (torch.lerp(new, h, z),)

    def reset_state(share: Tensor, state: State) -> State:
        (h,) = state
        z, reset = gate(torch.addmm(share[:, : 2 * hidden], h, into_gates)).chunk(2, 1)
        new = to_new(torch.addmm(share[:, 2 * hidden :], reset * h, into_new))
        return (torch.lerp(new, h, z),)

    if reset_last:
        return _share(x, w, ours), reset_product
    whole = None if ours is None or theirs is None else ours + theirs
    return _share(x, w, whole), reset_state


def _rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    p: Tensor | None,
    activations: Sequence[Function],
    variant: bool,
) -> tuple[Tensor, Step]:
    (function,), transposed = activations, r.t()

    def step(share: Tensor, state: State) -> State:
        return (function(torch.addmm(share, state[0], transposed)),)

    return _share(x, w, None if b is None else torch.add(*b.chunk(2))), step


_STEPS = {"lstm": _lstm, "gru": _gru, "rnn": _rnn}

_ACTIVATIONS: dict[str, Callable[[float, float], Function]] = {
    "affine": lambda a, b: lambda x: x * a + b,
    "elu": lambda a, b: lambda x: torch.nn.functional.elu(x, a),
    "hardsigmoid": lambda a, b: lambda x: (x * a + b).clamp_(0, 1),
    "leakyrelu": lambda a, b: lambda x: torch.nn.functional.leaky_relu(x, a),
    "relu": lambda a, b: torch.relu,
    "scaledtanh": lambda a, b: lambda x: a * torch.tanh(b * x),
    "sigmoid": lambda a, b: torch.sigmoid,
    "softplus": lambda a, b: torch.nn.functional.softplus,
    "softsign": lambda a, b: torch.nn.functional.softsign,
    "tanh": lambda a, b: torch.tanh,
    "thresholdedrelu": lambda a, b: lambda x: torch.nn.functional.threshold(x, a, 0.0),
}
