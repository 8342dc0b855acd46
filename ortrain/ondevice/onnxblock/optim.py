"""Optimizers as blocks: those of :mod:`ortrain.ondevice.optim`."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx import TensorProto

from ortrain.errors import StateError
from ortrain.files import seal
from ortrain.kinds import expect_number, expect_pair, refused
from ortrain.ondevice import contract
from ortrain.ondevice.making import optim
from ortrain.ondevice.making.base import current
from ortrain.ondevice.onnxblock.models import ForwardBlock, Parameters

__all__ = ["SGD", "AdamW", "ClipGradNorm"]


class ClipGradNorm:
    """Scales all gradients together to at most this 2-norm; for ``clip_grad=`` of an optimizer.

    Args:
        max_norm: the norm.
    """

    def __init__(self, max_norm: float) -> None:
        expect_number("max_norm", max_norm)
        self.max_norm = max_norm


class _Optimizer(ForwardBlock):
    """Makes the optimizer model, on an empty base.

    Attributes:
        optimizer: what it is a model of.
    """

    optimizer: optim.Optimizer

    def build(self, parameters: tuple[Sequence[TensorProto], Sequence[TensorProto]]) -> list[str]:
        """Makes the model of one update of the parameters that are trained.

        Args:
            parameters: of :meth:`TrainingBlock.parameters`. The optimizer's states are noted in
                them, and so stand in a checkpoint that is saved of them afterwards.

        Returns:
            The names of the model's outputs.

        Raises:
            StateError: the base is not empty.
            ValueError: no parameter is trained.
        """
        base = current().model
        if base.graph.node or base.graph.input:
            raise StateError(
                f"{type(self).__name__} was called on a base that is not empty",
                because="an optimizer is a model of its own",
                help="call it within `with onnxblock.empty_base():`",
            )
        shapes = [
            (tensor.name, ir.DataType(tensor.data_type), tuple(tensor.dims))
            for tensor in parameters[0]
        ]
        program = optim.optimizer_program(self.optimizer, shapes)
        if (whole := Parameters.of(parameters)) is not None:
            whole.states = optim.states(self.optimizer, shapes)
            program.model.metadata_props[contract.MODEL_HASH] = whole.model
            program.model.metadata_props[seal.KEY] = seal.NONE
        base.CopyFrom(ir.to_proto(program.model))
        return [output.name for output in base.graph.output]


class AdamW(_Optimizer):
    """``torch.optim.AdamW``, with the defaults of ONNX Runtime Training.

    Args:
        bias_correction: whether the first steps are corrected for moments that start at zero.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: rate.
        clip_grad: clips the gradients.
    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
    ) -> None:
        super().__init__()
        expect_pair("betas", betas)
        self.optimizer = optim.AdamW(
            betas=(betas[0], betas[1]),
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            max_norm=_max_norm(clip_grad),
        )


class SGD(_Optimizer):
    """``torch.optim.SGD`` without momentum.

    Args:
        clip_grad: clips the gradients.
    """

    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        super().__init__()
        self.optimizer = optim.SGD(max_norm=_max_norm(clip_grad))


def _max_norm(clip_grad: ClipGradNorm | None) -> float | None:
    if clip_grad is not None and not isinstance(clip_grad, ClipGradNorm):
        raise refused("clip_grad", clip_grad, "a ClipGradNorm")
    return None if clip_grad is None else clip_grad.max_norm
