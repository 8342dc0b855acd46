"""What a trace knows of tensors that are made of sizes, and what it uses of torch for that."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from ortrain.capture.export import capture
from ortrain.capture.trace import exact_numbers as exact
from ortrain.capture.trace.exact_numbers import DIGITS, Inexact, Ratio, stored
from ortrain.capture.trace.statements import only_called

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROUNDINGS: dict[str, tuple[Any, Any]] = {
    "ceil": (torch.ceil, exact.ceiled),
    "floor": (torch.floor, exact.floored),
    "trunc": (torch.trunc, exact.truncated),
    "round": (torch.round, exact.rounded),
}


def test_torch_has_what_is_used_beyond_its_documentation() -> None:
    assert callable(FakeTensorMode.dispatch)
    assert callable(ProxyTorchDispatchMode.__torch_dispatch__)
    assert callable(torch._refs.tensor)
    with FakeTensorMode() as mode:
        assert FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cpu")).constant is None


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_rounded_quotient_is_torchs_wherever_it_is_gone_by(dtype: Any, name: str) -> None:
    torchs, ours = ROUNDINGS[name]
    known = 0
    for over in (-97, -9, -4, -1, 0, 1, 2, 5, 7, 41, 63, 96, 1000, 4097, 2**21 + 1, 2**23):
        for under in (1, 2, 3, 5, 7, 8, 41, 49, 61, 1021):
            try:
                quotient = stored(exact.divided(Ratio(over), Ratio(under)), dtype)
            except Inexact:
                continue
            known += 1
            wanted = torchs(torch.tensor(over, dtype=dtype) / under)
            assert int(wanted) == ours(quotient).over, (over, under)
            for whole in (int(wanted) - 1, int(wanted), int(wanted) + 1):
                if abs(whole) > 2 ** DIGITS[dtype]:
                    continue
                with contextlib.suppress(Inexact):
                    first, second = exact.compared(quotient, Ratio(whole))
                    is_less = torch.tensor(over, dtype=dtype) / under < whole
                    assert (first < second) == bool(is_less)
    assert known > 40


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_sums_and_products_that_a_dtype_rounds_are_not_gone_by(dtype: Any) -> None:
    most = 2 ** DIGITS[dtype]
    for combine, torchs in ((exact.added, torch.add), (exact.multiplied, torch.mul)):
        for one in (1, 3, most // 2 + 1, most - 1, most):
            for other in (1, 2, 3, most - 1):
                try:
                    found = stored(combine(Ratio(one), Ratio(other)), dtype)
                except Inexact:
                    continue
                wanted = torchs(torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype))
                assert int(wanted) == found.over
        with pytest.raises(Inexact):
            stored(combine(Ratio(most), Ratio(most + 1)), dtype)


def test_whole_numbers_stay_in_the_range_of_their_dtype() -> None:
    assert stored(Ratio(2**31 - 1), torch.int32).over == 2**31 - 1
    for number, dtype in ((2**31, torch.int32), (-1, torch.uint8), (2**63, torch.int64)):
        with pytest.raises(Inexact):
            stored(Ratio(number), dtype)


def test_a_graphics_cards_quotients_are_not_gone_by() -> None:
    third = exact.divided(Ratio(6), Ratio(3))
    with pytest.raises(Inexact):
        stored(third, torch.float32, on_processor=False)
    assert stored(Ratio(6, 2), torch.float32, on_processor=False).over == 6


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        t = torch.tensor([x.shape[1], 2])
        return x[:, : t[0] // t[1]]


def test_a_graph_has_the_arithmetic_on_sizes_and_no_number_of_a_tensor() -> None:
    captured = capture(Reads(), (torch.randn(3, 8),))
    assert captured.rung == "non-strict"
    assert "Div" in captured.program.operators()
    assert captured.accepts([(4, 9)])
    assert captured.program.outputs()[0].shape is not None


@pytest.mark.parametrize(
    ("code", "fine"),
    [
        ("int(x)", True),
        ("isinstance(x, int)", True),
        ("isinstance(x, (int, float))", True),
        ("def f(x: int, y: list[int]) -> int: return int(x)", True),
        ("type(x) is int", False),
        ("map(int, x)", False),
        ("torch.zeros(2, dtype=int)", False),
        ("int.from_bytes(x)", False),
        ("{int: 3}", False),
        ("isinstance(int, type)", False),
        ("def f(", False),
    ],
)
def test_a_name_of_python_is_another_only_where_it_is_called(
    code: str, fine: bool, tmp_path: Path
) -> None:
    file = tmp_path / "code.py"
    file.write_text(code)
    assert only_called(str(file), "int") is fine
