"""``capture``: one call of a module becomes one ONNX program.

::

    captured = capture(model, kwargs={"input_ids": ids, "labels": labels})
    captured.program          # the forward, parameters and buffers as inputs
    captured.accepts(shapes)  # may a call with these shapes use it?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ortrain.cache import Cache
from ortrain.capture.onnx import lift
from ortrain.capture.onnx.fingerprint import parts_of
from ortrain.capture.onnx.translations.base import SymbolicSize, symbolic
from ortrain.capture.returned import Source, sources_of, views_of
from ortrain.capture.trace import ladder
from ortrain.capture.trace.call import Axes, Call, example_call, free_name
from ortrain.capture.trace.constants import read_in_place
from ortrain.capture.trace.decisions import fixed_sizes
from ortrain.capture.trace.exporter import check_version
from ortrain.capture.trace.keeping import Keeper, keeping, recorded_examples
from ortrain.capture.trace.layers import traceable_layers
from ortrain.capture.trace.refusal import located
from ortrain.capture.trace.seen import seen_routines
from ortrain.capture.trace.sharing import share
from ortrain.capture.traced import Traced
from ortrain.capture.translation import OutputLeaf, Watch, outputs_of, program_of, registry_of
from ortrain.exclusive import EXCLUSIVE
from ortrain.guards.constraints import Constraints, Shapes
from ortrain.guards.key_value_cache import closed
from ortrain.kept.call import Kept
from ortrain.module_state.untouched import untouched
from ortrain.program import Program, Role
from ortrain.pytorch.autocast import active
from ortrain.uncollected import uncollected


@dataclass(frozen=True)
class UserInput:
    """A tensor of the call.

    Attributes:
        name: of the program's input; the forward parameter and the way into it: ``past.0.1``.
        position: in ``torch.utils._pytree.tree_leaves((args, kwargs))`` of the example call.
    """

    name: str
    position: int


@dataclass
class Captured:
    """What :func:`capture` returns.

    Attributes:
        program: the forward program. Inputs: the user's tensors, the seed, buffers, parameters.
            Outputs: the user's tensors, updated buffers, a check.
        inputs: the user inputs of the program, in its order.
        dropped: tensors of the call that do not influence it; the program has no input for them.
        tensors: all tensors of the call, by position; the shapes of :meth:`accepts` are theirs.
        output_leaves: the leaves of the module's output, in pytree order.
        output_spec: the pytree of the module's output: ``output_spec.unflatten(leaves)``.
        constraints: which shapes the program is valid for.
        rung: how the module was captured: ``non-strict``, ``batch of 1 repeated``,
            ``batch or length of 1 repeated``, ``sizes of 1 kept symbolic``, ``example of the
            module``, ``strict``.
        failed: what was tried before, and why it did not work.
        seconds: what each part took.
        branches: whether the program goes the example's way at branches on values.
        by_values: whether code that asks if it is traced goes by values in a call that is not.
        returned: the user outputs that are no new contiguous tensors of the module.
        views: those that are copies of what is a view of another tensor in the module.
        kept: calls of the program's nodes that stay PyTorch's.
        held: tensors that are neither parameter nor buffer and inputs all the same, by name.
    """

    program: Program
    inputs: tuple[UserInput, ...]
    dropped: tuple[UserInput, ...]
    tensors: tuple[UserInput, ...]
    output_leaves: tuple[OutputLeaf, ...]
    output_spec: Any
    constraints: Constraints
    rung: str
    failed: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    branches: bool = False
    by_values: bool = False
    returned: dict[int, Source] = field(default_factory=dict)
    views: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def accepts(self, shapes: Shapes) -> bool:
        """Whether a call with these shapes, one for each of :attr:`tensors`, may use the program.

        About 1 us for a transformer's inputs. A size of 1 is accepted where a larger one was
        traced; ``constraints.assumes`` tells these apart.
        """
        return self.constraints.accepts(shapes)

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """The module's output of the program's user outputs."""
        leaves = [
            leaf.constant if leaf.output is None else outputs[leaf.output]
            for leaf in self.output_leaves
        ]
        return closed(pytree.tree_unflatten(leaves, self.output_spec))


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    opset: int = 21,
    exact: bool = False,
    still: bool = False,
    branches: bool = False,
    cache: Cache | None = None,
    keep: Keeper | None = None,
    uncompared: Sequence[torch.Tensor] | None = None,
) -> Captured:
    """Captures a module's forward, in its present mode, as an ONNX program.

    All dimensions of all tensors are symbolic as far as the module's code allows. Neither the
    module nor any random state changes. Autocast that is on around the call is part of it: the
    program has its casts.

    A size of 1 is special to the trace. A module that can say how a call of larger sizes would look
    has a method ``example_for_capture(*args, **kwargs)``, which returns such ``(args, kwargs)`` of
    the same structure, or None; these are traced instead.

    Args:
        module: in train or eval mode.
        args: example positional arguments: tensors, constants, and pytrees of them.
        kwargs: example keyword arguments.
        opset: of the standard ONNX domain. At 22 and above, onnxruntime lacks kernels for random
            draws.
        exact: take sizes of 1 for constants, where the module's code treats them apart.
        still: take the sizes of images for constants. Strides and windows make expressions of them
            that grow from layer to layer: Swin is captured in 5 s of processor time so, else in
            130 s. A module with an example of its own says itself what varies.
        branches: go the example's way at branches on values, and take for granted what ordinary
            numbers of selected elements have in common, as a check of the program says; else only
            those branches are taken of which the other way raises. For whoever looks at the check.
        cache: of programs by their exported graphs: the export runs always, its translation only
            where the cache does not know the result.
        keep: what stays PyTorch's, as nodes of the program; None refuses what cannot be translated.
        uncompared: tensors, neither parameters nor buffers, that may be written to without a trace
            between calls of the program. They, and large constants, are inputs of it with the role
            of buffers. None makes constants of all.

    Raises:
        CaptureError: the module cannot become one graph; the error says where and why.
        UnsupportedInput: an argument is of a type that a graph cannot take.
    """
    check_version()
    autocast = active()
    watch = Watch()
    state = lift.state_of(module)
    with EXCLUSIVE, traceable_layers():  # the call holds the module's forward
        call = example_call(module, tuple(args), dict(kwargs or {}), taken=state.first)
    still = still and call.example is None
    registry = registry_of(opset)

    def made(traced: Traced, held: dict[str, str]) -> Program:
        def make() -> list[Program]:
            return [
                program_of(traced, registry, call.leaves, state, watch, branches, autocast, held)
            ]

        if keep is not None and keep.calls:
            return make()[0]  # its nodes name what is there in this process alone
        parts = parts_of(traced, state, opset, branches, autocast, held)
        return (cache or Cache(None)).programs(parts, make)[0]

    if keep is not None:
        keep.module = module
    if keep is not None and keep.routines:  # in whose code all of PyTorch's layers are as always
        with EXCLUSIVE, located(module), uncollected(), untouched(module):
            seen_routines(keep, module, call.args, call.kwargs)
    with (
        EXCLUSIVE,
        located(module),
        uncollected(),
        untouched(module),
        traceable_layers(),
        keeping(keep),
    ):
        failed: list[str] = []
        if keep is not None and keep.modules:
            recorded_examples(keep, module, call.args, call.kwargs)
        # Fewer, where a translation needs a size that was of use as a symbol.
        for axes in [a for a in Axes if a is not (Axes.ALL if still else Axes.STILL)]:
            try:
                found = ladder.export(module, call, axes, exact, branches)
                watch.lap("export")
                traced = Traced.of(found.program)
                returned = sources_of(traced, [leaf.position for leaf in call.leaves])
                views, fixed = views_of(traced), fixed_sizes(found.program)
                held = {} if uncompared is None else read_in_place(found.program, uncompared)
                names = _free_names(held, call, state)
                program = made(traced, names)
                if later := fixed_sizes(found.program) - fixed:
                    raise symbolic(f"an operator that needs {', '.join(sorted(later))}")
                _check_sizes(program, found.constraints)
                break
            except SymbolicSize as error:
                if axes is Axes.NONE:
                    raise
                failed.append(f"{axes}: {error.what}")
        found.failed = (*failed, *found.failed)
    for filling in found.fillings:
        filling.apply()
    calls = () if keep is None else keep.kept(program)
    if keep is not None and calls:
        share(calls, module, program, keep.numbers)
    leaves, _ = outputs_of(traced)
    watch.lap("clean-up of the ONNX graph")
    tensors = tuple(UserInput(leaf.name, leaf.position) for leaf in call.tensors)
    by_name = {t.name: t for t in tensors}
    taken = {v.name for v in program.graph.inputs}
    return Captured(
        program=program,
        inputs=tuple(by_name[v.name or ""] for v in program.inputs(Role.USER_INPUT)),
        dropped=tuple(t for t in tensors if t.name not in taken),
        tensors=tensors,
        output_leaves=leaves,
        output_spec=traced.spec,
        constraints=found.constraints,
        rung=found.rung,
        failed=found.failed,
        seconds=watch.laps,
        branches=found.branches,
        by_values=found.by_values,
        returned=returned,
        views=views,
        kept=calls,
        held={names[constant]: t for constant, t in held.items() if names[constant] in taken},
    )


def _free_names(constants: Iterable[str], call: Call, state: lift.State) -> dict[str, str]:
    """Names of inputs for constants of the trace, that no other input has."""
    taken, found = {*state.first, *(leaf.name for leaf in call.leaves), "seed"}, {}
    for constant in constants:
        taken.add(name := free_name(constant, taken))
        found[constant] = name
    return found


def _check_sizes(program: Program, constraints: Constraints) -> None:
    """Raises where a size of an input is a number that no condition of the trace has made one."""
    for value in program.inputs(Role.USER_INPUT):
        place = constraints.names.index(value.name or "")
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, int) and (place, axis) not in constraints.static:
                raise symbolic(f"{value.name}.shape[{axis}]")
