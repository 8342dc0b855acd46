"""Sessions of the stock onnxruntime, run without a copy of any tensor.

A call is one ``run_with_ortvaluevector``: the feeds are ``OrtValue``s that share the memory of
whatever made them (6 outputs: 6.4 µs a run and 2 µs to hand them to torch, against 43 µs through
``IOBinding`` and DLPack). Results are allocated by onnxruntime in one arena that all sessions of
the process share, so that what a backward frees serves the next forward.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortrain.autodiff.partition import is_cheap
from ortrain.errors import ExecutionError
from ortrain.passes.fold import LIMIT
from ortrain.program import Program, origin_of
from ortrain.pytorch.sessions import OrtDevice, OrtValueVector, runner_of, value_of
from ortrain.runtime.base import Exchange
from ortrain.runtime.memory import POOLS, Ceiling
from ortrain.runtime.onnxruntime.lowering import lower

# Lowering has decided how each product reads its operands. The other one takes an Expand away
# whose target is nowhere larger than its input, and so one from a size of 1 to none; the passes
# have taken those away that leave the shape as it is.
DISABLED = ["MatmulTransposeFusion", "ExpandElimination"]

# TF32, the default there, has 11 bits: outputs of two small layers were off by 5e-4.
_SETTINGS = {"CUDAExecutionProvider": {"use_tf32": "0"}}

_RUN = onnxruntime.RunOptions()
_RUN.log_severity_level = 4  # what fails is raised, and need not be printed as well
_SHRINKING = onnxruntime.RunOptions()
_OTHER = 'engine="aten" serves reduced precision, onnxruntime has few kernels of it'
_SHRINKING.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
_NODE = re.compile(r"(?:with name |Node[: ]+)'?\(?([^'\s)]+)")
_shared_arena = False


def _is_of_16_bits(program: Program) -> bool:
    """Whether anything is computed in float16 or bfloat16."""
    made = (v.dtype for node in program.graph.all_nodes() for v in node.outputs)
    return any(dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) for dtype in made)


def _origin_in(message: str, program: Program) -> str:
    """The user's line behind the node that a message names; empty where it names none."""
    found = _NODE.search(message)
    named = (n for n in program.graph.all_nodes() if found and n.name == found[1])
    return next((origin_of(node) for node in named), "")


def _share_arena() -> None:
    """Registers one CPU arena for the process, which grows by what is asked."""
    global _shared_arena
    if _shared_arena:
        return
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    arena = onnxruntime.OrtArenaCfg(
        {
            "max_mem": 0,
            "arena_extend_strategy": 1,  # kSameAsRequested
            "initial_chunk_size_bytes": -1,
            "max_dead_bytes_per_chunk": -1,
        }
    )
    onnxruntime.create_and_register_allocator(memory, arena)
    POOLS["onnxruntime"] = _shrink_arena
    _shared_arena = True


def _shrink_arena() -> None:
    """Gives back the free blocks of the shared arena, which onnxruntime does behind a run."""
    _nothing().run(None, {"x": np.zeros((), np.float32)}, _SHRINKING)


@functools.cache
def _nothing() -> onnxruntime.InferenceSession:
    """A session that copies one number."""
    x = ir.Value(name="x", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
    copy = ir.node("Identity", [x])
    graph = ir.Graph([x], copy.outputs, nodes=[copy], opset_imports={"": 21}, name="nothing")
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    options = OnnxRuntimeExecutor(threads=1).session_options()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class Compiled:
    """A session with its names in the order of the program's inputs and outputs."""

    session: onnxruntime.InferenceSession
    input_names: list[str]
    output_names: list[str]
    devices: list[object]
    source: str = ""

    @functools.cached_property
    def runner(self) -> Any:
        """Runs the session on vectors of values."""
        return runner_of(self.session)

    def run_values(self, feeds: list[Any]) -> Any:
        """Runs on values in input order; returns fresh values in output order.

        Raises:
            ExecutionError: onnxruntime refused or failed.
        """
        vector, fetches = OrtValueVector(), OrtValueVector()
        push = vector.push_back
        for value in feeds:
            push(value)
        try:
            self.runner(_RUN, self.input_names, vector, self.output_names, fetches, self.devices)
        except Exception as error:
            because = str(error).strip().splitlines()[0]
            help = (
                "compare the inputs' shapes with those of the capture; ortrain.explain shows "
                "what runs where"
            )
            raise ExecutionError(
                "onnxruntime failed to run the graph",
                because=because,
                help=_OTHER if "Float16" in because else help,
            ) from error
        return fetches

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs on numpy arrays in input order."""
        arrays = [np.asarray(array, order="C") for array in inputs]  # which values do not hold
        return [np.array(value.numpy()) for value in self.run_values([*map(value_of, arrays)])]


class OnnxRuntimeExecutor:
    """Runs programs on one execution provider of the stock onnxruntime.

    Args:
        provider: name of the execution provider.
        threads: threads inside an operator; 0 leaves it to onnxruntime.
    """

    name = "onnxruntime"
    frees = False
    ceiling: Ceiling | None = None
    replays = None

    def __init__(
        self, provider: str = "CPUExecutionProvider", threads: int = 0, *, arena: bool = True
    ) -> None:
        if provider not in onnxruntime.get_available_providers():
            raise ExecutionError(
                f"onnxruntime has no execution provider {provider!r}",
                help=f"this build offers {', '.join(onnxruntime.get_available_providers())}",
            )
        self.provider = provider
        self.threads = threads
        self.arena = arena

    def __str__(self) -> str:
        return f"{self.name} {self.provider}"

    def __repr__(self) -> str:
        return f"OnnxRuntimeExecutor({self.provider!r}, threads={self.threads})"

    @property
    def exchange(self) -> Exchange:
        """Of tensors with sessions."""
        from ortrain.runtime.onnxruntime.exchange import OrtValues

        return OrtValues

    def keeps(self, node: ir.Node) -> bool:
        """None: it has no kernels for gradients."""
        return False

    def cheap(self, node: ir.Node) -> bool:
        """What is cheap anywhere."""
        return is_cheap(node)

    def lower(self, program: Program) -> Program:
        """The program in operators that onnxruntime runs fastest."""
        return lower(program)

    def compile(self, program: Program) -> Compiled:
        """Makes a session of a lowered program.

        Raises:
            ExecutionError: onnxruntime refuses the model.
        """
        _share_arena()
        try:
            session = onnxruntime.InferenceSession(
                program.serialize(),
                self._options_for(program),
                providers=[(self.provider, _SETTINGS.get(self.provider, {}))],
                disabled_optimizers=DISABLED,
                enable_fallback=0,
            )
        except Exception as error:
            other = "compute this in another dtype or with other operators, or leave it to PyTorch"
            if _is_of_16_bits(program):
                other = _OTHER
            raise ExecutionError(
                "onnxruntime refuses the graph",
                where=_origin_in(str(error), program),
                because=str(error).strip().splitlines()[0],
                help=f"{other}; DebugOptions(save_onnx=True, …) writes the graph",
            ) from error
        if self.provider not in session.get_providers():
            raise ExecutionError(
                f"onnxruntime could not load its {self.provider}",
                help="install the libraries that this build of onnxruntime asks for, or leave "
                "Options(provider=) out",
            )
        inputs = [v.name or "" for v in program.graph.inputs]
        outputs = [v.name or "" for v in program.graph.outputs]
        cpu = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
        return Compiled(session, inputs, outputs, [cpu] * len(outputs))

    def _options_for(self, program: Program) -> onnxruntime.SessionOptions:
        options = self.session_options()
        if any(v.dtype == ir.DataType.DOUBLE for n in program.graph.all_nodes() for v in n.outputs):
            # What onnxruntime fuses has its factors and epsilons as float32.
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        return options

    def session_options(self) -> onnxruntime.SessionOptions:
        """The options of a session."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        # A pattern is planned per input shape and holds its peak as one block; single chunks of
        # the shared arena can also serve the outputs.
        options.enable_mem_pattern = False
        if self.arena:
            options.add_session_config_entry("session.use_env_allocators", "1")
        else:
            options.enable_cpu_mem_arena = False
        # The passes have folded what is small. What is large, such as zeros to add to, takes less
        # time to fill anew than memory to keep.
        options.add_session_config_entry(
            "optimization.constant_folding_max_output_size_in_bytes", str(4 * LIMIT)
        )
        # Spinning threads make operators quick to start, but torch's own operators beside us need
        # the cores: stop when the run ends.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return options
