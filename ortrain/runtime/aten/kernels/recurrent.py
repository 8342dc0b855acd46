"""Recurrent layers: see :mod:`ortrain.runtime.aten.recurrent`."""

from __future__ import annotations

from ortrain.ops.base import attributes_of
from ortrain.runtime.aten.table import kernel

# Alpha and beta of the activations that have any; None where ONNX has no default.
_ALPHA = {"affine": None, "elu": 1.0, "hardsigmoid": 0.2, "leakyrelu": 0.01, "scaledtanh": None,
          "thresholdedrelu": 1.0}  # fmt: skip
_BETA = {"affine": None, "hardsigmoid": 0.5, "scaledtanh": None}
_OTHERS = {"relu", "sigmoid", "softplus", "softsign", "tanh"}
_USUAL = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}


def _is_known(node):
    """Not with activations that lack their numbers, nor with cells that are clipped.

    ONNX clips what every activation is given, onnxruntime not the cell in front of the last one.
    """
    names, alphas, betas = zip(*_activations(node), strict=True)
    clipped = node.op_type == "LSTM" and attributes_of(node).get("clip")
    known = set(names) <= _ALPHA.keys() | _OTHERS and None not in (*alphas, *betas)
    return known and len(names) % _directions(node) == 0 and not clipped


def _directions(node):
    return 2 if attributes_of(node).get("direction") == "bidirectional" else 1


def _activations(node):
    """Of each direction the functions with their alpha and beta, in the order of the gates."""
    given, usual = attributes_of(node), _USUAL[node.op_type] * _directions(node)
    alphas, betas = iter(given.get("activation_alpha", ())), iter(given.get("activation_beta", ()))
    rows = []
    for name in map(str.lower, given.get("activations", usual)[: len(usual)]):
        alpha = next(alphas, _ALPHA[name]) if name in _ALPHA else 0.0
        beta = next(betas, _BETA[name]) if name in _BETA else 0.0
        rows.append([name, alpha, beta])
    return rows


@kernel("LSTM", when=_is_known)
def lstm(
    t, x, w, r, b=None, sequence_lens=None, initial_h=None, initial_c=None, p=None, *,
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward",
    hidden_size=None, input_forget=0, layout=0, node,
):  # fmt: skip
    whole = "lstm" if p is None and not input_forget else None
    states = [initial_h, initial_c]
    return _layer(t, node, whole, (x, w, r, b), sequence_lens, states, p, bool(input_forget))


@kernel("GRU", when=_is_known)
def gru(
    t, x, w, r, b=None, sequence_lens=None, initial_h=None, *, activation_alpha=None,
    activation_beta=None, activations=None, clip=None, direction="forward", hidden_size=None,
    layout=0, linear_before_reset=0, node,
):  # fmt: skip
    whole, variant = ("gru", True) if linear_before_reset else (None, False)
    return _layer(t, node, whole, (x, w, r, b), sequence_lens, [initial_h], None, variant)


@kernel("RNN", when=_is_known)
def rnn(
    t, x, w, r, b=None, sequence_lens=None, initial_h=None, *, activation_alpha=None,
    activation_beta=None, activations=["Tanh", "Tanh"], clip=None, direction="forward",  # noqa: B006
    hidden_size=None, layout=0, node,
):  # fmt: skip
    names = {name for name, *_ in _activations(node)}
    whole = f"rnn_{names.pop()}" if names in ({"tanh"}, {"relu"}) else None
    return _layer(t, node, whole, (x, w, r, b), sequence_lens, [initial_h])


def _layer(t, node, whole, weights, lengths, states, p=None, variant=False):
    """A call of PyTorch's ``whole`` function where it has the form, else of one for every form."""
    given, activations, kind = attributes_of(node), _activations(node), node.op_type
    clip = float(given.get("clip", 0.0))
    form = {
        "reverse": given.get("direction") == "reverse",
        "batch_first": bool(given.get("layout", 0)),
        "outputs": 1 + len(states),
    }
    usual = kind == "RNN" or [row[0] for row in activations] == _USUAL[kind] * _directions(node)
    if whole and usual and lengths is None and not clip:
        return t.call("recurrent.fused", whole, *weights, states, **form)
    return t.call(
        "recurrent.layer", kind.lower(), *weights, lengths, states, p, activations=activations,
        clip=clip, variant=variant, **form,
    )  # fmt: skip
