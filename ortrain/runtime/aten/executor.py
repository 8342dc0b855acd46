"""``AtenExecutor``: runs a program as a generated Python function of PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ortrain.autodiff.partition import is_cheap
from ortrain.errors import CheckFailed, ExecutionError
from ortrain.graph import shapes
from ortrain.program import Program, Role
from ortrain.pytorch import kernels
from ortrain.pytorch.kernels import without_autocast_keys
from ortrain.runtime.aten.cutting import cut
from ortrain.runtime.aten.dtypes import DTYPES
from ortrain.runtime.aten.exchange import Tensors
from ortrain.runtime.aten.graphs.recorders import Recorder
from ortrain.runtime.aten.graphs.recordings import Recorded
from ortrain.runtime.aten.hash import spread
from ortrain.runtime.aten.kernels.attention_gradients import is_slow
from ortrain.runtime.aten.lines import render
from ortrain.runtime.aten.lowering import lower
from ortrain.runtime.aten.memory import plan
from ortrain.runtime.aten.modules import MODULES
from ortrain.runtime.aten.table import find
from ortrain.runtime.aten.writer import Writer
from ortrain.runtime.base import Exchange
from ortrain.runtime.memory import Ceiling, from_the_heap, given_back
from ortrain.runtime.reduced import Products, asked_for, has_effect, reduced_products
from ortrain.runtime.replays import Replays


class _Operators:
    """``aten.gelu_backward``: the operator itself, without a choice among its overloads."""

    def __getattr__(self, name: str) -> Any:
        operator, _, overload = name.partition("__")
        found = getattr(getattr(torch.ops.aten, operator), overload or "default")
        setattr(self, name, found)
        return found


ATEN = _Operators()

# Elements of a tensor for which the pages of its memory matter.
_LARGE = 1 << 17

# In bf16 half a step is such passes; what eager keeps, a graph may keep.
_KEPT = {"Gelu", "LayerNormalization", "Where"}


@dataclass(frozen=True)
class AtenCompiled:
    """A program as a Python function.

    Attributes:
        source: of the function.
        function: takes a list of tensors, which it empties, and returns a list.
        input_names: of the tensors that it takes.
        output_names: of those that it returns.
        input_dtypes: in ONNX.
        output_dtypes: in ONNX.
        device: that its tensors are on.
        surroundings: in which it runs.
        streams: by the places of the inputs that it takes
            :func:`~ortrain.runtime.aten.hash.spread` on the device, the streams of that.
        reduced: whether its products of float32 are of operands in bfloat16.
    """

    source: str
    function: Any
    input_names: list[str]
    output_names: list[str]
    input_dtypes: list[ir.DataType | None]
    output_dtypes: list[ir.DataType | None]
    device: torch.device
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext
    streams: Mapping[int, Sequence[int]] = field(default_factory=dict)
    reduced: bool = False

    def run_values(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Runs on tensors in input order, and returns those in output order.

        Args:
            values: emptied, so that the function can free what it has read.

        Raises:
            ExecutionError: PyTorch refused or failed.
        """
        for place, keys in self.keys(values).items():
            values[place] = keys.to(self.device, non_blocking=True)
        return self.call(values)

    def keys(self, values: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What the function takes in the places of seeds, still on the CPU."""
        return {place: spread(values[place], drawn) for place, drawn in self.streams.items()}

    def call(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the function on what it takes, which is emptied.

        Raises:
            ExecutionError: PyTorch refused or failed.
        """
        try:
            # The casts of autocast are in the graph.
            with torch.no_grad(), without_autocast_keys(), self.surroundings():
                if not self.reduced:
                    results: list[torch.Tensor] = self.function(values)
                else:
                    with reduced_products():
                        results = self.function(values)
        except CheckFailed:
            raise
        except Exception as error:
            raise ExecutionError(
                "PyTorch failed to run the graph",
                because=f"{type(error).__name__}: {error}",
                help="compare the inputs' shapes with those of the capture; ortrain.explain shows "
                "what runs where",
            ) from error
        return results

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs on numpy arrays in input order."""
        values = [
            constant(np.array(array), dtype).to(
                "cpu" if place in self.streams else self.device, DTYPES[dtype or ir.DataType.FLOAT]
            )
            for place, (array, dtype) in enumerate(zip(inputs, self.input_dtypes, strict=True))
        ]
        results = self.run_values(values)
        return [
            as_array(tensor, dtype)
            for tensor, dtype in zip(results, self.output_dtypes, strict=True)
        ]


class AtenExecutor:
    """Runs programs in PyTorch, operator by operator, without autograd.

    Args:
        device: that the tensors of the programs are on.
        recorder: records the programs and replays them; None runs them as they are.
        arena: whether memory that is freed stays for the next run, or else goes back to the system.
        ceiling: above which what stays goes back, too.

    Attributes:
        replays: what has come of that; None without a recorder.
        asked: whether it is made where products in bfloat16 are asked for.
        reduced: whether its programs have them: on the CPU, if that multiplies so.
    """

    name = "aten"
    frees = True

    def __init__(
        self,
        device: str | torch.device = "cpu",
        recorder: Recorder | None = None,
        *,
        arena: bool = True,
        ceiling: Ceiling | None = None,
    ) -> None:
        self.device, self.recorder, self.arena = torch.device(device), recorder, arena
        self.ceiling = ceiling
        self.replays = None if recorder is None else Replays()
        self.asked = asked_for()
        self.reduced = self.asked and self.device.type == "cpu" and has_effect()

    def __str__(self) -> str:
        products = ""
        if self.reduced:
            products = ", float32 multiplied in bfloat16"
        elif self.asked:
            products = ", float32 multiplied as such: bfloat16 takes a CPU with AMX"
        return f"{self.name} on {self.device}{products}"

    def __repr__(self) -> str:
        return f"AtenExecutor({str(self.device)!r})"

    @property
    def exchange(self) -> Exchange:
        """Of tensors with functions of tensors."""
        return Tensors

    def keeps(self, node: ir.Node) -> bool:
        """Those that PyTorch has a kernel for, and a fast one."""
        slow = self.device.type == "cpu" and is_slow(node)
        return find(node) is not None and not slow

    def cheap(self, node: ir.Node) -> bool:
        """What is cheap anywhere but the passes that PyTorch keeps the results of, too."""
        return is_cheap(node) and node.op_type not in _KEPT

    def lower(self, program: Program) -> Program:
        """The program in operators that PyTorch has kernels for."""
        return lower(program)

    def compile(self, program: Program) -> AtenCompiled | Recorded:
        """Writes the function of a lowered program.

        Raises:
            ExecutionError: an operator has no kernel.
        """
        plain = self._written(program)
        if self.recorder is None or self.replays is None:
            return plain
        return Recorded(plain, program.graph, self.recorder, self.replays)

    def _written(self, program: Program) -> AtenCompiled:
        """The function of a lowered program."""
        writer = Writer(program, self.device)
        block = writer.write()
        if self.device.type == "cpu":
            cut(block, writer.name)
        plan(block, writer.constants.values())
        large = self.device.type == "cpu" and _is_large(program)
        trains = bool(program.inputs(Role.SAVED) or program.outputs(Role.SAVED))
        ceiling = self.ceiling if large and trains else None
        source = render(block, inputs="values", watched=ceiling is not None)
        scope: dict[str, Any] = {
            "torch": torch,
            "aten": ATEN,
            "nn": kernels.nn,
            **MODULES,
            **({"blas": Products} if self.reduced else {}),
            "ceiling": ceiling,
            "inf": float("inf"),
            "nan": float("nan"),
            "device": self.device,
            **writer.keepers,
        }
        for name, tensor in writer.constants.items():
            scope[name] = constant(tensor.array, tensor.dtype).to(self.device)
        exec(compile(source, f"<ortrain {block.name}>", "exec"), scope)
        inputs = list(program.graph.inputs)
        surroundings: Callable[[], AbstractContextManager[None]] = nullcontext
        if large:
            surroundings = from_the_heap if self.arena else given_back
        if ceiling is not None and not program.inputs(Role.SAVED):
            surroundings = partial(_begun, ceiling)
        return AtenCompiled(
            source,
            scope[block.name],
            [v.name or "" for v in inputs],
            [v.name or "" for v in program.graph.outputs],
            [v.dtype for v in inputs],
            [v.dtype for v in program.graph.outputs],
            self.device,
            surroundings,
            {
                place: tuple(writer.streams[operand])
                for place, operand in enumerate(writer.block.parameters)
                if operand in writer.streams
            },
            self.reduced,
        )


@contextmanager
def _begun(ceiling: Ceiling) -> Iterator[None]:
    """A step begins, which runs from the heap."""
    ceiling.begin()
    with from_the_heap():
        yield


def _is_large(program: Program) -> bool:
    """Whether there are tensors that the C library would not take from its heap."""
    values = [*program.graph.inputs, *program.graph.outputs]
    return any((shapes.size(v) or 0) >= _LARGE for v in values)


def constant(array: Any, dtype: ir.DataType | None) -> torch.Tensor:
    """A constant of a program as a tensor; unsigned numbers by their bits."""
    if dtype is ir.DataType.BFLOAT16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    signed = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}.get(array.dtype.name)
    return torch.from_numpy(np.array(array if signed is None else array.view(signed)))


def as_array(tensor: torch.Tensor, dtype: ir.DataType | None) -> np.ndarray:
    """A result as numpy has it: the reverse of :func:`constant`."""
    if dtype is None or tensor.dtype != DTYPES[dtype] or dtype not in _BITS:
        return tensor.cpu().numpy()
    return tensor.view(_BITS[dtype]).cpu().numpy().view(dtype.numpy())


# What numpy and PyTorch hand to each other as other numbers of the same bits.
_BITS = {
    ir.DataType.BFLOAT16: torch.int16,
    ir.DataType.UINT16: torch.int16,
    ir.DataType.UINT32: torch.int32,
    ir.DataType.UINT64: torch.int64,
}

__all__ = ["AtenCompiled", "AtenExecutor"]
