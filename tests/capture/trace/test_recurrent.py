"""Recurrent layers are captured whole, for every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from ortrain.capture.export import Captured, capture
from ortrain.errors import CaptureError
from ortrain.program import Role
from ortrain.pytorch.recurrent import _SHAPES
from ortrain.testing import check_gradients
from tests.capture.running import check

LAYERS = [
    pytest.param(kind, options, id=f"{kind.__name__}-{note}")
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for note, options in (
        ("plain", {}),
        ("batch-first", {"batch_first": True}),
        ("no-bias", {"bias": False}),
        ("bidirectional", {"bidirectional": True}),
        ("deep", {"num_layers": 3}),
        ("all", {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}),
    )
] + [
    pytest.param(nn.RNN, {"nonlinearity": "relu", "bidirectional": True, "num_layers": 2},
                 id="RNN-relu"),
]  # fmt: skip


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape)


def serves(module: nn.Module, *calls: tuple[Any, ...]) -> Captured:
    """Captures with the first call, compares with all."""
    captured = capture(module, calls[0])
    for call in calls:
        check(captured, module, *call)
    return captured


@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_a_layer_is_one_node_a_layer_for_every_length_and_batch(kind: Any, options: Any) -> None:
    module = kind(3, 8, **options)
    sizes = ((5, 2), (7, 3), (1, 4), (3, 1))
    captured = serves(module, *((floats(*size, 3),) for size in sizes))
    assert captured.program.operators()[kind.__name__] == options.get("num_layers", 1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_first_call_of_one_step_or_one_sequence_serves_all(kind: Any) -> None:
    for first in ((1, 1), (1, 3), (4, 1)):
        serves(kind(3, 8), (floats(*first, 3),), (floats(5, 2, 3),), (floats(2, 4, 3),))


def test_without_a_batch() -> None:
    serves(nn.GRU(3, 8, bidirectional=True), (floats(5, 3),), (floats(2, 3),))


def test_initial_states_may_be_given() -> None:
    lstm, gru = nn.LSTM(3, 8, num_layers=2), nn.GRU(3, 8, bidirectional=True, batch_first=True)
    states = [(floats(2, batch, 8), floats(2, batch, 8)) for batch in (3, 4)]
    serves(lstm, (floats(5, 3, 3), states[0]), (floats(2, 4, 3), states[1]))
    serves(gru, (floats(3, 5, 3), states[0][0]), (floats(4, 2, 3), states[1][0]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_is_captured_with_and_without_states(kind: Any, bias: bool) -> None:
    module = kind(3, 8, bias=bias)
    states = [(floats(batch, 8), floats(batch, 8)) for batch in (2, 5)]
    if kind is not nn.LSTMCell:
        states = [hidden for hidden, _ in states]  # type: ignore[misc]
    serves(module, (floats(2, 3),), (floats(5, 3),))
    serves(module, (floats(2, 3), states[0]), (floats(5, 3), states[1]))


def test_a_cell_may_be_rectified_and_without_a_batch() -> None:
    serves(nn.RNNCell(3, 8, nonlinearity="relu"), (floats(2, 3),), (floats(5, 3),))
    serves(nn.GRUCell(3, 8), (floats(3),))


def test_dropout_is_between_the_layers_alone_and_its_gradient_is_right() -> None:
    module = nn.GRU(3, 8, num_layers=3, dropout=0.5)
    x = floats(4, 2, 3)
    program = capture(module, (x,)).program
    drops = [node for node in program.graph if node.op_type == "Dropout"]
    assert [node.attributes["stream"].as_int() for node in drops] == [0, 1]
    feeds = {"input": x.numpy(), "seed": np.array(7, np.int64)}
    feeds |= {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
    check_gradients(program, feeds, wrt=["weight_ih_l0", "weight_hh_l1"], tolerance="sums")

    evaluated = serves(module.eval(), (x,), (floats(2, 3, 3),)).program
    assert not evaluated.inputs(Role.SEED)
    assert "ortrain::Dropout" not in evaluated.operators()


def test_projections_are_refused_with_the_reason() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(nn.LSTM(3, 8, proj_size=4), (floats(5, 2, 3),))
    assert caught.value.what == "an LSTM with proj_size cannot be captured"


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y: Tensor = self.layer(packed)[1]
        return y


def test_a_packed_sequence_is_refused_with_the_remedy() -> None:
    packed = rnn.pack_sequence([floats(5, 3), floats(2, 3)])
    for module, call in (
        (Packs(), (floats(5, 2, 3), torch.tensor([2, 5]))),
        (nn.GRU(3, 8), (packed,)),
    ):
        with pytest.raises(CaptureError) as caught:
            capture(module, call)
        assert caught.value.what == "a packed sequence cannot be captured"
        assert "mask" in caught.value.help


def test_torch_is_as_before_after_a_capture_and_after_one_that_failed() -> None:
    def private() -> list[Any]:
        return [rnn.PackedSequence.__new__, *(dict(operator.py_kernels) for operator in _SHAPES)]

    before = private()
    capture(nn.LSTM(3, 8), (floats(5, 2, 3),))
    with pytest.raises(CaptureError):
        capture(Packs(), (floats(5, 2, 3), torch.tensor([2, 5])))
    assert private() == before
    assert all(kernels for kernels in before[1:])
    Packs()(floats(5, 2, 3), torch.tensor([2, 5])).sum().backward()


def test_results_require_a_gradient_in_a_trace_as_they_do_in_eager() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 8)

        def forward(self, x: Tensor) -> Tensor:
            y, (h, c) = self.layer(x)
            asked = y.requires_grad and h.requires_grad and c.requires_grad
            z: Tensor = y * 2 if asked else y
            return z

    serves(Asks(), (floats(5, 2, 3),))
