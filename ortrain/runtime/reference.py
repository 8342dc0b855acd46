"""The reference executor: slow, exact, and always there.

It runs standard ONNX on numpy, in the dtype that the graph states: a float64 program is computed in
float64 throughout, which is what makes finite differences and strict comparisons possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ortrain.autodiff.partition import is_cheap
from ortrain.errors import ExecutionError
from ortrain.ops.base import expand
from ortrain.program import Program
from ortrain.runtime import reference_ops, reference_recurrent
from ortrain.runtime.base import Exchange
from ortrain.runtime.memory import Ceiling


class ReferenceExecutor:
    """Runs programs on ``onnx.reference``, with its gaps filled (see ``reference_*``)."""

    name = "reference"
    frees = False
    ceiling: Ceiling | None = None
    replays = None

    def __repr__(self) -> str:
        return "ReferenceExecutor()"

    def __str__(self) -> str:
        return "onnx.reference"

    @property
    def exchange(self) -> Exchange:
        """Of tensors with arrays."""
        from ortrain.runtime.arrays import Arrays

        return Arrays

    def keeps(self, node: ir.Node) -> bool:
        """None: it runs what operators mean."""
        return False

    def cheap(self, node: ir.Node) -> bool:
        """What is cheap anywhere."""
        return is_cheap(node)

    def lower(self, program: Program) -> Program:
        """A copy of the program in which ortrain's operators are replaced by their bodies."""
        lowered = program.clone()
        while expand(lowered.graph, opset=lowered.opset):  # a body may hold operators of ours
            pass
        return lowered

    def compile(self, program: Program, *, check_annotations: bool = False) -> ReferenceCompiled:
        """Prepares a program for running.

        Args:
            program: what :meth:`lower` returned, or any program in standard ONNX.
            check_annotations: each run also checks that every value has the dtype and shape that
                the program states for it. A symbolic dimension must have one size throughout.
        """
        return ReferenceCompiled(program, check_annotations=check_annotations)


class _Evaluator(ReferenceEvaluator):
    """With our operators, also inside function bodies and sub-graphs."""

    def __init__(self, proto: Any, **options: Any) -> None:
        options["new_ops"] = [*reference_ops.OPERATORS, *reference_recurrent.OPERATORS]
        super().__init__(proto, **options)
        # Upstream's float attributes are numpy.float32, and arithmetic among them is as coarse.
        for node in self.rt_nodes_:
            for name, value in list(vars(node).items()):
                if isinstance(value, np.float32):
                    setattr(node, name, float(value))


class ReferenceCompiled:
    """A program that is ready to run.

    Attributes:
        inputs: names of the inputs, in the order in which :meth:`run` takes them.
        outputs: names of the outputs, in the order in which :meth:`run` returns them.
        source: none.
    """

    source = ""

    def __init__(self, program: Program, *, check_annotations: bool = False) -> None:
        proto = ir.to_proto(program.model)
        self.inputs = [v.name or "" for v in program.graph.inputs]
        self.outputs = [v.name or "" for v in program.graph.outputs]
        self._evaluator = _Evaluator(proto, check_shape_annotations=check_annotations)

    def run_values(self, feeds: list[np.ndarray]) -> list[np.ndarray]:
        """Runs on arrays, and returns such as nothing else holds."""
        given = {id(array) for array in feeds}
        results = self.run(feeds)
        for i, array in enumerate(results):
            if id(array) in given or array.base is not None:
                results[i] = array.copy()
            given.add(id(results[i]))
        return results

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the program once.

        Args:
            inputs: one array for each graph input, in graph order.

        Returns:
            One array for each graph output, in graph order.

        Raises:
            ExecutionError: the number of inputs is wrong.
        """
        if len(inputs) != len(self.inputs):
            raise ExecutionError(
                f"the program takes {len(self.inputs)} inputs and was given {len(inputs)}",
                because=f"its inputs are {', '.join(self.inputs)}",
            )
        feeds = dict(zip(self.inputs, map(np.asarray, inputs), strict=True))
        # Unsigned arithmetic wraps around on purpose, and 0/0 is as quiet as on any other runtime.
        with np.errstate(all="ignore"):
            results = self._evaluator.run(None, feeds)
        return [np.asarray(value) for value in results]


__all__ = ["ReferenceCompiled", "ReferenceExecutor"]
