"""Parameters and buffers that a module holds a second time, beside their registered names.

``self.weights = [self.up.weight, self.down.weight]``, a dictionary, a closure: whoever puts other
tensors in a module's place (a trace its stand-ins, a comparison its own) puts them under registered
names. So where a forward begins, each of these places gets what its registered name holds then.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ortrain.module_state.holder import Entries, Items, Named
from ortrain.module_state.survey import Survey
from ortrain.pytorch.version import put_back, version_of

# Lists of recurrent layers, which torch keeps in step itself.
_IN_STEP = ("_flat_weights",)

_Put = Callable[[Any], None]


class Aliases:
    """Where a module holds its parameters and buffers other than under their registered names.

    Args:
        module: that registers them.
        survey: of the module.
    """

    def __init__(self, module: nn.Module, survey: Survey) -> None:
        self.module = module
        self._homes: dict[int, tuple[dict[str, Any], str]] = {}
        for each in module.modules():
            for registry in (each._parameters, each._buffers):
                for name, tensor in registry.items():
                    if tensor is not None:
                        self._homes.setdefault(id(tensor), (registry, name))
        self.places = [
            (put, value)
            for holder in survey.holders
            if not holder.path.endswith(_IN_STEP)
            for put, value in _places(holder)
            if self._now(value) is not None
        ]

    def _now(self, value: Any) -> Callable[[], Any] | None:
        """What gives the value with what the registered names hold; None where it has no alias."""
        if isinstance(value, Tensor):
            home = self._homes.get(id(value))
            return None if home is None else lambda: home[0].get(home[1], value)
        if type(value) is not tuple:  # which cannot be filled
            return None
        parts = [self._now(each) for each in value]
        if not any(parts):
            return None
        return lambda: tuple([p() if p else v for p, v in zip(parts, value, strict=True)])

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A forward of the module finds there what stands under the registered names by then."""
        with self._contents_kept(), self._following():
            yield

    @contextlib.contextmanager
    def _contents_kept(self) -> Iterator[None]:
        """Nothing is left of what a forward writes to buffers from places that cannot be followed.

        Of a trace in vain as well: ``partial(torch.Tensor.add_, self.steps)`` counted in each.
        """
        held = [(b, version_of(b), b.detach().clone()) for b in self.module.buffers()]
        try:
            yield
        finally:
            for buffer, version, contents in held:
                if version_of(buffer) != version:
                    put_back(buffer, contents, version)

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        if not self.places:
            yield
            return
        found = [(put, now) for put, value in self.places if (now := self._now(value)) is not None]

        def follow(*_: object) -> None:
            for put, now in found:
                put(now())

        hook = self.module.register_forward_pre_hook(follow, prepend=True)
        try:
            yield
        finally:
            hook.remove()
            for put, value in self.places:
                with contextlib.suppress(IndexError):  # of a list that the forward has shortened
                    put(value)


def _places(holder: Any) -> Iterator[tuple[_Put, Any]]:
    """What a holder holds, each with what puts another in its place."""
    if isinstance(holder, Named):
        for name, value in holder.read().items():
            yield functools.partial(holder.set, name), value
    elif isinstance(holder, Entries):
        for key, value in holder.read().items():
            yield functools.partial(dict.__setitem__, holder.object, key), value
    elif isinstance(holder, Items):
        kind: Any = deque if isinstance(holder.object, deque) else list
        for index, value in enumerate(holder.read()):
            yield functools.partial(kind.__setitem__, holder.object, index), value
