"""Weights in files beside an ONNX file: where its tensors say, and never outside of its folder.

A link in that folder may lead out of it, as those of a hub's cache do (``model.onnx_data`` to
``../../blobs/…``): it was put there by who holds the folder, not by who wrote the model. onnx and
onnx_ir refuse all such links, and files of two names, so both are given what was looked up here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from ortrain.errors import InputError
from ortrain.files.names import expect_within
from ortrain.files.regular import expect_regular


def initializers(model: ir.Model) -> Iterator[ir.Value]:
    """All initializers of a model that have a tensor, those of its sub-graphs too."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value


def tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """All constants of a model: initializers, and those that are attributes of nodes."""
    for value in initializers(model):
        assert value.const_value is not None
        yield value.const_value
    for _, attribute in _attributes(model):
        yield attribute.as_tensor()


def locate(model: ir.Model, path: Path) -> None:
    """Has the weights of a model that lie beside its file be read from there, when they are used.

    Args:
        model: of the file; its external tensors are replaced.
        path: of the file.

    Raises:
        InputError: a weight is not there, or not all of it.
    """
    for value in initializers(model):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = _located(tensor, path)
        elif (
            isinstance(tensor, ir.TensorProtoTensor)
            and tensor.raw.HasField("raw_data")
            and (there := len(tensor.raw.raw_data)) != tensor.nbytes
        ):
            raise _missing(path, tensor, f"the file has {there} of its {tensor.nbytes} bytes")
    for node, attribute in [*_attributes(model)]:
        tensor = attribute.as_tensor()
        if isinstance(tensor, ir.ExternalTensor):
            array = _located(tensor, path).numpy()
            inside = ir.Tensor(array, tensor.dtype, name=tensor.name)
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, inside)


def protos(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All constants of a model whose bytes lie beside its file."""
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        found = [*graph.initializer]
        for attribute in (each for node in graph.node for each in node.attribute):
            graphs += [attribute.g] if attribute.HasField("g") else [*attribute.graphs]
            found += [attribute.t] if attribute.HasField("t") else [*attribute.tensors]
        yield from (each for each in found if each.data_location == onnx.TensorProto.EXTERNAL)


def read_into(model: onnx.ModelProto, path: Path) -> None:
    """Reads the weights of a model that lie beside its file.

    Raises:
        InputError: a weight is not there, or not all of it.
    """
    for proto in protos(model):
        tensor = ir.from_proto(proto)
        assert isinstance(tensor, ir.ExternalTensor)
        proto.raw_data = _located(tensor, path).tobytes()
        proto.data_location = onnx.TensorProto.DEFAULT
        del proto.external_data[:]


def _attributes(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Attr]]:
    for graph in model.graphs():
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield node, attribute


def _located(tensor: ir.ExternalTensor, path: Path) -> ir.ExternalTensor:
    """The tensor with the path of its file; where it has no folder, onnx_ir looks at no links."""
    try:
        file = expect_regular(expect_within(path.parent, tensor.location))
        reason = "" if file.is_file() else f"there is no file {file.name} beside it"
    except ValueError as error:
        reason = error.what if isinstance(error, InputError) else str(error)
    if not reason:
        size = file.stat().st_size
        end = (tensor.offset or 0) + (tensor.nbytes if tensor.length is None else tensor.length)
        if end > size:
            reason = f"{file.name} has {size} bytes, and the weight ends at {end}"
    if reason:
        raise _missing(path, tensor, reason)
    return ir.ExternalTensor(
        file,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
        doc_string=tensor.doc_string,
    )


def _missing(path: Path, tensor: ir.TensorProtocol, reason: str) -> InputError:
    return InputError(
        f"{path} has no weight {tensor.name}",
        because=reason,
        help="copy the model with all files that belong to it",
    )
