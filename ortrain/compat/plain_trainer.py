"""transformers' own Trainer, as scripts of transformers 4 call it around an ORTModule.

``tokenizer=`` is ``processing_class=`` there, and subclasses may override methods with the
signatures of then (:mod:`ortrain.compat.overrides`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

_OLD, _NEW = "tokenizer", "processing_class"


def extend(module: ModuleType) -> None:
    """Has Trainer, and what is derived from it, take what it took then.

    Args:
        module: ``transformers.trainer``.
    """
    trainer = vars(module).get("Trainer")
    if trainer is None or hasattr(trainer, _OLD):
        return
    if _OLD in inspect.signature(trainer.__init__).parameters:
        return
    trainer.__init__ = _taking_tokenizer(trainer.__init__)
    trainer.tokenizer = property(
        lambda self: self.processing_class,
        lambda self, tokenizer: setattr(self, _NEW, tokenizer),
        doc="``processing_class``, by its name of then.",
    )
    trainer.training_step = _dividing_itself(trainer.training_step)
    trainer.__init_subclass__ = classmethod(_adopting(trainer))


def extend_callbacks(module: ModuleType) -> None:
    """Has callbacks be given the tokenizer by its name of then as well.

    Args:
        module: ``transformers.trainer_callback``.
    """
    handler = vars(module).get("CallbackHandler")
    if handler is None or _OLD in inspect.signature(handler.__init__).parameters:
        return
    own = handler.call_event

    @functools.wraps(own)
    def call_event(self: Any, event: str, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault(_OLD, self.processing_class)
        return own(self, event, *args, **kwargs)

    handler.call_event = call_event


def _taking_tokenizer(init: Callable[..., None]) -> Callable[..., None]:
    """Trainer's ``__init__``, with ``tokenizer`` given to it as its ``processing_class``."""
    place = list(inspect.signature(init).parameters).index(_NEW)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _OLD in kwargs and (given := kwargs.pop(_OLD)) is not None:
            # The position counts `self`.
            if kwargs.get(_NEW) is not None or len(args) >= place:
                raise ValueError(f"Trainer: {_OLD} and {_NEW} are one: give {_NEW}")
            kwargs[_NEW] = given
        init(self, *args, **kwargs)

    return __init__


def _dividing_itself(step: Callable[..., Any]) -> Callable[..., Any]:
    """Trainer's ``training_step``, which divides the loss also where an old override calls it."""

    @functools.wraps(step)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        from ortrain.compat.overrides import backward_divides

        with backward_divides(self, 1):
            return step(self, *args, **kwargs)

    return training_step


def _adopting(trainer: type) -> Callable[..., None]:
    """What runs where a script derives from Trainer: overrides are called as they were then."""

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        super(trainer, cls).__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] not in ("transformers", "ortrain"):
            from ortrain.compat.overrides import adopt

            adopt(cls)

    return __init_subclass__
