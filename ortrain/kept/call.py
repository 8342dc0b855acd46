"""``Kept``: one call of the user's code as a node of a graph, forward and backward.

A step runs without autograd. Around a kept call it is on: the call's inputs become leaves, and what
autograd saves is a context (:mod:`~ortrain.kept.context`) that travels from the forward to the
backward as one of the graph's saved values. Nobody else refers to it, so it is freed with these.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ortrain.errors import CheckFailed, ExecutionError, StateError
from ortrain.kept.arguments import Arguments, Result
from ortrain.kept.context import Context, contexts
from ortrain.kept.parameter import BUFFERS, Parameter, instead
from ortrain.kept.parameter import memory_of as _memory
from ortrain.kept.premises import Premises
from ortrain.kept.shared import Handed, Watched
from ortrain.kept.times import Times
from ortrain.pytorch.autocast import Autocast, autocast_as

_class: Any = Tensor  # with what is private in it
_storage_users: Callable[[int], int] = torch._C._storage_Use_Count
_backward: Callable[..., Sequence[Tensor | None]] = (
    torch.autograd.Variable._execution_engine.run_backward
)
_tensor_users: Callable[[Tensor], int] = _class._use_count


@dataclass(frozen=True)
class Site:
    """Where a kept call is, for people.

    Attributes:
        name: of what is called.
        where: the module and line of the user's code.
        because: why it stays PyTorch's.
    """

    name: str
    where: str
    because: str


class Kept:
    """One call that stays PyTorch's.

    Args:
        function: that is called.
        arguments: of it.
        site: where it is.
        grad: whether gradients are on around it.
        autocast: around it.
        module: whose forward the function is; None where it is none's.

    Attributes:
        number: of the call, in the order in which traces came to them.
        key: by which a node of a graph names it, in this process alone.
        result: how its tensors make up what it returns.
        connected: of each tensor it is given, whether a gradient may reach it.
        ways: input, result, … of which the second has a gradient where the first has one; empty
            where that is so of each result that has one and each input.
        sizes: of each tensor of the result, the sizes that it must have: numbers, or input and
            axis; None where the code says so itself.
        repeatable: whether another run on the same tensors does the same and changes nothing.
        buffers: of the module around it that the graph has given another value before; inputs
            behind the parameters.
        shared: other buffers that the graph or another call has in hand: it must leave them alone.
        around: the module that the graph is of; None where it may come to nothing of that.
        axes: the label of each axis of its inputs and then its outputs, where it is known to treat
            the places of axes with labels alone; -1 for others.
        premises: of the proof of that.
        mixes: why it is not known; empty where nobody has asked.
        forwards: what they take.
        backwards: likewise.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        site: Site,
        *,
        grad: bool,
        autocast: Autocast = (),
        module: nn.Module | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.key = f"{_process}.{self.number}"
        self.function, self.arguments, self.site = function, arguments, site
        self.grad, self.autocast, self.module = grad, autocast, module
        self.result: Result | None = None
        self.connected: list[bool] = []
        self.ways: list[int] = []
        self.repeatable = True
        self.sizes: list[list[int | tuple[int, int]]] | None = None
        self.buffers: list[Parameter] = []
        self.shared: list[Parameter] = []
        self.around: nn.Module | None = None
        self.axes: list[int] = []
        self.premises: Premises | None = None
        self.mixes = ""
        self.forwards, self.backwards = Times(), Times()
        self.parameters = [] if module is None else Parameter.all_of(module)
        _table[self.key] = self

    def release(self) -> None:
        """Leaves its trace, whose tensors have no contents: the module has its own again."""
        self.arguments.release()
        if self.result is not None:
            self.result.release()
        if self.module is not None:
            before, self.parameters = self.parameters, Parameter.all_of(self.module)
            assert [p.places for p in before] == [p.places for p in self.parameters]
        self.buffers = [b.again() for b in self.buffers]

    @property
    def custom_function(self) -> Any:
        """The custom autograd function that is called; None where it is something else."""
        owner = getattr(self.function, "__self__", None)
        return owner if isinstance(owner, torch.autograd.function.FunctionMeta) else None

    @property
    def comes_to_more(self) -> bool:
        """Whether its code may come to more of the module than the tensors that it is given.

        An operator does not; a custom function comes to objects among its arguments.
        """
        if self.custom_function is None:
            return not isinstance(self.function, torch._ops.OpOverload)
        return any(hasattr(each, "__dict__") for each in self.arguments.objects)

    # -- what generated functions call -------------------------------------------------------------

    def run(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The call's tensors, without a history.

        Args:
            inputs: tensors of the call, parameters of the module, buffers, sizes.
        """
        if contexts() is not None:
            self._repeats()
        since = self.forwards.begin()
        outputs = self._outputs(inputs, [*inputs])
        self.forwards.end(since)
        seen: set[int] = set()
        return [self._own(t, inputs, seen) for t in outputs]

    def train(self, inputs: Sequence[Any], needs: Sequence[int]) -> list[Any]:
        """The call's tensors without a history, and behind them what the backward needs.

        Args:
            inputs: as of :meth:`run`.
            needs: places of those that a gradient is asked of.
        """
        seen: set[int] = set()
        known = contexts()
        if known is not None and (context := known.get(self.key)) is not None:
            outputs = context.outputs
            return [*[self._own(t, inputs, seen, detached=True) for t in outputs], context]
        if known is not None:
            self._repeats()
        since = self.forwards.begin()
        given = [*inputs]
        for i in needs:
            given[i] = given[i].detach().requires_grad_()
            given[i].register_post_accumulate_grad_hook(self._reached)
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        try:
            outputs = self._outputs(inputs, given)
        finally:
            torch._C._set_grad_enabled(before)
        context = Context(self.key, outputs, [given[i] for i in needs])
        self.forwards.end(since)
        return [*[self._own(t, inputs, seen, detached=True) for t in outputs], context]

    def _reached(self, _: Tensor) -> None:
        """A backward that is none of the graph's has come to what stands for an input."""
        raise StateError(
            f"{self.site.name} has left a tensor behind that a loss reads",
            where=self.site.where,
            because="the graph around it sends gradients back from what it returns alone",
            help='return the tensor, or run this module eagerly: Options(engine="torch")',
        )

    @property
    def treats_tokens_alone(self) -> bool:
        """Whether it is known to by now: its code, and the numbers in it, are what they were."""
        return self.premises is not None and self.premises.hold()

    def run_packed(self, inputs: Sequence[Any]) -> list[Tensor]:
        """As :meth:`run`, of some tokens.

        Raises:
            CheckFailed: what was proved of the code is not known of what it is by now.
        """
        self._expect_alone()
        return self.run(inputs)

    def train_packed(self, inputs: Sequence[Any], needs: Sequence[int]) -> list[Any]:
        """As :meth:`train`, of some tokens.

        Raises:
            CheckFailed: as of :meth:`run_packed`.
        """
        self._expect_alone()
        found = self.train(inputs, needs)
        found[-1].premises = self.premises
        return found

    def _expect_alone(self) -> None:
        if not self.treats_tokens_alone:
            raise self.strays("its code, or a number in it, is another one by now")

    def backward(self, context: Context, arriving: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of a context's leaves; zeros where autograd has none.

        Args:
            context: of the forward.
            arriving: the gradient of each of its outputs; None where there is none,
                and those behind the last one may be missing.
        """
        if context.premises is not None and not context.premises.hold():
            raise StateError(
                f"the code of {self.site.name} has changed between a forward and its backward",
                where=self.site.where,
                because="the forward has given it no more than the tokens that are read, as by its "
                "code each had its result alone",
                help="change it between two steps",
            )
        since = self.backwards.begin()
        pairs = [
            (output, gradient)
            for output, gradient in zip(context.outputs, arriving, strict=False)
            if gradient is not None and output.requires_grad
        ]
        leaves = context.leaves
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            # As torch.autograd.grad with retain_graph and allow_unused, in 19 us instead of 35.
            gradients = _backward(
                outputs, given, True, False, tuple(leaves), True, accumulate_grad=False
            )
        # A gradient may be what arrived, or what was saved: the graph writes over its own alone.
        others = {_memory(t) for t in (*arriving, *leaves, *context.outputs) if t is not None}
        found = []
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is None:
                gradient = torch.zeros_like(leaf)
            elif (
                _memory(gradient) in others
                or _tensor_users(gradient) > 1
                or _storage_users(gradient.untyped_storage()._cdata) > 2
            ):
                gradient = gradient.clone()
            others.add(_memory(gradient))
            found.append(gradient.detach() if gradient.requires_grad else gradient)
        self.backwards.end(since)
        return found

    def _repeats(self) -> None:
        """Raises where a further run would do something else, or once more what it did."""
        if not self.repeatable:
            raise StateError(
                f"{self.site.name} would have to run again for these gradients",
                where=self.site.where,
                because="it draws random numbers or changes something, and the forward has run it",
                help="have the first call's outputs receive the gradients that later ones do",
            )

    # -- the call ----------------------------------------------------------------------------------

    def _outputs(self, inputs: Sequence[Any], given: list[Any]) -> list[Tensor]:
        """The tensors of the call's result, as the call returns them.

        Args:
            inputs: that it is given by the graph.
            given: the same, or leaves that take their places; parameters may be put there.
        """
        places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        handed = Handed(given[i] for i in places)  # leaves count what is written to their inputs
        output = self.call(given)
        changed = {places[n] for n in handed.changed()}
        first = len(self.arguments.plain)
        self._expect_weights(p for i, p in enumerate(self.parameters, first) if i in changed)
        if changed:
            raise ExecutionError(
                f"{self.site.name} has changed one of its arguments in place",
                where=self.site.where,
                because="other parts of the graph may read it",
                help="work on a copy (tensor.clone())",
            )
        assert self.result is not None
        found = self.result.taken_apart(output)
        if self.sizes is not None:
            self._compare_sizes(inputs, found)
        return found

    def _expect_weights(self, changed: Iterable[Parameter]) -> None:
        """Raises where parameters are among those that the call has written to.

        That cannot be taken back: no copies were made, and PyTorch would write once more.
        """
        for each in changed:
            if each.registry != BUFFERS:
                raise StateError(
                    f"{self.site.name} has changed the parameter {each.places[0][1]!r} in place",
                    where=self.site.where,
                    because="it did not in the call that was captured, and no copy was made of it",
                    help="change parameters outside of the forward, or leave this module to "
                    "PyTorch, as ORTModule would had the first call changed it",
                )

    def _compare_sizes(self, inputs: Sequence[Any], found: Sequence[Tensor]) -> None:
        """Raises where the result has other sizes than its example lets one expect."""
        assert self.sizes is not None
        wanted = [
            tuple([s if isinstance(s, int) else inputs[s[0]].shape[s[1]] for s in rule])
            for rule in self.sizes
        ]
        if wanted != [tuple(t.shape) for t in found]:
            raise ExecutionError(
                f"{self.site.name} returns tensors of other sizes than it did before",
                where=self.site.where,
                because=f"shapes {wanted} were expected, and are {[tuple(t.shape) for t in found]}",
                help="leave the module around it to PyTorch",
            )

    def call(self, given: list[Any], *, own: bool = True) -> Any:
        """What the call returns for tensors, parameters, buffers and sizes.

        Args:
            given: those; a parameter's place gets the module's own where that holds the same.
            own: whether it may. Without, nothing but what is returned matters.

        Raises:
            CheckFailed: it has changed a buffer that the graph has in hand.
        """
        first, count = len(self.arguments.plain), len(self.parameters)
        held, last = self.parameters, first + count + len(self.buffers)
        numbers = [int(n) for n in given[last:]]
        args, kwargs = self.arguments.filled([*given[:first], *numbers])
        with autocast_as(self.autocast) if self.autocast else _NOTHING:
            if not count and not self.buffers and not self.shared:
                return self.function(*args, **kwargs)
            if not own:
                with instead([*held, *self.buffers], given[first:last]):
                    return self.function(*args, **kwargs)
            if all(map(Parameter.is_given, held, given[first : first + count])):
                given[first : first + count] = [p.tensor for p in held]
                held = []
            with instead(
                [*held, *self.buffers], given[last - len(self.buffers) - len(held) : last]
            ):
                return self._watched(args, kwargs, held, given[first:last])

    def _watched(
        self, args: Any, kwargs: Any, held: Sequence[Parameter], given: Sequence[Any]
    ) -> Any:
        """What the call returns, which leaves alone what the graph has in hand.

        Args:
            args: of the function.
            kwargs: likewise.
            held: what others stand for that are among what it is given.
            given: tensors in the places of parameters and buffers.

        Raises:
            CheckFailed: it does not.
        """
        current = zip(self.buffers, given[len(self.parameters) :], strict=True)
        watched = Watched([*current, *((b, b.now()) for b in self.shared)])
        output = self.function(*args, **kwargs)
        if name := watched.changed():
            raise self.strays(f"it changes {name!r}, which the graph around it has, too")
        for buffer, tensor in zip(held, given, strict=False):
            if buffer.registry == BUFFERS and not buffer.is_everywhere(tensor):
                raise self.strays(f"it puts another tensor in the place of {buffer.places[0][1]!r}")
        return output

    def strays(self, because: str) -> CheckFailed:
        """The error of a call that does something else than the graph around it takes for granted.

        Args:
            because: what.
        """
        return CheckFailed(
            f"{self.site.name} does something else than in the call that was captured",
            where=self.site.where,
            because=because,
            help="none is needed: such calls run in PyTorch",
        )

    def _own(
        self, tensor: Tensor, inputs: Sequence[Any], seen: set[int], *, detached: bool = False
    ) -> Tensor:
        """An output as the graph's own: without a history, in memory that is no input's.

        With a history, what is saved of it is the context's, which the graph knows to share it.
        """
        memory = _memory(tensor)
        shared = memory in seen or any(
            isinstance(t, Tensor) and _memory(t) == memory for t in inputs
        )
        if not detached:  # such as an attribute of a module
            shared |= _tensor_users(tensor) > 1
            shared |= _storage_users(tensor.untyped_storage()._cdata) > 2
        plain = tensor.detach() if tensor.requires_grad else tensor
        if shared:
            plain = plain.clone()
        elif detached and plain is tensor:
            plain = tensor.detach()
        seen.add(_memory(plain))
        return plain


# -- the table -------------------------------------------------------------------------------------

# Nodes name calls by keys, which mean something in this process while a capture holds the calls.
_table: weakref.WeakValueDictionary[str, Kept] = weakref.WeakValueDictionary()
_process = f"{time.time_ns():x}"
_numbers = itertools.count()
_NOTHING = contextlib.nullcontext()


def kept(key: str) -> Kept:
    """The call of a key.

    Raises:
        ExecutionError: there is none: the graph is another process's.
    """
    found = _table.get(key)
    if found is None:
        raise ExecutionError(
            "a node of the graph is a call that stays PyTorch's, and its code is not there",
            because="the graph was made in another process, or for a module that is gone",
            help="capture the module again",
        )
    return found
