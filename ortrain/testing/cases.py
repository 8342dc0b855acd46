"""``OpCase``: one operator in one form, and the data to try it on."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.program import Program, Role, set_role

Draw = Callable[[np.random.Generator], np.ndarray]
Input = np.ndarray | Draw | None


@dataclass(frozen=True, eq=False)
class OpCase:
    """One operator with inputs and attributes, for :func:`~ortrain.testing.check_gradients`.

    Attributes:
        operator: ``"Softmax"``, or ``"ortrain::Attention"`` outside the standard domain.
        inputs: by name and in order: an array, a draw such as :func:`normal`, or None where an
            optional input is absent. Floating data is rounded to float32, so that every run
            starts from the same numbers.
        attributes: of the operator.
        wrt: names of the inputs to differentiate with respect to; by default every floating one
            that is not among ``constants``.
        constants: names of the inputs that are constants of the graph.
        single: names of floating inputs that are float32 whatever the others are.
        outputs: how many outputs the node has.
        seeds: positions of the outputs that receive a gradient; by default every floating one.
        torch: the same function in PyTorch. It is called with those of the inputs (tensors) and
            attributes (numbers) that its parameters name, and returns the outputs in ``seeds``.
        tolerance: a class in :data:`~ortrain.testing.TOLERANCES`.
        opsets: to try; by default 18 and 21, or the operator's first one where that is later.
        symbolic: whether to try the case with every dimension symbolic as well.
        batch: whether to try it with the first dimension of the first input symbolic, too.
        unsupported: part of the reason with which the rule refuses a symbolic form.
        runtime: why stock onnxruntime cannot run the case, where it cannot.
        flat: names of the inputs whose gradient is zero by nature.
        estimate: whether the gradient is an estimate by design, which PyTorch alone can confirm:
            finite differences are left out.
        note: tells two cases of an operator apart; part of :attr:`id`.
        seed: of the draws.
    """

    operator: str
    inputs: Mapping[str, Input]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    wrt: Sequence[str] | None = None
    constants: Sequence[str] = ()
    single: Sequence[str] = ()
    outputs: int = 1
    seeds: Sequence[int] | None = None
    torch: Callable[..., Any] | None = None
    tolerance: str = "smooth"
    opsets: Sequence[int] | None = None
    symbolic: bool = True
    batch: bool = False
    unsupported: str = ""
    runtime: str = ""
    flat: Sequence[str] = ()
    estimate: bool = False
    note: str = ""
    seed: int = 0

    @property
    def id(self) -> str:
        """A readable name: the operator and the note."""
        return f"{self.operator}-{self.note}" if self.note else self.operator

    @property
    def domain(self) -> str:
        """The operator's domain, empty for the standard one."""
        return self.operator.rpartition("::")[0]

    @property
    def op_type(self) -> str:
        """The operator's name within its domain."""
        return self.operator.rpartition("::")[2]

    def tried_opsets(self) -> tuple[int, ...]:
        """The opsets to try the case at."""
        if self.opsets is not None:
            return tuple(self.opsets)
        if self.domain:
            return (18, 21)
        first = _first_opset(self.op_type)
        return tuple(o for o in (18, 21) if o >= first) or (first,)

    def arrays(self) -> dict[str, np.ndarray]:
        """The data of the inputs that are present; floating data is float32 in value."""
        rng = np.random.default_rng([zlib.crc32(self.id.encode()), self.seed])
        result = {}
        for name, source in self.inputs.items():
            if source is None:
                continue
            array = np.asarray(source(rng) if callable(source) else source)
            result[name] = array.astype(np.float32) if array.dtype.kind == "f" else array
        return result

    def plain_attributes(self) -> dict[str, Any]:
        """The attributes as ONNX stores them: floats rounded to float32."""
        return {
            k: float(np.float32(v)) if isinstance(v, float) else v
            for k, v in self.attributes.items()
        }

    def build(
        self, dtype: np.dtype[Any], opset: int, dims: str = "static"
    ) -> tuple[Program, dict[str, np.ndarray]]:
        """A program of this one node, and what to feed it.

        Args:
            dtype: of the floating inputs.
            opset: of the standard domain.
            dims: ``static``; ``batch``, where the first dimension of the first input is a symbol;
                ``symbolic``, where every dimension of every input has a symbol of its own.

        Returns:
            The program and its feeds by input name.
        """
        arrays = {
            name: array.astype(dtype)
            if array.dtype.kind == "f" and name not in self.single
            else array
            for name, array in self.arrays().items()
        }
        wrt = self.differentiable(arrays)
        graph = ir.Graph(
            [], [], nodes=[], opset_imports={"": opset, "ortrain": 1}, name=self.op_type
        )
        values: list[ir.Value | None] = []
        with Builder(graph, opset=opset, prefix="case") as op:
            for name in self.inputs:
                if name not in arrays:
                    values.append(None)
                    continue
                array = arrays[name]
                if name in self.constants:
                    values.append(op.constant(array))
                    continue
                shape: list[int | str] = list(array.shape)
                if dims == "symbolic":
                    shape = [f"{name}_{i}" for i in range(array.ndim)]
                elif dims == "batch" and not graph.inputs:
                    shape[0] = "batch"
                value = ir.Value(
                    name=name,
                    shape=ir.Shape(shape),
                    type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                )
                set_role(value, Role.PARAMETER if name in wrt else Role.USER_INPUT)
                graph.inputs.append(value)
                values.append(value)
            results = op.node(
                self.op_type,
                values,
                domain=self.domain,
                outputs=self.outputs,
                **self.plain_attributes(),
            )
        results = (results,) if isinstance(results, ir.Value) else results
        for i, value in enumerate(results):
            value.name = "y" if len(results) == 1 else f"y{i}"
            graph.outputs.append(set_role(value, Role.USER_OUTPUT))
        program = Program(ir.Model(graph, ir_version=10))
        if not self.domain:
            shapes.infer_all(program.model)
        return program, {k: v for k, v in arrays.items() if k not in self.constants}

    def differentiable(self, arrays: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Names of the inputs to differentiate with respect to."""
        if self.wrt is not None:
            return tuple(self.wrt)
        return tuple(
            n for n, a in arrays.items() if a.dtype.kind == "f" and n not in self.constants
        )


@functools.cache
def _first_opset(op_type: str) -> int:
    """The first opset that has an operator of the standard; to look takes 8 ms."""
    schemas = onnx.defs.get_all_schemas_with_history()
    return min(s.since_version for s in schemas if s.name == op_type and not s.domain)


def normal(*shape: int, scale: float = 1.0, avoid: Sequence[float] = ()) -> Draw:
    """Normal numbers, none closer than 0.05 to a point of ``avoid`` (where the function bends)."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        x = np.asarray(rng.standard_normal(shape) * scale)
        for point in avoid:
            near = np.abs(x - point) < 0.05
            x = np.where(near, point + np.where(x < point, -1, 1) * (0.05 + np.abs(x - point)), x)
        return x

    return draw


def between(low: float, high: float, *shape: int) -> Draw:
    """Uniform numbers in an interval."""
    return lambda rng: np.asarray(rng.uniform(low, high, shape))


def positive(*shape: int) -> Draw:
    """Uniform numbers between 0.5 and 2."""
    return between(0.5, 2.0, *shape)


def distinct(*shape: int) -> Draw:
    """Numbers at least 0.06 apart and as far from zero, so that a small step keeps their order."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        count = int(np.prod(shape))
        places = np.arange(count) - count // 2 + 0.5
        steps = places * 0.1 + rng.uniform(-0.02, 0.02, count)
        return rng.permutation(steps).reshape(shape)

    return draw


def integers(high: int, *shape: int, low: int = 0) -> Draw:
    """int64 numbers from ``low`` up to, and without, ``high``."""
    return lambda rng: np.asarray(rng.integers(low, high, shape))


def flags(*shape: int) -> Draw:
    """Booleans, both values among them where there are at least two."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        result = np.asarray(rng.random(shape) < 0.6)
        if result.size > 1:
            result.reshape(-1)[:2] = (True, False)
        return result

    return draw
