"""``Trial``: a call on tensors of its own, which the module and its graph both run aside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain.capture.returned import instead
from ortrain.capture.trace.checkpointing import reentrant_as_it_is, reentrant_as_the_others
from ortrain.errors import OrtrainError, listing
from ortrain.guards.handed import Containers
from ortrain.guards.structure import FlatCall, OutputStructure
from ortrain.kept.call import Kept
from ortrain.kept.effects import modules_of, undone
from ortrain.module_state.stand_in import standing_in
from ortrain.module_state.untouched import Effects, random_states, untouched, watched
from ortrain.program import Role
from ortrain.pytorch.autocast import without_autocast
from ortrain.pytorch.saving import unhooked
from ortrain.pytorch.version import put_back, version_of
from ortrain.runtime.memory import HOLES, release_pools
from ortrain.runtime.reduced import reduced_products
from ortrain.step.agreement import TOLERANCES
from ortrain.step.autograd import Step
from ortrain.step.digest import Digest
from ortrain.step.draws import replayed_draws, unreplayed
from ortrain.step.evidence import Evidence
from ortrain.step.probe import cotangent, precision_of, rounded_like, typical
from ortrain.step.saved_forward import Received
from ortrain.step.seeds import draw_seed


@dataclass(frozen=True)
class Trial:
    """A call on tensors of its own, which both engines run.

    Attributes:
        module: that is called.
        call: tensors of its own in the place of the user's.
        names: of its tensors, for messages.
        grad: whether gradients are compared.
        upstream: names of the outputs that receive a gradient.
        seed: of the random numbers.
        draws: whether the graph draws any.
        precision: the narrowest dtype that the graph computes in; float32 where it is wider.
        reduced: whether that is so in products of float32 only, which PyTorch then has likewise.
        hidden: names of the outputs that are not compared.
        masks: name of an output → where it is compared, bool; the graph has zeros elsewhere.
        kept: calls in the graph that stay PyTorch's.
    """

    module: nn.Module
    call: FlatCall
    names: tuple[str, ...]
    grad: bool
    upstream: frozenset[str]
    seed: int
    draws: bool
    precision: torch.dtype = torch.float32
    reduced: bool = False
    hidden: frozenset[str] = frozenset()
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        flat: FlatCall,
        names: Sequence[str],
        step: Step,
        outputs: Sequence[str],
        grad: bool,
        rows: dict[int, int] | None = None,
        number: int = 0,
    ) -> Trial:
        """A trial of a user's call.

        Args:
            module: that is called.
            flat: the call.
            names: of its tensors.
            step: of the graph.
            outputs: names of what the graph returns. Its result has fewer tensors: what a cache has
                counted is a number there.
            grad: whether gradients are enabled.
            rows: tensor → how many of its first rows take part; all where it is not here.
            number: another draws other random numbers.
        """
        rows = rows or {}
        leaves, spec = pytree.tree_flatten((flat.args, flat.kwargs))
        places = {id(tensor): i for i, tensor in enumerate(flat.tensors)}

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            part = leaf.detach()[: rows.get(places[id(leaf)])] if leaf.ndim else leaf.detach()
            return part.clone().requires_grad_(leaf.requires_grad and grad)

        with torch.inference_mode(False):
            args, kwargs = pytree.tree_unflatten([own(leaf) for leaf in leaves], spec)
            call = flat.rebuilt(args, kwargs)
        seed = int(torch.initial_seed() + number & 0x7FFFFFFF)
        plan = step.plan
        pairs = zip(outputs, plan.upstream, strict=True)
        upstream = frozenset(name for name, receives in pairs if receives)
        hidden = frozenset(outputs[i] for i in step.hidden)
        draws = any(role is Role.SEED for role, _ in plan.feeds)
        reduced = bool(getattr(plan.forward, "reduced", False))
        precision = torch.bfloat16 if reduced else precision_of(plan.programs)
        return cls(
            module, call, tuple(names), grad, upstream, seed, draws, precision, reduced,
            hidden, kept=plan.kept,
        )  # fmt: skip

    def digest(self, tensor: torch.Tensor) -> Digest:
        """What is kept of a tensor, as exact as the comparison needs it."""
        return Digest.of(tensor, TOLERANCES[self.precision].directions)

    def tensors(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """The call's tensors anew, in another floating dtype where one is asked for."""
        return [_own(t, dtype, t.requires_grad) for t in self.call.tensors]

    def given(self) -> list[torch.Tensor]:
        """The parameters and the inputs."""
        return [*self.module.parameters(), *self.call.tensors]

    def typical(self) -> float:
        """The median root mean square of the parameters and of the inputs."""
        return typical(self.given())

    def eager(self, dtype: torch.dtype | None = None, rounding: int = 0) -> Evidence:
        """What the module makes of it.

        Args:
            dtype: floating, of everything; None leaves each tensor its own.
            rounding: number of a way of rounding parameters and arguments; 0 leaves them.
        """
        named = self.module.named_buffers() if self.grad else ()
        before = {n: (b, b.detach().clone(), version_of(b)) for n, b in named}
        reduced = reduced_products() if self.reduced else contextlib.nullcontext()
        # A checkpoint runs some of it once more in the backward.
        with _alone(), undone(self.kept), reduced:
            evidence = self._eager(dtype, rounding)
        # That run has the module's own buffers: a normalization by the batch moves them twice.
        moved = [name for name, (now, then, _) in before.items() if not _same(now, then)]
        if moved:
            for name in moved:
                put_back(*before[name])
            evidence.otherwise.append(
                f"what a checkpoint runs again in the backward writes to {listing(moved, 3)}"
            )
        return evidence

    def _eager(self, dtype: torch.dtype | None, rounding: int) -> Evidence:
        evidence = Evidence()
        # A reentrant checkpoint gives gradients to the module's parameters, not to a trial's.
        plain = dtype is None and not rounding
        with (
            reentrant_as_the_others() as reentrant,
            watched(self.module, traced=False, live=modules_of(self.kept))
            if plain
            else contextlib.nullcontext(Effects()) as effects,
        ):
            tensors, structure, leaves, buffers = self._forward(dtype, rounding)
        if reentrant:
            evidence.otherwise = self._otherwise(tensors, reentrant, dtype, rounding)
        evidence.otherwise += self._left(effects)
        evidence.buffers = {name: self.digest(buffer) for name, buffer in buffers.items()}
        strays = _strays(tensors, leaves.values()) if self.grad else []
        if strays:
            # What the forward has made itself, as transformers does for reentrant checkpointing,
            # is another tensor the next time, and nobody sees its gradient.
            with reentrant_as_the_others():
                again, _, others, _ = self._forward(dtype, rounding)
            lasting = {id(stray) for stray in _strays(again, others.values())}
            evidence.strays = [
                f"a tensor of shape {[*stray.shape]} that is no parameter"
                for stray in strays
                if id(stray) in lasting
            ]
            del again, others
        self._close(evidence, structure.names, tensors, leaves, apart=bool(strays))
        return evidence

    def _left(self, effects: Effects) -> list[str]:
        """What a call leaves in the module beside its buffers, which no trace has seen."""
        drawn = [] if self.kept else effects.drawn
        fillings = [each.path for each in effects.fillings]
        left = [*effects.assigned, *fillings, *effects.filled, *effects.recast, *drawn]
        return [f"the forward changes {listing(left, 3)}"] if left else []

    def _otherwise(
        self,
        outputs: list[torch.Tensor],
        names: Sequence[str],
        dtype: torch.dtype | None,
        rounding: int,
    ) -> list[str]:
        """Where functions in reentrant checkpoints compute something else without gradients.

        PyTorch runs them so first, and again with gradients in the backward.
        """
        again, *_ = self._forward(dtype, rounding, reentrant_as_it_is())
        same = len(again) == len(outputs) and all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
            for a, b in zip(again, outputs, strict=True)
            if a.shape == b.shape and a.is_floating_point()
        )
        return [] if same else [f"{names[0]} computes something else where gradients are off"]

    def _forward(
        self,
        dtype: torch.dtype | None,
        rounding: int,
        reentrant: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[
        list[torch.Tensor], OutputStructure, dict[str, torch.Tensor], dict[str, torch.Tensor]
    ]:
        """The module's outputs and their structure, the leaves that it was given, its buffers."""
        module = self.module
        named = list(module.named_parameters())
        held = {n: _own_parameter(p, dtype, self.grad and p.requires_grad) for n, p in named}
        buffers = {n: _own(b, dtype, False) for n, b in module.named_buffers()}
        held, users = self._rounded(held, self.tensors(dtype), rounding)
        everything = {**held, **buffers}
        args, kwargs = _replaced(self.call, users)
        with untouched(module), torch.set_grad_enabled(self.grad):
            torch.manual_seed(self.seed)
            with self._drawing(), reentrant or contextlib.nullcontext():
                containers = Containers(args, kwargs)
                standing_in(module, everything)
                output = torch.func.functional_call(module, everything, args, kwargs)
                output = containers.handed(output)
        tensors, structure = OutputStructure.from_output(output)
        leaves = dict(zip(self.names, users, strict=True)) | held
        return tensors, structure, leaves, {name: everything[name] for name in buffers}

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """PyTorch draws what the graph draws; what stays PyTorch's draws as it does there."""
        if not self.draws:
            yield
            return
        with unreplayed(self.kept), replayed_draws(int(draw_seed(1))):
            yield

    def _rounded(
        self, parameters: dict[str, torch.Tensor], users: list[torch.Tensor], rounding: int
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Parameters and arguments, rounded in the way of a number; 0 leaves them."""
        if not rounding:
            return parameters, users
        generator = torch.Generator().manual_seed(rounding)
        parameters = {n: rounded_like(p, self.precision, generator) for n, p in parameters.items()}
        return parameters, [rounded_like(t, self.precision, generator) for t in users]

    def masked(self, step: Step, tensors: dict[str, torch.Tensor], served: Any) -> Trial:
        """The trial of a step that shows only some tokens of some outputs.

        Args:
            step: the compiled step; of its outputs those are partial that the tokens tell.
            tensors: the module's parameters and buffers by name.
            served: the capture that the step belongs to.
        """
        tokens = served.tokens
        own = {name: _own(tensor, None, False) for name, tensor in tensors.items()}
        own |= served.captured.held
        bound, users = Step(step.plan, own, _no_other, step.original), self.tensors()
        with undone(step.plan.kept), random_states(), torch.no_grad():
            torch.manual_seed(self.seed)
            outputs = bound.infer([users[i] for i in served.positions])
        names = served.structure.names
        masks = {names[i]: (outputs[i] != 0).any(-1, keepdim=True) for i in tokens.partial}
        return replace(self, masks=masks)

    def graph(
        self, step: Step, tensors: dict[str, torch.Tensor], served: Any, rounding: int = 0
    ) -> Evidence:
        """What the graph makes of it.

        Args:
            step: the compiled step.
            tensors: the module's parameters and buffers by name.
            served: the capture that the step belongs to: its order of inputs, its output structure.
            rounding: number of a way of rounding, PyTorch's of this number; 0 is none.

        Raises:
            CheckFailed: the numbers lead the module's code another way than the graph.
        """
        with _alone(), undone(step.plan.kept):
            return self._graph(step, tensors, served, rounding)

    def _graph(
        self, step: Step, tensors: dict[str, torch.Tensor], served: Any, rounding: int
    ) -> Evidence:
        evidence = Evidence()
        trained = {n: tensors[n] for n, _ in self.module.named_parameters() if n in tensors}
        parameters = {
            n: _own_parameter(t, None, self.grad and t.requires_grad) for n, t in trained.items()
        }
        buffers = {n: _own(t, None, False) for n, t in tensors.items() if n not in trained}
        parameters, users = self._rounded(parameters, self.tensors(), rounding)
        held = {**served.captured.held, **buffers, **parameters}
        bound = Step(step.plan, held, _no_other, step.original)
        with random_states(), unhooked(), torch.set_grad_enabled(self.grad):
            torch.manual_seed(self.seed)
            chosen = [users[i] for i in served.positions]
            trains = bool(step.plan.arguments)
            outputs = bound.train(chosen, self.call, _Nobody()) if trains else bound.infer(chosen)
        outputs = instead(outputs, served.returned, users, {**buffers, **parameters})
        found, structure = OutputStructure.from_output(served.structure.rebuild(outputs))
        del outputs
        buffers |= self._own_buffers(step, tensors)
        evidence.buffers = {name: self.digest(buffer) for name, buffer in buffers.items()}
        leaves = dict(zip(self.names, users, strict=True)) | parameters
        self._close(evidence, structure.names, found, leaves)
        return evidence

    def _own_buffers(self, step: Step, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The buffers that modules in the graph have written to themselves, by name."""
        names = {id(tensor): name for name, tensor in tensors.items()}
        paths = {id(module): path for path, module in self.module.named_modules()}
        found = {
            names.get(id(buffer), f"{paths[id(module)]}.{path}"): buffer
            for module in modules_of(step.plan.kept)
            for path, buffer in module.named_buffers()
        }
        for _, name in step.plan.updated:  # the graph has written to these
            found.pop(name, None)
        return found

    def _close(
        self,
        evidence: Evidence,
        names: Sequence[str],
        outputs: list[torch.Tensor],
        leaves: dict[str, torch.Tensor],
        *,
        apart: bool = False,
    ) -> None:
        """Digests the outputs, then each gradient as it comes.

        Args:
            evidence: to be filled.
            names: of the outputs.
            outputs: of the module or graph, emptied.
            leaves: arguments and parameters by name.
            apart: whether autograd's graph has leaves of others, which keep their gradients.
        """
        known = {id(leaf) for leaf in leaves.values()}
        for i, name in enumerate(names):
            evidence.note_place("output", name, outputs[i])
            if name in self.masks:
                outputs[i] = torch.where(self.masks[name], outputs[i], 0)
        for name, tensor in zip(names, outputs, strict=True):
            if name in self.hidden:
                continue
            # A view made under no_grad says that it requires a gradient, and passes none on.
            requires = any(id(leaf) in known for leaf in _leaves([tensor]))
            evidence.outputs[name] = (self.digest(tensor), requires)
            if not (tensor.is_floating_point() or tensor.is_complex()):
                evidence.discrete[name] = tensor.detach()
        if not self.grad:
            return
        roots = [
            tensor
            for name, tensor in zip(names, outputs, strict=True)
            if name in self.upstream and tensor.requires_grad
        ]
        waiting = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        evidence.gradients = dict.fromkeys(waiting)
        if not roots:
            return
        cotangents = [cotangent(root) for root in roots]
        outputs.clear()

        def digested(name: str) -> Any:
            def take(leaf: torch.Tensor) -> None:
                if leaf.grad is None:
                    return  # the hooks of a leaf run where no gradient came, too
                gradient = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
                evidence.gradients[name] = self.digest(gradient)
                leaf.grad = None

            return take

        def placed(name: str) -> Any:
            def look(gradient: torch.Tensor) -> None:
                evidence.note_place("gradient", name, gradient)

            return look

        for name, leaf in waiting.items():
            leaf.register_post_accumulate_grad_hook(digested(name))
            if name in self.names:
                leaf.register_hook(placed(name))  # autograd puts `leaf.grad` as the leaf lies
        with unhooked(), random_states(), without_autocast():
            # A graph asks whether a backward is one of all leaves, and has none but these.
            inputs = [*waiting.values()] if apart else None
            if inputs != []:
                torch.autograd.backward(roots, cotangents, inputs=inputs)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A run has the memory that the one before has left, and leaves none of its own behind.

    Casts of parameters that nobody else knows would stay as long as the caller's autocast.
    """
    release_pools(beyond=HOLES)
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, of which some may be no numbers."""
    if torch.equal(one, other):
        return True
    floats = one.is_floating_point() or one.is_complex()
    return floats and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _strays(outputs: Sequence[torch.Tensor], leaves: Any) -> list[torch.Tensor]:
    """The leaves of autograd's graph that are none of ours."""
    known = {id(leaf) for leaf in leaves}
    return [leaf for leaf in _leaves(outputs) if id(leaf) not in known]


def _leaves(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves that autograd's graph of these outputs ends in."""
    yield from (tensor for tensor in outputs if tensor.requires_grad and tensor.is_leaf)
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _replaced(flat: FlatCall, tensors: Sequence[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    """The call with other tensors, in their order."""
    new = {id(old): tensor for old, tensor in zip(flat.tensors, tensors, strict=True)}
    leaves, spec = pytree.tree_flatten((flat.args, flat.kwargs))
    args, kwargs = pytree.tree_unflatten([new.get(id(leaf), leaf) for leaf in leaves], spec)
    return args, kwargs


def _own(tensor: torch.Tensor, dtype: torch.dtype | None, grad: bool) -> torch.Tensor:
    """A copy that shares nothing."""
    with torch.inference_mode(False), torch.no_grad():
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        copied = tensor.detach().to(wanted, copy=True)
    return copied.requires_grad_(grad)


def _own_parameter(parameter: torch.Tensor, dtype: torch.dtype | None, grad: bool) -> torch.Tensor:
    """The same memory under a parameter of its own: its gradients and hooks are apart."""
    with torch.inference_mode(False):
        value = parameter.detach()
        value = value if dtype is None or not value.is_floating_point() else value.to(dtype)
        return nn.Parameter(value, requires_grad=grad)


class _Nobody:
    """Hears nothing of what a trial's backward needs: one that fails, fails."""

    def differentiated_again(self) -> None:
        raise AssertionError("a trial differentiates once")

    def recovers(self, error: OrtrainError, call: FlatCall) -> bool:
        return False


def _no_other(received: Received) -> Step:
    raise AssertionError("a trial gives gradients to the outputs that its step expects")
