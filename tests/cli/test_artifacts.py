"""`ortrain artifacts` of files from elsewhere: one line and status 2, whatever is in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortrain.cli import main
from ortrain.errors import GraphError, InputError, OrtrainError
from ortrain.ondevice import generate_artifacts

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
HUGE = 2**62


def tensor(name: str, *shape: int) -> TensorProto:
    values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    return onnx.numpy_helper.from_array(values, name)


def model(nodes: list[onnx.NodeProto], tensors: list[TensorProto], **options: Any) -> Any:
    opset = options.pop("opset", 18)
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, options.pop("input", ["n", 4]))],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        tensors,
    )
    return helper.make_model(
        graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)], **options
    )


def perceptron(**options: Any) -> Any:
    return model(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], transB=1),
            helper.make_node("Relu", ["h"], ["a"]),
            helper.make_node("Gemm", ["a", "w2", "b2"], ["y"], transB=1),
        ],
        [tensor("w1", 8, 4), tensor("b1", 8), tensor("w2", 3, 8), tensor("b2", 3)],
        **options,
    )


def convolution() -> Any:
    names = ["scale", "shift", "mean", "var"]
    return model(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3]),
            helper.make_node(
                "BatchNormalization", ["c", *names], ["n", "m2", "v2"], training_mode=1
            ),
            helper.make_node("Relu", ["n"], ["r"]),
            helper.make_node("Flatten", ["r"], ["f"]),
            helper.make_node("Gemm", ["f", "w2"], ["y"]),
        ],
        [tensor("w", 2, 1, 3, 3), *(tensor(name, 2) for name in names), tensor("w2", 8, 3)],
        input=["n", 1, 4, 4],
    )


def run(
    path: Path, folder: Path, capfd: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str]:
    """Status, and what is said; nothing else may be, and no file left where it is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", lambda *_: None)
        status = main(
            ["artifacts", str(path), "-o", str(folder), "--loss", "CrossEntropyLoss", *options]
        )
    out, err = capfd.readouterr()
    if status:
        assert status == 2
        assert err.startswith("ortrain: error: ")
        assert err.count("\n") == 1
        assert not out
        assert not folder.exists() or not any(folder.iterdir())
    else:
        assert out == f"the artifacts are in {folder}\n"
    return status, err


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("build", [perceptron, convolution])
def test_damage_anywhere_in_a_file_is_one_line_or_none(
    build: Callable[[], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = build().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(whole)
    assert run(path, tmp_path / "whole", capfd)[0] == 0
    generator = np.random.default_rng(0)
    refused = 0
    for case in range(32):
        data = bytearray(whole)
        if case < 24:
            data[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        else:
            del data[generator.integers(len(data)) :]
        path.write_bytes(data)
        status, _ = run(path, tmp_path / str(case), capfd)
        refused += status == 2
        if status:
            with pytest.raises((OrtrainError, ValueError)):
                generate_artifacts(path, ["w1", "w2"], artifact_directory=tmp_path / "python")
            assert not (tmp_path / "python").exists() or not any((tmp_path / "python").iterdir())
    assert refused >= 8


# -- what is no file, or not all of one ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "folder", "device", "pipe", "link", "empty", "text"])
def test_what_is_no_model_is_one_line(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind != "missing":
        path.write_text("" if kind == "empty" else "a text, and not a model\n" * 100)
    assert run(path, tmp_path / "out", capfd)[0] == 2
    with pytest.raises((FileNotFoundError, GraphError, InputError)):
        generate_artifacts(path)


@pytest.mark.parametrize("suffix", ["json", "textproto", "onnxtxt", "onnxjson"])
def test_a_file_that_is_read_as_text_and_is_none_is_one_line(
    suffix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"model.{suffix}"
    for data in (b"", b"\xff\xfe", b"{" * 5000, perceptron().SerializeToString()):
        path.write_bytes(data)
        assert run(path, tmp_path / "out", capfd)[0] == 2


def external(location: str, **places: Any) -> Any:
    result = perceptron()
    first = result.graph.initializer[0]
    first.ClearField("raw_data")
    first.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **places}.items():
        entry = first.external_data.add()
        entry.key, entry.value = key, str(value)
    return result


@pytest.mark.parametrize(
    "places",
    [
        {"location": "missing"},
        {"location": "../outside"},
        {"location": "inner/../../outside"},
        {"location": "/dev/zero"},
        {"location": "zero"},
        {"location": "pipe"},
        {"location": "folder"},
        {"location": ""},
        {"location": "a\0b"},
        {"location": "short"},
        {"location": "short", "offset": 0, "length": 128},
        {"location": "beside", "offset": 64, "length": 128},
        {"location": "beside", "offset": HUGE},
        {"location": "beside", "offset": -1},
        {"location": "beside", "length": HUGE},
        {"location": "beside", "length": "many"},
        {"location": "beside", "length": 64},
        {"location": "long"},
    ],
    ids=str,
)
def test_external_data_that_is_not_there_is_one_line(
    places: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, size in (("../outside", 128), ("beside", 128), ("short", 100), ("long", 132)):
        (folder / name).write_bytes(bytes(size))
    (folder / "folder").mkdir()
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    path = folder / "model.onnx"
    path.write_bytes(external(**places).SerializeToString())
    assert run(path, tmp_path / "out", capfd)[0] == 2
    with pytest.raises((FileNotFoundError, GraphError, InputError)):
        generate_artifacts(path, ["w2"])


def test_external_data_beside_the_model_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside").write_bytes(bytes(128))
    path = tmp_path / "model.onnx"
    path.write_bytes(external("beside", offset=0, length=128, unknown="key").SerializeToString())
    assert run(path, tmp_path / "out", capfd)[0] == 0


# -- models that are none --------------------------------------------------------------------------


def changed(change: Callable[[Any], object]) -> Any:
    result = perceptron()
    change(result)
    return result


def dims(*sizes: int) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        del proto.graph.initializer[0].dims[:]
        proto.graph.initializer[0].dims.extend(sizes)

    return change


def nested_bytes(depth: int) -> bytes:
    """Subgraphs in subgraphs as they lie in a file: protobuf is the first that has to stop."""

    def field(number: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            length += bytes([size & 127 | 128])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    graph = b""
    for _ in range(depth):  # graph → node → attribute → graph
        graph = field(1, field(4, b"If") + field(5, field(1, b"then_branch") + field(6, graph)))
    return bytes([8, 8]) + field(7, graph)


def recursive() -> Any:
    """A function that calls itself."""
    result = model([helper.make_node("F", ["x"], ["y"], domain="own")], [])
    result.opset_import.append(helper.make_opsetid("own", 1))
    result.functions.append(
        helper.make_function(
            "own",
            "F",
            ["a"],
            ["b"],
            [helper.make_node("F", ["a"], ["b"], domain="own")],
            [helper.make_opsetid("own", 1)],
        )
    )
    return result


def constant_of(shape: list[int]) -> Any:
    sizes = onnx.numpy_helper.from_array(np.array(shape, np.int64), "sizes")
    return model(
        [
            helper.make_node("ConstantOfShape", ["sizes"], ["large"]),
            helper.make_node("ReduceSum", ["large"], ["sum"], keepdims=0),
            helper.make_node("Gemm", ["x", "w"], ["p"]),
            helper.make_node("Add", ["p", "sum"], ["y"]),
        ],
        [sizes, tensor("w", 4, 3)],
    )


def counted(length: int) -> Any:
    numbers = [onnx.numpy_helper.from_array(np.int64(i), f"i{i}") for i in (0, length, 1)]
    return model(
        [
            helper.make_node("Range", [tensor.name for tensor in numbers], ["numbers"]),
            helper.make_node("ReduceMax", ["numbers"], ["last"], keepdims=0),
            helper.make_node("Cast", ["last"], ["sum"], to=FLOAT),
            helper.make_node("Gemm", ["x", "w"], ["p"]),
            helper.make_node("Add", ["p", "sum"], ["y"]),
        ],
        [*numbers, tensor("w", 4, 3)],
    )


def old(opset: int) -> Any:
    return perceptron(opset=opset)


MODELS: dict[str, Callable[[], Any]] = {
    "nothing at all": onnx.ModelProto,
    "no nodes": lambda: changed(lambda p: p.graph.ClearField("node")),
    "no outputs": lambda: changed(lambda p: p.graph.ClearField("output")),
    "an unknown output": lambda: changed(lambda p: setattr(p.graph.output[0], "name", "other")),
    "unsorted": lambda: changed(lambda p: p.graph.node.insert(3, p.graph.node.pop(0))),
    "cyclic": lambda: changed(lambda p: p.graph.node[0].input.__setitem__(0, "a")),
    "of itself": lambda: changed(lambda p: p.graph.node[1].input.__setitem__(0, "a")),
    "an unknown value": lambda: changed(lambda p: p.graph.node[1].input.__setitem__(0, "q")),
    "a value twice": lambda: changed(lambda p: p.graph.node[1].output.__setitem__(0, "h")),
    "a weight twice": lambda: changed(lambda p: p.graph.initializer.append(p.graph.initializer[0])),
    "an unknown operator": lambda: changed(lambda p: setattr(p.graph.node[1], "op_type", "Rolu")),
    "an unknown domain": lambda: changed(lambda p: setattr(p.graph.node[1], "domain", "where")),
    "an unknown attribute": lambda: changed(
        lambda p: p.graph.node[1].attribute.append(helper.make_attribute("slope", 1.0))
    ),
    "an attribute of another type": lambda: changed(
        lambda p: p.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("transB", "one"))
    ),
    "an unknown dtype": lambda: changed(
        lambda p: setattr(p.graph.initializer[0], "data_type", 999)
    ),
    "an undefined dtype": lambda: changed(
        lambda p: setattr(p.graph.initializer[0], "data_type", 0)
    ),
    "strings for weights": lambda: changed(
        lambda p: setattr(p.graph.initializer[0], "data_type", TensorProto.STRING)
    ),
    "an unknown dtype of an input": lambda: changed(
        lambda p: setattr(p.graph.input[0].type.tensor_type, "elem_type", 999)
    ),
    "an input without a type": lambda: changed(lambda p: p.graph.input[0].ClearField("type")),
    "a weight too short": lambda: changed(
        lambda p: setattr(p.graph.initializer[0], "raw_data", bytes(12))
    ),
    "a weight without data": lambda: changed(
        lambda p: p.graph.initializer[0].ClearField("raw_data")
    ),
    "a huge weight": lambda: changed(dims(HUGE, 4)),
    "a weight beyond integers": lambda: changed(dims(HUGE, HUGE)),
    "a weight of negative size": lambda: changed(dims(-8, -4)),
    "a weight of another rank": lambda: changed(dims(2, 2, 2, 4)),
    "a weight of another shape": lambda: changed(dims(16, 2)),
    "no opset": lambda: changed(lambda p: p.ClearField("opset_import")),
    "opset 0": lambda: old(0),
    "opset -1": lambda: old(-1),
    "opset 9999": lambda: old(9999),
    "an IR of the future": lambda: changed(lambda p: setattr(p, "ir_version", 9999)),
    "no IR": lambda: changed(lambda p: p.ClearField("ir_version")),
    "a function that calls itself": recursive,
    "constants of negative size": lambda: constant_of([-1]),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_not_valid_is_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    proto = MODELS[name]()
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    status, said = run(path, tmp_path / "out", capfd)
    assert status == 2, said
    with pytest.raises((OrtrainError, ValueError)):
        generate_artifacts(proto, ["w1", "w2"], artifact_directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("depth", [1, 20, 60, 1000, 20_000])
def test_subgraphs_however_deep_are_one_line(
    depth: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(nested_bytes(depth))
    assert run(path, tmp_path / "out", capfd)[0] == 2


def test_texts_that_are_no_utf8_are_one_line_or_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    proto = perceptron(producer_name="PPPPPPPP", doc_string="DDDDDDDD")
    entry = proto.metadata_props.add()
    entry.key, entry.value = "KKKKKKKK", "VVVVVVVV"
    proto.graph.node[0].name = "NNNNNNNN"
    whole = proto.SerializeToString()
    for letter in b"PDKVN":
        path = tmp_path / "model.onnx"
        path.write_bytes(whole.replace(bytes([letter] * 8), b"\xff\xfe\x80\0\xc3\x28AB"))
        run(path, tmp_path / chr(letter), capfd)


def test_sizes_beyond_any_memory_are_not_computed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    for number, proto in enumerate(
        [
            constant_of([2**40]),
            constant_of([HUGE]),
            constant_of([HUGE, HUGE]),
            perceptron(input=[HUGE, 4]),
            counted(HUGE),
        ]
    ):
        path.write_bytes(proto.SerializeToString())
        run(path, tmp_path / str(number), capfd)


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(perceptron().SerializeToString())
    (tmp_path / "out").write_text("mine")
    status = main(["artifacts", str(path), "-o", str(tmp_path / "out"), "--loss", "MSELoss"])
    out, err = capfd.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert (tmp_path / "out").read_text() == "mine"
