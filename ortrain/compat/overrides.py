"""Methods of Trainer, overridden by subclasses as old versions of transformers called them.

Trainer calls its own methods with arguments that they did not have then: a ``compute_loss(self,
model, inputs, return_outputs=False)`` of 2023 would end with a TypeError. Here each such override
is given what it takes. Where an argument also said how a loss is scaled, the scale is that of then.
"""

from __future__ import annotations

from ortrain.extras import require

require("hf", __name__)

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

# The parameters that transformers has added to methods since 2021, as Trainer itself calls them.
ADDED = {
    "compute_loss": ("num_items_in_batch",),
    "training_step": ("num_items_in_batch",),
    "log": ("start_time",),
    "save_model": ("_internal_call",),
    "create_optimizer": ("model",),
    "init_hf_repo": ("private",),
    "_get_train_sampler": ("train_dataset",),
    "_maybe_log_save_evaluate": ("grad_norm", "start_time", "learning_rate"),
}
_ANY_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
_ANY_KEYWORD = inspect.Parameter.VAR_KEYWORD


def adopt(trainer: type[Trainer]) -> None:
    """Has a class's overrides of old signatures take the calls of today.

    A loss that an old ``compute_loss`` returns is a mean over its batch: Trainer divides it by the
    number of batches of an update, which it would leave to a loss that knows the number of items.

    Args:
        trainer: changed in place.
    """
    for name, added in ADDED.items():
        own = getattr(trainer, name)
        kinds = {each.kind for each in inspect.signature(own).parameters.values()}
        missing = [each for each in added if each not in inspect.signature(own).parameters]
        old = bool(missing) and _ANY_KEYWORD not in kinds
        if missing and _ANY_POSITIONAL not in kinds:
            called = _of_then(own, name, missing, by_keyword=_ANY_KEYWORD in kinds)
            setattr(trainer, name, _dividing(called) if name == "training_step" and old else called)
        if name == "compute_loss" and "compute_loss" in vars(trainer):
            _scale(trainer, old)


def _of_then(
    own: Callable[..., Any], name: str, missing: list[str], by_keyword: bool
) -> Callable[..., Any]:
    """The method, called without what it has no parameters for, or with that as ``**kwargs``."""
    today = list(inspect.signature(getattr(Trainer, name)).parameters)[1:]

    @functools.wraps(own)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(zip(today, args, strict=False))
        kept = [value for key, value in given if key not in missing] + list(args[len(given) :])
        if by_keyword:
            kwargs.update({key: value for key, value in given if key in missing})
        else:
            kwargs = {key: value for key, value in kwargs.items() if key not in missing}
        return own(self, *kept, **kwargs)

    del called.__wrapped__  # it takes whatever is given
    return called


def _dividing(step: Callable[..., Any]) -> Callable[..., Any]:
    """An old ``training_step``, for which ``accelerator.backward`` divides as it did then."""

    @functools.wraps(step)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with backward_divides(self, self.args.gradient_accumulation_steps):
            return step(self, *args, **kwargs)

    del called.__wrapped__
    return called


@contextmanager
def backward_divides(trainer: Trainer, by: int) -> Iterator[None]:
    """``accelerator.backward`` divides losses by a number meanwhile; Trainer has it divide by 1."""
    accelerator = trainer.accelerator
    before = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = by
    try:
        yield
    finally:
        accelerator.gradient_accumulation_steps = before


def _scale(trainer: type[Trainer], old: bool) -> None:
    """Notes for Trainer whether it is to divide what ``compute_loss`` returns."""
    if "loss_is_scaled_for_ga" in vars(trainer):
        return
    if old:
        trainer.loss_is_scaled_for_ga = False
        trainer._mean_of_then = True  # type: ignore[attr-defined]
    elif getattr(trainer, "_mean_of_then", False):
        # A loss of today in a subclass of a trainer with one of then.
        trainer.loss_is_scaled_for_ga = None
        trainer._mean_of_then = False  # type: ignore[attr-defined]
