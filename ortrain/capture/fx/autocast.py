"""Autocast's casts, made explicit.

An exported graph has its operators as the module called them, above autocast: which of them run
under it is known, the casts that it puts in front of them are not in the graph. They are put there
as PyTorch has them: each operator is run under autocast on what the trace had for its arguments,
and the casts that reach it are noted. No list of operators is kept here.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.decompose import decompose_call
from ortrain.capture.fx.regions import AUTOCAST
from ortrain.capture.fx.splice import from_same_place, new_node
from ortrain.capture.origin import captured_error, operator_name
from ortrain.pytorch import pytree
from ortrain.pytorch.autocast import Autocast, autocast_as, without_autocast
from ortrain.pytorch.modes import TorchDispatchMode
from ortrain.pytorch.operators import OpOverload, has_kernel, is_mutable, schema_of
from ortrain.pytorch.tracing import FakeTensorMode, enable_python_dispatcher, fake_mode_of

aten = torch.ops.aten

# A recurrent layer is one operator here, and a loop of many in PyTorch, some of them cast.
_RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
# They run on what autocast has set as their dtype; no cast comes first.
_NORMS = {"aten::norm.Scalar", "aten::norm.ScalarOpt_dim"}

_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")


def explicit_casts(module: fx.GraphModule) -> None:
    """Puts a cast before each operator wherever autocast has one, and forgets autocast."""
    known: dict[Any, Any] = {}
    for node in list(module.graph.nodes):
        autocast = node.meta.pop(AUTOCAST, ())
        if autocast and isinstance(node.target, OpOverload):
            _make_explicit(module, node, autocast, known)


def _make_explicit(
    module: fx.GraphModule, node: fx.Node, autocast: Autocast, known: dict[Any, Any]
) -> None:
    target: Any = node.target
    if node.target in _RECURRENT:
        dtype = node.meta["val"][0].dtype
        _cast(node, [dtype if _floats(n) else None for n in node.all_input_nodes])
    elif _is_listed(target, autocast):
        wanted = _dtypes(node.meta["val"])
        key = (target, autocast, *(_dtype(n) for n in node.all_input_nodes), *wanted)
        if key in known:
            casts, dtype = known[key]
            _cast(node, casts)
            if dtype is not None:
                node.kwargs = {**node.kwargs, "dtype": dtype}
        else:
            known[key] = _found(node, autocast, wanted)
    elif _may_hold_others(node):
        key = (target, autocast, _form(node))
        if key not in known:
            known[key] = _holds_others(node, autocast)
        if known[key]:
            with autocast_as(autocast):
                decompose_call(module, node)


def _is_listed(target: Any, autocast: Autocast) -> bool:
    """Whether autocast has a kernel of its own for an operator."""
    return any(_has_kernel(target, f"Autocast{device.upper()}") for device, _ in autocast)


@functools.cache
def _has_kernel(target: Any, key: str) -> bool:
    return has_kernel(target, key)


def _holds_others(node: fx.Node, autocast: Autocast) -> bool:
    """Whether a call runs operators of autocast's."""
    inside = _operators(node, autocast)
    if not any(f is aten._to_copy.default or _is_listed(f, autocast) for f, *_ in inside):
        return False
    alone = _run_alone(node)
    return alone is None or inside != alone.operators


def _may_hold_others(node: fx.Node) -> bool:
    """Whether an operator calls others, of which autocast may know some."""
    target: Any = node.target
    unknown = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*target.tags}
    return (
        not unknown
        and not is_mutable(target)
        and _has_kernel(target, "CompositeImplicitAutograd")
        and any(_floats(n) for n in node.all_input_nodes)
    )


def _floats(node: fx.Node) -> bool:
    """Whether autocast may cast a node's value, which it does not in float64."""
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _form(node: fx.Node) -> tuple[str, ...]:
    """What a call looks like but for the values of its tensors."""
    given = fx.node.map_arg((node.args, node.kwargs), lambda n: _shown(n.meta.get("val")))
    return (str(given),)


def _shown(value: Any) -> str:
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


class _Watch(TorchDispatchMode):
    """Notes the operators that run, and the casts of certain tensors."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        self.places = {id(t): i for i, t in enumerate(tensors) if isinstance(t, torch.Tensor)}
        self.casts: list[torch.dtype | None] = [None] * len(tensors)
        self.operators: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "aten":
            given = (a.dtype for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor))
            self.operators.append((function, *given))
        if function is aten._to_copy.default:
            place = self.places.get(id(args[0]))
            if place is not None and self.casts[place] is None:
                self.casts[place] = kwargs.get("dtype")
        return function(*args, **kwargs)


def _run(node: fx.Node, autocast: Autocast, dtype: torch.dtype | None = None) -> tuple[_Watch, Any]:
    """Runs a call on what the trace had, under some autocast.

    Args:
        node: the call.
        autocast: what is on.
        dtype: of all that autocast might cast; None leaves each tensor its own.
    """
    inputs = node.all_input_nodes
    mode, given = _of_the_example(node)
    if dtype is not None:
        with mode, without_autocast():
            given |= {n: given[n].to(dtype) for n in inputs if _floats(n)}
    watch = _Watch(list(given.values()))
    args: Any = fx.node.map_arg(node.args, lambda n: given[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: given[n])
    target: Any = node.target
    with torch.no_grad(), autocast_as(autocast), mode, enable_python_dispatcher(), watch:
        return watch, target(*args, **kwargs)


def _of_the_example(node: fx.Node) -> tuple[FakeTensorMode, dict[fx.Node, Any]]:
    """What the trace had for the inputs of a call, at the sizes of its example.

    An operator takes several times as long on symbolic sizes, and what is cast goes by none.
    """
    values = {n: n.meta.get("val") for n in node.all_input_nodes}
    mode = FakeTensorMode()
    try:
        with mode, without_autocast():
            return mode, pytree.tree_map(_sized, values)
    except _NoHint:
        traced: Any = fake_mode_of([*values.values()])
        return traced, values


class _NoHint(Exception):
    """A size is known when the program runs, and not before."""


def _sized(value: Any) -> Any:
    """A tensor or a number of a trace at the sizes of its example; others as they are.

    Raises:
        _NoHint: they are not known.
    """
    if isinstance(value, torch.Tensor):
        shape, strides = (list(map(_sized, each)) for each in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    if not value.node.has_hint():
        raise _NoHint
    return value.node.hint


def _run_alone(node: fx.Node, dtype: torch.dtype | None = None) -> _Watch | None:
    """What a call runs without autocast; None where it takes these dtypes under autocast alone."""
    # PyTorch logs each error of a tensor without contents, with its traceback, before it raises it.
    was = _FAKE_TENSORS.disabled
    _FAKE_TENSORS.disabled = True
    try:
        return _run(node, (), dtype)[0]
    except RuntimeError:
        return None
    finally:
        _FAKE_TENSORS.disabled = was


def _operators(node: fx.Node, autocast: Autocast) -> list[tuple[Any, ...]]:
    """What a call runs."""
    return _run(node, autocast)[0].operators


def _cast(node: fx.Node, dtypes: list[torch.dtype | None]) -> None:
    """Casts the inputs of a call."""
    for source, dtype in zip(node.all_input_nodes, dtypes, strict=True):
        value: Any = source.meta.get("val")
        if dtype is None or value.dtype == dtype:
            continue
        with node.graph.inserting_before(node):
            cast = new_node(node.graph, aten.to.dtype, (source, dtype), source)
        mode: Any = fake_mode_of([value])
        with mode, without_autocast():
            cast.meta["val"] = value.to(dtype)
        from_same_place(cast, node)
        node.replace_input_with(source, cast)


def _casts(node: fx.Node, autocast: Autocast) -> list[torch.dtype | None]:
    """The dtype that autocast casts each input of a call to; None where it does not.

    What an operator casts by itself, as attention in bfloat16 does for its softmax, it casts
    without autocast, too.
    """
    casts, alone = _run(node, autocast)[0].casts, _run_alone(node)
    own = _casts_of_its_own(node) if alone is None else alone.casts
    return [None if dtype == other else dtype for dtype, other in zip(casts, own, strict=True)]


def _casts_of_its_own(node: fx.Node) -> list[torch.dtype | None]:
    """The dtype that an operator casts each input to where all have that input's dtype."""
    dtypes = [_dtype(n) for n in node.all_input_nodes]
    floating = {d for d, n in zip(dtypes, node.all_input_nodes, strict=True) if _floats(n)}
    runs = {dtype: _run_alone(node, dtype) for dtype in floating}
    found = [None if dtype is None else runs.get(dtype) for dtype in dtypes]
    return [None if run is None else run.casts[i] for i, run in enumerate(found)]


def _found(
    node: fx.Node, autocast: Autocast, wanted: list[torch.dtype]
) -> tuple[list[torch.dtype | None], torch.dtype | None]:
    """Makes the casts of a call explicit: those of its inputs, and a dtype that it is told.

    On a GPU, some operators are told to compute in float32 instead.

    Raises:
        CaptureError: what is cast so does not give the dtypes that the call gave under autocast.
    """
    target: Any = node.target
    casts, dtype = _casts(node, autocast), None
    _cast(node, casts)
    if _dtypes(_run(node, ())[1]) != wanted:
        if any(a.name == "dtype" for a in schema_of(target).arguments):
            dtype = wanted[0]
            node.kwargs = {**node.kwargs, "dtype": dtype}
        elif target.name() in _NORMS:
            casts = [wanted[0] if _floats(n) else None for n in node.all_input_nodes]
            _cast(node, casts)
        found = _dtypes(_run(node, ())[1])
        if found != wanted:
            raise captured_error(
                node,
                f"{operator_name(target)} cannot be captured under autocast",
                because=f"it gives {wanted} there, and {found} for what it is given",
                help="put it into a region with torch.autocast(…, enabled=False)",
            )
    return casts, dtype


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
