"""Norms over a batch of images whose channels lie last are as exact as where they come first."""

from __future__ import annotations

import pytest
import torch

from ortrain.runtime.aten import norms

aten = torch.ops.aten
LAST = torch.channels_last
# Sizes whose counts of numbers a channel have many divisors, few, and none.
SIZES = [(8, 6, 112, 112), (4, 5, 75, 75), (1, 3, 43, 43), (1, 2, 1, 4099), (16, 40, 14, 14)]


def error(found, wanted):
    return ((found.double() - wanted).abs().max() / wanted.abs().mean()).item()


def images(sizes, mean=3.0):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, generator=rng) + mean
    return x, torch.randn(sizes, generator=rng) + 0.5, torch.rand(sizes[1], generator=rng) + 0.5


def forward(function, x, weight):
    channels = x.shape[1]
    state = [v.to(x.dtype) for v in (torch.full([channels], 0.25), torch.full([channels], 2.0))]
    bias = torch.linspace(-1, 1, channels).to(x.dtype)
    return function(x, weight.to(x.dtype), bias, *state, True, 0.1, 1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_output_and_statistics_are_as_exact_as_of_rows(sizes):
    x, _, weight = images(sizes)
    plain = aten._native_batch_norm_legit_functional.default
    wanted = forward(plain, x.double(), weight)
    rows = forward(plain, x, weight)
    found = forward(norms.batch_norm, x.contiguous(memory_format=LAST), weight)
    assert len(found) == 5
    assert found[0].is_contiguous(memory_format=LAST)
    for part, (ours, theirs, exact) in enumerate(zip(found, rows, wanted, strict=True)):
        assert ours.shape == exact.shape
        assert error(ours, exact) <= 4 * error(theirs, exact) + 5e-7, part


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (True, False, True)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_are_as_exact_as_of_rows(sizes, mask):
    x, dy, weight = images(sizes, mean=0.5)

    def backward(function, x, dy):
        axes = [0, 2, 3]
        mean, variance = x.double().mean(axes), x.double().var(axes, correction=0)
        statistics = [v.to(x.dtype) for v in (mean, (variance + 1e-5).rsqrt())]
        given = (weight.to(x.dtype), None, None, *statistics, True, 1e-5, [*mask])
        return function(dy, x, *given)

    plain = aten.native_batch_norm_backward.default
    wanted = backward(plain, x.double(), dy.double())
    rows = backward(plain, x, dy)
    last = [v.contiguous(memory_format=LAST) for v in (x, dy)]
    found = backward(norms.batch_norm_backward, *last)
    for flag, ours, theirs, exact in zip(mask, found, rows, wanted, strict=True):
        if flag:
            assert error(ours, exact) <= 4 * error(theirs, exact) + 2e-6
        else:
            assert ours is None or not ours.numel()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_with_constant_statistics_the_gradients_are_those_of_pytorch(sizes):
    x, dy, weight = images(sizes)
    state = (torch.full([sizes[1]], 3.0), torch.full([sizes[1]], 1.5))

    def backward(function, x, dy):
        given = [v.to(x.dtype) for v in (weight, *state)]
        return function(dy, x, *given, None, None, False, 1e-5, [True] * 3)

    wanted = backward(aten.native_batch_norm_backward.default, x.double(), dy.double())
    last = [v.contiguous(memory_format=LAST) for v in (x, dy)]
    for ours, exact in zip(backward(norms.batch_norm_backward, *last), wanted, strict=True):
        assert error(ours, exact) < 5e-6


def test_what_lies_otherwise_and_what_is_short_is_pytorchs_own(monkeypatch):
    monkeypatch.setattr(norms, "LENGTH", 256)
    plain = aten._native_batch_norm_legit_functional.default
    for x in (
        images((8, 6, 112, 112))[0],
        images((2, 3, 4, 4))[0].contiguous(memory_format=LAST),
        images((8, 6, 112, 112))[0].bfloat16().contiguous(memory_format=LAST).float()[:, :, ::2],
        images((2, 3, 4, 40, 40))[0],
    ):
        weight = torch.ones(x.shape[1])
        for ours, theirs in zip(
            forward(norms.batch_norm, x, weight), forward(plain, x, weight), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_parts_have_one_size():
    for count in (1025, 2048, 4099, 100_352, 50_653):
        parts = norms._parts(count)
        assert count % parts == 0
        assert count // parts <= norms.LENGTH
