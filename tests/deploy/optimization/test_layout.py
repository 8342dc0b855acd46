"""Transposes and reshapes that undo each other go, and no others."""

from __future__ import annotations

import pytest

from tests.deploy.optimization.graphs import assert_same, draw, fused, graph, operators

WEIGHTS = (
    "int64[4] split = {0,0,4,4}, int64[3] join = {0,0,16}, int64[3] turned = {0,-1,8}, "
    "int64[2] flat = {-1,16}"
)
SAME = "(float[batch,seq,16] x) => (float[batch,seq,16] y)"
GONE = {
    "two transposes": """a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(a)
                         y = Relu(b)""",
    "a transpose of nothing": "a = Transpose<perm=[0,1,2]>(x) y = Relu(a)",
    "a split and a merge": "a = Reshape(x, split) b = Reshape(a, join) y = Relu(b)",
    "a split and a merge by sizes": """n = Shape(x) a = Reshape(x, split)
        b = Reshape<allowzero=1>(a, n) y = Relu(b)""",
}
LEFT = {
    "a transpose of a transpose": (
        "(float[a,b,16,4] x) => (float[16,a,b,4] y)",
        "p = Transpose<perm=[0,2,1,3]>(x) y = Transpose<perm=[1,0,2,3]>(p)",
        {"Transpose": 1},
        (2, 3, 16, 4),
    ),
    "a reshape of a reshape": (
        "(float[batch,seq,16] x) => (float[rows,16] y)",
        "a = Reshape(x, split) y = Reshape(a, flat)",
        {"Reshape": 1},
        (2, 3, 16),
    ),
    "sizes that are others than they seem": (
        "(float[batch,seq,16] x) => (float[batch,n,8] y)",
        "f = Reshape(x, flat) a = Reshape(f, turned) y = Relu(a)",
        {"Reshape": 2, "Relu": 1},
        (2, 3, 16),
    ),
}


@pytest.mark.parametrize("case", GONE)
def test_what_undoes_itself_goes(case: str) -> None:
    before = graph(SAME, GONE[case], WEIGHTS)
    after, _ = fused(before)
    assert operators(after) == {"Relu": 1}
    assert_same(before, after, {"x": draw(2, 3, 16)}, {"x": draw(1, 1, 16)})


@pytest.mark.parametrize("case", LEFT)
def test_what_does_something_stays(case: str) -> None:
    signature, body, left, shape = LEFT[case]
    before = graph(signature, body, WEIGHTS)
    after, _ = fused(before)
    assert operators(after) == left
    assert_same(before, after, {"x": draw(*shape)})
