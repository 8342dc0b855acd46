"""Tensors go to onnxruntime and come back by reference, whatever their dtype and shape."""

from __future__ import annotations

import pytest
import torch
from onnxruntime.capi import _pybind_state as native

from ortrain.runtime.onnxruntime.exchange import OrtValues

NAMES = {
    torch.bool: "bool", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16",
    torch.int32: "int32", torch.int64: "int64", torch.float16: "float16",
    torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double",
}  # fmt: skip


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=["a number", "empty", "a matrix"])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_a_tensor_keeps_its_memory_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.ones(shape).to(dtype)
    value = OrtValues.take(tensor)
    assert value.data_type() == f"tensor({NAMES[dtype]})"
    is_bool = dtype is torch.bool
    vector = native.OrtValueVector()
    vector.push_back(value)
    found = (
        OrtValues.give(value),
        OrtValues.at(vector, 0, is_bool),
        *OrtValues.all(vector, (0,) if is_bool else ()),
    )
    for each in found:
        assert (each.dtype, each.shape) == (dtype, tensor.shape)
        assert each.data_ptr() == tensor.data_ptr()


def test_what_is_written_to_bools_shows_in_onnxruntime() -> None:
    tensor = torch.tensor([True, False])
    value = OrtValues.take(tensor)
    tensor[1] = True
    assert value.numpy().tolist() == [True, True]
