"""``check_gradients``: every oracle there is, on one operator or program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from ortrain.autodiff.engine import differentiate
from ortrain.errors import ParityError, UnsupportedGradient
from ortrain.program import Program, Role, target_of
from ortrain.runtime.reference import ReferenceCompiled, ReferenceExecutor
from ortrain.testing.cases import OpCase
from ortrain.testing.precision import TOLERANCES, Tolerance, assert_close, in_float64

Arrays = dict[str, np.ndarray]

# Of the finite differences. Fourth order: the error falls as STEP⁴ and rounding adds 1e-16 / STEP.
STEP = 1e-3


class Executor(Protocol):
    """What :func:`check_gradients` needs of an executor."""

    @property
    def name(self) -> str:
        """For messages."""

    def lower(self, program: Program) -> Program:
        """The program in operators that the executor knows."""

    def compile(self, program: Program) -> Any:
        """Something with a method ``run(inputs) -> outputs``, arrays in graph order."""


@dataclass(frozen=True)
class Variant:
    """A form of a case: an opset, and what is known of the dimensions (see OpCase.build)."""

    opset: int
    dims: str

    def __str__(self) -> str:
        return f"opset{self.opset}-{self.dims}"


def variants(case: OpCase) -> list[Variant]:
    """The forms in which a case is tried."""
    kinds = ["static"] + ["batch"] * case.batch + ["symbolic"] * case.symbolic
    return [Variant(opset, dims) for opset in case.tried_opsets() for dims in kinds]


def check_gradients(
    subject: OpCase | Program,
    inputs: Mapping[str, np.ndarray] | None = None,
    *,
    only: Iterable[Variant] | None = None,
    wrt: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    torch: Callable[..., Any] | None = None,
    tolerance: str = "smooth",
    executor: Executor | None = None,
) -> None:
    """Checks the gradients of an operator or a program against every oracle there is.

    1. In float64 on the reference executor, against finite differences along a random direction
       in each input (the dot-product test), unless a case says that its gradient is an estimate.
    2. Against PyTorch's autograd, where there is a PyTorch function.
    3. In float32 on stock onnxruntime, against the float64 result.

    It also checks that differentiation leaves the outputs as they are and that the dtypes and
    shapes that the program states are the true ones.

    Args:
        subject: a case, or a float32 program.
        inputs: data of a program's inputs by name; a case brings its own.
        only: restricts a case to some of its :func:`variants`.
        wrt: of a program: names of the inputs; by default its parameters.
        outputs: of a program: names of those that receive a gradient; by default the floating ones
            among its user outputs and losses.
        torch: of a program: see :attr:`OpCase.torch`.
        tolerance: of a program: a class in :data:`~ortrain.testing.TOLERANCES`.
        executor: runs the float32 program instead of stock onnxruntime.

    Raises:
        ParityError: a gradient is wrong.
    """
    if isinstance(subject, OpCase):
        for variant in variants(subject) if only is None else only:
            _check_case(subject, variant, executor)
        return
    single = subject
    feeds = {k: np.asarray(v) for k, v in (inputs or {}).items()}
    names = list(wrt) if wrt is not None else [v.name or "" for v in single.inputs(Role.PARAMETER)]
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}
    chosen = None if outputs is None else list(outputs)
    check = _Check("the program", TOLERANCES[tolerance], names, chosen, torch, {})
    check.run(in_float64(single), wide, single, feeds, executor or _Stock())


def _check_case(case: OpCase, variant: Variant, executor: Executor | None) -> None:
    double, wide = case.build(np.dtype(np.float64), variant.opset, variant.dims)
    single, feeds = case.build(np.dtype(np.float32), variant.opset, variant.dims)
    names = [n for n in case.differentiable(case.arrays()) if n in wide]
    outputs = [v.name or "" for v in double.graph.outputs]
    seeds = None if case.seeds is None else [outputs[i] for i in case.seeds]
    where = f"{case.id}, {variant}"
    if variant.dims == "symbolic" and case.unsupported:
        try:
            differentiate(double, names, seeds)
        except UnsupportedGradient as error:
            if case.unsupported in str(error):
                return
            raise
        raise ParityError(f"the rule did not refuse: {case.unsupported}", where=where)
    check = _Check(
        where,
        TOLERANCES[case.tolerance],
        names,
        seeds,
        case.torch,
        {**case.plain_attributes(), **{k: v for k, v in case.arrays().items() if k not in wide}},
        tuple(case.flat),
        case.estimate,
    )
    runs = None if case.runtime else executor or _Stock()
    check.run(double, wide, single, feeds, runs)


@dataclass
class _Check:
    where: str
    tolerance: Tolerance
    wrt: list[str]
    outputs: list[str] | None
    torch: Callable[..., Any] | None
    attributes: dict[str, Any]
    flat: tuple[str, ...] = ()
    estimate: bool = False

    def run(
        self,
        double: Program,
        wide: Arrays,
        single: Program,
        feeds: Arrays,
        executor: Executor | None,
    ) -> None:
        training = differentiate(double, self.wrt, self.outputs)
        forward = _reference(double)
        values = _run(forward, wide)
        added, made = _added(double, training)
        seeds = self.seeds(added, values)
        missing = [n for n in self.wrt if n not in made]
        if missing:
            raise ParityError(f"no gradient flows to {missing[0]!r}", where=self.where)

        compiled = _reference(training, check_annotations=True)
        results = _run(compiled, {**wide, **{added[k]: v for k, v in seeds.items()}})
        # Bit for bit, but for an operator that was replaced by its function body.
        kept = set(double.operators()) <= set(training.operators())
        bound = 0.0 if kept else self.tolerance.oracle
        for name, value in values.items():
            assert_close(results[name], value, bound, f"output {name!r} after autodiff", self.where)
        gradients = {target: results[name] for target, name in made.items()}
        for name, gradient in gradients.items():
            if gradient.shape != wide[name].shape:
                raise ParityError(
                    f"the gradient of {name!r} has shape {gradient.shape}, not {wide[name].shape}",
                    where=self.where,
                )
            if not self.estimate:
                self.numeric(forward, wide, seeds, name, gradient)
        if self.torch is not None:
            self.oracle(wide, values, seeds, gradients)
        if executor is not None:
            self.single(executor, single, feeds, seeds, results)

    def seeds(self, targets: Iterable[str], values: Arrays) -> Arrays:
        """Random gradients of the outputs by the output's name, exact in float32."""
        rng = np.random.default_rng(1)
        found = {}
        for target in targets:
            draw = rng.standard_normal(values[target].shape).astype(np.float32)
            found[target] = np.asarray(draw.astype(np.float64))
        return found

    def numeric(
        self,
        forward: ReferenceCompiled,
        feeds: Arrays,
        seeds: Arrays,
        name: str,
        gradient: np.ndarray,
    ) -> None:
        """Compares one gradient with the finite difference along a random direction."""
        rng = np.random.default_rng(2)
        direction = np.asarray(rng.uniform(0.3, 1.0, gradient.shape))
        direction = direction * rng.choice([-1.0, 1.0], gradient.shape)

        def along(distance: float) -> float:
            moved = {**feeds, name: np.asarray(feeds[name] + distance * direction)}
            outputs = _run(forward, moved)
            return float(sum((outputs[s] * v).sum() for s, v in seeds.items()))

        h = STEP
        numeric = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
        terms = gradient * direction
        scale = float(np.abs(terms).sum())
        if scale == 0 and name not in self.flat and gradient.size:
            raise ParityError(
                f"the gradient of {name!r} is zero everywhere, which tests nothing",
                where=self.where,
                help="change the case's data, or list the input in `flat`",
            )
        error = abs(float(terms.sum()) - numeric)
        # Not `error > bound`: a NaN must fail too.
        if not error <= self.tolerance.numeric * max(scale, abs(numeric)) + 1e-11:
            raise ParityError(
                f"the gradient of {name!r} disagrees with finite differences: "
                f"{float(terms.sum()):.9g} instead of {numeric:.9g}",
                where=self.where,
            )

    def oracle(self, feeds: Arrays, values: Arrays, seeds: Arrays, gradients: Arrays) -> None:
        """Compares outputs and gradients with PyTorch's, in float64."""
        import torch

        assert self.torch is not None
        accepted = inspect.signature(self.torch).parameters
        tensors = {k: torch.tensor(v) for k, v in feeds.items()}
        for name in gradients:
            tensors[name].requires_grad_()
        given = {
            k: torch.tensor(v) if isinstance(v, np.ndarray) else v
            for k, v in {**self.attributes, **tensors}.items()
        }
        for k, v in self.attributes.items():
            if isinstance(v, np.ndarray) and v.dtype == np.float32:
                given[k] = torch.tensor(v.astype(np.float64))
        outputs = self.torch(**{k: v for k, v in given.items() if k in accepted})
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        tolerance = self.tolerance.oracle
        for target, output in zip(seeds, outputs, strict=True):
            assert_close(
                values[target], output.detach().numpy(), tolerance,
                f"output {target!r} against torch", self.where,
            )  # fmt: skip
        expected = torch.autograd.grad(
            outputs,
            [tensors[n] for n in gradients],
            [torch.tensor(v) for v in seeds.values()],
            allow_unused=True,
        )
        for (name, gradient), other in zip(gradients.items(), expected, strict=True):
            unused: Any = other is None  # torch's types deny it
            wanted = np.zeros_like(gradient) if unused else other.numpy()
            assert_close(
                gradient, wanted, tolerance, f"gradient of {name!r} against torch", self.where
            )

    def single(
        self, executor: Executor, program: Program, feeds: Arrays, seeds: Arrays, expected: Arrays
    ) -> None:
        """Compares everything with a float32 run on another executor."""
        keep = getattr(executor, "keeps", None)
        training = executor.lower(differentiate(program, self.wrt, self.outputs, keep=keep))
        if all(v.shape is not None for v in (*training.graph.inputs, *training.graph.outputs)):
            onnx.checker.check_model(ir.to_proto(training.model))  # it insists on a rank
        added, made = _added(program, training)
        dtypes = {v.name: v.dtype.numpy() for v in training.graph.inputs if v.dtype is not None}
        narrow = {added[k]: v.astype(dtypes[added[k]]) for k, v in seeds.items()}
        flat = {made[n] for n in self.flat if n in made}
        results = _run(executor.compile(training), {**feeds, **narrow}, training)
        for name, value in results.items():
            # A gradient that is zero by nature leaves rounding noise, of no scale of its own.
            if name in flat:
                continue
            assert_close(
                value, expected[name], self.tolerance.single,
                f"{name!r} in float32 on {executor.name}", self.where,
            )  # fmt: skip


def _added(program: Program, training: Program) -> tuple[dict[str, str], dict[str, str]]:
    """What differentiation appended: names of output gradients and of gradients, by target."""
    inputs = training.graph.inputs[len(program.graph.inputs) :]
    outputs = training.graph.outputs[len(program.graph.outputs) :]
    return (
        {target_of(v): v.name or "" for v in inputs},
        {target_of(v): v.name or "" for v in outputs},
    )


def _reference(program: Program, check_annotations: bool = False) -> ReferenceCompiled:
    executor = ReferenceExecutor()
    return executor.compile(executor.lower(program), check_annotations=check_annotations)


def _run(compiled: Any, feeds: Arrays, program: Program | None = None) -> Arrays:
    """Runs on named arrays; returns the outputs by name."""
    if program is None:
        inputs, outputs = compiled.inputs, compiled.outputs
    else:
        inputs = [v.name for v in program.graph.inputs]
        outputs = [v.name for v in program.graph.outputs]
    return dict(zip(outputs, compiled.run([feeds[n] for n in inputs]), strict=True))


class _Stock:
    """Standard ONNX on stock onnxruntime's CPU, one thread, without anything of ours in between."""

    name = "stock onnxruntime"

    def lower(self, program: Program) -> Program:
        return ReferenceExecutor().lower(program)

    def compile(self, program: Program) -> _Session:
        return _Session(program)


class _Session:
    def __init__(self, program: Program) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            program.serialize(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        names = [i.name for i in self._session.get_inputs()]
        feeds = dict(zip(names, inputs, strict=True))
        return [np.asarray(v) for v in self._session.run(None, feeds)]


__all__ = ["Executor", "Variant", "check_gradients", "variants"]
