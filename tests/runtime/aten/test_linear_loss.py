"""The loss of a linear layer in blocks of rows is torch's, and so are its gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from ortrain.runtime.aten import blas, linear_loss
from ortrain.runtime.aten.linear_loss import linear_cross_entropy, scaled
from tests.tensors_held import TensorsHeld

CLASSES, WIDTH = 11, 6
IGNORED = -100
OPTIONS = [
    {"smoothing": smoothing, "weights": weights, "mean": mean}
    for smoothing, weights, mean in itertools.product((0.0, 0.2), (False, True), (True, False))
]


@pytest.fixture(autouse=True)
def few_classes_at_a_time(monkeypatch):
    monkeypatch.setattr(linear_loss, "_CLASSES", 4)


def batch(count, ignored="some", dtype=torch.float32, flipped=False):
    generator = torch.Generator().manual_seed(count)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    target = torch.randint(CLASSES, (count,), generator=generator)
    if ignored == "all":
        target[:] = IGNORED
    elif ignored == "some":
        target[1::3] = IGNORED
    weight = draw(WIDTH, CLASSES).t() if flipped else draw(CLASSES, WIDTH)
    return draw(count, WIDTH).to(dtype), weight.to(dtype), draw(CLASSES).to(dtype), target


def shares(weights):
    return torch.linspace(0.5, 2.0, CLASSES) if weights else None


def ours(x, weight, bias, target, rows, smoothing, weights, mean, dtype=None, needs=(1, 1, 1)):
    class_weight = shares(weights)
    if class_weight is not None and x.dtype is torch.float64:
        class_weight = class_weight.double()
    return linear_cross_entropy(
        blas, x, weight, target, bias, class_weight, rows=rows, dtype=dtype or x.dtype,
        ignore_index=IGNORED, label_smoothing=smoothing, mean=mean, needs=needs,
    )  # fmt: skip


def expected(x, weight, bias, target, smoothing, weights, mean):
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    class_weight = shares(weights)
    loss = F.cross_entropy(
        F.linear(*leaves), target, None if class_weight is None else class_weight.double(),
        label_smoothing=smoothing, reduction="mean" if mean else "sum",
    )  # fmt: skip
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("ignored", ["some", "none"])
def test_numbers_are_torchs_for_any_number_of_rows(ignored, flipped, options):
    for count, dtype in itertools.product((1, 3, 4, 5, 9, 23), (torch.float32, torch.float64)):
        given = batch(count, ignored, dtype, flipped)
        found = ours(*given, rows=4, **options)
        for mine, theirs in zip(found, expected(*given, **options), strict=True):
            assert mine.dtype is dtype
            tolerance = 2e-6 if dtype is torch.float32 else 1e-13
            torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_of_ignored_rows_there_is_no_gradient(count, options):
    given = batch(count, "all")
    loss, *gradients = ours(*given, rows=4, **options)
    torch.testing.assert_close(loss, expected(*given, **options)[0].float(), equal_nan=True)
    for gradient, leaf in zip(gradients, given, strict=False):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_products_in_bfloat16_are_as_exact_as_torchs(smoothing, rows, wide):
    """Of autocast's: logits rounded, softmax and loss in float32, operands rounded."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((256, 48), (96, 48), (96,)))
    target = torch.randint(96, (256,), generator=generator)
    narrow = [t.bfloat16() for t in (x, weight, bias)]
    options = {"smoothing": smoothing, "weights": False, "mean": True}
    truth = expected(*narrow, target, **options)
    leaves = [t.clone().requires_grad_() for t in narrow]
    dense = F.cross_entropy(F.linear(*leaves).float(), target, label_smoothing=smoothing)
    theirs = [dense.detach(), *torch.autograd.grad(dense, leaves)]
    given = (x, weight, bias) if wide else narrow
    found = ours(*given, target, rows, dtype=torch.bfloat16, **options)
    for mine, other, exact in zip(found, theirs, truth, strict=True):
        assert mine.dtype is torch.float32
        distance, allowed = ((t.double() - exact).norm() / exact.norm() for t in (mine, other))
        assert distance <= 1.1 * allowed + 1e-6


@pytest.mark.parametrize("needs", [*itertools.product((False, True), repeat=3)])
def test_what_is_not_asked_for_is_not_made(needs):
    given = batch(9)
    options = OPTIONS[0]
    found = ours(*given, rows=4, needs=needs, **options)
    whole = ours(*given, rows=4, **options)
    asked = [whole[0], *(g for g, need in zip(whole[1:], needs, strict=True) if need)]
    for mine, theirs in zip(found, asked, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_row_alone_is_infinitely_wrong_and_no_other_notices():
    x, weight, bias, target = batch(6, "none")
    bias[3], target[:] = float("-inf"), 2
    target[1] = 3
    loss, *_ = ours(x, weight, bias, target, rows=2, **OPTIONS[0])
    assert loss == float("inf")
    target[1] = IGNORED
    loss, *gradients = ours(x, weight, bias, target, rows=2, **OPTIONS[0])
    assert all(t.isfinite().all() for t in (loss, *gradients))


@pytest.mark.parametrize("label", [CLASSES, CLASSES + 5, -1])
def test_a_label_that_is_no_class_is_an_error(label):
    x, weight, bias, target = batch(9, "none")
    target[5] = label
    for weights in (False, True):
        with pytest.raises((IndexError, RuntimeError)):
            ours(x, weight, bias, target, 4, 0.0, weights, True)


def test_of_logits_there_is_a_block_and_no_more():
    generator = torch.Generator().manual_seed(0)
    count, classes, width, rows = 512, 4000, 8, 32
    x, weight = (torch.randn(n, width, generator=generator) for n in (count, classes))
    target = torch.randint(classes, (count,), generator=generator)
    with TensorsHeld() as held:
        ours(x, weight, None, target, rows, 0.0, False, True, needs=(1, 1, 0))
    block, gradients = 4 * rows * classes, 4 * width * (count + classes)
    assert block < held.most < 1.2 * block + 2 * gradients


# -- the backward --------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", [1.0, 0.25, -3.0, 0.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_multiplied_by_what_arrives(upstream, dtype):
    unit = torch.linspace(-1, 1, 12).view(3, 4)
    found = scaled(unit, torch.tensor(upstream), dtype)
    assert found.dtype is dtype
    torch.testing.assert_close(found, (unit * upstream).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_memory_that_nobody_else_has_is_used_again():
    def one():
        (own,) = [torch.ones(3)]
        place = own.data_ptr()
        found = scaled(own, torch.tensor(2.0), torch.float32)
        return found.data_ptr() == place, found

    same, found = one()
    assert same
    assert found.tolist() == [2.0, 2.0, 2.0]


HOLDERS = {
    "a list": lambda t: [t],
    "a view": lambda t: t[1:],
    "a detached tensor": lambda t: t.detach(),
    "autograd": lambda t: torch.ones(3, requires_grad=True) * t,
    "the storage": lambda t: t.untyped_storage(),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("upstream", [1.0, 2.0])
def test_memory_that_somebody_else_has_stays_as_it_is(holder, upstream):
    def one():
        (own,) = [torch.ones(3)]
        place, held = own.data_ptr(), HOLDERS[holder](own)
        found = scaled(own, torch.tensor(upstream), torch.float32)
        assert own.tolist() == [1.0, 1.0, 1.0]
        return held, found.data_ptr() != place

    held, apart = one()
    assert apart
    assert held is not None
