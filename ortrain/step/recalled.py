"""What contests have found, for later processes: with ``cache_dir`` a contest is held once.

A note that should not hold any more costs time and nothing else: what it names is compared with the
module before it is used, as ever.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ortrain.cache import Cache, fingerprint
from ortrain.config import Options
from ortrain.cpuinfo import processor
from ortrain.passes.tokens import Shown
from ortrain.step.report import Contest

# Of the fields of a contest, those that a later one can use.
_KEPT = ("engines", "eager", "winner", "engine", "rivals", "refused")


@dataclass(frozen=True)
class Note:
    """The note on the contest of one form of call.

    Attributes:
        cache: that it is kept in.
        engines: that are in the contest.
        name: of all that decides which one is fast.
    """

    cache: Cache
    engines: tuple[str, ...]
    name: str

    @classmethod
    def of(
        cls,
        cache: Cache,
        engines: tuple[str, ...],
        module: nn.Module,
        options: Options,
        key: object,
        size: int,
        modes: Sequence[Any],
        shown: Shown,
    ) -> Note | None:
        """The note on a contest; None where nothing is kept, or the call has no words of its own.

        Args:
            cache: that it is kept in.
            engines: that are in the contest.
            module: that is called.
            options: settings.
            key: of the form.
            size: of it; one note serves calls up to twice as large.
            modes: in which it is called.
            shown: what is read of its outputs.
        """
        if cache.folder is None:
            return None
        host = processor(), torch.get_num_threads()
        settings, scale = replace(options, cache_dir=None, cache_bytes=None), size.bit_length()
        parts = ["contest", host, engines, settings, key, scale, tuple(modes), shown]
        try:
            return cls(cache, engines, fingerprint([*parts, *_structure(module)]))
        except Exception:  # the repr of an argument is user code
            return None

    def read(self) -> tuple[Contest, float] | None:
        """What an earlier process has found, and for steps of which size; None where none has."""
        text = self.cache.note([self.name])
        with contextlib.suppress(TypeError, ValueError, KeyError, IndexError):
            fields, size = json.loads(text)
            found = Contest(**{name: fields[name] for name in _KEPT})
            found.rivals = tuple(found.rivals)
            if found.winner == "eager" or (found.engine in self.engines and found.graph):
                return found, max(float(size), 1.0)
        return None

    def write(self, contest: Contest, size: float) -> None:
        """Keeps what was found for steps of a size."""
        fields = asdict(contest)
        kept = {name: fields[name] for name in _KEPT}, size
        self.cache.keep_note([self.name], json.dumps(kept))


def _structure(module: nn.Module) -> Iterator[object]:
    """What a module is made of: classes, and the forms of its tensors."""
    for name, each in module.named_modules():
        yield name, type(each).__module__, type(each).__qualname__, each.training
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
