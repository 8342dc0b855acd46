"""``torch.export``, without its warnings and with what makes a trace exact.

Used of torch, beyond what it documents (``tests/capture/test_exporter.py`` pins each of them):

- ``torch.fx.experimental._config``: ``backed_size_oblivious``;
- ``torch._dynamo.config``: ``fake_tensor_cache_enabled``;
- ``torch.export._trace``: ``register_buffer_assignment_hook``;
- the errors by which a trace says what it cannot do (`_nothing_swallowed`);
- ``torch._C._autograd``: whether hooks on saved tensors are allowed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._subclasses import fake_tensor
from torch.export import ExportedProgram, _trace
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental import symbolic_shapes
from torch.utils.hooks import RemovableHandle

from ortrain.capture.origin import is_users
from ortrain.capture.trace.autograd_calls import check_autograd_calls, checked_autograd_calls
from ortrain.capture.trace.checkpointing import marked_checkpoints
from ortrain.capture.trace.keeping import keeper, keeping
from ortrain.capture.trace.known_numbers import numbers_remembered
from ortrain.capture.trace.known_results import results_found_once
from ortrain.capture.trace.known_sizes import sizes_computed_once
from ortrain.capture.trace.maps import whole_maps
from ortrain.capture.trace.parametrized_draws import ParametrizedDraws
from ortrain.capture.trace.plain_forms import PlainForms
from ortrain.capture.trace.stand_ins import stand_ins_watched
from ortrain.capture.trace.symbols import symbols_as_numbers
from ortrain.capture.trace.value_checks import Ways, value_checks
from ortrain.errors import CaptureError
from ortrain.pytorch import autocast
from ortrain.pytorch.recurrent import whole_recurrences

TESTED = ("2.13", "2.14", "2.15")
_HOOK = "register_buffer_assignment_hook"


@functools.cache
def check_version() -> None:
    """Warns once where this torch is not one that ortrain was tested with."""
    running = ".".join(torch.__version__.split(".")[:2])
    if running not in TESTED:
        warnings.warn(
            f"ortrain was tested with torch {', '.join(TESTED)}, not with {torch.__version__}: "
            "its capture uses private names of the ONNX exporter, which may have changed",
            stacklevel=2,
        )


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    strict: bool = False,
    oblivious: bool = False,
    ways: Ways | None = None,
) -> ExportedProgram:
    """``torch.export.export`` without its warnings and log lines.

    Args:
        module: traced in its present mode.
        args: example arguments.
        kwargs: example keyword arguments.
        dynamic_shapes: as torch.export takes it, one entry for args and one for kwargs.
        strict: trace with Dynamo instead of running the Python code.
        oblivious: do not let a size of 1 decide anything.
        ways: at branches on values; None refuses them. Dynamo has no use for them.
    """
    if (known := keeper()) is not None:
        known.begin()
    sizes = _oblivious() if oblivious else contextlib.nullcontext()
    if strict:  # Dynamo does not run the code
        with quiet(), keeping(None):
            check_autograd_calls(module, args, kwargs)
    watching = contextlib.nullcontext() if strict else checked_autograd_calls(module)
    checking = contextlib.nullcontext() if strict else _branches(module, ways)
    numbers = contextlib.nullcontext() if strict else symbols_as_numbers(module)
    drawing = contextlib.nullcontext() if strict else ParametrizedDraws()
    plainly = contextlib.nullcontext() if strict else PlainForms()
    remembering = contextlib.nullcontext() if strict else numbers_remembered()
    # torch prints the partial graph of a failure; the error has what matters of it.
    with (
        sizes,
        quiet(),
        _uncached(),
        autocast.uncached(),
        _buffers_left_to_us(),
        results_found_once(),
        remembering,  # above what looks results up
        sizes_computed_once(),  # before what asks sizes as numbers, which is asked first
        watching,
        checking,
        numbers,
        drawing,
        plainly,
        marked_checkpoints(),
        whole_recurrences(),
        whole_maps(),
        _nothing_swallowed(),
        _saved_tensors_hooks_as_before(),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return torch.export.export(
            module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict
        )


@contextlib.contextmanager
def _buffers_left_to_us() -> Iterator[None]:
    """Without what torch does for buffers that are assigned, in the module itself alone.

    See `assigned_buffers`, which sees to those of every module.
    """
    own = vars(_trace).get(_HOOK)
    if own is None:
        yield
        return
    setattr(_trace, _HOOK, lambda *_: RemovableHandle(OrderedDict()))
    try:
        yield
    finally:
        setattr(_trace, _HOOK, own)


def _uncached() -> contextlib.AbstractContextManager[None]:
    """Computes the shapes of each operator's results once.

    The cache of fake tensors seldom knows an operator where sizes are symbols, and makes the result
    a second time for its entry: 3.1 s of processor time with it, 2.1 s without for a small BERT.
    """
    patched: contextlib.AbstractContextManager[None] = dynamo_config.patch(
        fake_tensor_cache_enabled=False
    )
    return patched


@contextlib.contextmanager
def _branches(module: torch.nn.Module, ways: Ways | None) -> Iterator[None]:
    """Branches on values in a trace, which runs the forward more than once."""
    if ways is None:
        with value_checks():
            yield
        return
    hook = module.register_forward_pre_hook(ways.begin)
    # What `item()` returns stands in for numbers once the ways are known.
    numbers = stand_ins_watched(module, lambda: ways.numbers, arguments_too=False)
    try:
        with value_checks(ways), numbers if ways.known else contextlib.nullcontext():
            yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _saved_tensors_hooks_as_before() -> Iterator[None]:
    """Lets hooks on saved tensors be set afterwards where they could be before.

    ``torch.func.grad`` forbids them, and where its trace fails at once because there are some, they
    stay forbidden (torch 2.13): every later capture and every checkpoint of the process would fail.
    """
    state: Any = torch._C._autograd
    before = state._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        if before is None and state._saved_tensors_hooks_get_disabled_error_message() is not None:
            state._saved_tensors_hooks_enable()


@contextlib.contextmanager
def _nothing_swallowed() -> Iterator[None]:
    """Refuses a forward that catches the errors by which the trace says what it cannot do.

    In PyTorch there is no such error, so that the graph would go another way than the module. An
    error's traceback grows until it is caught: its first frame is the one that caught it.

    Raises:
        CaptureError: the user's code caught one.
    """
    raised: list[BaseException] = []
    kinds: tuple[Any, ...] = (
        symbolic_shapes.GuardOnDataDependentSymNode,
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )
    own = [kind.__init__ for kind in kinds]

    def noted(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def note(self: BaseException, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            raised.append(self)

        return note

    for kind, init in zip(kinds, own, strict=True):
        kind.__init__ = noted(init)
    try:
        yield
    finally:
        for kind, init in zip(kinds, own, strict=True):
            kind.__init__ = init
    for error in raised:
        frames = error.__traceback__
        if frames is not None and is_users(frames.tb_frame.f_code.co_filename):
            place = f"({frames.tb_frame.f_code.co_filename}:{frames.tb_lineno})"
            raise CaptureError(
                "the forward catches an error of the trace",
                where=place,
                because="PyTorch raises none there, since it knows the values: the graph would go "
                "another way",
                help="leave the values of tensors out of try and except, or compute both ways and "
                "choose with torch.where",
            )


def _oblivious() -> contextlib.AbstractContextManager[None]:
    config: Any = symbolic_config
    return config.patch(backed_size_oblivious=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the exporter logs on the way to an error is in the error too."""
    loggers = [
        logging.getLogger(name) for name in ("torch", "torch.export", "torch.onnx", "onnx_ir")
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
