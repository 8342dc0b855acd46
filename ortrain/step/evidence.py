"""``Evidence``: what an engine made of a call; ``Certificate``: how that of two agrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ortrain.step.digest import Digest

Place = tuple[torch.Size, tuple[int, ...]]
"""How a tensor lies in memory: sizes and strides."""


@dataclass
class Evidence:
    """What one engine made of a call.

    Attributes:
        outputs: name → digest, with whether it requires a gradient.
        gradients: name of a parameter or input → digest; None where autograd delivers none.
        buffers: name → digest, after the call.
        strays: tensors that receive a gradient and are neither parameters nor inputs.
        otherwise: what the module does otherwise than it was run for this.
        discrete: the outputs that are whole numbers or truth values, by name.
        places: sizes and strides of outputs, and of the gradients of inputs, by kind and name.
    """

    outputs: dict[str, tuple[Digest, bool]] = field(default_factory=dict)
    gradients: dict[str, Digest | None] = field(default_factory=dict)
    buffers: dict[str, Digest] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    otherwise: list[str] = field(default_factory=list)
    discrete: dict[str, torch.Tensor] = field(default_factory=dict)
    places: dict[tuple[str, str], Place] = field(default_factory=dict)

    def tensors(self, kind: str) -> Mapping[str, Digest | None]:
        """All that is known of outputs, gradients or buffers."""
        if kind == "output":
            return {name: digest for name, (digest, _) in self.outputs.items()}
        return self.gradients if kind == "gradient" else self.buffers

    def note_place(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Notes how an output, or the gradient of an input, lies in memory."""
        if tensor.layout is torch.strided and not tensor.is_nested:
            self.places[kind, name] = tensor.shape, tensor.stride()


@dataclass(frozen=True)
class Certificate:
    """That a graph agrees with its module on one batch.

    Attributes:
        loss: whether the first output is a single number.
        outputs: output → difference from eager, root mean square, relative to the values.
        gradients: likewise for each parameter and input that has a gradient.
        buffers: likewise for each buffer, after the forward.
        faults: what does not agree, a phrase each; none in a certificate that holds.
        orders: of outputs and gradients that lie otherwise than eager's, by kind and name, the
            order of eager's axes in memory.
    """

    loss: bool
    outputs: dict[str, float]
    gradients: dict[str, float]
    buffers: dict[str, float]
    faults: tuple[str, ...] = ()
    orders: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    @property
    def differences(self) -> dict[str, float]:
        """All of them, by name."""
        return {**self.buffers, **self.outputs, **self.gradients}

    def __str__(self) -> str:
        parts = []
        if self.outputs:
            name = "loss" if self.loss else "outputs"
            parts.append(f"{name} {_digits(max(self.outputs.values()))}")
        if self.gradients:
            worst = _digits(max(self.gradients.values()))
            parts.append(f"gradients {worst} of {len(self.gradients)} tensors")
        if self.buffers:
            parts.append(f"buffers {_digits(max(self.buffers.values()))} of {len(self.buffers)}")
        return ", ".join(parts) or "nothing to compare"


def _digits(value: float) -> str:
    return f"{value:.0e}" if value else "0"
