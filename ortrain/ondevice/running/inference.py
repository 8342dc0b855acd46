"""Exports a model for inference: a graph pruned to what some of its values need, weights put in.

The ONNX file is taken apart by its wire format, as there is no onnx package on a device. Numbers of
fields are those of onnx.proto.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime

from ortrain.errors import InputError, listing
from ortrain.files import seal
from ortrain.files.crc32 import crc32
from ortrain.files.regular import expect_regular
from ortrain.files.replacing import replace_file
from ortrain.ondevice.running.checkpoint_file import Uri, source_name
from ortrain.ondevice.running.protobuf import Chunks, Field, fields, integer, nested, size

# What protocol buffers can hold in one message.
LIMIT = (1 << 31) - 1

_ELEMENT_TYPES = {
    np.dtype(dtype): number
    for number, dtype in (
        (1, np.float32),
        (2, np.uint8),
        (3, np.int8),
        (4, np.uint16),
        (5, np.int16),
        (6, np.int32),
        (7, np.int64),
        (9, np.bool_),
        (10, np.float16),
        (11, np.float64),
        (12, np.uint32),
        (13, np.uint64),
    )
}
# As onnxruntime spells them; what numpy lacks may be the type of an output too.
_SPELLINGS = {
    "float": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7,
    "string": 8, "bool": 9, "float16": 10, "double": 11, "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip


def export(
    uri: Uri,
    tensors: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    path: str | os.PathLike[str],
    load: Callable[[bytes], onnxruntime.InferenceSession],
    defaults: Collection[str] = (),
) -> None:
    """Writes a model that computes some values of another, with inputs replaced by weights.

    Args:
        uri: the other model, as a path or as the file's content.
        tensors: by names of inputs that they take the place of.
        outputs: values of the graph.
        path: of the new file.
        load: makes a session, which tells the types of the outputs.
        defaults: names of those among ``tensors`` that stay inputs, with the tensor as default.

    Raises:
        InputError: the model cannot be taken apart, has no such values, or would pass 2 GB.
        SaveError: the file could not be written.
    """
    names = list(outputs)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"graph_output_names must name values, each once, and is {names}")
    source = source_name(uri)
    in_memory = isinstance(uri, bytes | bytearray | memoryview)
    try:
        content = bytes(uri) if in_memory else expect_regular(uri).read_bytes()  # type: ignore[arg-type]
        seal.is_whole(content, f"evaluation model {source}")
        model, graph = _read(memoryview(content))
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot take the evaluation model {source} apart",
            because=str(error),
            help="give Module an evaluation model in ONNX format, in one whole file",
        ) from error
    unknown = [name for name in names if name not in graph.values()]
    if unknown:
        results = [name for name in graph.outputs if name]
        raise InputError(
            f"the evaluation model {source} has no value {listing(unknown)}",
            help=f"name values of its graph, such as {listing(results)}",
        )
    pruned = _pruned(graph, names)
    session = load(b"".join(_written(model, pruned)))
    pruned.outputs = {
        output.name: pruned.outputs[output.name] or _value_info(output)
        for output in session.get_outputs()
    }
    weights = {name: tensors[name] for name in pruned.inputs if name in tensors}
    pruned.inputs = {
        name: content
        for name, content in pruned.inputs.items()
        if name not in weights or name in defaults
    }
    chunks = _written(model, pruned, weights)
    if size(chunks) > LIMIT:
        raise InputError(
            f"the model for inference would have {size(chunks)} bytes",
            because="an ONNX file holds 2 GB at most",
            help="name outputs that need fewer of the weights",
        )
    replace_file(path, chunks, "model for inference")


# -- reading -------------------------------------------------------------------------------------


@dataclass
class _Node:
    """A node: what it and its sub-graphs read from around it, and what it writes."""

    whole: memoryview
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)


@dataclass
class _Graph:
    """A graph, with its parts as they stand in the file.

    Attributes:
        nodes: in order.
        initializers: by name; sparse ones too.
        inputs: by name.
        outputs: by name; None where the type is not known.
        value_infos: by name, where they tell a type.
        others: the graph's name and the like.
    """

    nodes: list[_Node] = field(default_factory=list)
    initializers: dict[str, memoryview] = field(default_factory=dict)
    inputs: dict[str, memoryview] = field(default_factory=dict)
    outputs: dict[str, Chunks | None] = field(default_factory=dict)
    value_infos: dict[str, memoryview] = field(default_factory=dict)
    others: list[memoryview] = field(default_factory=list)

    def values(self) -> set[str]:
        """Names of all that a node could read."""
        written = {name for node in self.nodes for name in node.writes if name}
        return {*self.inputs, *self.initializers, *written}

    def reads(self) -> list[str]:
        """What a sub-graph reads, also from around it: names are unique in the whole model."""
        return [*(name for node in self.nodes for name in node.reads), *self.outputs]


def _read(model: memoryview) -> tuple[list[memoryview], _Graph]:
    """All of a model but the graph, as it stands in the file; and the graph.

    Raises:
        ValueError: it is not an ONNX model, or keeps weights in other files.
    """
    if bytes(model[4:8]) == b"ORTM":
        raise ValueError("it is in ORT format")
    others, graphs = [], []
    for part in fields(model):
        if part.number == 7:  # graph
            graphs.append(part.content)
        elif part.number != 14 or not _is_seal(part.content):
            others.append(part.whole)
    if len(graphs) != 1:
        raise ValueError("it has no graph")
    return others, _read_graph(graphs[0])


def _is_seal(metadata: memoryview) -> bool:
    keys = (part.text() for part in fields(metadata) if part.number == 1)
    return any(key in (seal.KEY, seal.DATA_KEY) for key in keys)


def _read_graph(message: memoryview) -> _Graph:
    graph = _Graph()
    for part in fields(message):
        match part.number:
            case 1:
                graph.nodes.append(_read_node(part.content, part.whole))
            case 5:
                graph.initializers[_read_tensor(part.content)] = part.whole
            case 15:  # sparse: its values carry the name
                values = next(p for p in fields(part.content) if p.number == 1)
                graph.initializers[_read_tensor(values.content)] = part.whole
            case 11:
                graph.inputs[_name(part.content)] = part.content
            case 12:
                graph.outputs[_name(part.content)] = [part.content] if _has_type(part) else None
            case 13:
                if _has_type(part):
                    graph.value_infos[_name(part.content)] = part.content
            case 14:  # how tensors were quantized: names some that may be left out
                pass
            case _:
                graph.others.append(part.whole)
    return graph


def _read_node(message: memoryview, whole: memoryview) -> _Node:
    node = _Node(whole)
    for part in fields(message):
        match part.number:
            case 1:
                node.reads.append(part.text())
            case 2:
                node.writes.append(part.text())
            case 5:  # attribute
                for value in fields(part.content):
                    if value.number in (5, 10):  # tensors
                        _read_tensor(value.content)
                    elif value.number in (6, 11):  # graphs
                        node.reads += _read_graph(value.content).reads()
    return node


def _read_tensor(message: memoryview) -> str:
    """The name of a tensor."""
    name = ""
    for part in fields(message):
        if part.number == 8:
            name = part.text()
        elif part.number == 14 and part.value == 1:  # data_location: EXTERNAL
            raise ValueError(f"it keeps the tensor {name!r} in another file")
    return name


def _has_type(value_info: Field) -> bool:
    return any(part.number == 2 for part in fields(value_info.content))


def _name(value_info: memoryview) -> str:
    return next((part.text() for part in fields(value_info) if part.number == 1), "")


# -- pruning -------------------------------------------------------------------------------------


def _pruned(graph: _Graph, outputs: Iterable[str]) -> _Graph:
    """What of a graph some of its values need."""
    needed = set(outputs)
    nodes = []
    for node in reversed(graph.nodes):
        # An empty name stands for an optional input or output that is left out.
        if needed.intersection(filter(None, node.writes)):
            needed.update(node.reads)
            nodes.append(node)
    return _Graph(
        nodes[::-1],
        {name: whole for name, whole in graph.initializers.items() if name in needed},
        {name: content for name, content in graph.inputs.items() if name in needed},
        {name: _typed(graph, name) for name in outputs},
        {name: content for name, content in graph.value_infos.items() if name in needed},
        graph.others,
    )


def _typed(graph: _Graph, name: str) -> Chunks | None:
    """What the graph says of the type of a value."""
    for known in (graph.value_infos, graph.inputs):
        if name in known:
            return [known[name]]
    return graph.outputs.get(name)


# -- writing -------------------------------------------------------------------------------------


def _written(
    model: Iterable[memoryview], graph: _Graph, weights: Mapping[str, np.ndarray] | None = None
) -> Chunks:
    parts: Chunks = [node.whole for node in graph.nodes]
    parts += graph.initializers.values()
    for name, array in (weights or {}).items():
        parts += nested(5, _tensor(name, array))
    for content in graph.inputs.values():
        parts += nested(11, [content])
    for name, info in graph.outputs.items():
        parts += nested(12, info or _text(1, name))
    for name, content in graph.value_infos.items():
        if name not in graph.outputs:
            parts += nested(13, [content])
    return _sealed([*model, *nested(7, [*parts, *graph.others])])


def _sealed(chunks: Chunks) -> Chunks:
    """The same with a seal before it."""
    entry = seal.model_entry()
    checksum = crc32(entry)
    for chunk in chunks:
        checksum = crc32(chunk, checksum)
    at = seal.find(entry)
    return [entry[:at] + seal.digits(checksum) + entry[at + seal.DIGITS :], *chunks]


def _tensor(name: str, array: np.ndarray) -> Chunks:
    dims = [integer(1, dim) for dim in array.shape]
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    kind = integer(2, _ELEMENT_TYPES[array.dtype])
    return [*dims, kind, *_text(8, name), *nested(9, [data])]


def _value_info(argument: Any) -> Chunks:
    """A value's name and type, as a session tells them."""
    spelling = argument.type.removeprefix("tensor(").removesuffix(")")
    if spelling not in _SPELLINGS:
        raise InputError(
            f"{argument.name} cannot be an output",
            because=f"it is a {argument.type}",
            help="name values that are tensors",
        )
    dims: Chunks = []
    for dim in argument.shape:
        dims += nested(1, _dim(dim))
    tensor = [integer(1, _SPELLINGS[spelling]), *nested(2, dims)]
    return [*_text(1, argument.name), *nested(2, nested(1, tensor))]


def _dim(size: int | str | None) -> Chunks:
    if size is None:
        return []
    return [integer(1, size)] if isinstance(size, int) else _text(2, size)


def _text(number: int, text: str) -> Chunks:
    return nested(number, [text.encode()])
