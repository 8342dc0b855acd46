"""A graph's step is compared with PyTorch on a call before it is used, outputs and gradients.

What Dynamo hands over is trusted, and run by PyTorch on the call's own tensors beside the step:
wrong translations, gradients and kernels show in the numbers. No gradient is kept, each leaves a
:class:`~ortrain.step.digest.Digest` as it comes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn

from ortrain.aside import random_states
from ortrain.capture.origin import IN_PYTORCH
from ortrain.errors import NotServed, ParityError, listing
from ortrain.exclusive import EXCLUSIVE
from ortrain.frontend.call import spent
from ortrain.frontend.form import Form, sizes_of
from ortrain.frontend.graph import Graph
from ortrain.program import Role
from ortrain.pytorch.autocast import uncached, without_autocast
from ortrain.pytorch.precision import without_tf32
from ortrain.pytorch.saving import unhooked
from ortrain.pytorch.version import version_of
from ortrain.runtime.aten.graphs.recordings import unrecorded
from ortrain.runtime.memory import release_pools
from ortrain.step.agreement import TOLERANCES, agrees, compare
from ortrain.step.digest import Digest
from ortrain.step.draws import replayed_draws
from ortrain.step.evidence import Certificate, Evidence
from ortrain.step.probe import cotangent, precision_of, rounded_like, typical
from ortrain.step.seeds import draw_seed, drawing

# Multiplications of the forward above which a batch's first rows stand for it: four layers of
# BERT-base are 3.6e9 for a row of 128 tokens, and 0.15 s forward and backward. With twice as many a
# comparison of MiniLM in 16 bits takes 1.05 s, not 0.8.
ENOUGH = 3 << 30


class Prover:
    """Compares the programs of a graph with PyTorch before calls of them, when it is due.

    Args:
        graph: the graph.
        asked: as ``certificate`` of :class:`~ortrain.Options`.
    """

    def __init__(self, graph: Graph, asked: str | int) -> None:
        self._graph, self._asked, self._calls = weakref.ref(graph), asked, 0
        self._sizes: set[Any] = set()

    def __call__(self, form: Form, args: Sequence[Any]) -> None:
        """Before a call of one of the graph's programs."""
        graph = self._graph()
        if graph is None or not self._is_due(form, args):
            return
        with EXCLUSIVE, spent("parity"), unrecorded():
            known = _agreeing(graph, form) if self._asked == "first" else None
            try:
                form.certificate = found = proven(graph, form, args, known)
            except NotServed as why:
                form.refused = why
                return
        if found.faults:
            form.refused = ParityError(
                "a graph does not compute what PyTorch does",
                because=listing(list(found.faults)),
                help="it runs in PyTorch instead; please report it with the module's code",
            )
        else:
            graph.cache.begin()  # what was taken from it is right
            graph.lay(found.orders)

    def _is_due(self, form: Form, args: Sequence[Any]) -> bool:
        if form.certificate is None:
            self._sizes.add(sizes_of(args))
            return True
        if self._asked == "first":
            return False
        if self._asked == "each size":
            before = len(self._sizes)
            self._sizes.add(sizes_of(args))
            return len(self._sizes) > before
        self._calls += 1
        return self._calls % int(self._asked) == 0


@without_tf32()
def proven(graph: Graph, form: Form, args: Sequence[Any], known: Form | None = None) -> Certificate:
    """How a program of a graph agrees with PyTorch on a call, which nobody notices.

    Args:
        graph: the graph.
        form: its program.
        args: of the call.
        known: a program that agrees, and shows all that this one does: it is compared with that,
            which is faster; where there is a doubt, with PyTorch.

    Raises:
        NotServed: PyTorch cannot differentiate the graph.
    """
    rows = graph.rows(args, ENOUGH)
    if rows is not None:
        with contextlib.suppress(Exception):  # which fewer rows than the call has may raise
            return _proven(_Trial(graph, form, rows), known)
    return _proven(_Trial(graph, form, args), known)


def _agreeing(graph: Graph, form: Form) -> Form | None:
    """A program of the graph that agrees with PyTorch, and shows all that another one does.

    Of several the latest, which as a rule computes least.
    """
    for each in reversed(graph.forms.values()):
        is_right = each.certificate is not None and not each.certificate.faults
        if is_right and {*each.hidden} <= {*form.hidden} and {*each.partial} <= {*form.partial}:
            return each
    return None


def _proven(trial: _Trial, known: Form | None) -> Certificate:
    steps = trial.graph(0)  # first, since it tells which tokens it leaves out
    if known is not None and agrees(trial.by(known), steps, trial.precision):
        assert known.certificate is not None
        return known.certificate
    found = compare(trial.eager(), steps, trial, trial.graph)
    release_pools()
    return found


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Learns what PyTorch saves for a backward."""

    def __init__(self) -> None:
        self._places = set[int]()
        super().__init__(self._note, self._given)

    def has(self, tensor: Tensor) -> bool:
        """Whether it is among that, or a view of it."""
        return tensor.untyped_storage().data_ptr() in self._places

    def _note(self, tensor: Tensor) -> tuple[Tensor, int]:
        if tensor.layout is torch.strided:
            self._places.add(tensor.untyped_storage().data_ptr())
        # Held as it is, a result that its own operator saves would hold itself.
        return tensor.detach(), version_of(tensor)

    @staticmethod
    def _given(noted: tuple[Tensor, int]) -> Tensor:
        tensor, version = noted
        if version_of(tensor) != version:
            raise NotServed(
                "the forward writes to a tensor that its backward reads",
                because="PyTorch raises an error when that gradient is asked for",
                help=IN_PYTORCH,
            )
        return tensor.detach()


class _Trial:
    """A call of a graph on tensors of its own."""

    def __init__(self, graph: Graph, form: Form, args: Sequence[Any]) -> None:
        self.own, self.form, self.args = graph, form, args
        self.seed = int(torch.initial_seed()) & 0x7FFFFFFF
        plan = form.way.step.plan
        self.draws = any(role is Role.SEED for role, _ in plan.feeds)
        self.precision = precision_of(plan.programs)
        self.reached = [i for i, given in enumerate(plan.upstream) if given]
        self.shown: dict[int, Tensor] = {}

    def given(self) -> list[Tensor]:
        """The arguments, parameters among them."""
        return [value for value in self.args if isinstance(value, Tensor)]

    def typical(self) -> float:
        """The median root mean square of what is given."""
        return typical(self.given())

    def eager(self, dtype: torch.dtype | None = None, rounding: int = 0) -> Evidence:
        """What PyTorch makes of it."""
        release_pools()  # PyTorch has its gradients beside what is left of other runs
        with random_states(), unhooked(), drawing(None):
            torch.manual_seed(self.seed)
            args = self._copies(dtype, rounding)
            saved = _Saved()
            draws: Any = contextlib.nullcontext()
            if self.draws:
                draws = replayed_draws(int(draw_seed(1)))
            with draws, saved, uncached():
                made = [self.own.fallback(*args)]
            is_the_call = dtype is None and not rounding and is_grad_enabled()
            if is_the_call and not self.own.has_bodies:
                self.own.leave([i for i in self.own.filled if not saved.has(args[i])])
            return self._evidence(args, made)

    def graph(self, rounding: int) -> Evidence:
        """What the step makes of it."""
        with random_states(), unhooked(), drawing(None):
            torch.manual_seed(self.seed)
            args = self._copies(None, rounding)
            made = [self.own.run(self.form, args)]
            if not self.shown:
                self._note_shown(made[0])
            return self._evidence(args, made)

    def by(self, form: Form) -> Evidence:
        """What another program of the graph makes of it, as far as this one shows that."""
        with random_states(), unhooked(), drawing(None):
            torch.manual_seed(self.seed)
            args = self._copies(None, 0)
            return self._evidence(args, [self.own.run(form, args)])

    def _note_shown(self, results: Any) -> None:
        """Where the step shows something of outputs that lack tokens."""
        for i, each in enumerate(self.own.translated.outside.results):
            if each.kind == "root" and each.index in self.form.partial:
                self.shown[i] = (results[i].detach() != 0).any(-1, keepdim=True)

    def _copies(self, dtype: torch.dtype | None, rounding: int) -> list[Any]:
        drawn = torch.Generator().manual_seed(rounding)
        found: list[Any] = []
        for i, value in enumerate(self.args):
            if not isinstance(value, Tensor):
                found.append(value)
                continue
            wants = value.requires_grad and is_grad_enabled()
            with torch.no_grad():
                own = value.detach()
                own = own.clone() if i in self.own.written else own
                if dtype is not None and own.is_floating_point():
                    own = own.to(dtype)
                if rounding:
                    own = rounded_like(own, self.precision, drawn)
                own = nn.Parameter(own, requires_grad=False) if type(value) is nn.Parameter else own
            found.append(own.requires_grad_(wants))
        return found

    def _evidence(self, args: list[Any], made: list[Any]) -> Evidence:
        """What was made of arguments: the one of a list, which is emptied before the backward."""
        directions, evidence, found = TOLERANCES[self.precision].directions, Evidence(), made.pop()
        results = [found] if isinstance(found, Tensor) else [*found]
        del found
        roots = []
        outside = self.own.translated.outside
        for i, (result, each) in enumerate(zip(results, outside.results, strict=True)):
            if not isinstance(result, Tensor) or each.kind == "input":
                continue
            if each.kind == "root" and each.index in self.form.hidden:
                continue
            if i in self.shown:
                result = torch.where(self.shown[i], result, 0)
            name = f"output {i}"
            evidence.outputs[name] = Digest.of(result, directions), result.requires_grad
            if each.kind == "root" and each.index not in self.form.partial:
                evidence.note_place("output", name, result)
            if not (result.is_floating_point() or result.is_complex()):
                evidence.discrete[name] = result.detach()
            if each.kind == "root" and each.index in self.reached and result.requires_grad:
                roots.append(result)
        for place in self.own.written:
            evidence.buffers[f"argument {place}"] = Digest.of(args[place], directions)
        names = {place: name for name, place in self.own.translated.places.items()}
        waiting = {
            names.get(i, f"argument {i}"): leaf
            for i, leaf in enumerate(args)
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf
        }
        evidence.gradients = dict.fromkeys(waiting)
        if not roots:
            return evidence
        cotangents = [cotangent(root) for root in roots]
        del results, result

        def digested(name: str) -> Any:
            def take(gradient: Tensor | None) -> None:
                if gradient is None:
                    return  # the hooks of a leaf run where no gradient came, too
                evidence.note_place("gradient", name, gradient)
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                evidence.gradients[name] = Digest.of(dense, directions)

            return take

        for name, leaf in waiting.items():
            leaf.register_hook(digested(name))  # behind it, it lies in memory as the leaf does
            leaf.register_post_accumulate_grad_hook(_dropped)
        with unhooked(), without_autocast():
            torch.autograd.backward(roots, cotangents)
        return evidence


def _dropped(leaf: Tensor) -> None:
    leaf.grad = None
