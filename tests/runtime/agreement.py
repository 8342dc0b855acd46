"""Runs small programs on PyTorch's executor and on the reference, in several forms."""

from __future__ import annotations

import numpy as np
import torch

from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten.executor import as_array, constant
from tests.programs import program, run


def agree(body, feeds, *, opset=21, tolerance=0.0, symbolic=True):
    """Runs a program with its sizes known, then with each a symbol, over tensors of any strides.

    Args:
        body: of a program, as :func:`tests.programs.program` takes it.
        feeds: arrays of its inputs.
        opset: of the standard domain.
        tolerance: of the results, relative to the largest.
        symbolic: whether each size is a symbol as well.

    Returns:
        The sources of the functions, that of known sizes first.
    """
    sources = []
    for form in ("static", "symbolic")[: 2 if symbolic else 1]:
        shapes = {
            name: array.shape
            if form == "static"
            else tuple(f"{name}_{i}" for i in range(array.ndim))
            for name, array in feeds.items()
        }
        dtypes = {name: array.dtype for name, array in feeds.items()}
        subject = program(body, shapes, opset=opset, dtypes=dtypes)
        sources.append(agrees(subject, feeds, tolerance=tolerance))
    return sources


def agrees(subject, feeds, *, tolerance=0.0):
    """Compares one program's results, and looks where they lie; returns the source."""
    expected = run(subject, feeds)
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    for lay in (torch.Tensor.clone, _turned):
        held = [constant(np.array(feeds[v.name]), v.dtype) for v in subject.graph.inputs]
        given = [lay(tensor) for tensor in held]
        results = compiled.run_values(list(given))
        for value, result in zip(subject.graph.outputs, results, strict=True):
            found = as_array(result, value.dtype)
            compare(found, expected[value.name], tolerance, compiled.source)
        for before, after in zip(held, given, strict=True):
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        memory = [t.untyped_storage().data_ptr() for t in (*results, *given) if t.numel()]
        assert len(set(memory)) == len(memory), compiled.source
    return compiled.source


def compare(result, expected, tolerance, source):
    """Same dtype, same shape, and no further apart than the tolerance of the largest."""
    assert result.dtype == expected.dtype, source
    assert result.shape == expected.shape, f"{result.shape}, not {expected.shape}:\n{source}"
    finite = expected[np.isfinite(expected)] if expected.dtype.kind == "f" else np.zeros(0)
    scale = np.abs(finite).max(initial=0.0)
    np.testing.assert_allclose(
        result, expected, rtol=0, atol=tolerance * scale, err_msg=source, equal_nan=True
    )


def _turned(tensor):
    """The same numbers, with the axes in memory from behind and gaps between them."""
    wide = tensor.new_zeros([2 * n for n in tensor.shape[::-1]])
    places = wide[tuple(slice(None, None, 2) for _ in tensor.shape)]
    places.copy_(tensor.permute([*range(tensor.dim())][::-1]))
    return places.permute([*range(tensor.dim())][::-1])
