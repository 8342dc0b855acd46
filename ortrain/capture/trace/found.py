"""What a call that stays PyTorch's gives, found beside a trace on tensors without contents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.capture.writes import written_by
from ortrain.errors import CaptureError
from ortrain.kept.arguments import Result
from ortrain.kept.call import Kept, Site
from ortrain.kept.effects import Watch
from ortrain.kept.history import leaves_of
from ortrain.kept.shared import Handed
from ortrain.module_state.holder import Contents, were_written
from ortrain.module_state.untouched import untouched


@dataclass(frozen=True)
class Found:
    """What is known of a call.

    Attributes:
        result: how its tensors make it up.
        tensors: in it.
        differentiable: whether each has a gradient.
        connected: of each input whether a gradient may reach it.
        repeatable: see :class:`~ortrain.kept.call.Kept`.
        given: shapes of the inputs.
        ways: input, result, … of which the second has a gradient where the first has one; empty
            where that is so of each differentiable result and each input.
    """

    result: Result
    tensors: list[Tensor]
    differentiable: list[bool]
    connected: list[bool]
    repeatable: bool
    given: list[tuple[int, ...]]
    ways: list[int] = field(default_factory=list)


class UnseenWrites(Exception):
    """A call writes to what it is given in a way that contents alone tell of, as a trace has none.

    So does code that writes to ``weight.data``.
    """


def find(call: Kept, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Found:
    """Runs a call beside the trace, after which its module is as before.

    Raises:
        UnseenWrites: it writes to an argument or a parameter, and no version tells of it.
        CaptureError: it does what no node of a graph may do.
    """
    count = len(call.arguments.plain)
    tracked = [True] * len(tensors)
    if call.custom_function is not None:  # autograd looks into none of its arguments
        tracked[:count] = call.arguments.plain
    if call.buffers:
        tracked[-len(call.buffers) :] = [False] * len(call.buffers)
    effects, module = Effects(), call.module
    around = contextlib.nullcontext() if module is None else untouched(module)
    with around, torch.set_grad_enabled(call.grad), effects, _marked_dirty() as dirty:
        watch = None if module is None else Watch(module)
        leaves = [
            t.detach().requires_grad_(call.grad and p and t.is_floating_point())
            for t, p in zip(tensors, tracked, strict=True)
        ]
        # No leaves, into which autograd lets nobody write: what is written to shall be seen.
        given = [*(t.clone() for t in leaves[:count]), *leaves[count:]]
        own = given[: len(given) - len(call.buffers)]
        handed, held = Handed(given), [Contents(t) for t in own]
        output = call.call([*given, *sizes], own=False)
        if were_written(held):
            raise UnseenWrites
        if dirty or handed.changed() or effects.wrote_to(own):
            raise refused(call.site, "it changes one of its arguments in place")
        if watch is not None and watch.left_history():
            raise refused(call.site, "it leaves a tensor behind that a loss may read")
        result = Result(output)
        repeatable = not effects.drew and (watch is None or not watch.changed())
        if call.custom_function is not None and call.comes_to_more:
            repeatable = False  # nothing watches what it is given
        connected = _connected(result.tensors, leaves)
        if handed.changed() or were_written(held) or effects.wrote_to(own):
            raise refused(call.site, "its backward changes one of its arguments in place")
        return Found(
            result,
            [t.detach() for t in result.tensors],
            [t.requires_grad for t in result.tensors],
            connected,
            repeatable,
            [tuple(t.shape) for t in tensors],
            ways(result.tensors, leaves),
        )


def ways(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[int]:
    """The pairs of an input and a result whose history ends in it, as of :attr:`Found.ways`.

    Of ``return y * 2, mask * 3`` the second has no gradient where ``mask`` has none.
    """
    places = {id(leaf): i for i, leaf in enumerate(leaves) if leaf.is_floating_point()}
    found, most = list[int](), 0
    for place, result in enumerate(results):
        if result.requires_grad:
            most += len(places)
            reached = {id(leaf) for leaf in leaves_of([result])}
            for key, at in places.items():
                if key in reached:
                    found += [at, place]
    return found if len(found) < 2 * most else []


def like(example: Found, call: Kept, tensors: Sequence[Tensor]) -> Found:
    """What a call gives where its example gave something: sizes are those of inputs, or numbers.

    A result of an input's shape has that; else an axis has the size of the first axis that had as
    many in the example. Each call is compared with that: see :attr:`Kept.sizes`.
    """
    rules: list[list[int | tuple[int, int]]] = []
    results = []
    count = len(call.arguments.plain)  # what parameters have are numbers
    for made in example.tensors:
        whole = [i for i in range(count) if example.given[i] == tuple(made.shape)]
        rule: list[int | tuple[int, int]] = []
        for axis, size in enumerate(made.shape):
            places = [(i, axis) for i in whole] or [
                (i, at)
                for at in (axis, *range(9))
                for i in range(count)
                if at < len(example.given[i]) and example.given[i][at] == size
            ]
            rule.append(places[0] if places else int(size))
        rules.append(rule)
        shape = [r if isinstance(r, int) else tensors[r[0]].shape[r[1]] for r in rule]
        results.append(torch.empty(shape, dtype=made.dtype, device=made.device))
    call.sizes = rules
    return replace(example, tensors=results)


def _connected(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[bool]:
    """Of each input whether a gradient reaches it; of all that may where that cannot be tried."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    roots = [t for t in results if t.requires_grad]
    if not wanted or not roots:
        return [False] * len(leaves)
    try:
        found: Any = torch.autograd.grad(
            roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True
        )
    except Exception:  # its backward needs values
        return [leaf.requires_grad for leaf in leaves]
    reached = {id(leaf) for leaf, g in zip(wanted, found, strict=True) if g is not None}
    return [id(leaf) in reached for leaf in leaves]


class Effects(TorchDispatchMode):
    """Sees what operators do besides computing: whether they draw, and to what memory they write.

    Of tensors without contents nothing else tells that their data was written to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = False
        self._written: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice

    def wrote_to(self, tensors: Sequence[Tensor]) -> bool:
        """Whether something was written to the memory of one of them."""
        return any(t.untyped_storage()._cdata in self._written for t in tensors)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.drew |= torch.Tag.nondeterministic_seeded in operator.tags
        for written in written_by(operator, args, kwargs, Tensor):
            memory = written.untyped_storage()
            self._written[memory._cdata] = memory
        return operator(*args, **kwargs)


@contextlib.contextmanager
def _marked_dirty() -> Iterator[list[Tensor]]:
    """Collects the tensors that custom functions say they change."""
    context: Any = torch.autograd.function.FunctionCtx
    own, found = context.mark_dirty, list[Tensor]()

    def mark(self: Any, *tensors: Tensor) -> None:
        found.extend(tensors)
        own(self, *tensors)

    context.mark_dirty = mark
    try:
        yield found
    finally:
        context.mark_dirty = own


def refused(site: Site, because: str) -> CaptureError:
    """The refusal of a call that can be no node."""
    return CaptureError(
        f"{site.name} can be no node of a graph that PyTorch runs",
        where=site.where,
        because=f"{because}; and it cannot be taken apart, as {site.because}",
        help="change it, or leave this module to PyTorch",
    )
