"""``Routine``: a call of a function or method, below a module, that is a node of a graph.

Code that stays PyTorch's because it looks at values may do something else at each call. What a
graph takes for granted of it is therefore looked at each time: what it changes in place, which of
its results are its arguments, which parameters gradients reach. Where that is not so, the call of
the whole module runs in PyTorch, from where it began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ortrain.errors import CheckFailed, ExecutionError
from ortrain.kept.arguments import Arguments
from ortrain.kept.call import Kept, Site
from ortrain.kept.history import leaves_of
from ortrain.kept.parameter import Parameter, memory_of
from ortrain.kept.shared import Handed, silent
from ortrain.module_state.holder import same_elements
from ortrain.pytorch.autocast import Autocast
from ortrain.pytorch.version import put_back, version_of


class Routine(Kept):
    """One call of a function that stays PyTorch's.

    Args:
        function: that is called.
        arguments: of it.
        site: where it is.
        grad: whether gradients are on around it.
        autocast: around it.
        held: parameters and buffers that it reads, behind its arguments among the inputs.

    Attributes:
        written: places of the inputs that it changes in place. What they hold at the end follows
            the results among the node's outputs.
        guarded: places of those that it is given as copies: the same, and those in memory of
            others than the graph, which a call that fails must find as they were.
        returned: places of those of the written ones that the caller of the module owns.
        unreached: places of arguments that no gradient reaches and that may have one.
        own: of each tensor of the result the place of the argument that it is; None where it is
            a new one.
        differentiable: of each output whether it may have a gradient.
        generators: of random numbers that it may draw from, PyTorch's left out.
        original: the function as the user's code knows it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        site: Site,
        *,
        grad: bool,
        autocast: Autocast = (),
        held: Sequence[Parameter] = (),
    ) -> None:
        super().__init__(function, arguments, site, grad=grad, autocast=autocast)
        self.parameters = [*held]
        self.written: list[int] = []
        self.guarded: list[int] = []
        self.returned: list[int] = []
        self.unreached: list[int] = []
        self.own: list[int | None] = []
        self.differentiable: list[bool] = []
        self.generators: list[Any] = []
        self.original: Any = function

    def release(self) -> None:
        """Leaves its trace: the modules have their own tensors again."""
        self.arguments.release()
        if self.result is not None:
            self.result.release()
        self.parameters = [p.again() for p in self.parameters]
        self.buffers = [b.again() for b in self.buffers]

    def run(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The call's tensors, without a history; see :meth:`Kept.run`.

        Gradients are on where they are around the call: what they reach is compared.
        """
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.grad)
        try:
            return super().run(inputs)
        finally:
            torch._C._set_grad_enabled(before)

    def _outputs(self, inputs: Sequence[Any], given: list[Any]) -> list[Tensor]:
        """New tensors of the result, and what is in the written inputs at the end.

        Raises:
            CheckFailed: the code does something else than in its example.
        """
        first = len(self.arguments.plain)
        count = first + len(self.parameters)
        if self.written:
            shown = [memory_of(t) for t in inputs[:count]]
            if any(shown.count(shown[i]) > 1 for i in self.written):
                raise self.strays("it is given what it changes in place under another name, too")
        passed = [*given]
        for i in self.unreached:
            passed[i] = given[i].detach().requires_grad_()
        for i in self.guarded:
            passed[i] = passed[i].clone()
        copies = {i: passed[i] for i in self.guarded}
        watched = [*passed[:count], *[p.tensor for p in self.parameters]]
        handed = Handed(watched)
        try:
            output = self.call(passed)
        except CheckFailed:
            raise
        except Exception as error:
            raise self.strays(f"it raises {type(error).__name__}: {error}") from error
        changed = {*handed.changed()}
        if not changed <= {*self.written}:
            own = [*range(count), *range(first, count)]  # places of what is watched
            self._expect_weights(
                self.parameters[own[i] - first]
                for i in changed - {*self.written} - {*self.guarded}
                if own[i] >= first
            )
            raise self.strays("it changes another one of its arguments in place")
        for i in {*self.guarded} - {*self.written}:
            if i >= first and silent(passed[i]) and not _alike(passed[i], given[i]):
                name = self.parameters[i - first].places[0][1]
                raise self.strays(f"it changes {name!r} in place")
        asked = {i for i in range(count) if given[i] is not inputs[i]}
        for i in range(first, count):
            if i not in copies:  # the module's own, where that is the same
                given[i] = passed[i]
        found = self._new(output, passed[: count + len(self.buffers)])
        self._compare_sizes(inputs, found)
        outputs = [*found, *[copies[i] for i in self.written]]
        if torch.is_grad_enabled():
            known = [t for i, t in enumerate(given[:count]) if i not in self.unreached]
            self._compare_gradients(outputs, known, [given[i] for i in sorted(asked)])
        for i in self.returned:
            _write(inputs[i], copies[i])
        return outputs

    def _new(self, output: Any, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a result that are none of the arguments.

        Raises:
            CheckFailed: they are made up in another way.
        """
        assert self.result is not None
        try:
            found = self.result.taken_apart(output)
        except ExecutionError as error:
            raise self.strays(error.because) from None
        if not self.result.is_like(output):
            raise self.strays("its result has None or a container elsewhere")
        known = {memory_of(t) for t in given}
        outputs = []
        for tensor, place in zip(found, self.own, strict=True):
            if place is not None:
                alike = tensor is given[place]
            else:
                alike = memory_of(tensor) not in known
                known.add(memory_of(tensor))
                outputs.append(tensor)
            if not alike:
                raise self.strays("another one of its results is one of its arguments")
        return outputs

    def _compare_sizes(self, inputs: Sequence[Any], found: Sequence[Tensor]) -> None:
        try:
            super()._compare_sizes(inputs, found)
        except ExecutionError as error:
            raise self.strays(error.because) from None

    def _compare_gradients(
        self, outputs: Sequence[Tensor], known: Sequence[Tensor], asked: Sequence[Tensor]
    ) -> None:
        """Raises where gradients would reach something else than in the example.

        Args:
            outputs: of the call.
            known: what gradients may reach.
            asked: of these what they have to reach: in PyTorch the others get none, not zeros.
        """
        for tensor, may in zip(outputs, self.differentiable, strict=True):
            if tensor.requires_grad and not may:
                raise self.strays("a result has a gradient that had none before")
        reached = {id(leaf) for leaf in leaves_of(outputs)}
        if not reached <= {id(tensor) for tensor in known}:
            raise self.strays("it reads another parameter, or a tensor that requires a gradient")
        if not reached.issuperset(map(id, asked)):
            raise self.strays("no gradient reaches what one has reached before")


def _alike(one: Tensor, other: Tensor) -> bool:
    return same_elements(one.detach(), other.detach())


# -- what is written to the caller's own tensors ---------------------------------------------------


class _Writes(threading.local):
    """Tensors of callers that were written to, with what they held and their versions.

    None where nobody asks.
    """

    made: list[tuple[Tensor, Tensor, int]] | None = None


_writes = _Writes()


def _write(tensor: Tensor, contents: Tensor) -> None:
    with torch.no_grad():
        if _writes.made is not None:
            _writes.made.append((tensor, tensor.detach().clone(), version_of(tensor)))
        tensor.copy_(contents)


def noting_writes() -> list[tuple[Tensor, Tensor, int]]:
    """From now on, tensors of callers that routines write to are noted in what this returns."""
    _writes.made = []
    return _writes.made


def undo_writes(made: list[tuple[Tensor, Tensor, int]]) -> None:
    """Puts back what tensors held."""
    for tensor, held, version in reversed(made):
        put_back(tensor, held, version)
    made.clear()
