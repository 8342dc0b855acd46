"""Operators of ``onnx.reference`` done over: recurrent layers and loops.

- ``LSTM``, ``GRU``, ``RNN``: upstream's pass over the lengths of sequences, and know no ``Relu``.
- ``Scan``: upstream's runs forwards only, over the first axis.
- ``Loop``: upstream puts what steps collect one below the other, also where it is to be stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

Array = np.ndarray
State = tuple[Array, ...]


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
}


class _Recurrent(OpRun):
    """One layer in one direction or both; a subclass is one step of it."""

    op_domain = ""
    states = 1

    def _step(self, x: Array, r: Array, bias: Array, state: State, p: Array | None) -> State:
        """The states after a step.

        Args:
            x: [B, gates * H], the input's share of the gates with its bias.
            r: [gates * H, H].
            bias: [gates * H], of the recurrence.
            state: [B, H] each, the hidden one first.
            p: [3 * H] or absent.
        """
        raise NotImplementedError

    def _run(
        self,
        x: Array,
        w: Array,
        r: Array,
        b: Array | None = None,
        sequence_lens: Array | None = None,
        initial_h: Array | None = None,
        initial_c: Array | None = None,
        p: Array | None = None,
        direction: str | None = None,
        layout: int | None = None,
        **attributes: Any,
    ) -> tuple[Array, ...]:
        if layout:
            x = x.swapaxes(0, 1)
        length, batch, hidden = x.shape[0], x.shape[1], r.shape[-1]
        lengths = np.full(batch, length) if sequence_lens is None else sequence_lens
        outputs, finals = [], []
        for d in range(w.shape[0]):
            state: State = tuple(
                np.zeros((batch, hidden), x.dtype)
                if initial is None
                else (initial.swapaxes(0, 1) if layout else initial)[d]
                for initial in (initial_h, initial_c)[: self.states]
            )
            bias = np.zeros(2 * w.shape[1], x.dtype) if b is None else b[d]
            ours, theirs = np.split(bias, 2)
            y = np.zeros((length, batch, hidden), x.dtype)
            backwards = direction == "reverse" or d == 1
            for t in range(length)[:: -1 if backwards else 1]:
                peepholes = None if p is None else p[d]
                new = self._step(x[t] @ w[d].T + ours, r[d], theirs, state, peepholes)
                valid = (t < lengths)[:, None]
                state = tuple(np.where(valid, a, b) for a, b in zip(new, state, strict=True))
                y[t] = np.where(valid, new[0], 0)
            outputs.append(y)
            finals.append(state)
        result = [np.stack(outputs, 1), *(np.stack(s) for s in zip(*finals, strict=True))]
        if layout:
            result = [result[0].transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in result[1:])]
        return tuple(v.astype(x.dtype) for v in result)


class LSTM(_Recurrent):  # noqa: D101
    states = 2

    def _step(self, x: Array, r: Array, bias: Array, state: State, p: Array | None) -> State:
        h, c = state
        i, o, f, g = np.split(x + h @ r.T + bias, 4, -1)
        pi, po, pf = np.split(np.zeros(3 * h.shape[1], x.dtype) if p is None else p, 3)
        new = _sigmoid(f + pf * c) * c + _sigmoid(i + pi * c) * np.tanh(g)
        return _sigmoid(o + po * new) * np.tanh(new), new


class GRU(_Recurrent):  # noqa: D101
    linear_before_reset: int

    def _step(self, x: Array, r: Array, bias: Array, state: State, p: Array | None) -> State:
        (h,) = state
        (xz, xr, xn), (rz, rr, rn), (bz, br, bn) = (
            np.split(x, 3, -1), np.split(r, 3), np.split(bias, 3),
        )  # fmt: skip
        update, reset = _sigmoid(xz + h @ rz.T + bz), _sigmoid(xr + h @ rr.T + br)
        if self.linear_before_reset:
            new = np.tanh(xn + reset * (h @ rn.T + bn))
        else:
            new = np.tanh(xn + (reset * h) @ rn.T + bn)
        return ((1 - update) * new + update * h,)


class RNN(_Recurrent):  # noqa: D101
    activations: Sequence[str]

    def _step(self, x: Array, r: Array, bias: Array, state: State, p: Array | None) -> State:
        activation = _ACTIVATIONS[self.activations[0].lower()]
        return (activation(x + state[0] @ r.T + bias),)


class Scan(OpRun):  # noqa: D101
    op_domain = ""

    def need_context(self) -> bool:
        """The body may read what is outside."""
        return True

    def _run(
        self,
        *values: Array,
        context: dict[str, Array],
        bindings: Any = None,
        num_scan_inputs: int,
        scan_input_axes: Sequence[int] | None = None,
        scan_input_directions: Sequence[int] | None = None,
        scan_output_axes: Sequence[int] | None = None,
        scan_output_directions: Sequence[int] | None = None,
        **attributes: Any,
    ) -> tuple[Array, ...]:
        body: Any = self.body  # type: ignore[attr-defined]
        count = len(values) - num_scan_inputs
        axes_in = scan_input_axes or [0] * num_scan_inputs
        states = list(values[:count])
        slices = [np.moveaxis(v, a, 0) for v, a in zip(values[count:], axes_in, strict=True)]
        length = len(slices[0])
        collected = len(body.output_names) - count
        back_in = scan_input_directions or [0] * num_scan_inputs
        back_out = scan_output_directions or [0] * collected
        rows: list[list[Array]] = [[] for _ in range(collected)]
        for t in range(length):
            seen = [v[-1 - t if b else t] for v, b in zip(slices, back_in, strict=True)]
            given = dict(zip(body.input_names, [*states, *seen], strict=True))
            results = body.run(None, {**context, **given}, _bindings=bindings)
            states = results[:count]
            for row, value in zip(rows, results[count:], strict=True):
                row.append(value)
        axes_out = scan_output_axes or [0] * collected
        columns = zip(rows, back_out, axes_out, strict=True)
        return (*states, *(np.stack(r[::-1] if b else r, a) for r, b, a in columns))


class Loop(OpRun):  # noqa: D101
    op_domain = ""

    def need_context(self) -> bool:
        """The body may read what is outside."""
        return True

    def _run(
        self,
        trips: Array | None,
        condition: Array | None,
        *states: Array,
        context: dict[str, Array],
        bindings: Any = None,
        **attributes: Any,
    ) -> tuple[Array, ...]:
        body: Any = self.body  # type: ignore[attr-defined]
        rows: list[list[Array]] = [[] for _ in body.output_names[1 + len(states) :]]
        goes_on, step = condition is None or bool(condition), 0
        while goes_on and (trips is None or step < trips):
            entries = [np.array(step, np.int64), np.array(True), *states]
            given = dict(zip(body.input_names, entries, strict=True))
            going, *results = body.run(None, {**context, **given}, _bindings=bindings)
            goes_on, step = bool(going), step + 1
            states = tuple(results[: len(states)])
            for row, value in zip(rows, results[len(states) :], strict=True):
                row.append(value)
        # Of no step at all nobody knows here what it would have collected.
        return (*states, *(np.stack(row) if row else np.zeros(0) for row in rows))


OPERATORS: tuple[type[OpRun], ...] = (GRU, Loop, LSTM, RNN, Scan)
