"""Graphs that nobody of ours has written answer as before, whatever is optimized of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer
from tests.breadth import sampled
from tests.deploy.optimization.foreign import Foreign, drawn

GROUP = 8
GROUPS = range(100)
# Of each dtype: sums are in another order, and the GELU of O3 is an approximation.
ATOL = {np.float16: 4e-2, np.float32: 3e-4, np.float64: 1e-7}
APPROXIMATED = 2e-2


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def assert_kept(graph: Foreign, folder: Path, *, external: bool) -> int:
    """How many levels were compared; none where onnxruntime itself does not run the graph."""
    path = graph.save(folder / "before", external=external)
    try:
        runner = session(path)
        before = [runner.run(None, feeds) for feeds in graph.feeds]
    except Exception:  # no kernel for the type, or shapes that contradict each other
        return 0
    names = [(v.name, v.type) for v in (*runner.get_inputs(), *runner.get_outputs())]
    for level in ("O1", "O2", "O3"):
        config = AutoOptimizationConfig.with_optimization_level(level)
        ORTOptimizer.from_pretrained(path).optimize(config, folder / level)
        after = session(folder / level / "model_optimized.onnx")
        assert [(v.name, v.type) for v in (*after.get_inputs(), *after.get_outputs())] == names
        for feeds, expected in zip(graph.feeds, before, strict=True):
            for x, y in zip(after.run(None, feeds), expected, strict=True):
                rough = APPROXIMATED if level == "O3" and x.dtype != np.float64 else 0.0
                top = float(np.abs(y[np.isfinite(y)]).max(initial=1.0))
                atol = max(ATOL[graph.dtype], rough) * top
                np.testing.assert_allclose(x, y, atol=atol, rtol=0)
    return 3


@pytest.mark.parametrize("group", sampled(GROUPS, GROUPS[:6]))
def test_graphs_of_any_spelling_answer_as_before(tmp_path: Path, group: int) -> None:
    compared = 0
    for seed in range(group * GROUP, (group + 1) * GROUP):
        graph = drawn(seed)
        try:
            compared += assert_kept(graph, tmp_path / str(seed), external=seed % 3 == 0)
        except Exception as error:
            error.add_note(f"graph {seed}: {'; '.join(graph.told)}")
            raise
    assert compared >= GROUP
