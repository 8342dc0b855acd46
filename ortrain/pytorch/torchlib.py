"""torchlib: the translations to ONNX that come with PyTorch's exporter.

Private: ``torch.onnx._internal.exporter``, its ``_registration.ONNXRegistry`` with
``from_torchlib`` and ``get_decomps``, and its ``_building.OpRecorder`` with ``nodes`` and
``functions``. Without them operators that have no other translation are taken apart, or PyTorch
runs them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import onnx_ir as ir
import onnxscript.evaluator

_EXPORTER = "torch.onnx._internal.exporter"


@functools.cache
def function_of(operator: Any, opset: int) -> Callable[..., Any] | None:
    """The translation of an operator; None where there is none.

    The first question of a process loads all of them, which takes 0.65 s.
    """
    registry = _registry(opset)
    known = () if registry is None else registry.get_decomps(operator)
    return next((each.onnx_function for each in known if not each.is_complex), None)


def emitted(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    opset: int,
    constants: dict[Any, ir.Value],
) -> tuple[Any, list[ir.Node], list[ir.Function]]:
    """What a translation gives for values: the results, the nodes, and functions that these call.

    Args:
        function: the translation.
        args: of the operator, values in the places of tensors.
        kwargs: likewise.
        opset: of the standard domain.
        constants: shared ones by what they are.
    """
    building: Any = import_module(f"{_EXPORTER}._building")
    tracer = building.OpRecorder(onnxscript.values.Opset("", opset), constants)
    with _quiet(), onnxscript.evaluator.default_as(tracer):
        results = function(*args, **kwargs)
    called = [
        each if isinstance(each, ir.Function) else ir.from_proto(each.to_function_proto())
        for each in tracer.functions.values()
    ]
    return results, [*tracer.nodes], called


@functools.cache
def _registry(opset: int) -> Any:
    try:
        registration: Any = import_module(f"{_EXPORTER}._registration")
        with _quiet():
            return registration.ONNXRegistry.from_torchlib(opset_version=opset)
    except (ImportError, AttributeError, TypeError):  # of another PyTorch
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the exporter logs on the way to an error is in the error too."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
