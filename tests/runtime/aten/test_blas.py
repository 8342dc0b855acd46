"""The library of a product is measured once, remembered, and changes no number but by rounding."""

from __future__ import annotations

import json

import pytest
import torch

from ortrain.runtime.aten import blas
from ortrain.runtime.aten.blas import Choice

SIDE = 512


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIDE, SIDE, generator=generator) for _ in range(2)]


@pytest.fixture
def measured(monkeypatch):
    """Counts measurements, and has oneDNN win them."""
    counted = []
    monkeypatch.setattr(Choice, "_measured", lambda *args: counted.append(1) or True)
    return counted


def asked(choice, x, weight, rows=SIDE):
    return choice.prefers_onednn("linear", rows, SIDE, SIDE, x, weight)


def test_a_shape_is_measured_once_and_remembered_by_the_next_process(tmp_path, operands, measured):
    path = tmp_path / "new" / "products.json"
    assert asked(Choice(path), *operands)
    assert asked(Choice(path), *operands)
    assert len(measured) == 1
    assert len(json.loads(path.read_text())) == 1


def test_numbers_of_rows_of_one_size_are_one_shape(tmp_path, operands, measured):
    choice = Choice(tmp_path / "products.json")
    for rows in (512, 600, 1023):
        asked(choice, *operands, rows=rows)
    assert len(measured) == 1
    asked(choice, *operands, rows=1024)
    assert len(measured) == 2


def test_sums_over_rows_of_a_batch_of_one_size_are_one_shape(measured):
    """A weight's gradient: each batch without its padding has another number of rows."""
    choice = Choice(None)
    for rows in (512, 600, 1023):
        dy, x = torch.ones(rows, SIDE), torch.ones(rows, SIDE)
        choice.prefers_onednn("mmtn", SIDE, SIDE, rows, dy.t(), x.t())
    assert len(measured) == 1


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": "b"', "null"])
def test_a_damaged_file_is_measured_anew(tmp_path, operands, measured, content):
    path = tmp_path / "products.json"
    path.write_text(content)
    assert asked(Choice(path), *operands)
    assert len(measured) == 1
    assert len(json.loads(path.read_text())) == 1


def test_a_folder_that_cannot_be_written_into_is_no_error(tmp_path, operands, measured):
    (tmp_path / "file").write_text("")
    assert asked(Choice(tmp_path / "file" / "products.json"), *operands)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_have_one_library(operands, measured, dtype):
    choice = Choice(None)
    assert not asked(choice, *(t.to(dtype) for t in operands))
    assert not measured
    # What float32 has of the same shape is its own.
    assert asked(choice, *operands)
    assert not asked(choice, *(t.to(dtype) for t in operands))


def test_a_product_has_the_same_dtype_after_one_of_float32(monkeypatch, operands, measured):
    monkeypatch.setattr(blas, "_CHOICE", Choice(None))
    a, b = operands
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, weight = a.to(dtype), b.to(dtype)
        assert blas.linear(x, weight).dtype is dtype
        assert torch.equal(blas.mm(x, weight), x @ weight) or dtype is torch.float32


@pytest.mark.parametrize("wins", [False, True])
def test_both_libraries_give_the_same_numbers(monkeypatch, operands, wins):
    monkeypatch.setattr(Choice, "prefers_onednn", lambda *args: wins)
    a, b = operands
    rows, bias = a.reshape(2, SIDE // 2, SIDE), b[0].clone()
    assert_as_close(blas.linear, torch.nn.functional.linear, rows, b, bias)
    assert_as_close(blas.mm, torch.mm, a.t(), b)
    assert_as_close(blas.mm, torch.mm, a, b.t())
    assert_as_close(blas.matmul, torch.matmul, rows, b)
    for added in (bias, b, b[:1], b[:, 1:2], torch.tensor(3.0), b.t()):
        assert_as_close(blas.addmm, torch.addmm, added, a, b.t())
        assert_as_close(blas.addmm, torch.addmm, added, a.t(), b)


FEW = 24
# Of [FEW, FEW], as tensors of users may lie.
LAYOUTS = {
    "rows": lambda draw: draw(FEW, FEW),
    "columns": lambda draw: draw(FEW, FEW).t(),
    "one row": lambda draw: draw(FEW).expand(FEW, FEW),
    "one column": lambda draw: draw(FEW, 1).expand(FEW, FEW),
    "gaps": lambda draw: draw(FEW, 2 * FEW)[:, ::2],
    "windows": lambda draw: draw(2 * FEW).unfold(0, FEW, 1)[:FEW],
    "windows that overlap by half": lambda draw: draw(FEW * FEW).as_strided(
        (FEW, FEW), (FEW // 2, 1)
    ),
    "windows in columns": lambda draw: draw(2 * FEW).unfold(0, FEW, 1)[:FEW].t(),
}


@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_operands_lie_as_they_like(monkeypatch, left, right):
    """oneDNN has no form for a right operand whose rows or columns share memory."""
    monkeypatch.setattr(Choice, "prefers_onednn", lambda *args: True)
    a, b = (LAYOUTS[name](torch.randn) for name in (left, right))
    rows, bias = a.unflatten(0, (2, -1)), b[0].clone()
    same = torch.testing.assert_close
    same(blas.linear(rows, b, bias), torch.nn.functional.linear(rows, b, bias))
    same(blas.mm(a, b), torch.mm(a, b))
    same(blas.matmul(rows, b), torch.matmul(rows, b))
    same(blas.addmm(bias, a, b), torch.addmm(bias, a, b))


@pytest.mark.parametrize("form", ["linear", "mmnn added"])
def test_what_onednn_has_no_form_for_is_measured_all_the_same(monkeypatch, form):
    monkeypatch.setattr(blas, "SMALL", 0)
    windows = LAYOUTS["windows"](torch.randn)
    assert Choice(None).prefers_onednn(form, FEW, FEW, FEW, windows, windows) in (True, False)


def assert_as_close(ours, theirs, *operands):
    """Ours is about as close to float64 as PyTorch's own product."""
    truth = theirs(*(t.double() for t in operands))
    own = float((theirs(*operands) - truth).norm())
    assert float((ours(*operands) - truth).norm()) <= 3 * own


@pytest.mark.parametrize(("rows", "columns", "inner"), [(97, 5, 64), (64, 64, 33), (129, 1, 40)])
@pytest.mark.parametrize("copied", [1, 4096, 10_000])
def test_a_transposed_operand_is_copied_in_blocks(
    monkeypatch, measured, rows, columns, inner, copied
):
    """The same numbers, whatever the last block has."""
    seen = []
    pointwise = blas.in_linear_pointwise
    monkeypatch.setattr(
        blas, "in_linear_pointwise", lambda a, *rest: seen.append(a) or pointwise(a, *rest)
    )
    monkeypatch.setattr(blas, "SMALL", 0)
    monkeypatch.setattr(blas, "COPIED", copied)
    monkeypatch.setattr(blas, "_CHOICE", Choice(None))
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(inner, n, generator=generator) for n in (rows, columns))
    found = blas.mm(a.t(), b)
    assert len(seen) == (-(-rows // max(copied // (4 * inner), 1)) if copied < a.nbytes / 2 else 1)
    assert found.is_contiguous()
    torch.testing.assert_close(found, a.t() @ b)


class Clock:
    """Products that take given seconds, one after another; the last time goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.runs = 0.0, []
        monkeypatch.setattr(blas.time, "perf_counter", lambda: self.now)

    def product(self, name: str, *seconds: float) -> blas.Product:
        left = list(seconds)

        def run() -> torch.Tensor:
            self.runs.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return torch.empty(0)

        return run


@pytest.mark.parametrize(
    ("mine", "other", "is_faster", "runs"),
    [
        ((40,), (10,), True, 3),  # a second run of mine, and it is clear
        ((10,), (40,), False, 4),
        ((40, 12), (30, 9), True, 8),  # both cold at first
        ((40, 10), (10,), False, 8),  # only its first run was slow
        ((10,), (60, 9), True, 8),  # its first run made the kernel
        ((10,), (9.8,), False, 8),  # within the scatter
        ((10, 50, 10), (9,), True, 8),  # a neighbour's burst
    ],
)
def test_libraries_run_until_one_is_clearly_slower(monkeypatch, mine, other, is_faster, runs):
    clock = Clock(monkeypatch)
    found = blas._is_faster(clock.product("other", *other), clock.product("mine", *mine))
    assert (found, len(clock.runs)) == (is_faster, runs)
