"""``ortrain.compile``: a model trains through its graphs, and stays what it is."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from ortrain.config import DebugOptions, Options
from ortrain.frontend.machine import Machine
from ortrain.kinds import expect
from ortrain.pytorch.routes import plainly, route, way_of
from ortrain.step.report import Report

Model = TypeVar("Model", bound=nn.Module)


def compile(model: Model, **options: Any) -> Model:
    """Has a model's calls run as graphs where that is faster; in place, as ``nn.Module.compile``.

    ::

        model = ortrain.compile(model)

    Class, parameters, ``state_dict``, ``isinstance`` and methods stay the model's own; copies and
    files are of the model as it was. :func:`report_of` tells what ran where.

    Args:
        model: any module.
        options: fields of :class:`~ortrain.Options`.

    Returns:
        The model.

    Raises:
        TypeError: it is no module, or an option is not known or of another type.
        ValueError: a value that is not served.
    """
    expect("model", model, nn.Module, "a torch.nn.Module")
    settings = Options(**options)
    route(model, _Way(model, Machine(model, settings, DebugOptions())))
    return model


def report_of(model: nn.Module) -> Report:
    """What ran where of a model that :func:`compile` was given.

    Raises:
        ValueError: it was not, or something else has compiled it since.
    """
    way = way_of(model)
    if not isinstance(way, _Way):
        raise ValueError(
            f"this {type(model).__name__} was not compiled: call ortrain.compile(model)"
        )
    return way.machine.report


class _Way:
    """A model's call."""

    def __init__(self, model: nn.Module, machine: Machine) -> None:
        self.model, self.machine = model, machine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as a part of what somebody else compiles
            return plainly(self.model, args, kwargs)
        route(self.model, None)  # what the machine calls is the model's own call
        try:
            return self.machine(args, kwargs)
        finally:
            route(self.model, self)


__all__ = ["compile", "report_of"]
