"""A small model with two outputs, as a torch module and as an ONNX model of an old opset."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper
from torch import Tensor, nn

TEXT = """
<ir_version: 7, opset_import: ["" : 14]>
heads (float[batch,4] input) => (float[batch,3] output1, float[batch,2] output2) {
    product = Gemm<transB = 1>(input, "body.weight", "body.bias")
    hidden = Tanh(product)
    output1 = Gemm<transB = 1>(hidden, "a.weight", "a.bias")
    output2 = Gemm<transB = 1>(hidden, "b.weight", "b.bias")
}
"""


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.a(hidden), self.b(hidden)

    def as_onnx(self) -> onnx.ModelProto:
        model = onnx.parser.parse_model(TEXT)
        for name, parameter in self.named_parameters():
            model.graph.initializer.append(
                numpy_helper.from_array(parameter.detach().numpy().copy(), name)
            )
        return model


def floats(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(found: object, expected: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)  # type: ignore[arg-type]
