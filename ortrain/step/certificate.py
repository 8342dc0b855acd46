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
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain.capture.returned import instead
from ortrain.capture.structure import FlatCall, OutputStructure
from ortrain.capture.untouched import random_states, untouched
from ortrain.errors import OrtrainError, ParityError, listing
from ortrain.program import Role
from ortrain.step.build import Plan
from ortrain.step.digest import Digest
from ortrain.step.draws import replayed_draws
from ortrain.step.run import Received, Step, draw_seed

# Root mean square of the differences, relative to that of the values, that passes without a doubt.
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}
# A gradient that is zero but for roundings, such as that of a key's bias, has no digits of its own:
# it may differ by roundings of the others.
FLOOR = 1e-3
# Where that is exceeded, eager's own distance from float64 decides: the graph may be so many times
# as far, of which a factor of two comes from estimating both distances.
SLACK = 6.0
# What counts as equal to float64 in any case, relative as above; and where there is no float64. Of
# what is float64 itself it is CLOSE, unless eager is further away, by parts in float32.
ROUNDING, LOOSE = 1e-5, 1e-3
# What is zero but for roundings, such as the mean of a normalized tensor, has no digits at all: in
# float64 and in both engines it is below so many roundings of the typical parameter or input.
NOISE = 16
# Multiplications of the forward above which a batch's first rows stand for it: four layers of
# BERT-base are 3.6e9 for a row of 128 tokens, and 0.15 s forward and backward.
ENOUGH = 6 << 30


@dataclass
class Evidence:
    """What one engine made of a call.

    Attributes:
        outputs: name → digest, with whether it requires a gradient.
        gradients: name of a parameter or input → digest; None where autograd delivers none.
        buffers: name → digest, after the call.
        strays: tensors that receive a gradient and are neither parameters nor inputs.
    """

    outputs: dict[str, tuple[Digest, bool]] = field(default_factory=dict)
    gradients: dict[str, Digest | None] = field(default_factory=dict)
    buffers: dict[str, Digest] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)

    def tensors(self, kind: str) -> Mapping[str, Digest | None]:
        """All that is known of outputs, gradients or buffers."""
        if kind == "output":
            return {name: digest for name, (digest, _) in self.outputs.items()}
        return self.gradients if kind == "gradient" else self.buffers


@dataclass(frozen=True)
class Certificate:
    """That a graph agrees with its module on one batch.

    Attributes:
        loss: whether the first output is a single number.
        outputs: output → difference from eager, root mean square, relative to the values.
        gradients: likewise for each parameter and input that has a gradient.
        buffers: likewise for each buffer, after the forward.
        faults: what does not agree, a phrase each; none in a certificate that holds.
    """

    loss: bool
    outputs: dict[str, float]
    gradients: dict[str, float]
    buffers: dict[str, float]
    faults: tuple[str, ...] = ()

    @property
    def differences(self) -> dict[str, float]:
        """All of them, by name."""
        return {**self.buffers, **self.outputs, **self.gradients}

    def __str__(self) -> str:
        parts = []
        if self.outputs:
            name = "loss" if self.loss else "outputs"
            parts.append(f"{name} {_digits(max(self.outputs.values()))}")
        if self.gradients:
            worst = _digits(max(self.gradients.values()))
            parts.append(f"gradients {worst} of {len(self.gradients)} tensors")
        if self.buffers:
            parts.append(f"buffers {_digits(max(self.buffers.values()))} of {len(self.buffers)}")
        return ", ".join(parts) or "nothing to compare"


def _digits(value: float) -> str:
    return f"{value:.0e}" if value else "0"


@dataclass(frozen=True)
class Trial:
    """A call on tensors of its own, which both engines run.

    Attributes:
        module: that is called.
        call: tensors of its own in the place of the user's.
        names: of its tensors, for messages.
        grad: whether gradients are compared.
        upstream: which outputs receive a gradient.
        seed: of the random numbers.
        draws: whether the graph draws any.
    """

    module: nn.Module
    call: FlatCall
    names: tuple[str, ...]
    grad: bool
    upstream: Received
    seed: int
    draws: bool

    @classmethod
    def of(
        cls,
        module: nn.Module,
        flat: FlatCall,
        names: Sequence[str],
        plan: Plan,
        grad: bool,
        rows: dict[int, int] | None = None,
        number: int = 0,
    ) -> Trial:
        """A trial of a user's call.

        Args:
            module: that is called.
            flat: the call.
            names: of its tensors.
            plan: of the graph.
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
        draws = any(role is Role.SEED for role, _ in plan.feeds)
        return cls(module, call, tuple(names), grad, plan.upstream, seed, draws)

    def tensors(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """The call's tensors anew, in another floating dtype where one is asked for."""
        return [_own(t, dtype, t.requires_grad) for t in self.call.tensors]

    def typical(self) -> float:
        """The median root mean square of the parameters and of the inputs."""
        with torch.no_grad():
            given = [*self.module.parameters(), *self.call.tensors]
            scales = [
                float(torch.linalg.vector_norm(t)) / math.sqrt(t.numel())
                for t in given
                if t.is_floating_point() and t.numel()
            ]
        return statistics.median(scales) if scales else 0.0

    def eager(self, dtype: torch.dtype | None = None) -> Evidence:
        """What the module makes of it; in another floating dtype where one is asked for."""
        evidence = Evidence()
        tensors, structure, leaves, buffers = self._forward(dtype)
        evidence.buffers = {name: Digest.of(buffer) for name, buffer in buffers.items()}
        strays = _strays(tensors, leaves.values()) if self.grad else []
        if strays:
            # What the forward has made itself, as transformers does for reentrant checkpointing,
            # is another tensor the next time, and nobody sees its gradient.
            again, _, others, _ = self._forward(dtype)
            lasting = {id(stray) for stray in _strays(again, others.values())}
            evidence.strays = [
                f"a tensor of shape {[*stray.shape]} that is no parameter"
                for stray in strays
                if id(stray) in lasting
            ]
            del again, others
        self._close(evidence, structure.names, tensors, leaves)
        return evidence

    def _forward(
        self, dtype: torch.dtype | None
    ) -> tuple[
        list[torch.Tensor], OutputStructure, dict[str, torch.Tensor], dict[str, torch.Tensor]
    ]:
        """The module's outputs and their structure, the leaves that it was given, its buffers."""
        module = self.module
        named = list(module.named_parameters())
        held = {n: _own_parameter(p, dtype, self.grad and p.requires_grad) for n, p in named}
        buffers = {n: _own(b, dtype, False) for n, b in module.named_buffers()}
        everything = {**held, **buffers}
        users = self.tensors(dtype)
        args, kwargs = _replaced(self.call, users)
        with untouched(module), quiet_backward(), torch.set_grad_enabled(self.grad):
            torch.manual_seed(self.seed)
            with replayed_draws(int(draw_seed())) if self.draws else contextlib.nullcontext():
                output = torch.func.functional_call(module, everything, args, kwargs)
        tensors, structure = OutputStructure.from_output(output)
        leaves = dict(zip(self.names, users, strict=True)) | held
        return tensors, structure, leaves, {name: everything[name] for name in buffers}

    def graph(self, step: Step, tensors: dict[str, torch.Tensor], served: Any) -> Evidence:
        """What the graph makes of it.

        Args:
            step: the compiled step.
            tensors: the module's parameters and buffers by name.
            served: the capture that the step belongs to: its order of inputs, its output structure.
        """
        evidence = Evidence()
        trained = {n for n, _ in self.module.named_parameters()}
        parameters = {
            n: _own_parameter(t, None, self.grad and t.requires_grad)
            for n, t in tensors.items()
            if n in trained
        }
        buffers = {n: _own(t, None, False) for n, t in tensors.items() if n not in trained}
        bound = Step(step.plan, {**buffers, **parameters}, _no_other, step.original)
        users = self.tensors()
        with random_states(), quiet_backward(), torch.set_grad_enabled(self.grad):
            torch.manual_seed(self.seed)
            chosen = [users[i] for i in served.positions]
            trains = bool(step.plan.arguments)
            outputs = bound.train(chosen, self.call, _Nobody()) if trains else bound.infer(chosen)
        outputs = instead(outputs, served.returned, users, {**buffers, **parameters})
        found, structure = OutputStructure.from_output(served.structure.rebuild(outputs))
        del outputs
        evidence.buffers = {name: Digest.of(buffer) for name, buffer in buffers.items()}
        leaves = dict(zip(self.names, users, strict=True)) | parameters
        self._close(evidence, structure.names, found, leaves)
        return evidence

    def _close(
        self,
        evidence: Evidence,
        names: Sequence[str],
        outputs: list[torch.Tensor],
        leaves: dict[str, torch.Tensor],
    ) -> None:
        """Digests the outputs, then each gradient as it comes."""
        known = {id(leaf) for leaf in leaves.values()}
        for name, tensor in zip(names, outputs, strict=True):
            # A view made under no_grad says that it requires a gradient, and passes none on.
            requires = any(id(leaf) in known for leaf in _leaves([tensor]))
            evidence.outputs[name] = (Digest.of(tensor), requires)
        if not self.grad:
            return
        roots = [
            tensor
            for tensor, receives in zip(outputs, self.upstream, strict=False)
            if receives and tensor.requires_grad
        ]
        waiting = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        evidence.gradients = dict.fromkeys(waiting)
        if not roots:
            return
        cotangents = [_cotangent(root) for root in roots]
        outputs.clear()

        def digested(name: str) -> Any:
            def take(leaf: torch.Tensor) -> None:
                if leaf.grad is None:
                    return  # the hooks of a leaf run where no gradient came, too
                gradient = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
                evidence.gradients[name] = Digest.of(gradient)
                leaf.grad = None

            return take

        for name, leaf in waiting.items():
            leaf.register_post_accumulate_grad_hook(digested(name))
        with quiet_backward(), random_states():
            torch.autograd.backward(roots, cotangents)


def compare(eager: Evidence, graph: Evidence, trial: Trial) -> Certificate:
    """The certificate of two engines' evidence, with what does not agree.

    Args:
        eager: of the module.
        graph: of the graph.
        trial: runs the module in float64, where that is needed to decide.
    """
    faults = [f"{name} receives a gradient that the graph does not know" for name in eager.strays]
    if list(eager.outputs) != list(graph.outputs):
        faults.append(f"the outputs are {_names(eager.outputs)}, not {_names(graph.outputs)}")
        return Certificate(False, {}, {}, {}, tuple(faults))
    for name, (_, requires) in eager.outputs.items():
        if requires and not graph.outputs[name][1]:
            faults.append(f"{name} requires a gradient in PyTorch only")
        elif not requires and graph.outputs[name][1]:
            faults.append(f"{name} requires a gradient in the graph only")
    rows = _Rows()
    outputs, gradients, buffers = (
        rows.add(kind, eager.tensors(kind), graph.tensors(kind))
        for kind in ("output", "gradient", "buffer")
    )
    faults += rows.faults
    if rows.doubtful:
        truth, typical = _in_double(trial), trial.typical()
        differences = {"output": outputs, "gradient": gradients, "buffer": buffers}
        for row in rows.doubtful:
            if row.is_noise(truth, typical):
                differences[row.kind][row.name] = 0.0
            elif not row.excused_by(truth):
                faults.append(row.fault)
    first = next(iter(eager.outputs.values()), None)
    loss = first is not None and len(first[0].shape) == 0
    return Certificate(loss, outputs, gradients, buffers, tuple(faults))


@dataclass(frozen=True)
class _Row:
    """One tensor of both engines."""

    kind: str
    name: str
    eager: Digest
    graph: Digest
    difference: float
    scale: float

    @property
    def fault(self) -> str:
        label = f"{self.kind} {self.name}"
        if self.eager.shape != self.graph.shape:
            return f"{label} has shape {[*self.eager.shape]}, not {[*self.graph.shape]}"
        if self.eager.dtype != self.graph.dtype:
            return f"{label} is {self.eager.dtype}, not {self.graph.dtype}"
        if self.eager.special != self.graph.special:
            return f"{label} has NaN or infinities in other places"
        return f"{label} differs by {self.difference:.1e}"

    def is_noise(self, truth: Evidence | None, typical: float) -> bool:
        """Whether it is zero but for roundings: nothing above the noise, in float64 neither."""
        rounding = torch.float64 if self.eager.dtype == torch.float64 else torch.float32
        noise = NOISE * torch.finfo(rounding).eps * typical
        exact = truth.tensors(self.kind).get(self.name) if truth is not None else None
        return (
            exact is not None
            and self.eager.alike(self.graph)
            and exact.special == self.eager.special
            and max(exact.scale, self.eager.scale, self.graph.scale) <= noise
        )

    def excused_by(self, truth: Evidence | None) -> bool:
        """Whether the graph is about as close to float64 as eager is."""
        if not self.eager.dtype.is_floating_point or not self.eager.alike(self.graph):
            return False
        least, loose = ROUNDING, LOOSE
        if self.eager.dtype == torch.float64:
            least = loose = CLOSE[torch.float64]
        if truth is None:
            return self.difference <= loose
        exact = truth.tensors(self.kind).get(self.name)
        if exact is None or exact.shape != self.eager.shape or exact.special != self.eager.special:
            return self.difference <= loose
        own, mine = exact.distance(self.eager), exact.distance(self.graph)
        return mine <= max(SLACK * own, least * self.scale)


class _Rows:
    """Sorts pairs of tensors into those that agree, that do not, and that are in doubt."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.doubtful: list[_Row] = []

    def add(
        self, kind: str, eager: Mapping[str, Digest | None], graph: Mapping[str, Digest | None]
    ) -> dict[str, float]:
        known = {name: d for name, d in eager.items() if d is not None}
        other = {name: d for name, d in graph.items() if d is not None}
        for name in [*eager, *(n for n in graph if n not in eager)]:
            if (name in known) != (name in other):
                where = "PyTorch" if name in known else "the graph"
                self.faults.append(f"{kind} of {name} is there in {where} only")
        floats = [d.scale for d in known.values() if d.dtype.is_floating_point]
        floor = FLOOR * max(floats, default=0.0) if kind == "gradient" else 0.0
        differences: dict[str, float] = {}
        for name in known.keys() & other.keys():
            mine, theirs = known[name], other[name]
            scale = max(mine.scale, floor)
            apart = mine.distance(theirs) if mine.alike(theirs) else math.inf
            difference = apart / scale if scale else (math.inf if apart else 0.0)
            differences[name] = difference
            if not difference <= CLOSE.get(mine.dtype, 0.0):
                self.doubtful.append(_Row(kind, name, mine, theirs, difference, scale))
        return differences


def _in_double(trial: Trial) -> Evidence | None:
    """What the module makes of it in float64; None where it cannot compute in that."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return trial.eager(torch.float64)
    except Exception:
        return None
    finally:
        torch.set_default_dtype(default)


def refuted(module: nn.Module, certificate: Certificate) -> ParityError:
    """The error of a graph that does not agree with its module."""
    return ParityError(
        f"the graph of {type(module).__name__} does not compute what the module does",
        because=listing(list(certificate.faults)),
        help="it runs in PyTorch instead; please report it with the module's code",
    )


def _names(outputs: dict[str, Any]) -> str:
    return listing(list(outputs)) or "none"


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


def _cotangent(root: torch.Tensor) -> torch.Tensor:
    """The gradient that an output receives: 1 for a loss, else noise."""
    if root.ndim == 0:
        return torch.ones_like(root)
    generator = torch.Generator().manual_seed(root.ndim)
    noise = torch.randn(root.shape, generator=generator, dtype=torch.float32)
    return noise.to(root.device, root.dtype)


class _Nobody:
    """Hears nothing of what a trial's backward needs: one that fails, fails."""

    def differentiated_again(self) -> None:
        raise AssertionError("a trial differentiates once")

    def recovers(self, error: OrtrainError, call: FlatCall) -> bool:
        return False


def _no_other(received: Received) -> Step:
    raise AssertionError("a trial gives gradients to the outputs that its step expects")


@contextlib.contextmanager
def quiet_backward() -> Iterator[None]:
    """What is saved for a backward of our own, or none, is not for the caller's hooks."""
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        yield


def _itself(value: Any) -> Any:
    return value
