"""Which engines are tried for a program."""

from __future__ import annotations

import itertools

import pytest
import torch

from ortrain.runtime import engines
from tests.programs import program

BOTH = ("onnxruntime", "aten")
F32, BF16, F16, I64 = torch.float32, torch.bfloat16, torch.float16, torch.int64
CPU = torch.device("cpu")
PROVIDER = "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("device", "dtypes", "more", "expected"),
    [
        ("cpu", {F32, I64}, {}, BOTH),
        ("cpu", {torch.float64}, {}, BOTH),
        ("cpu", {F32, BF16}, {}, ("aten",)),
        ("cpu", {F16}, {}, ("aten",)),
        ("cpu", {F32}, {"provider": PROVIDER}, ("onnxruntime",)),
        ("cpu", {BF16}, {"provider": PROVIDER}, ()),
        ("cpu", {F32}, {"cuda_graphs": True}, BOTH),
        ("cuda", {F32}, {}, ()),
        ("cuda", {F32, BF16}, {"cuda_graphs": True}, ("aten",)),
        ("cuda", {F32}, {"cuda_graphs": True, "provider": PROVIDER}, ()),
        ("meta", {F32}, {"cuda_graphs": True}, ()),
    ],
)
def test_candidates(device, dtypes, more, expected):
    assert engines.candidates(torch.device(device), dtypes, **more) == expected


X, W = (1, 2, 8, 8), (2, 2, 3, 3)


def products(count):
    def body(op, x, w):
        for _ in range(count):
            x = op.MatMul(x, w)
        return x

    return program(body, {"x": (4, 4), "w": (4, 4)})


@pytest.fixture(params=["AuthenticAMD", "GenuineIntel", ""])
def vendor(request, monkeypatch):
    monkeypatch.setattr(engines, "cpuinfo", lambda: {"vendor_id": request.param})
    return request.param


def test_small_nodes_are_onnxruntimes_and_large_ones_pytorchs(vendor):
    for count in (1, 3):
        graph = products(count).graph
        found = [engines.line_up(BOTH, graph, count * 10**each) for each in range(3, 10)]
        starters = [each.starters for each in found]
        assert starters[0] == ("onnxruntime",)
        assert starters[-1] == ("aten",)
        # From one to the other by way of both.
        groups = [key for key, _ in itertools.groupby(starters)]
        assert groups == [("onnxruntime",), BOTH, ("aten",)]


@pytest.mark.parametrize("known", [("aten",), ("onnxruntime",)])
@pytest.mark.parametrize("each", [10, 10**9])
def test_the_only_one_is_always_tried(known, each):
    assert engines.line_up(known, products(1).graph, each) == (known, ())


def test_of_large_products_onnxruntime_is_a_rival_where_its_own_are_not_far_behind(vendor):
    graph = products(1).graph
    rivals = [engines.line_up(BOTH, graph, 10**each).rivals for each in range(3, 10)]
    assert rivals[0] == ()
    assert rivals[-1] == (() if vendor == "GenuineIntel" else ("onnxruntime",))


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_of_convolutions_it_is_none(vendor, kind):
    graph = program(lambda op, x, w: getattr(op, kind)(x, w), {"x": X, "w": W}).graph
    assert engines.line_up(BOTH, graph, 10**9) == (("aten",), ())
