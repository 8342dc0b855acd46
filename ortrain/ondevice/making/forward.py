"""``Forward``: a model's forward in both modes, with its tensors beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ortrain.program import Program


@dataclass
class Forward:
    """What artifacts are made of.

    Attributes:
        training: the forward in training mode. Inputs with the roles user_input, seed, parameter
            and buffer; outputs with the roles loss, user_output and updated_buffer.
        evaluation: the forward in evaluation mode, of the same parameters and buffers.
        tensors: of parameters and buffers, by name.
        trainable: names of the parameters that are trained, in the model's order.
    """

    training: Program
    evaluation: Program
    tensors: dict[str, np.ndarray]
    trainable: tuple[str, ...]
