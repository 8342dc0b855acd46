"""Eager with the graph's random numbers: its dropouts keep the elements that the graph keeps.

A graph draws by a hash of the step's seed and of a number that each draw has, its stream
(`ortrain/ops/hash.py`); the streams count the draws of the module's forward in their order. So
eager, told the seed, can draw the same: each operator that would take numbers from torch's
generator gets those of the next stream. With them graph and eager can be compared with dropout on,
and a step that the graph cannot finish is finished by eager.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ortrain.capture.onnx.replay import replay
from ortrain.errors import CaptureError
from ortrain.pytorch.modes import TorchDispatchMode


class _Here(threading.local):
    replaying = False


_here = _Here()


def is_replaying() -> bool:
    """Whether what runs in this thread draws what a graph draws.

    Nothing may be left to a repetition then, which would draw anew.
    """
    return _here.replaying


@contextlib.contextmanager
def replayed_draws(seed: int) -> Iterator[None]:
    """Eager calls inside draw what a graph draws whose seed input is this."""
    before, _here.replaying = _here.replaying, True
    try:
        with _SpelledOut(), _Replay(seed):
            yield
    finally:
        _here.replaying = before


class _SpelledOut(TorchFunctionMode):
    """Keeps GPUs from kernels that draw inside, where no other numbers can be given to them."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with contextlib.ExitStack() as stack:
            if function in _RECURRENT:
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            elif function is scaled_dot_product_attention and _drops(*args[4:5], **(kwargs or {})):
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            return function(*args, **(kwargs or {}))


def _drops(dropout_p: float = 0.0, **_: Any) -> bool:
    return dropout_p > 0


_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class _Replay(TorchDispatchMode):
    """Gives each random draw the numbers of the next stream."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.stream = seed, 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in operator.tags:
            return operator(*args, **kwargs)
        result = replay(operator, args, kwargs, seed=self.seed, stream=self.stream)
        if result is not NotImplemented:
            self.stream += 1
            return result
        before = _states()
        result = operator(*args, **kwargs)
        if not all(map(torch.equal, before, _states())):
            raise CaptureError(
                f"{operator} draws random numbers in another way than a graph",
                because="the module cannot be run again with the numbers of the graph",
                help="leave this module to eager",
            )
        return result


def _states() -> list[torch.Tensor]:
    """Of PyTorch's generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states
