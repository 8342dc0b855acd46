"""Attention by PyTorch's own function, where it computes what the operator's body does."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.runtime.aten import AtenExecutor
from tests.programs import program, run

SHAPES = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 6)}
SHUT_OUT = np.array([[True] * 5, [False] * 5, [True, False, True, False, False]])
FLOATS = np.where(SHUT_OUT, 0.5, -np.inf).astype(np.float32)


def attention(mask=None, shapes=None, domain="ortrain", **attributes):
    """A program of one attention, and what to feed it."""
    sizes = {**SHAPES, **(shapes or {})}
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(s).astype(np.float32) for name, s in sizes.items()}
    dtypes = {}
    if mask is not None:
        mask = np.asarray(mask)
        sizes["mask"], feeds["mask"], dtypes["mask"] = mask.shape, mask, mask.dtype
    if domain:
        attributes = {"scale": 0.5, **attributes}

    def body(op, **inputs):
        return op.node("Attention", list(inputs.values()), domain=domain, **attributes)

    return program(body, sizes, dtypes=dtypes, opset=23), feeds


def agrees(subject, feeds):
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    (result,) = compiled.run([feeds[name] for name in compiled.input_names])
    np.testing.assert_allclose(result, run(subject, feeds)["y"], rtol=1e-5, atol=1e-6)
    return compiled.source


@pytest.mark.parametrize("mask", [None, SHUT_OUT, FLOATS, SHUT_OUT[1:2], FLOATS[1:2], SHUT_OUT[2]])
def test_a_query_that_sees_no_key_yields_zeros(mask):
    assert "attention.attend(" in agrees(*attention(mask))


@pytest.mark.parametrize("mask", [True, False, np.float32(0.5), np.float32(-np.inf)])
def test_a_mask_may_be_a_number(mask):
    agrees(*attention(np.asarray(mask)))


@pytest.mark.parametrize("shape", [(1, 1, 5, 4), (2, 1, 5, 4), (5, 4)])
def test_leading_axes_broadcast(shape):
    agrees(*attention(SHUT_OUT, {"k": shape}))


@pytest.mark.parametrize("keys", [3, 5, 2])
def test_a_query_sees_the_keys_up_to_its_own_place(keys):
    agrees(*attention(shapes={"k": (2, 2, keys, 4), "v": (2, 2, keys, 6)}, causal=1))


def test_with_dropout_its_body_runs():
    def body(op, q, k, v, seed):
        inputs = [q, k, v, None, seed]
        return op.node("Attention", inputs, domain="ortrain", scale=0.5, ratio=0.5, stream=1)

    subject = program(body, {**SHAPES, "seed": ()}, dtypes={"seed": np.int64})
    lowered = AtenExecutor().lower(subject)
    assert "ortrain::Attention" not in lowered.operators()


@pytest.mark.parametrize("form", [{}, {"is_causal": 1}, {"scale": 0.3}])
def test_the_standard_operator_is_one_call(form):
    assert "scaled_dot_product_attention" in agrees(*attention(domain="", **form))


@pytest.mark.parametrize("grouped", [{}, {"k": (2, 1, 5, 4), "v": (2, 1, 5, 6)}])
def test_heads_may_share_keys(grouped):
    assert "scaled_dot_product_attention" in agrees(*attention(None, grouped, domain=""))


@pytest.mark.parametrize(("mask", "form"), [(SHUT_OUT[::2], {}), (None, {"softcap": 2.0})])
def test_other_forms_of_the_standard_operator_run_by_its_body(mask, form):
    shapes = {} if mask is None else {"q": (2, 2, 2, 4)}
    source = agrees(*attention(mask, shapes, domain="", **form))
    assert "scaled_dot_product_attention" not in source
