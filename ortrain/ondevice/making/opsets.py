"""A model of an old opset in the one of today: by onnx's converter, and what it cannot do."""

from __future__ import annotations

import onnx

# From here on a batch normalization says in an attribute that it trains.
_SAYS_SO = 14


def converted(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model in a newer opset.

    A batch normalization of opset 9 to 13 trains where it has more than one result, which the
    converter refuses. As exporters write it, its last two results are read by nobody.

    Args:
        proto: stays as it is.
        opset: the newer one.

    Raises:
        Exception: of the converter, which knows no other.
    """
    version = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    trained: dict[str, list[str]] = {}
    if version < _SAYS_SO <= opset:
        given, proto = proto, onnx.ModelProto()
        proto.CopyFrom(given)
        read = {name for node in proto.graph.node for name in node.input}
        read |= {value.name for value in proto.graph.output}
        for node in proto.graph.node:
            if node.op_type == "BatchNormalization" and len(node.output) > 1:
                if read & {*node.output[3:]}:
                    continue  # the converter says what it thinks of that
                trained[node.output[0]] = list(node.output[1:3])
                del node.output[1:]
    result = onnx.version_converter.convert_version(proto, opset)
    for node in result.graph.node:
        if node.op_type == "BatchNormalization" and node.output[0] in trained:
            node.output.extend(trained[node.output[0]])
            node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
    return result
