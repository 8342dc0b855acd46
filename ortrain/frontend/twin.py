"""A held module's graphs are compared with the module itself, which runs a call on a copy of it.

The parity of a graph (:mod:`ortrain.frontend.proof`) takes it that what Dynamo hands over is the
module. Here the copy's outputs, buffers and gradients are looked at, and which of these there are.
Roundings are the business of the graph's own parity: what counts here is what nobody would call
one. The copy shares the parameters' memory and nothing else, and draws what graphs draw.

Where the graphs are further away, a second copy runs on parameters that are rounded otherwise. It
tells how far PyTorch is from itself: a rounding changes some gradients of ResNet-18 in bfloat16
with random weights by half.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd.function import BackwardCFunction

from ortrain.aside import random_states
from ortrain.frontend.separate import put_back
from ortrain.frontend.watch import Watch
from ortrain.pytorch import pytree
from ortrain.pytorch.autocast import active, uncached, without_autocast
from ortrain.pytorch.saving import unhooked
from ortrain.runtime.engines import are_narrow
from ortrain.runtime.memory import release_pools
from ortrain.step.agreement import NARROW
from ortrain.step.backward import frees
from ortrain.step.chain import nobody_looks
from ortrain.step.digest import Digest
from ortrain.step.eager_draws import as_graphs
from ortrain.step.probe import cotangent, rounded_like
from ortrain.step.seeds import Seeds, draw_seed, drawing

# Differences, relative to the values, that are no roundings: of outputs, and of gradients.
FAR, FAR_GRADIENT = 0.05, 0.1
# Where bfloat16 or float16 are computed with, so many times as much.
NARROW_FAR = 4
# What is smaller than this share of the largest is compared with that; where bfloat16 or float16
# are computed with, the second: the gradient of a bias of attention's keys is of roundings alone,
# in bfloat16 0.002 of the largest.
FLOOR, NARROW_FLOOR = 1e-3, 0.03
# Graphs may be so many times as far from PyTorch as PyTorch, rounded otherwise, is from itself.
SLACK = 4


@dataclass
class Seen:
    """What a call has given.

    Attributes:
        outputs: tensors that it returns, and whether they require gradients.
        gradients: of parameters and arguments, by name; None where there are none.
        buffers: after the call, by name.
    """

    outputs: list[tuple[Digest, bool]]
    gradients: dict[str, Digest | None]
    buffers: dict[str, Digest]

    def numbers(self, places: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Outputs at some places, buffers and gradients, by what a phrase calls them."""
        gradients = {f"the gradient of {name}": each for name, each in self.gradients.items()}
        return {f"output {i}": self.outputs[i][0] for i in places}, self.buffers, gradients


class Reference:
    """What a copy of a module makes of a call in PyTorch.

    Args:
        module: the module, before the call.
        watch: what it was converted with.
        args: of the call.
        kwargs: of the call.
        narrow: whether graphs of the module compute in 16 bits, as far as is known.

    Raises:
        Exception: it cannot be copied.

    Attributes:
        narrow: whether anything is computed in 16 bits or fewer, as far as is known.
        wanting: the call's arguments that want gradients.
        roots: places among the tensors that the call returns, from which gradients come.
        seen: what the copy gives; None until it has run.
        rounded: what a copy gives on parameters that are rounded otherwise; None until one has run.
    """

    def __init__(
        self,
        module: nn.Module,
        watch: Watch,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        narrow: bool,
    ) -> None:
        self._watch = watch
        self._state = torch.get_rng_state()
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._first: Any = _copied(module, (args, kwargs))
        self._spare: Any = None
        self.wanting = wanting_of((args, kwargs))
        tensors = [*module.parameters(), *tensors_of((args, kwargs))]
        self._dtypes = {t.dtype for t in tensors} | {dtype for _, dtype in active()}
        self.narrow = narrow or are_narrow(self._dtypes)
        self._own_draws = False
        self.roots: Sequence[int] = ()
        self.seen: Seen | None = None
        self.rounded: Seen | None = None

    @property
    def precision(self) -> torch.dtype:
        """The narrowest dtype that is computed in, as far as is known; at most float32."""
        usual = torch.bfloat16 if self.narrow else torch.float32
        return next((dtype for dtype in NARROW if dtype in self._dtypes), usual)

    def run(self, roots: Sequence[int], *, twice: bool) -> None:
        """Calls the copy.

        Args:
            roots: as of this object.
            twice: whether the copy that is rounded otherwise runs, too: now, before graphs hold
                the tensors of the call.

        Raises:
            Exception: it fails.
        """
        self.roots = roots
        now = [(buffer, buffer.clone()) for buffer, _ in self._buffers]  # perhaps behind the call
        self._spare = _copied(*self._first)
        release_pools()  # PyTorch has its gradients beside what steps keep
        seen = self._run(*self._first)
        self._first = None
        if all(torch.equal(buffer, before) for buffer, before in now):
            self.seen = seen
            if twice:
                self._round()
        else:  # which the copy has written to, or which are no numbers
            _fill(now)
        release_pools()  # the graphs of the call begin without the holes of this

    def _round(self) -> None:
        """Calls a copy on parameters that are rounded otherwise."""
        twin, given = self._spare
        release_pools()
        drawn = torch.Generator().manual_seed(1)
        for parameter in twin.parameters():
            parameter.data = rounded_like(parameter.detach(), self.precision, drawn)
        self.rounded = self._run(twin, given)
        self._spare = None

    def _run(self, twin: nn.Module, given: tuple[Any, Any]) -> Seen:
        """Calls a copy, which leaves no other trace."""
        seeds = Seeds()
        with random_states(), unhooked(), drawing(None), put_back(self._watch):
            torch.set_rng_state(self._state)
            wanting = wanting_of(given)
            with as_graphs(twin, seeds), uncached():
                tensors = tensors_of(twin(*given[0], **given[1]))
            drawn = torch.get_rng_state()
            torch.set_rng_state(self._state)
            if seeds.drawn:
                draw_seed(1)
            self._own_draws |= not torch.equal(drawn, torch.get_rng_state())
            return seen_of(tensors, twin, wanting, self.roots, again=False)

    def faults(self, graphs: Seen, *, all_are_read: bool) -> list[str]:
        """What of the graphs is not the module's, a phrase each.

        Args:
            graphs: what they have given for the same call.
            all_are_read: whether outputs are what PyTorch's are, other than those that have roots.
        """
        mine = self.seen
        assert mine is not None
        if len(mine.outputs) != len(graphs.outputs):
            return [f"{len(graphs.outputs)} tensors are returned, not {len(mine.outputs)}"]
        places = range(len(mine.outputs)) if all_are_read else self.roots
        found = _structure(mine, graphs, places)
        if found or self._own_draws:
            return found
        if (found := self._far(graphs, places)) and self.rounded is None:
            self._round()
            found = self._far(graphs, places)
        return found

    def take_back(self) -> None:
        """Gives the module the buffers and PyTorch the random state that they had before."""
        torch.set_rng_state(self._state)
        _fill(self._buffers)

    def _far(self, graphs: Seen, places: Sequence[int]) -> list[str]:
        """Phrases about what is further apart than roundings are."""
        assert self.seen is not None
        times, floor = (NARROW_FAR, NARROW_FLOOR) if self.precision in NARROW else (1, FLOOR)
        again = ({}, {}, {}) if self.rounded is None else self.rounded.numbers(places)
        kinds = zip(self.seen.numbers(places), graphs.numbers(places), again, strict=True)
        return [
            phrase
            for far, (mine, theirs, own) in zip((FAR, FAR, FAR_GRADIENT), kinds, strict=True)
            for phrase in _far(_both(mine, theirs), own, far * times, floor)
        ]


def _fill(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Puts values back."""
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _structure(mine: Seen, graphs: Seen, places: Sequence[int]) -> list[str]:
    """What there is in one and not in the other."""
    found = []
    for i in places:
        one, other = mine.outputs[i], graphs.outputs[i]
        if one[1] != other[1]:
            found.append(f"output {i} requires a gradient in {_whose(one[1])} only")
        if (one[0].shape, one[0].dtype) != (other[0].shape, other[0].dtype):
            found.append(f"output {i} has another shape or dtype")
    for name, gradient in mine.gradients.items() if graphs.gradients else ():
        own = graphs.gradients.get(name)
        if any(each is not None and each.norm > 0 for each in (gradient, own)) and None in (
            gradient, own,
        ):  # fmt: skip
            found.append(f"{name} has a gradient in {_whose(own is None)} only")
    return found


def seen_of(
    tensors: list[Tensor],
    module: nn.Module,
    arguments: Mapping[str, Tensor],
    roots: Sequence[int],
    *,
    again: bool,
) -> Seen:
    """What a call has given.

    Args:
        tensors: that the module returns; the list is emptied before the backward, which then holds
            no more than that of a loss whose other outputs nobody keeps.
        module: the module.
        arguments: those that wanted gradients before the call, of :func:`wanting_of`.
        roots: places among its tensors, from which gradients come.
        again: whether another backward follows; else parameters and arguments are the call's own.
    """
    outputs = [(_digest(tensor), tensor.requires_grad) for tensor in tensors]
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    wanting = {**parameters, **arguments}
    chosen = [tensors[i] for i in roots if i < len(tensors) and tensors[i].requires_grad]
    tensors.clear()
    if again and any(argument.grad_fn is not None for argument in arguments.values()):
        chosen = []  # what they come from may have been made of the same parameters
    gradients: dict[str, Digest | None] = {}
    if chosen and wanting and is_grad_enabled():
        with frees(), unhooked(), without_autocast():
            upstream = [cotangent(root) for root in chosen]
            gradients = (_again if again else _once)(chosen, wanting, upstream)
    buffers = {name: _digest(buffer) for name, buffer in module.named_buffers()}
    return Seen(outputs, gradients, buffers)


def _again(
    roots: Sequence[Tensor], leaves: Mapping[str, Tensor], upstream: Sequence[Tensor]
) -> dict[str, Digest | None]:
    """The gradients of leaves, by their names, where another backward follows."""
    with nobody_looks():
        gradients = torch.autograd.grad(
            roots, [*leaves.values()], upstream, retain_graph=True, allow_unused=True
        )
    found: dict[str, Tensor | None] = dict(zip(leaves, gradients, strict=True))
    return {name: None if each is None else _digest(each) for name, each in found.items()}


def _once(
    roots: Sequence[Tensor], leaves: Mapping[str, Tensor], upstream: Sequence[Tensor]
) -> dict[str, Digest | None]:
    """The gradients of a copy's leaves, by their names, in the only backward.

    They are read from ``grad``, since a reentrant checkpoint gives no others. All together are as
    large as the model, so that each one is digested and freed once it is complete. Where the
    backward runs a function in Python, all are digested behind it: that function may run a backward
    of its own, which adds to them.
    """
    found: dict[int, Digest] = {}

    def digest(leaf: Tensor) -> None:
        if leaf.grad is not None:
            if id(leaf) in found:
                raise RuntimeError("a parameter has gradients of several backwards")
            found[id(leaf)] = _digest(leaf.grad)
            leaf.grad = None

    for leaf in leaves.values():
        leaf.grad = None
    _expect_no_other(roots, leaves.values())
    early = [] if _in_python(roots) else leaves.values()
    hooks = [leaf.register_post_accumulate_grad_hook(digest) for leaf in early]
    try:
        torch.autograd.backward(roots, upstream)
    finally:
        for hook in hooks:
            hook.remove()
    for leaf in leaves.values():
        digest(leaf)
    return {name: found.get(id(leaf)) for name, leaf in leaves.items()}


def _expect_no_other(roots: Sequence[Tensor], leaves: Iterable[Tensor]) -> None:
    """Raises where a backward would go on to the gradients of other tensors."""
    known = {id(leaf) for leaf in leaves}
    found = (getattr(node, "variable", None) for node in _nodes_behind(roots))
    if any(leaf is not None and id(leaf) not in known for leaf in found):
        raise RuntimeError("a parameter that is read is not the copy's")


def _in_python(roots: Sequence[Tensor]) -> bool:
    """Whether a backward runs a function in Python."""
    return any(isinstance(node, BackwardCFunction) for node in _nodes_behind(roots))


def _nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Any]:
    """The nodes of autograd's graph that a backward from some outputs runs."""
    nodes: list[Any] = [output.grad_fn for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        yield node
        further = {each for each, _ in node.next_functions} - seen
        seen |= further
        nodes += further


def roots_of(output: Any, ran: Sequence[tuple[Any, Any]]) -> list[int]:
    """Places among the tensors of an output of those that graphs expect gradients of.

    Args:
        output: of a module.
        ran: its graphs, each with what it has returned.
    """
    expected = set()
    for graph, results in ran:
        upstream = graph.step.plan.upstream
        flat = [results] if graph.alone else results
        for each, result in zip(graph.translated.outside.results, flat, strict=True):
            if each.kind == "root" and upstream[each.index]:
                expected.add(id(result))
    tensors = tensors_of(output)
    found = [i for i, tensor in enumerate(tensors) if id(tensor) in expected]
    if found:
        return found
    wanting = [i for i, t in enumerate(tensors) if t.requires_grad and t.is_floating_point()]
    losses = [i for i in wanting if not tensors[i].dim()]
    return losses[:1] or wanting


def _copied(module: nn.Module, given: Any) -> Any:
    """A module and arguments for it, which share nothing with others but parameters' memory."""
    memo: dict[int, Any] = {}
    for each in module.parameters():
        copied = memo[id(each)] = nn.Parameter(each.detach(), requires_grad=each.requires_grad)
        vars(copied).update(vars(each))  # of which Dynamo gives it one at its first conversion
    for tensor in tensors_of(given):
        if not tensor.is_leaf:
            own = tensor.detach().clone()
            memo[id(tensor)] = own.requires_grad_(tensor.requires_grad)
    return copy.deepcopy((module, given), memo)


def wanting_of(given: Any) -> dict[str, Tensor]:
    """The arguments of a call that want gradients, by names.

    To be asked before the call, which may put its results among them: models of
    sentence-transformers return the dictionary that they were given.
    """
    return {f"args.{i}": t for i, t in enumerate(tensors_of(given)) if t.requires_grad}


def tensors_of(value: Any) -> list[Tensor]:
    """Those of a value that may be in containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _digest(tensor: Tensor) -> Digest:
    tensor = tensor.detach()
    return Digest.of(tensor.to_dense() if tensor.layout is not torch.strided else tensor)


def _both(one: Any, other: Any) -> dict[str, tuple[Digest, Digest]]:
    """Pairs of what both have under a name."""
    found = {name: (digest, other.get(name)) for name, digest in one.items()}
    return {name: pair for name, pair in found.items() if None not in pair}


def _far(
    pairs: dict[str, tuple[Digest, Digest]],
    rounded: dict[str, Digest | None],
    far: float,
    floor: float,
) -> list[str]:
    """Phrases about pairs that are further apart, relative to their size, than roundings are.

    Args:
        pairs: by name.
        rounded: the first of each, rounded otherwise, where that is known.
        far: relative to the size.
        floor: of the size, a share of the largest.
    """
    usable = {name: pair for name, pair in pairs.items() if pair[0].alike(pair[1])}
    least = floor * max((one.scale for one, _ in usable.values()), default=0.0)
    found = []
    for name, (one, other) in usable.items():
        if one.dtype.is_floating_point or one.dtype.is_complex:
            size = max(one.scale, other.scale, least)
            again = rounded.get(name)
            own = one.distance(again) if again is not None and one.alike(again) else 0.0
            if one.distance(other) > max(far * size, SLACK * own):
                found.append(f"{name} differs by {one.distance(other) / size:.0%}")
    return found


def _whose(pytorchs: bool) -> str:
    return "PyTorch" if pytorchs else "the graph"
