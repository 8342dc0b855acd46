"""Writes the Python function of a program: one line a call of PyTorch, in the program's order.

Kernels say what is called (:mod:`~ortrain.runtime.aten.table`); this file keeps the lines
(:mod:`~ortrain.runtime.aten.lines`), the names and the constants. What is freed where, and which
line may write into its operand, is planned over the finished lines
(:mod:`~ortrain.runtime.aten.memory`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ortrain.errors import ExecutionError, OrtrainError
from ortrain.graph import shapes
from ortrain.graph.shapes import FLOATING, Dim
from ortrain.graph.walk import SIZES, reads
from ortrain.ops.base import attributes_of
from ortrain.program import Program, Role, origin_of, role_of
from ortrain.runtime.aten import hash, host
from ortrain.runtime.aten.images import RANK, channels_last, images_of
from ortrain.runtime.aten.lines import Block, Line, Raw
from ortrain.runtime.aten.modules import MODULES
from ortrain.runtime.aten.operands import Host, Operand, Size, Tensor
from ortrain.runtime.aten.operators import ARITHMETIC, CONTIGUOUS, ELEMENTWISE, TAKES_NUMBERS, VIEWS
from ortrain.runtime.aten.table import find, named

# What generated code calls.
_RESERVED = [*MODULES, *"torch aten nn values rows abs bool float int max min".split()]
_KEYWORDS = frozenset(
    "False None True and as assert async await break class continue def del elif else except "
    "finally for from global if import in is lambda nonlocal not or pass raise return try while "
    "with yield inf nan device".split()
)


class _Namespace:
    """``t.aten.gelu_backward(…)``: writes a call of an ATen operator by its own name.

    ``t.nn.gelu(…)`` is one of what ``torch.nn.functional`` calls, at half the cost of ``t.aten``'s.
    """

    def __init__(self, writer: Writer, name: str) -> None:
        self._writer, self._name = writer, name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._writer.call(f"{self._name}.{name}", *args, **kwargs)


class Writer:
    """Writes one program as a function.

    Attributes:
        values: the operand of each of the program's values.
        constants: tensors by their names in the function.
        keepers: what the function keeps from call to call, by their names in it.
        opset: of the program.
        device: that the function's tensors are on.
        streams: by the inputs that the function takes :func:`~ortrain.runtime.aten.hash.spread`
            instead of, the streams that are drawn from them.
        images: values of the program that lie with their channels last.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program, self.opset, self.device = program, program.opset, device
        self.values: dict[ir.Value, Operand] = {}
        self.constants: dict[str, Tensor] = {}
        self.keepers: dict[str, object] = {}
        self.aten, self.nn = _Namespace(self, "aten"), _Namespace(self, "nn")
        self.symbols: dict[str, int | Size] = {}
        self._names: set[str] = set(_RESERVED)
        self._numbers = 0
        self._origin = ""
        self.block = Block("run", [])
        self._named: set[Tensor] = set()
        self._input_symbols: dict[str, tuple[Tensor, int]] = {}
        self._prologue: list[Line] = []
        self.streams: dict[Tensor, list[int]] = {}
        self.images: frozenset[ir.Value] = frozenset()
        self._unordered: set[ir.Value] = set()
        self._mixed: dict[Tensor, Tensor] = {}

    # -- the walk ------------------------------------------------------------------------------

    def write(self) -> Block:
        """The lines of the program.

        Raises:
            ExecutionError: an operator has no kernel, or not in this form.
        """
        graph = self.program.graph
        self.images = channels_last(graph, self.device)
        for value in graph.inputs:
            operand = self.parameter(value)
            for axis, dim in enumerate(operand.dims or ()):
                if isinstance(dim, str):
                    self._input_symbols.setdefault(dim, (operand, axis))
            if hash.on_device(self.device) and _is_for_draws(value):
                self.streams[operand] = []
        self._unordered = {  # what was saved is in the order that the forward gave it
            v for v in graph.inputs if v in self.images and role_of(v) is not Role.SAVED
        }
        self.nodes(graph)
        self.block.results = self._results(graph)
        self.block.lines[:0] = self._prologue
        return self.block

    def _results(self, graph: ir.Graph) -> list[Tensor]:
        """What the function returns: contiguous, and nothing that shares memory with anything.

        What is saved for the backward may lie as it likes, and in what else is saved.
        """
        found = [self.tensor(self.operand(v)) for v in graph.outputs]
        saved = [role_of(v) is Role.SAVED for v in graph.outputs]
        taken = self.lasting.union(*(t.roots for t in self.block.parameters))
        taken_by_others: set[str] = {
            r for t, s in zip(found, saved, strict=True) if s for r in t.roots
        }
        results = []
        for tensor, is_saved in zip(found, saved, strict=True):
            if tensor.is_context:
                pass
            elif tensor.roots & (taken if is_saved else taken | taken_by_others):
                dtype, dims = tensor.dtype, tensor.dims
                tensor = tensor.clone(memory_format=Raw("torch.contiguous_format"))
                tensor.dtype, tensor.dims = dtype, dims
            elif not is_saved and not tensor.is_contiguous:
                dims = tensor.dims
                tensor = tensor.contiguous()
                if dims is not None and len(dims) == RANK and dims[1] == 1:
                    # Of one channel both orders are contiguous, and who reads it goes by strides.
                    tensor = tensor.view([-1]).view([*tensor.shape])
            if not is_saved:
                taken_by_others |= tensor.roots
            results.append(tensor)
        return results

    @property
    def lasting(self) -> frozenset[str]:
        """The roots of what is there from call to call: the constants."""
        return frozenset().union(*(t.roots for t in self.constants.values()))

    def parameter(self, value: ir.Value) -> Tensor:
        """A parameter of the function, for an input of the graph."""
        tensor = self.own(Tensor(self, self.name(value.name or "x"), value.dtype))
        tensor.dims = shapes.dims(value)
        self.block.parameters.append(tensor)
        self._named.add(tensor)
        self.values[value] = tensor
        return tensor

    def nodes(self, graph: ir.Graph) -> None:
        """Writes the nodes of a graph."""
        for value in graph.initializers.values():
            self.operand(value)
        for node in graph:
            if self._unordered and self.block.outer is None and node.op_type not in SIZES:
                self._order_what_is_read(node)
            self._node(node)

    def _order_what_is_read(self, node: ir.Node) -> None:
        """Copies images among the inputs to the order of the others, before their first reader."""
        for value in reads(node):
            if value in self._unordered:
                self._unordered.remove(value)
                self.values[value] = self._with_channels_last(self.tensor(self.operand(value)))

    def _node(self, node: ir.Node) -> None:
        self._origin = origin_of(node)
        if node.op_type == "Constant" and shapes.constant(node.outputs[0]) is not None:
            return  # where it is read
        inputs = [None if v is None else self.operand(v) for v in node.inputs]
        try:
            results = self._computed(node, inputs)
        except OrtrainError:
            raise
        except AssertionError as error:  # a rank that is not known
            raise self.refusal(node, str(error)) from error
        except Exception as error:  # another form than the kernel was written for
            because = f"its kernel fails on this form: {type(error).__name__}: {error}"
            raise self.refusal(node, because) from error
        if not isinstance(results, (tuple, list)):
            results = (results,)
        ordered = set(images_of(node)) if self.images else set()
        for value, result in zip(node.outputs, results, strict=False):
            if value in self.images and value not in ordered and result is not None:
                result = self._with_channels_last(self.tensor(result))
            self._bind(value, result)

    def _with_channels_last(self, image: Tensor) -> Tensor:
        """An image as convolutions want it: itself where it already lies so."""
        if image.dims is not None and image.dims[1] == 1:
            # Of one channel both orders are the same, and PyTorch goes by the strides.
            batch, _, *area = image.shape
            rows = image if image.is_contiguous else image.contiguous()
            result = rows.view([batch, *area, 1]).permute([0, 3, 1, 2])
        else:
            result = image.contiguous(memory_format=Raw("torch.channels_last"))
        result.dtype, result.dims, result.is_contiguous = image.dtype, image.dims, False
        return result

    def _for_kernel(self, node: ir.Node, operand: Operand | None) -> Operand | None:
        """Kernels meet hosts of whole numbers, in arithmetic of any number, and as conditions."""
        if not isinstance(operand, Host) or operand.dtype in host.WHOLE:
            return operand
        if node.op_type in host.CONDITIONAL:
            return operand
        if operand.is_scalar and operand.dtype in FLOATING and node.op_type in host.ARITHMETIC:
            return operand
        return self.tensor(operand)

    def _computed(self, node: ir.Node, inputs: list[Operand | None]) -> Any:
        known = host.evaluate(self, node, inputs)
        if known is not None:
            return known
        function = find(node)
        if function is None:
            raise self.refusal(node, "PyTorch's executor has no kernel for it")
        attributes = attributes_of(node)
        inputs = [self._for_kernel(node, operand) for operand in inputs]
        if "node" in inspect.signature(function).parameters:
            attributes["node"] = node
        return function(self, *inputs, **attributes)

    def refusal(self, node: ir.Node, because: str) -> ExecutionError:
        """The error for a node that cannot be written."""
        return ExecutionError(
            f"no kernel of PyTorch's executor serves {named(node)!r}",
            where=origin_of(node),
            because=because,
            help='engine="onnxruntime" runs it',
        )

    def _bind(self, value: ir.Value, result: Operand | None) -> None:
        if result is None:
            return
        if isinstance(result, Tensor):
            if result not in self._named and result.array is None:
                result.name = self.name(value.name or "x")
                self._named.add(result)
                if result.dtype is None:
                    result.dtype = value.dtype
            known = shapes.dims(value)
            if result.dims is None:
                result.dims = known
            elif known is not None and len(known) == len(result.dims):
                result.dims = tuple(
                    k if not isinstance(d, int) and k is not None else d
                    for d, k in zip(result.dims, known, strict=True)
                )
        self.values[value] = result

    def operand(self, value: ir.Value) -> Operand:
        """The operand of a value."""
        known = self.values.get(value)
        if known is None:
            array = shapes.constant(value)
            assert array is not None, f"{value.name} is read before it is made"
            known = self.values[value] = self.constant(array, value.name or "constant", value.dtype)
        return known

    # -- operands ------------------------------------------------------------------------------

    def name(self, wanted: str) -> str:
        """A name of the function that is not taken."""
        base = re.sub(r"\W+", "_", wanted).strip("_") or "x"
        if base[0].isdigit() or base in _KEYWORDS:
            base = f"_{base}"
        name, number = base, 1
        while name in self._names:
            number += 1
            name = f"{base}_{number}"
        self._names.add(name)
        return name

    def constant(
        self, array: Any, name: str = "constant", dtype: ir.DataType | None = None
    ) -> Operand:
        """A constant; one of few whole numbers is a row of Python ints."""
        array = np.asarray(array)
        dtype = dtype or ir.DataType.from_numpy(array.dtype)
        if dtype in (ir.DataType.INT64, ir.DataType.INT32) and array.ndim <= 1 and array.size <= 64:
            items: list[int | Size] = [int(i) for i in array.reshape(-1)]
            return Host(items, array.ndim == 0, dtype)
        return self.constant_tensor(array, name, dtype)

    def constant_tensor(
        self, array: np.ndarray, name: str = "constant", dtype: ir.DataType | None = None
    ) -> Tensor:
        """A constant tensor."""
        tensor = self.own(
            Tensor(self, self.name(name), dtype or ir.DataType.from_numpy(array.dtype))
        )
        tensor.dims, tensor.array = tuple(array.shape), array
        self.constants[tensor.name] = tensor
        return tensor

    def keeper(self, name: str, keeper: object) -> Raw:
        """An object of the function's own, which lasts from call to call."""
        own = self.name(name)
        self.keepers[own] = keeper
        return Raw(own)

    def tensor(self, operand: Operand) -> Tensor:
        """The operand as a tensor."""
        if isinstance(operand, Tensor):
            return operand
        if operand.tensor is None:
            known = operand.known
            if known is not None:
                array = np.array(known, operand.dtype.numpy()).reshape(operand.shape)
                operand.tensor = self.constant_tensor(array, "sizes", operand.dtype)
            else:
                items = operand.items[0] if operand.is_scalar else operand.items
                on: dict[str, Any] = {"dtype": operand.dtype, "device": Raw("device")}
                if operand.is_scalar and self.device.type != "cpu":  # a kernel, and no copy
                    made = self.call("torch.full", [], items, **on)
                else:
                    made = self.call("torch.tensor", items, **on)
                if operand.sizes is not None:
                    made = made.view(operand.sizes)
                made.dims, made.dtype = operand.shape, operand.dtype
                if self.block.outer is None:  # inside another one it is not there later
                    operand.tensor = made
                return made
        return operand.tensor

    def ints(self, operand: Operand | list[int], count: int | None = None) -> list[int | Size]:
        """The numbers in an operand, as Python ints of the running function.

        Args:
            operand: a scalar or a vector; or an attribute of ints, as it is.
            count: of the numbers, where it is known.
        """
        if isinstance(operand, list):
            return [*operand]
        if isinstance(operand, Host):
            return operand.items
        if operand.array is not None:
            return [int(i) for i in operand.array.reshape(-1)]
        assert operand.dims is not None
        if operand.dims == ():
            number = Size(self.name("size"))
            self._line([number], ".item", operand)
            return [number]
        (length,) = operand.dims
        count = length if isinstance(length, int) else count
        if count is None:
            raise ExecutionError("the number of sizes is not known", where=self._origin)
        found = [Size(self.name("size")) for _ in range(count)]
        self._line(list(found), ".tolist", operand, is_tuple=True)
        return list(found)

    def number(self, operand: Operand) -> Any:
        """A Python number where the operand is a known scalar, else the operand."""
        if isinstance(operand, Host):
            return operand.items[0] if operand.is_scalar else operand
        return operand if operand.scalar is None else operand.scalar

    def seed(self, operand: Operand, stream: int) -> Any:
        """What a draw of a stream takes as its seed.

        On a device that mixes numbers itself, those of all streams at once: the function is given
        their keys, one copy a run, and reads no number of the host's.
        """
        if not hash.on_device(self.device):
            return self.number(operand)
        if not isinstance(operand, Tensor) or operand not in self.streams:
            return self.call("hash.streams", self.number(operand), [stream], Raw("device"))
        numbers = self.streams[operand]
        if operand not in self._mixed:
            mixed = self._mixed[operand] = self.own(Tensor(self, self.name("streams")))
            # The row is complete once all is written.
            self._prologue.append(Line([mixed], "hash.Streams", (operand, numbers)))
        if stream not in numbers:
            numbers.append(stream)
        return self._mixed[operand]

    def scalar(self, operand: Any) -> Any:
        """An operand as it is cheapest where both a tensor and a Python number will do.

        On the CPU a constant of rank 0 stays a tensor: `torch.mul(x, c)` takes 3 us less than
        `torch.mul(x, 0.5)`. On a GPU it is a number, which no kernel has to load.
        """
        if isinstance(operand, Host) and operand.is_scalar and operand.known is None:
            return operand.items[0]
        if self.device.type == "cpu" or not isinstance(operand, (Tensor, Host)):
            return operand
        return self.number(operand)

    def size(self, tensor: Tensor, axis: int) -> int | Size:
        """Of one axis of a tensor."""
        axis %= tensor.rank
        assert tensor.dims is not None
        dim = tensor.dims[axis]
        if isinstance(dim, int):
            return dim
        if dim in self.symbols:
            return self.symbols[dim]
        block: Block | None = self.block
        while block is not None:
            if (tensor, axis) in block.sizes:
                return block.sizes[tensor, axis]
            block = block.outer
        size = Size(self.name(dim if dim is not None and dim.isidentifier() else "size"))
        if dim is not None and dim in self._input_symbols:
            source, place = self._input_symbols[dim]
            line = Line([size], "=", (source, Raw(f".shape[{place}]")))
            self._prologue.append(line)
            self.symbols[dim] = size
            return size
        self.block.lines.append(Line([size], "=", (tensor, Raw(f".shape[{axis}]"))))
        self.block.sizes[tensor, axis] = size
        return size

    def bound(self, size: Size) -> Size:
        """A variable for an expression, which is not to be computed wherever it is read."""
        name = Size(self.name("size"))
        self._line([name], "=", Raw(size.text))
        return name

    # -- calls ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``t.relu(x)``: writes a call of ``torch.relu``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.call(f"torch.{name}", *args, **kwargs)

    def at(self, tensor: Tensor, *places: str | Tensor) -> Tensor:
        """Writes ``tensor[places]``: a view by slices and numbers, and a copy by tensors.

        Args:
            tensor: that is read.
            places: source such as ``1:3``, or tensors of indices.
        """
        result = self.own(Tensor(self, self._temporary()))
        if all(isinstance(place, str) for place in places):
            result.roots = tensor.roots
        parts: list[Any] = [Raw("[")]
        for place in places:
            parts += [Raw(place) if isinstance(place, str) else place, Raw(", ")]
        self._line([result], "=", tensor, *parts[:-1], Raw("]"))
        return result

    def call(
        self, function: str, *args: Any, outputs: int = 1, is_tuple: bool = False, **kwargs: Any
    ) -> Any:
        """Writes a call.

        Args:
            function: ``torch.relu``, ``aten.gelu_backward``, ``.view``.
            args: operands, sizes, numbers, dtypes, rows of them, and None.
            outputs: of the call: one is a tensor, several are a tuple.
            is_tuple: one is a tuple, too.
            kwargs: of the call.

        Returns:
            The result, or a tuple of results.
        """
        name = function.rpartition(".")[2]
        if name in TAKES_NUMBERS and len(args) > 1 and not isinstance(args[0], Host):
            args = (args[0], *(self.scalar(a) for a in args[1:]))
        args = tuple(self._settled(a) for a in args)
        kwargs = {key: self._settled(a) for key, a in kwargs.items()}
        results = []
        for _ in range(outputs):
            result = Tensor(self, self._temporary())
            first = args[0] if args else None
            if name in VIEWS and isinstance(first, Tensor):
                result.roots = first.roots
            else:
                self.own(result)
            operands = [a for a in args if isinstance(a, Tensor)]
            if name in ELEMENTWISE and operands:
                result.dims = shapes.broadcast(*(a.dims for a in operands))
            if name in ARITHMETIC and len({a.dtype for a in operands}) == 1:
                result.dtype = operands[0].dtype
            if name == "cat":  # of images with their channels last the result is such a one
                result.is_contiguous = all(
                    a.is_contiguous or (a.dims is not None and len(a.dims) < RANK) for a in args[0]
                )
            else:
                result.is_contiguous = name in CONTIGUOUS or (
                    name in ELEMENTWISE and all(a.is_contiguous for a in operands)
                )
            results.append(result)
        self._line(list(results), function, *args, is_tuple=is_tuple or outputs > 1, **kwargs)
        return tuple(results) if is_tuple or outputs > 1 else results[0]

    def _temporary(self) -> str:
        """A name for what no value of the program is."""
        while True:
            self._numbers += 1
            name = f"t{self._numbers}"
            if name not in self._names:
                self._names.add(name)
                return name

    def _line(
        self,
        targets: list[Tensor | Size],
        function: str,
        *args: Any,
        is_tuple: bool = False,
        **kwargs: Any,
    ) -> None:
        line = Line(targets, function, args, kwargs, is_tuple=is_tuple, origin=self._origin)
        self.block.lines.append(line)

    def _settled(self, value: Any) -> Any:
        """An argument with tensors for the rows of numbers that stand for operands."""
        if isinstance(value, Host):
            return self.tensor(value)
        if isinstance(value, (list, tuple)):
            return [self._settled(item) for item in value]
        return value

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor that shares its memory with no other."""
        tensor.roots = frozenset([tensor.name])
        return tensor

    # -- sub-graphs ----------------------------------------------------------------------------

    def function(
        self,
        graph: ir.Graph,
        name: str,
        results: Callable[[list[Operand]], list[Any]] | None = None,
        given: Mapping[ir.Value, Operand] | None = None,
        dims: Mapping[ir.Value, tuple[Dim, ...] | None] | None = None,
    ) -> Block:
        """Writes a sub-graph as a function of its own, which reads what is around it.

        Args:
            graph: the sub-graph; its inputs are the parameters.
            name: of the function.
            results: what it returns, of the operands of the graph's outputs; those by default.
            given: operands of inputs that are no parameters.
            dims: of inputs whose shape the graph does not say.
        """
        outer, self.block = self.block, Block(self.name(name), [], self.block)
        self.values |= given or {}
        try:
            for value in graph.inputs:
                if value not in self.values:
                    entry = self.parameter(value)
                    entry.dims = (dims or {}).get(value) if entry.dims is None else entry.dims
            self.nodes(graph)
            found = [self.operand(v) for v in graph.outputs]
            self.block.results = (
                [self.tensor(o) for o in found] if results is None else results(found)
            )
            body = self.block
        finally:
            self.block = outer
        self.block.lines.append(Line([], "def", body=body, origin=self._origin))
        return body


def _is_for_draws(value: ir.Value) -> bool:
    """Whether an input is a seed that nothing but draws reads."""
    draws = {"Dropout", *(f"Random{kind}" for kind in _DRAWN)}
    uses = list(value.uses())
    return (
        bool(uses)
        and not value.is_graph_output()
        and all(n.domain == "ortrain" and n.op_type in draws and at == 1 for n, at in uses)
    )


_DRAWN = ("Bits", "Uniform", "Normal", "Exponential", "Bernoulli")
