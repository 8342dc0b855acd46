"""The AdamW of transformers, which took ``torch.optim.AdamW`` in its place."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

from typing import Any

from torch.optim.optimizer import ParamsT

from ortrain.optim import AdamWMode, FusedAdam


class AdamW(FusedAdam):
    """`ortrain.optim.FusedAdam` in the mode that has its maths, with its defaults.

    Without weight decay, as it was: ``torch.optim.AdamW`` decays by 0.01 unless told otherwise.
    Groups and state dicts may have ``correct_bias``.

    Args:
        params: parameters, or groups of them with hyperparameters of their own.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the denominator, before the bias correction.
        weight_decay: rate.
        correct_bias: whether the moments' bias is corrected; BERT's own code did not.
        no_deprecation_warning: not read; there is none.

    Raises:
        ValueError: a hyperparameter is out of its range.
        TypeError: a parameter is complex or of an integer type.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction=correct_bias,
            betas=betas,
            eps=eps,
            adam_w_mode=AdamWMode.ADAMW_TRANSFORMERS,
            weight_decay=weight_decay,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `FusedAdam`'s; ``correct_bias`` of a group is its ``bias_correction``."""
        super().add_param_group(_of_today(param_group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `FusedAdam`'s, also of a state dict of the old class."""
        groups = [_of_today(group) for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


def _of_today(group: dict[str, Any]) -> dict[str, Any]:
    if "correct_bias" not in group:
        return group
    kept = {name: value for name, value in group.items() if name != "correct_bias"}
    return {**kept, "bias_correction": group["correct_bias"]}
