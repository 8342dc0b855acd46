"""Matrix products."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.autodiff.registry import gradient
from ortrain.graph import shapes
from ortrain.graph.broadcast import unbroadcast


@gradient("MatMul")
def matmul(g, a, b):
    """da = dy bᵀ, db = aᵀ dy, summed over batch axes that were broadcast"""
    dy, rows, columns = g.dy, a, b
    if g.rank(b) == 1:  # a vector is a matrix of one column, or of one row
        columns, dy = g.op.Unsqueeze(b, [1]), g.op.Unsqueeze(dy, [-1])
    if g.rank(a) == 1:
        rows, dy = g.op.Unsqueeze(a, [0]), g.op.Unsqueeze(dy, [-2])
    da = _left(g, dy, rows, columns) if g.needs(0) else None
    db = _right(g, dy, rows, columns) if g.needs(1) else None
    if da is not None and rows is not a:
        da = g.op.Squeeze(da, [0])
    if db is not None and columns is not b:
        db = g.op.Squeeze(db, [1])
    return da, db


def _left(g, dy, a, b):
    da = g.op.MatMul(dy, g.op.transposed(b))
    return unbroadcast(g.op, da, a, da)


def _right(g, dy, a, b):
    if g.rank(b) == 2 and g.rank(a) > 2:
        # A weight: one product over all rows instead of a batch of them and a sum.
        return g.op.MatMul(g.op.transposed(_rows(g, a)), _rows(g, dy))
    db = g.op.MatMul(g.op.transposed(a), dy)
    return unbroadcast(g.op, db, b, db)


def _rows(g, value):
    known = shapes.dims(value)
    last = known[-1] if known is not None else None
    if isinstance(last, int):
        return g.op.Reshape(value, [-1, last])
    rows = g.op.Reshape(value, g.op.Concat([-1], g.op.dim(value, -1), axis=0))
    rows.shape = ir.Shape([None, last])
    return rows


@gradient("Gemm")
def gemm(g, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    """y = alpha a' b' + beta c: da' = alpha dy b'ᵀ, db' = alpha a'ᵀ dy, dc = beta dy"""
    da = db = dc = None
    if g.needs(0):
        if transA:
            da = g.op.Gemm(b, g.dy, alpha=alpha, transA=transB, transB=1)
        else:
            da = g.op.Gemm(g.dy, b, alpha=alpha, transB=1 - transB)
    if g.needs(1):
        if transB:
            db = g.op.Gemm(g.dy, a, alpha=alpha, transA=1, transB=transA)
        else:
            db = g.op.Gemm(a, g.dy, alpha=alpha, transA=1 - transA)
    if c is not None and g.needs(2):
        dc = unbroadcast(g.op, g.dy if beta == 1 else g.dy * beta, c, g.y)
    return da, db, dc


@gradient("Einsum")
def einsum(g, *inputs, equation):
    """d x_i = einsum of dy and the other inputs, with the axes that x_i alone had repeated"""
    terms, result = _equation(g, equation, len(inputs))
    grads: list[ir.Value | None] = []
    for i, (x, term) in enumerate(zip(inputs, terms, strict=True)):
        if not g.needs(i):
            grads.append(None)
            continue
        others = [t for k, t in enumerate(terms) if k != i]
        known = {c for t in (result, *others) for c in t}
        kept = "".join(c for c in term if c in known)
        spelled = ",".join([result, *others]) + "->" + kept
        part = g.op.Einsum(g.dy, *(v for k, v in enumerate(inputs) if k != i), equation=spelled)
        if kept != term:
            alone = [axis for axis, c in enumerate(term) if c not in known]
            part = g.op.Expand(g.op.Unsqueeze(part, alone), g.op.shape(x))
        grads.append(part)
    return tuple(grads)


def _equation(g, equation, count):
    """The terms and the result of an equation, both spelled out."""
    if "." in equation:
        g.unsupported("an ellipsis in the equation")
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    assert len(terms) == count
    if any(len(set(t)) < len(t) for t in terms):
        g.unsupported("a diagonal: a label occurs twice in one term")
    if not arrow:
        letters = "".join(terms)
        result = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return terms, result
