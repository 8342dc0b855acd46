"""What goes through the modules of a model, and what flows back: recorded, compared, changed.

::

    from ortrain.hooks import GlobalSubscriberManager, StatisticsSubscriber

    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber("activations")])

Each module's outputs, and their gradients, are summed up in a file a step. The hooks are those of
PyTorch, so that a model with subscribers runs in PyTorch, below an ORTModule as well.
"""

from ortrain.extras import require

require("torch", __name__)

from ortrain.hooks.statistics import StatisticsSubscriber, inspect_activation
from ortrain.hooks.subscribers import (
    GlobalSubscriberManager,
    SubscriberBase,
    SubscriberManager,
    no_increase_global_step,
)

__all__ = [
    "GlobalSubscriberManager",
    "StatisticsSubscriber",
    "SubscriberBase",
    "SubscriberManager",
    "inspect_activation",
    "no_increase_global_step",
]
