"""The one place that speaks to private parts of PyTorch's ONNX exporter.

Used of torch, beyond what it documents (``tests/capture/test_exporter.py`` pins each of them):

- ``torch.onnx._internal.exporter._registration``: ``ONNXRegistry``, ``OnnxDecompMeta``;
- ``torch.onnx._internal.exporter._core``: ``_exported_program_to_onnx_program``;
- ``torch.onnx._internal.exporter._building``: ``OpRecorder`` (its ``nodes``, ``constant_farm``);
- ``torch.fx.experimental._config``: ``backed_size_oblivious``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import onnxscript.evaluator
import torch
from onnx_ir.passes.common import InlinePass
from torch.export import ExportedProgram
from torch.fx.experimental import _config as symbolic_config
from torch.onnx._internal.exporter import _building, _core, _registration

from ortrain.capture.autograd_calls import check_autograd_calls, checked_autograd_calls
from ortrain.capture.checkpointing import marked_checkpoints
from ortrain.capture.normalization import averaged_statistics
from ortrain.capture.recurrent import whole_recurrences
from ortrain.capture.torchlib import is_verified
from ortrain.capture.value_checks import value_checks

TESTED = ("2.13",)

Translation = Callable[..., Any]


@functools.cache
def check_version() -> None:
    """Warns once where this torch is not one that ortrain was tested with."""
    running = ".".join(torch.__version__.split(".")[:2])
    if running not in TESTED:
        warnings.warn(
            f"ortrain was tested with torch {' and '.join(TESTED)}, not with {torch.__version__}: "
            "its capture uses private names of the ONNX exporter, which may have changed",
            stacklevel=2,
        )


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    strict: bool = False,
    oblivious: bool = False,
) -> ExportedProgram:
    """``torch.export.export`` without its warnings and log lines.

    Args:
        module: traced in its present mode.
        args: example arguments.
        kwargs: example keyword arguments.
        dynamic_shapes: as torch.export takes it, one entry for args and one for kwargs.
        strict: trace with Dynamo instead of running the Python code.
        oblivious: do not let a size of 1 decide anything.
    """
    sizes = _oblivious() if oblivious else contextlib.nullcontext()
    if strict:  # Dynamo does not run the code
        with _quiet():
            check_autograd_calls(module, args, kwargs)
    watching = contextlib.nullcontext() if strict else checked_autograd_calls(module)
    checking = contextlib.nullcontext() if strict else value_checks()
    # torch prints the partial graph of a failure; the error has what matters of it.
    with (
        sizes,
        _quiet(),
        watching,
        checking,
        marked_checkpoints(),
        whole_recurrences(),
        averaged_statistics(),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return torch.export.export(
            module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict
        )


def _oblivious() -> contextlib.AbstractContextManager[None]:
    config: Any = symbolic_config
    return config.patch(backed_size_oblivious=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the exporter logs on the way to an error is in the error too."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.export", "torch.onnx")]
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


class Registry:
    """Translations of ATen operators: ours first, then what is trusted of upstream's torchlib.

    torchlib is loaded when a graph first needs it: filling its registry takes 0.65 s, and graphs
    of the common models get by without.

    Args:
        opset: of the standard domain.
        translations: ours, called with FX arguments whose nodes are ONNX values.
    """

    def __init__(self, opset: int, translations: dict[Any, Translation]) -> None:
        self.opset = opset
        self.translations = translations
        self.ours = _registration.ONNXRegistry()
        self.ours._opset_version = opset
        self._enter(self.ours)

    def _enter(self, registry: _registration.ONNXRegistry) -> None:
        for target, function in self.translations.items():
            entry = _registration.OnnxDecompMeta(
                onnx_function=function,
                fx_target=target,
                signature=None,
                is_custom=True,
                skip_signature_inference=True,
            )
            registry._register(target, entry)

    @functools.cached_property
    def everything(self) -> _registration.ONNXRegistry:
        """Ours and torchlib's."""
        with _quiet():
            registry = _registration.ONNXRegistry.from_torchlib(opset_version=self.opset)
        self._enter(registry)
        return registry

    def covers(self, targets: set[Any]) -> set[Any]:
        """Those of the targets that have a translation."""
        found = {t for t in targets if self.ours.is_registered(t)}
        verified = {t for t in targets - found if is_verified(t)}
        return found | {t for t in verified if self.everything.is_registered(t)}

    def translate(self, exported: ExportedProgram) -> ir.Model:
        """The ONNX model of a program all of whose operators are covered.

        Parameters, buffers and constants are its initializers; updated buffers are not among its
        outputs yet. A node's ``meta["node"]`` is the FX node that it comes from.
        """
        targets = {n.target for n in exported.graph.nodes if n.op == "call_function"}
        ours = all(self.ours.is_registered(t) for t in targets - {operator.getitem})
        registry = self.ours if ours else self.everything
        with _quiet():
            return _core._exported_program_to_onnx_program(exported, registry=registry).model


def recorder() -> tuple[list[ir.Node], dict[Any, ir.Value]]:
    """The nodes recorded so far for the FX node in translation, and the pool of constants."""
    current = onnxscript.evaluator.default()
    assert isinstance(current, _building.OpRecorder)
    return current.nodes, current.constant_farm


def make_standard(model: ir.Model, opset: int) -> None:
    """Leaves only standard operators and ortrain's: torchlib's functions are inlined.

    The exporter imports opset 18 whatever it was asked for, and its functions say 18 as well,
    although their bodies were chosen for the registry's opset.
    """
    model.opset_imports[""] = opset
    for function in model.functions.values():
        function.opset_imports[""] = opset
    if model.functions:
        InlinePass()(model)
        model.functions.clear()


_NODE = re.compile(r"Error when translating node %(\S+)")


def failed_node(error: BaseException) -> str:
    """Name of the FX node that an error of :meth:`Registry.translate` is about."""
    current: BaseException | None = error
    while current is not None:
        found = _NODE.search(str(current))
        if found:
            return found[1]
        current = current.__cause__
    return ""
