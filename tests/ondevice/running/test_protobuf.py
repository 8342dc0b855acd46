"""The wire format against the onnx package."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from ortrain.ondevice.running.protobuf import fields, integer, nested, size


def test_fields_put_together_again_are_the_message(adamw: Path) -> None:
    content = (adamw / "training_model.onnx").read_bytes()
    parts = list(fields(memoryview(content)))
    assert b"".join(part.whole for part in parts) == content
    graph = next(part for part in parts if part.number == 7)
    assert b"".join(part.whole for part in fields(graph.content)) == bytes(graph.content)
    model = onnx.load_from_string(content)
    nodes = [part for part in fields(graph.content) if part.number == 1]
    assert [bytes(node.content) for node in nodes] == [
        node.SerializeToString() for node in model.graph.node
    ]
    assert next(part.value for part in parts if part.number == 1) == model.ir_version


def test_nothing_is_copied(adamw: Path) -> None:
    content = memoryview((adamw / "eval_model.onnx").read_bytes())
    for part in fields(content):
        assert part.whole.obj is content.obj
    data = memoryview(bytes(1000))
    assert nested(9, [data])[1] is data


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31 - 1, 2**31, 2**53, 2**63 - 1])
def test_integers_are_those_of_the_onnx_package(value: int) -> None:
    assert integer(1, value) == onnx.TensorProto(dims=[value]).SerializeToString()
    (part,) = fields(memoryview(integer(14, value)))
    assert (part.number, part.value) == (14, value)


def test_nested_messages_are_those_of_the_onnx_package() -> None:
    for length in (0, 1, 127, 128, 20_000):
        name = "ä" * length
        chunks = nested(8, [name.encode()]) if name else []
        tensor = onnx.TensorProto(name=name) if name else onnx.TensorProto()
        assert b"".join(chunks) == tensor.SerializeToString()
        assert size(chunks) == len(tensor.SerializeToString())
        graph = onnx.GraphProto(initializer=[tensor])
        assert b"".join(nested(5, chunks)) == graph.SerializeToString()


def test_floats_are_passed_over() -> None:
    attribute = onnx.AttributeProto(name="a", f=1.5, floats=[1.0, 2.0], type=1)
    tensor = onnx.TensorProto(double_data=[1.5, 2.5], name="t")
    for message in (attribute, tensor):
        content = message.SerializeToString()
        assert b"".join(part.whole for part in fields(memoryview(content))) == content


def test_a_message_that_is_cut_off_is_refused(adamw: Path) -> None:
    content = memoryview((adamw / "eval_model.onnx").read_bytes())
    ends = {0}
    for part in fields(content):
        ends.add(max(ends) + len(part.whole))
    for end in range(len(content)):
        if end not in ends:
            with pytest.raises(ValueError, match=r"cut off|does not end"):
                list(fields(content[:end]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x0b", "unknown kind 3"),  # a group, which ONNX does not use
        (b"\x00\x01", "does not end"),  # field number 0
        (b"\x08" + b"\xff" * 11, "cut off"),
        (b"\x3a\xff\xff\xff\xff\x7f", "does not end"),
    ],
)
def test_what_is_no_message_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(fields(memoryview(content)))
