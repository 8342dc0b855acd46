"""Products."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten.table import kernel

# Below this width of a matrix the choice of a library costs more than it brings.
_WIDE = 128


@kernel("MatMul")
def matmul(t, a, b):
    if b.rank == 2 and _is_large(t, b):
        return t.call("blas.mm" if a.rank == 2 else "blas.matmul", a, b)
    if t.device.type == "cpu" and min(a.rank or 0, b.rank or 0) > 3:
        return t.call("batches.matmul", a, b)
    return t.mm(a, b) if a.rank == b.rank == 2 else t.matmul(a, b)


@kernel("aten::WideMatMul")
def wide_matmul(t, a, b):
    return t.call("batches.wide_matmul", a, b)


@kernel("aten::ScaledMatMul")
def scaled_matmul(t, a, b, *, alpha):
    return t.call("batches.scaled_matmul", a, b, alpha)


@kernel("aten::Linear")
def linear(t, x, weight, bias=None):
    if _is_large(t, weight):
        return t.call("blas.linear", x, weight, bias)
    return t.call("torch._C._nn.linear", x, weight, bias)


def _is_large(t, matrix):
    """Whether two libraries compete for products with it: of float32, on the CPU."""
    sides = [d for d in matrix.dims if not isinstance(d, int) or d >= _WIDE]
    return t.device.type == "cpu" and matrix.dtype == ir.DataType.FLOAT and len(sides) == 2


@kernel("Gemm")
def gemm(t, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0, node):
    if a.dtype not in FLOATING:
        if not (alpha == int(alpha) and beta == int(beta)):
            raise t.refusal(node, "PyTorch multiplies whole numbers by whole numbers only")
        alpha, beta = int(alpha), int(beta)
    is_large = _is_large(t, b)  # of what is turned no sizes are known
    a, b = a.t() if transA else a, b.t() if transB else b
    if c is None:
        product = t.call("blas.mm", a, b) if is_large else t.mm(a, b)
        return product if alpha == 1 else product * alpha
    if is_large and alpha == beta == 1:
        return t.call("blas.addmm", c, a, b)
    return t.addmm(c, a, b, alpha=alpha, beta=beta)


@kernel("Einsum")
def einsum(t, *Inputs, equation):
    operands = [t.tensor(operand) for operand in Inputs]
    result = t.aten.einsum(equation, operands)
    if len(operands) == 1:  # a transpose or a diagonal is a view
        result.roots = operands[0].roots
    return result


@kernel("Det")
def det(t, X):
    return t.call("torch.linalg.det", X)
