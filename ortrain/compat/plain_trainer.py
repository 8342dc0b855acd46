"""transformers' own Trainer, as scripts of transformers 4 call it around an ORTModule.

``tokenizer=`` is ``processing_class=`` there, ``TrainingArguments(ort=True)`` wraps the model, and
subclasses may override methods with the signatures of then (:mod:`ortrain.compat.overrides`).
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
    """An ``__init__`` of Trainer's, with ``tokenizer`` given to it as its ``processing_class``.

    One that takes no ``processing_class``, or a ``tokenizer`` of its own, stays as it is.
    """
    names = list(inspect.signature(init).parameters)
    if _NEW not in names or _OLD in names:
        return init
    place = names.index(_NEW)

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if _OLD in kwargs and (given := kwargs.pop(_OLD)) is not None:
            # The position counts `self`.
            if kwargs.get(_NEW) is not None or len(args) >= place:
                raise ValueError(f"Trainer: {_OLD} and {_NEW} are one: give {_NEW}")
            kwargs[_NEW] = given
        init(self, *_with_wrapped_model(self, args, kwargs), **kwargs)

    return made


def _with_wrapped_model(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trainer's positions; its model is in an ORTModule where its arguments say ``ort``."""
    training = args[1] if len(args) > 1 else kwargs.get("args")
    model = args[0] if args else kwargs.get("model")
    own = any(kind.__module__.startswith("ortrain.") for kind in type(trainer).__mro__)
    if own or model is None or not getattr(training, "ort", False):
        return args
    from ortrain.module import ORTModule

    wrapped = model if isinstance(model, ORTModule) else ORTModule(model)
    if args:
        return (wrapped, *args[1:])
    kwargs["model"] = wrapped
    return args


def _dividing_itself(step: Callable[..., Any]) -> Callable[..., Any]:
    """Trainer's ``training_step``, which divides the loss also where an old override calls it."""

    @functools.wraps(step)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        from ortrain.compat.overrides import backward_divides

        with backward_divides(self, 1):
            return step(self, *args, **kwargs)

    return training_step


def _adopting(trainer: Any) -> Callable[..., None]:
    """What runs where a class derives from Trainer: overrides are called as they were then."""

    def derived(cls: Any, **kwargs: Any) -> None:
        super(trainer, cls).__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _taking_tokenizer(cls.__init__)
        if cls.__module__.partition(".")[0] not in ("transformers", "ortrain"):
            from ortrain.compat.overrides import adopt

            adopt(cls)

    return derived
