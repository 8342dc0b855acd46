"""Constants of a trace that are no constants of the graph: tensors that are read where they lie.

A guard compares what small tensors hold. Of others it knows how often they were written to, but
writes through ``tensor.data`` or NumPy are not counted: these are inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ortrain.errors import CaptureError
from ortrain.kept.parameter import memory_of
from ortrain.module_state import survey


def constants_of(exported: ExportedProgram) -> Iterator[tuple[str, Tensor]]:
    """The tensors that the trace has taken for constants and that have strides, by their names."""
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
            constant = exported.constants.get(spec.target)
            if isinstance(constant, Tensor) and constant.layout is torch.strided:
                yield spec.target, constant


def read_in_place(exported: ExportedProgram, uncompared: Iterable[Tensor]) -> dict[str, Tensor]:
    """Those that may be written to without a trace, each as the graph reads it: complex as pairs.

    Args:
        exported: as traced.
        uncompared: tensors whose contents no guard compares.

    Raises:
        CaptureError: one is a view that conjugates or negates.
    """
    places = {
        memory_of(each)
        for each in uncompared
        if each.layout is torch.strided and not isinstance(each, FakeTensor)
    }
    found = {
        name: constant
        for name, constant in constants_of(exported)
        if (constant.nbytes > survey.LARGE_TENSOR or memory_of(constant) in places)
        and constant.numel()
        and not constant.requires_grad
    }
    for name, constant in found.items():
        if constant.is_conj() or constant.is_neg():
            raise CaptureError(
                f"{name} is another view of numbers than they lie in memory",
                because="a graph reads what lies there: neither conjugates nor negatives of it",
                help="keep what tensor.resolve_conj().resolve_neg() gives",
            )
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in found.items()}
