"""Sizes of symbolic dimensions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from ortrain.graph.shapes import Dim, dims, evaluate, infer_all
from tests.programs import program


@pytest.mark.parametrize(
    ("dim", "size"),
    [
        (3, 3),
        (None, None),
        ("s76", 400),
        ("((s76//40)) - 1", 9),
        ("max(1, s76) * other", 800),
        ("unknown", None),
        ("unknown // 2", None),
        ("a name: of the user's", 5),
        ("another name", None),
    ],
)
def test_a_dimension_is_as_large_as_its_symbols_say(dim: Dim, size: int | None) -> None:
    assert evaluate(dim, {"s76": 400, "other": 2, "a name: of the user's": 5}) == size


def test_the_pieces_of_a_split_are_known() -> None:
    def body(op, x):  # type: ignore[no-untyped-def]
        even = op.Split(x, num_outputs=3, axis=-1, outputs=3)
        uneven = op.Split(x, [2, 4], axis=-1, outputs=2)
        open_ = op.Split(x, num_outputs=2, axis=0, outputs=2)
        return {f"y{i}": value for i, value in enumerate((*even, *uneven, *open_))}

    subject = program(body, {"x": ["b", 6]})
    known = [dims(value) for value in subject.graph.outputs]
    assert known == [("b", 2)] * 3 + [("b", 2), ("b", 4)] + [(None, 6)] * 2


@pytest.mark.parametrize(
    ("op_type", "places", "axis", "shape"),
    [
        ("Gather", [], 1, ("b", 7)),
        ("Gather", ["n"], 0, ("n", 6, 7)),
        ("Gather", ["n", 2], -1, ("b", 6, "n", 2)),
        ("GatherElements", ["b", 2, 7], 1, ("b", 2, 7)),
    ],
)
def test_what_is_gathered_has_the_shape_of_the_places(
    op_type: str, places: list[int | str], axis: int, shape: tuple[Dim, ...]
) -> None:
    def body(op, x, i):  # type: ignore[no-untyped-def]
        return op.node(op_type, [x, i], axis=axis)

    subject = program(body, {"x": ["b", 6, 7], "i": places}, dtypes={"i": np.int64})
    assert dims(subject.graph.outputs[0]) == shape


@pytest.mark.parametrize("layout", [0, 1])
def test_the_outputs_of_a_recurrent_layer_are_known(layout: int) -> None:
    def body(op, x, w, r):  # type: ignore[no-untyped-def]
        outputs = op.LSTM(x, w, r, direction="bidirectional", layout=layout, outputs=3)
        return dict(zip("yhc", outputs, strict=True))

    lead = ["b", "t"] if layout else ["t", "b"]
    subject = program(body, {"x": [*lead, 3], "w": [2, 20, 3], "r": [2, 20, 5]})
    state = ("b", 2, 5) if layout else (2, "b", 5)
    y = ("b", "t", 2, 5) if layout else ("t", 2, "b", 5)
    assert [dims(value) for value in subject.graph.outputs] == [y, state, state]


def test_long_vectors_are_not_taken_for_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    own = onnx.shape_inference.infer_shapes

    def infer_shapes(proto: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
        shown.append([v.type.tensor_type.shape.dim[0].dim_value for v in proto.graph.input])
        return own(proto, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", infer_shapes)
    sizes = {"x": [1 << 24], "y": [3], "z": [1 << 24, 2]}
    subject = program(lambda op, x, y, z: {"a": op.Unsqueeze(x, [1]), "b": op.Add(y, y)}, sizes)
    infer_all(subject.model)
    assert [each[:3] for each in shown] == [[0, 3, 1 << 24]]
    assert [dims(value) for value in subject.graph.inputs] == [(1 << 24,), (3,), (1 << 24, 2)]
    assert dims(subject.graph.outputs[0]) == (1 << 24, 1)
