"""Matrix products."""

from __future__ import annotations

import torch

from ortrain.testing import OpCase, normal


def product(a, b):
    return a @ b


def gemm(a, b, c=None, alpha=1.0, beta=1.0, transA=0, transB=0):
    y = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return y if c is None else y + beta * c


def matmul(note, a, b, **options):
    return OpCase(
        "MatMul", {"a": normal(*a), "b": normal(*b)}, torch=product, tolerance="sums", note=note,
        **options,
    )  # fmt: skip


def einsum(note, equation, *shapes, **options):
    names = "abcd"[: len(shapes)]
    inputs = {name: normal(*shape) for name, shape in zip(names, shapes, strict=True)}
    call = {
        1: lambda a, equation: torch.einsum(equation, a),
        2: lambda a, b, equation: torch.einsum(equation, a, b),
        3: lambda a, b, c, equation: torch.einsum(equation, a, b, c),
    }
    return OpCase(
        "Einsum", inputs, {"equation": equation}, torch=call[len(shapes)], tolerance="sums",
        note=note, **options,
    )  # fmt: skip


CASES = [
    einsum("product", "ij,jk->ik", (2, 3), (3, 4)),
    einsum("attention", "bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)),
    einsum("implicit", "ij,jk", (2, 3), (3, 4)),
    einsum("outer", "i,j->ij", (2,), (3,)),
    einsum("transpose", "ijk->kij", (2, 3, 4)),
    einsum("sum", "ij->i", (2, 3)),
    einsum("sum-alone", "ij,k->jk", (2, 3), (4,)),
    einsum("spaces", " b i d , b j d -> b i j ", (2, 3, 4), (2, 2, 4)),
    einsum("three", "ij,jk,k->i", (2, 3), (3, 4), (4,)),
    einsum("only-b", "ij,jk->ik", (2, 3), (3, 4), wrt=("b",)),
    matmul("2x2", (3, 4), (4, 5)),
    matmul("weight", (2, 3, 4), (4, 5)),
    matmul("weight-4d", (2, 3, 2, 4), (4, 5)),
    matmul("weight-left", (3, 4), (2, 4, 5)),
    matmul("batched", (2, 3, 4), (2, 4, 5)),
    matmul("batched-4d", (2, 2, 3, 4), (2, 2, 4, 5)),
    matmul("batch-broadcast-left", (1, 3, 4), (2, 4, 5)),
    matmul("batch-broadcast-right", (2, 2, 3, 4), (2, 1, 4, 5)),
    matmul("batch-broadcast-both", (2, 1, 3, 4), (3, 4, 5)),
    matmul("batch-of-one", (1, 3, 4), (1, 4, 5)),
    matmul("rows-of-one", (2, 1, 4), (4, 5)),
    matmul("square", (3, 3), (3, 3)),
    matmul("only-a", (2, 3, 4), (4, 5), wrt=("a",)),
    matmul("only-b", (2, 3, 4), (4, 5), wrt=("b",)),
    matmul("constant-b", (2, 3, 4), (4, 5), constants=("b",)),
    matmul("vector-matrix", (4,), (4, 5)),
    matmul("vector-batch", (4,), (2, 4, 5)),
    matmul("matrix-vector", (3, 4), (4,)),
    matmul("batch-vector", (2, 3, 4), (4,)),
    matmul("vector-vector", (4,), (4,)),
    *(
        OpCase(
            "Gemm",
            {"a": normal(*((4, 3) if ta else (3, 4))), "b": normal(*((5, 4) if tb else (4, 5))),
             "c": normal(5)},
            {"transA": ta, "transB": tb, "alpha": 0.5, "beta": 1.5},
            torch=gemm, tolerance="sums", note=f"trans{ta}{tb}",
        )
        for ta in (0, 1) for tb in (0, 1)
    ),
    OpCase(
        "Gemm", {"a": normal(3, 4), "b": normal(4, 5)}, torch=gemm, tolerance="sums", note="no-c"
    ),
    *(
        OpCase(
            "Gemm", {"a": normal(3, 4), "b": normal(4, 5), "c": normal(*c)},
            torch=gemm, tolerance="sums", note=f"c-{'x'.join(map(str, c)) or 'scalar'}",
        )
        for c in ((), (1,), (3, 1), (1, 5), (3, 5))
    ),
    OpCase(
        "Gemm", {"a": normal(3, 4), "b": normal(5, 4), "c": normal(5)}, {"transB": 1},
        torch=gemm, tolerance="sums", constants=("b",), note="constant-b",
    ),
]  # fmt: skip
