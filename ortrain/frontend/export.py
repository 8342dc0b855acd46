"""``export``: one call of a module becomes one ONNX program, for files and for other programs.

::

    exported = export(model, kwargs={"input_ids": ids, "labels": labels})
    exported.program          # the forward, with parameters and buffers as inputs
    exported.accepts(shapes)  # may a call with these shapes use it?

The graph is the one that ``torch.compile(fullgraph=True)`` has of the call, with all sizes open. So
a file has what a training step has: the user's own backwards, checkpoints and autocast.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor, fx, nn

from ortrain.aside import copied, random_states
from ortrain.capture.call import Call, example_call, step_name
from ortrain.capture.onnx.lift import State, drop_unused_inputs, set_outputs, state_of
from ortrain.capture.origin import BESIDE, FRAME, is_users
from ortrain.errors import CaptureError, OrtrainError, UnsupportedOutput
from ortrain.exclusive import EXCLUSIVE
from ortrain.frontend.aten import check_followed, squeezes
from ortrain.frontend.program import Translated, translated
from ortrain.frontend.watch import Watch
from ortrain.key_value_cache import closed, opened
from ortrain.kinds import NONE, expect, expect_flag, expect_whole
from ortrain.passes.clean import clean
from ortrain.program import Program, Role, set_role, target_of
from ortrain.pytorch import pytree
from ortrain.pytorch.arrays import ARRAYS, fold_arrays
from ortrain.pytorch.conditions import Sizes, example_of
from ortrain.pytorch.dynamo import (
    NotFollowed,
    converted,
    is_of_conversion,
    not_followed,
    settings,
    with_open_sizes,
)
from ortrain.pytorch.saving import unhooked
from ortrain.pytorch.tracing import fake_mode_of, known_fake
from ortrain.uncollected import uncollected

# Conversions of one call: what the first one leaves in the module may ask for a second.
MOST = 3
# Axes of images, channels first or last, and of films, beside their batch.
_IMAGE = range(1, 6)


@dataclass
class Exported:
    """What :func:`export` returns.

    Attributes:
        program: the forward. Inputs: the user's tensors, the seed, buffers, parameters. Outputs:
            the user's tensors, updated buffers.
        tensors: names of all tensors of the call, in the order of
            ``torch.utils._pytree.tree_leaves((args, kwargs))``. The program has no input for those
            that do not influence it.
        output: what the module has returned for the call.
        leaves: for each leaf of the output, of which a cache is opened into its parts, its place
            among the program's user outputs; None where it is no tensor.
        sizes: which shapes the program is valid for.
    """

    program: Program
    tensors: tuple[str, ...]
    output: Any
    leaves: tuple[int | None, ...]
    sizes: Sizes = field(repr=False)

    def accepts(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a call with these shapes, one for each of :attr:`tensors`, may use the program.

        A size of 1 is accepted where the code asks whether one is more than 1, and it was.
        """
        return self.sizes.accept(shapes)

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """What the module returns, of the program's user outputs."""
        own, spec = pytree.tree_flatten(opened(self.output))
        pairs = zip(own, self.leaves, strict=True)
        found = [leaf if place is None else outputs[place] for leaf, place in pairs]
        return closed(pytree.tree_unflatten(found, spec))


def export(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    opset: int = 21,
    still: bool = False,
) -> Exported:
    """The ONNX program of a module's forward, in its present mode.

    All sizes of all tensors are open as far as the module's code allows. Neither the module nor any
    random state changes. Autocast that is on around the call is part of it. A call that is wrong
    raises its own error.

    A batch or a length of 1 is special to PyTorch, which may broadcast it: such an example is
    repeated along that axis. A module that can say how a call of larger sizes would look has a
    method ``example_for_capture(*args, **kwargs)``, which returns such ``(args, kwargs)`` of the
    same structure, or None.

    Args:
        module: in train or eval mode.
        args: example positional arguments: tensors, constants, and pytrees of them.
        kwargs: example keyword arguments.
        opset: of the standard ONNX domain. At 22 and above, onnxruntime lacks kernels for random
            draws.
        still: take the sizes of images for constants. Windows make expressions of them that grow
            from layer to layer.

    Raises:
        TypeError: an argument of this function is of another type.
        ValueError: ``opset`` is not served.
        CaptureError: the module cannot become one graph; the error says where and why.
        UnsupportedInput: an argument is of a type that a graph cannot take.
        UnsupportedOutput: the module returns a number that its input changes.
    """
    expect("module", module, nn.Module, "a torch.nn.Module")
    expect("args", args, (tuple, list), "a tuple of positional arguments")
    expect("kwargs", kwargs, (Mapping, NONE), "keyword arguments by name, or None")
    expect_whole("opset", opset)
    expect_flag("still", still)
    if not 18 <= opset <= 23:
        raise ValueError(f"opset={opset}: expected 18 to 23")
    state = state_of(module)
    call = example_call(module, tuple(args), dict(kwargs or {}), taken=state.first)
    batches, lengths = call.growable()
    examples = [call.grown(frozenset(axes)) for axes in (batches | lengths, batches) if axes]
    if call.example is not None:
        examples.insert(0, call.replaced())
    tensors = [leaf.value for leaf in call.tensors]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    closed = {(i, axis) for i, t in enumerate(tensors) if still and _is_image(t) for axis in _IMAGE}
    first: CaptureError | None = None
    with EXCLUSIVE, uncollected(), unhooked(), random_states():
        for example in [*examples, call]:
            for ones_are_sizes in (True, False):
                attempt = partial(_Export, module, example, state, opset, ones_are_sizes)
                try:
                    found = attempt(closed).run()
                    if found is None or not found.accepts(shapes):
                        continue
                    fixed = found.sizes.fixed(shapes)
                    return (attempt(closed | fixed).run() if fixed else None) or found
                except CaptureError as error:
                    first = first or error
                    break
    raise first or CaptureError(
        "its code goes another way where a size is 1",
        because="a graph for larger sizes does not hold for the call",
        help="give an example of larger sizes",
    )


class _OnesMatter(Exception):
    """The code drops axes of size one, so that no symbol may be one."""


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


class _Export:
    """One attempt, of a copy of the module that has its parameters.

    Args:
        module: it.
        call: its example.
        state: names of its parameters and buffers.
        opset: of the program.
        ones_are_sizes: whether a size of one is like others.
        closed: sizes that are constants: which tensor, and which axis.
    """

    made: Translated
    real: Sequence[Any]
    results: Sequence[Any]
    sizes: Sizes
    watch: Watch

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        state: State,
        opset: int,
        ones_are_sizes: bool,
        closed: Collection[tuple[int, int]],
    ) -> None:
        self.module, self.state, self.opset = _copied(module), state, opset
        self.ones_are_sizes, self.closed = ones_are_sizes, closed
        self.conversions, self.ones_matter = 0, False
        self.failed: OrtrainError | None = None
        # Which sizes are open is noted on the tensors themselves.
        given = pytree.tree_map_only(Tensor, _alias, (call.args, call.kwargs))
        self.args, self.kwargs = given
        leaves = pytree.tree_leaves(given)
        pairs = sorted(zip(call.leaves, leaves, strict=True), key=lambda pair: pair[0].position)
        self.given = {leaf.name: value for leaf, value in pairs if leaf.is_tensor}

    def run(self) -> Exported | None:
        """The program; None where it needs to know whether a size is one."""
        output: Any = None
        results: Sequence[Any] = ()
        run, settled = self._converted(), False
        for _ in range(MOST):
            before = self.conversions
            try:
                with settings(
                    hooks=self.watch.hooked,
                    whole_layers=self.watch.whole_layers,
                    ones_are_sizes=self.ones_are_sizes,
                    parted=False,
                    once=True,
                ):
                    for i, tensor in enumerate(self.given.values()):
                        axes = (a for a in range(tensor.dim()) if (i, a) not in self.closed)
                        with_open_sizes(tensor, axes)
                    now = run(self.module, self.args, self.kwargs)
            except Exception as error:
                if self.ones_matter:
                    return None
                if not settled and self._settles(error):
                    run, settled = self._converted(), True
                    continue
                raise self._refusal(error) from error
            if self.conversions == before:
                break
            output, results = now, self.results
        else:
            raise CaptureError(
                "what its code depends on changes from call to call",
                because="each call would be another graph",
                help="take what counts calls, or collects values, out of the forward",
            )
        if not self.conversions:
            raise CaptureError(
                f"{type(self.module).__name__} computes nothing",
                because="there is no graph of it",
                help=BESIDE,
            )
        self.results = results  # of the call that was converted
        return self._finished(output)

    def _converted(self) -> Callable[..., Any]:
        """The call through Dynamo, with the hooks that the module has now.

        Raises:
            CaptureError: a graph would be wrong about its code.
        """
        self.watch = Watch(self.module)
        if self.watch.not_followed:
            raise _wrong(self.watch.not_followed)
        self.packs = self.watch.packs()
        return converted(_called, self._take, self.watch.names)

    def _take(self, graph: fx.GraphModule, real: Sequence[Any]) -> Callable[..., Any]:
        """The backend: translates a graph, which PyTorch runs then."""
        self.conversions += 1
        if self.ones_are_sizes and squeezes(graph):
            self.ones_matter = True
            raise _OnesMatter
        if not fold_arrays(graph):
            raise NotFollowed(ARRAYS)
        check_followed(graph, packs=self.packs)
        holders = graph.graph.find_nodes(op="placeholder")
        pairs = zip(real, holders, strict=True)
        fakes = {id(value): holder.meta["example_value"] for value, holder in pairs}
        _unify_batches(fakes.get(id(value)) for value in self.given.values())
        eager = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        try:
            self.made = translated(graph, real, self.opset, whole=True)
        except OrtrainError as error:
            self.failed = error
            raise
        self.real = [*real]
        # The code may have asked a size of a tensor that the graph does not take.
        mode = fake_mode_of([*fakes.values()])
        tensors = [fakes.get(id(t), known_fake(mode, t)) for t in self.given.values()]
        self.sizes = Sizes(tensors, ones=self.ones_are_sizes)

        def run(*args: Any) -> Any:
            self.results = eager(*args)
            return self.results

        return run

    def _settles(self, error: Exception) -> bool:
        """Runs the copy in PyTorch, whose first call may do what no graph does, and no other one.

        Raises:
            Exception: the call's own error.
        """
        if self.failed is not None or not_followed(error) or not is_of_conversion(error):
            return False
        self.module(*self.args, **self.kwargs)
        return True

    def _refusal(self, error: Exception) -> Exception:
        if self.failed is not None:
            return self.failed
        if what := not_followed(error):
            return _wrong(what)
        try:  # a call that is wrong has an error of its own
            _copied(self.module)(*self.args, **self.kwargs)
        except Exception as own:
            return own
        lines = str(error).splitlines()
        where = [f"({file}:{n})" for file, n in FRAME.findall(str(error)) if is_users(file)]
        return CaptureError(
            f"{type(self.module).__name__} cannot become one graph",
            where=where[-1] if where else "",
            because=f"{type(error).__name__}: {lines[0] if lines else 'no message'}",
            help=BESIDE,
        )

    def _finished(self, output: Any) -> Exported:
        program = self.made.program
        updates = self._updates(program)
        self._name_inputs(program)
        leaves, outputs = self._outputs(program, output)
        program.graph.outputs.clear()
        set_outputs(program.graph, [*outputs, *updates])
        clean(program)
        drop_unused_inputs(program)
        for node in program.graph.all_nodes():
            node.name = node.outputs[0].name
        return Exported(program, tuple(self.given), output, leaves, self.sizes)

    @cached_property
    def _known(self) -> dict[int, tuple[str, Role]]:
        """What the module and the call call a tensor, by its identity."""
        known = {id(t): (name, Role.USER_INPUT) for name, t in self.given.items()}
        known |= {id(t): (name, Role.BUFFER) for name, t in self.module.named_buffers()}
        return known | {id(t): (n, Role.PARAMETER) for n, t in self.module.named_parameters()}

    def _name_inputs(self, program: Program) -> None:
        """Gives inputs the names that they have in the module and in the call, and their order."""
        graph = program.graph
        for value in program.inputs(Role.USER_INPUT, Role.BUFFER, Role.PARAMETER):
            tensor = self.real[self.made.places[value.name or ""]]
            if not isinstance(tensor, Tensor):
                raise CaptureError(
                    f"its code computes with {value.name}, a number",
                    because="the number changes from call to call, and is no argument",
                    help="make it a buffer",
                )
            graph.inputs.remove(value)
            self._enter(graph, tensor, value)
        names = [*self.given, "seed", *self.state.buffers, *self.state.parameters]
        place = {name: i for i, name in enumerate(names)}
        inputs = sorted(graph.inputs, key=lambda value: place[value.name or ""])
        graph.inputs.clear()
        graph.inputs.extend(inputs)

    def _enter(self, graph: ir.Graph, tensor: Tensor, value: ir.Value) -> ir.Value:
        """Has a value stand for a tensor: an input, or a constant where nobody knows it."""
        value.metadata_props.clear()
        if id(tensor) in self._known:
            value.name, role = self._known[id(tensor)]
            graph.inputs.append(set_role(value, role))
        else:
            value.const_value = ir.tensor(tensor.detach().cpu().contiguous().numpy())
            graph.register_initializer(value)
        return value

    def _outputs(
        self, program: Program, output: Any
    ) -> tuple[tuple[int | None, ...], list[tuple[ir.Value, str, Role, str]]]:
        """What the program returns for the leaves of an output."""
        graph = program.graph
        tensors = [each for each in self.results if isinstance(each, Tensor)]
        values = dict(zip(map(id, tensors), program.outputs(Role.USER_OUTPUT), strict=True))
        inputs = {value.name: value for value in graph.inputs}
        leaves: list[int | None] = []
        outputs: list[tuple[ir.Value, str, Role, str]] = []
        for path, leaf in pytree.tree_flatten_with_path(opened(output))[0]:
            if not isinstance(leaf, Tensor):
                if any(leaf is each for each in self.results if each is not None):
                    raise UnsupportedOutput(
                        "the forward returns a size of its input as a number",
                        because="a graph returns tensors, and constants that no input changes",
                        help="return the tensor itself, or take its size outside of the module",
                    )
                leaves.append(None)
                continue
            value = values.get(id(leaf)) or inputs.get(self._known.get(id(leaf), ("",))[0])
            if value is None:
                shape, dtype = ir.Shape(leaf.shape), from_torch_dtype(leaf.dtype)
                new = ir.Value(name="constant", shape=shape, type=ir.TensorType(dtype))
                value = inputs[new.name] = self._enter(graph, leaf, new)
            steps = [step_name(step) for step in path]
            name = ".".join(["output", *steps] if not steps or steps[0].isdigit() else steps)
            leaves.append(len(outputs))
            outputs.append((value, name, Role.USER_OUTPUT, ""))
        return tuple(leaves), outputs

    def _updates(self, program: Program) -> list[tuple[ir.Value, str, Role, str]]:
        """The outputs that are new values of buffers."""
        found = []
        for value in program.outputs(Role.UPDATED_BUFFER):
            own = target_of(value)
            name, role = self._known.get(id(self.real[self.made.places[own]]), (own, None))
            if role is not Role.BUFFER:
                raise CaptureError(
                    f"its code writes to {name}, which is none of its buffers",
                    because="a graph has its results and new values of buffers for outputs",
                    help="write to a copy, or make it a buffer",
                )
            found.append((value, f"{name}.updated", Role.UPDATED_BUFFER, name))
        return found


def _alias(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _wrong(what: str) -> CaptureError:
    return CaptureError(f"a graph would be wrong about it: {what}", help=BESIDE)


def _is_image(tensor: Tensor) -> bool:
    return tensor.dim() >= 4 and tensor.is_floating_point()


def _copied(module: nn.Module) -> nn.Module:
    """A module with the same parameters, whose buffers and attributes are its own."""
    try:
        return copied(module)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied",
            because=f"{type(error).__name__}: {error}".partition("\n")[0],
            help="a graph is made of a copy; see copy.deepcopy",
        ) from error


def _unify_batches(fakes: Iterator[Tensor | None]) -> None:
    """One symbol for leading sizes that are equal and that the code never compares.

    A mask that is only indexed may have more rows than the tokens, as far as a trace knows.
    """
    sizes: list[Any] = [fake.shape[0] for fake in fakes if fake is not None and fake.dim()]
    leading = [size for size in sizes if isinstance(size, torch.SymInt)]
    for size in leading[1:]:
        if example_of(size) == example_of(leading[0]):
            bool(size == leading[0])
