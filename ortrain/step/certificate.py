"""The certificate: a capture is compared with its module before it is used.

What a capture missed (a hook, a function with a backward of its own, a write that the trace did not
see, a wrong translation) shows in the numbers of the very first call. So the module and the graph
each run once aside, on the call's own tensors, with the same random numbers; every output, every
gradient that autograd would deliver and every updated buffer must agree. Neither parameters, their
gradients, buffers, random states nor the user's hooks notice.

No gradient is kept: each leaves a :class:`Digest` as soon as autograd delivers it. So the peak of
memory is that of the hungrier engine alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import is_grad_enabled, nn

from ortrain.capture.origin import is_own, own_failure
from ortrain.errors import CaptureError, CheckFailed, ParityError, listing
from ortrain.guards.structure import FlatCall
from ortrain.program import Role
from ortrain.step.agreement import compare
from ortrain.step.autograd import Step
from ortrain.step.evidence import Certificate
from ortrain.step.forms import CompiledCapture
from ortrain.step.trial import Trial

# Multiplications of the forward above which a batch's first rows stand for it: four layers of
# BERT-base are 3.6e9 for a row of 128 tokens, and 0.15 s forward and backward. With twice as many a
# certificate of MiniLM in 16 bits takes 1.05 s, not 0.8.
ENOUGH = 3 << 30
# Comparisons of one capture, each with other random numbers, until one goes the graph's way.
MOST_TRIALS = 4


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """On GPUs, float32 is multiplied as such.

    cuDNN's recurrent layers, which one engine may have and the other not, round to TF32 by default.
    """
    known = torch.cuda.is_available() and hasattr(torch._C, "_set_fp32_precision_setter")
    parts = ("matmul", "conv", "rnn") if known else ()
    before = {part: torch._C._get_fp32_precision_getter("cuda", part) for part in parts}
    try:
        for part in parts:
            torch._C._set_fp32_precision_setter("cuda", part, "ieee")
        yield
    finally:
        for part, precision in before.items():
            torch._C._set_fp32_precision_setter("cuda", part, precision)


@without_tf32()
def certify(
    module: nn.Module,
    tensors: dict[str, torch.Tensor],
    served: CompiledCapture,
    flat: FlatCall,
    step: Step,
) -> Certificate:
    """Compares a step with its module on one call, aside.

    Args:
        module: the module.
        tensors: parameters and buffers by name.
        served: the capture that the step is of.
        flat: the call.
        step: that is compared.

    Raises:
        CaptureError: the module cannot be run aside.
    """
    # Not asked of the graph, which may know of no gradient where there is one.
    grad = is_grad_enabled() and any(t.requires_grad for t in (*flat.tensors, *module.parameters()))
    names = [""] * len(flat.tensors)
    for place, tensor in zip(served.order, served.captured.tensors, strict=True):
        names[place] = tensor.name
    rows, number = _rows(served, flat), 0
    if rows and served.kinds is not None and not served.kinds.is_that_of(flat.tensors, rows):
        rows = {}
    while True:
        trial = Trial.of(module, flat, names, step, served.structure.names, grad, rows, number)
        try:
            if step.is_partial:
                trial = trial.masked(step, tensors, served)
            eager = trial.eager()
        except Exception as error:
            if not rows and is_own(error):
                raise CaptureError(
                    **own_failure(error, "comparing the module with its graph")
                ) from error
            if not rows:
                raise CaptureError(
                    f"{type(module).__name__} cannot be compared with its graph",
                    because=f"run aside it raises {type(error).__name__}: {error}",
                    help='Options(certificate="off") uses the graph without a comparison',
                ) from error
            rows = {}
            continue
        try:
            run = functools.partial(trial.graph, step, tensors, served)
            return compare(eager, run(), trial, run)
        except CheckFailed as error:
            # Fewer rows than the call has, or its random numbers, may lead another way.
            number += 1
            if not rows and (error.seed is None or number == MOST_TRIALS):
                raise
            rows = {}


def _rows(served: CompiledCapture, flat: FlatCall) -> dict[int, int]:
    """Of each tensor of a large batch, how many rows a comparison takes; {} takes all."""
    cost = served.cost(served.sizes(flat))
    dims = [
        [str(d) for d in v.shape or ()] for v in served.captured.program.inputs(Role.USER_INPUT)
    ]
    batch = next((shape[0] for shape in dims if shape and not shape[0].isdigit()), "")
    if cost <= ENOUGH or not batch or any(batch in shape[1:] for shape in dims):
        return {}
    places = [p for p, shape in zip(served.positions, dims, strict=True) if batch in shape]
    whole = flat.tensors[places[0]].shape[0]
    rows = dict.fromkeys(places, max(2, int(whole * ENOUGH / cost)))
    shapes = [
        torch.Size([rows[place], *shape[1:]]) if place in rows else shape
        for place, shape in ((i, flat.tensors[i].shape) for i in served.order)
    ]
    constraints = served.captured.constraints
    fits = rows[places[0]] < whole and constraints.accepts(shapes)
    return rows if fits and not constraints.untraced(shapes) else {}


def refuted(module: nn.Module, certificate: Certificate) -> ParityError:
    """The error of a graph that does not agree with its module."""
    return ParityError(
        f"the graph of {type(module).__name__} does not compute what the module does",
        because=listing(list(certificate.faults)),
        help="it runs in PyTorch instead; please report it with the module's code",
    )
