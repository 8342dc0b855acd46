"""Small programs for tests: a function over values becomes a ``Program``."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.program import Program, Role, set_role
from ortrain.runtime.reference import ReferenceExecutor


def program(body, shapes, *, opset=21, dtype=np.float32, dtypes=None):
    """The program of a function.

    Args:
        body: ``body(op, **inputs)`` returns a value, or a dict of outputs by name.
        shapes: of each input; a string is a symbolic dimension.
        opset: of the standard domain.
        dtype: of every input, but for those in ``dtypes``.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset, "ortrain": 1}, name="test")
    inputs = {}
    for name, shape in shapes.items():
        kind = ir.DataType.from_numpy(np.dtype((dtypes or {}).get(name, dtype)))
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
        role = Role.PARAMETER if kind.is_floating_point() else Role.USER_INPUT
        graph.inputs.append(set_role(value, role))
        inputs[name] = value
    with Builder(graph, opset=opset, prefix="forward") as op:
        results = body(op, **inputs)
    if isinstance(results, ir.Value):
        results = {"y": results}
    for name, value in results.items():
        if value.producer() is not None:
            value.name = name
        graph.outputs.append(set_role(value, Role.USER_OUTPUT))
    return Program(ir.Model(graph, ir_version=10))


def run(subject, feeds):
    """Outputs by name, from the reference executor."""
    executor = ReferenceExecutor()
    compiled = executor.compile(executor.lower(subject), check_annotations=True)
    values = compiled.run([np.asarray(feeds[name]) for name in compiled.inputs])
    return dict(zip(compiled.outputs, values, strict=True))
