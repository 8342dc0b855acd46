"""``clip_grad_norm_`` gives torch's results, and writes gradients only where it has to."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.optim import clip_grad_norm_
from ortrain.optim.clip import LARGE, ROW, any_nonfinite, by_rows, largest, total_norm
from tests.devices import DEVICES

GRADIENTS = [(5, 7), (33,), (), None, (0, 3), (2000,)]
NORMS = [1.0, 2.0, 3.5, 0.5, math.inf]


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(5)
    result = [nn.Parameter(torch.zeros(shape or ()).to(device, dtype)) for shape in GRADIENTS]
    for parameter, shape in zip(result, GRADIENTS, strict=True):
        parameter.grad = None if shape is None else torch.randn(shape).to(device, dtype)
    return result


def torchs(ones: Any, max_norm: float, norm_type: float) -> Tensor:
    """torch's infinity norm takes no empty tensors."""
    ones = [p for p in ones if p.grad is not None and (p.grad.numel() or norm_type != math.inf)]
    return torch.nn.utils.clip_grad_norm_(ones, max_norm, norm_type)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 3, 1e4])
@pytest.mark.parametrize("norm_type", NORMS)
def test_results_are_torchs_bit_for_bit(
    norm_type: float, max_norm: float, dtype: torch.dtype, device: str
) -> None:
    mine, its = parameters(dtype, device), parameters(dtype, device)
    norm, expected = clip_grad_norm_(mine, max_norm, norm_type), torchs(its, max_norm, norm_type)
    assert torch.equal(norm, expected)
    assert norm.dtype == expected.dtype
    for one, other in zip(mine, its, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_what_is_not_finite_goes_as_in_torch_or_is_refused(
    norm_type: float, value: float, device: str
) -> None:
    mine, its = parameters(device=device), parameters(device=device)
    for ones in (mine, its):
        assert ones[1].grad is not None
        ones[1].grad[3] = value
    before = [p.grad.clone() for p in mine if p.grad is not None]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(mine, 1.0, norm_type, error_if_nonfinite=True)
    for parameter, old in zip([p for p in mine if p.grad is not None], before, strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7.0), old.nan_to_num(7.0))
    norm, expected = clip_grad_norm_(mine, 1.0, norm_type), torchs(its, 1.0, norm_type)
    torch.testing.assert_close(norm, expected, rtol=0.0, atol=0.0, equal_nan=True)
    for one, other in zip(mine, its, strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=0.0, atol=0.0, equal_nan=True)


def test_one_tensor_and_a_generator_are_parameters_too() -> None:
    one, other = parameters(), parameters()
    assert clip_grad_norm_(one[0], 0.1) == torch.nn.utils.clip_grad_norm_(other[0], 0.1)
    assert clip_grad_norm_((p for p in one), 0.1) == torchs(other, 0.1, 2.0)


def test_no_gradients_have_the_norm_0_and_an_exhausted_generator_warns() -> None:
    assert clip_grad_norm_([], 1.0) == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0.0
    with pytest.warns(UserWarning, match="generator of parameters is empty"):
        assert clip_grad_norm_((p for p in ()), 1.0) == 0.0


def test_gradients_that_are_short_enough_are_not_written() -> None:
    ones = parameters()
    versions = [p.grad._version for p in ones if p.grad is not None]
    clip_grad_norm_(ones, 1e4)
    assert [p.grad._version for p in ones if p.grad is not None] == versions
    clip_grad_norm_(ones, 0.1)
    assert all(p.grad._version > v for p, v in zip([ones[0], ones[1]], versions, strict=False))


def test_on_a_device_nothing_waits_for_the_norm() -> None:
    """The meta device stands in for one whose values are not there yet."""
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    parameter.grad = torch.ones(3, device="meta")
    version = parameter.grad._version
    assert clip_grad_norm_([parameter], 1.0).device.type == "meta"
    assert parameter.grad._version > version, "it may need scaling"


def test_the_norm_is_of_all_elements_together() -> None:
    tensors = [torch.randn(3, 4), torch.randn(50).double(), torch.randn(())]
    joined = torch.cat([tensor.double().flatten() for tensor in tensors])
    for norm_type in NORMS:
        expected = torch.linalg.vector_norm(joined, norm_type)
        torch.testing.assert_close(
            total_norm(tensors, norm_type).double(), expected, rtol=1e-6, atol=0.0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2**20 + 7,), (300, 2**12), (2, LARGE)])
def test_the_norm_of_a_large_tensor_is_exact(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    large, small = torch.randn(shape, dtype=dtype), torch.randn(5)
    expected = torch.linalg.vector_norm(torch.cat([large.double().flatten(), small.double()]))
    found = total_norm([large, small])
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)
    for value in (math.nan, math.inf):
        large[-1] = value
        torch.testing.assert_close(float(total_norm([large, small])), value, equal_nan=True)


def test_what_torch_sums_as_well_is_left_to_it() -> None:
    large = torch.randn(2, LARGE)
    for tensor in (large.t(), large[:, ::2], large.bfloat16(), torch.randn(LARGE - 1)):
        assert by_rows(tensor) is tensor
    assert by_rows(large).shape == (2 * LARGE // ROW + 1,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_magnitude_is_found_in_each_tensor(dtype: torch.dtype) -> None:
    tensors = [torch.tensor(v).to(dtype) for v in ([1.0, -3.0], [-0.5, 2.0], [math.nan, 1.0])]
    found = largest([tensors[0], torch.zeros(0), *tensors[1:]])
    assert [value.item() for value in found[:2]] == [3.0, 2.0]
    assert found[2].isnan()
    assert len(found) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_any_value_that_is_not_finite_is_found_and_nothing_else(
    value: float, dtype: torch.dtype, device: str
) -> None:
    full = partial(torch.full, dtype=dtype, device=device)
    top = torch.finfo(dtype).max
    tensors = [full((5,), top), full((3, 3), -top)]
    tensors.append(torch.ones(0))
    assert not any_nonfinite(tensors)
    assert not any_nonfinite([torch.ones(0)])
    tensors[1][2, 1] = value
    assert any_nonfinite(tensors)
    assert any_nonfinite(tensors).dtype == torch.bool
