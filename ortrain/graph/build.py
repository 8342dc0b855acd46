"""``Builder``: emits ONNX nodes as if they were function calls and arithmetic.

::

    with Builder(graph, prefix="softmax_grad") as op:
        dx = y * (dy - op.ReduceSum(dy * y, [axis], keepdims=1))

Python numbers become constants of the dtype of the values beside them, lists of integers become
``int64`` tensors, and equal constants are shared. Every value gets its dtype, and its shape as far
as :mod:`ortrain.graph.shapes` can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.program import ORIGIN, PHASE, REGION, Phase, origin_of, phase_of, region_of

Operand = ir.Value | int | float | bool | Sequence[int] | np.ndarray | None

# Operators whose inputs share one dtype, by the positions that share it (None = all of them).
# A bare Python number at such a position takes the dtype of the first value among them.
_SAME_TYPE: dict[str, tuple[int, ...] | None] = {
    "Where": (1, 2),
    "ScatterND": (0, 2),
    "ScatterElements": (0, 2),
    "Pad": (0, 2),
    "OneHot": (2,),
}
# Positions that always take int64 (or what is given as an array).
_INT64 = {
    ("Reshape", 1), ("Expand", 1), ("Slice", 1), ("Slice", 2), ("Slice", 3), ("Slice", 4),
    ("Unsqueeze", 1), ("Squeeze", 1), ("ReduceSum", 1), ("ReduceMean", 1), ("ReduceMax", 1),
    ("ReduceMin", 1), ("ReduceProd", 1), ("ReduceL2", 1), ("ReduceL1", 1), ("Split", 1),
    ("Tile", 1), ("Pad", 1), ("Pad", 3), ("Gather", 1), ("GatherND", 1), ("GatherElements", 1),
    ("ScatterND", 1), ("ScatterElements", 1), ("ConstantOfShape", 0), ("TopK", 1),
    ("CumSum", 1), ("Trilu", 1), ("OneHot", 0), ("OneHot", 1), ("ReduceSumSquare", 1),
    ("ReduceLogSumExp", 1), ("CenterCropPad", 1), ("MaxUnpool", 2), ("Col2Im", 1), ("Col2Im", 2),
}  # fmt: skip

_NARROW = (ir.DataType.FLOAT16.numpy(), ir.DataType.BFLOAT16.numpy())


class Builder:
    """Emits nodes into a graph, or collects them where ``graph`` is None.

    Args:
        graph: where nodes are appended; None collects them in :attr:`nodes` only.
        opset: of the standard domain: rules look at :attr:`opset` where a form depends on it.
        prefix: start of the names of the emitted values; names are deterministic.
        phase: written into every node.
        origin: the user's module path and source line, written into every node.
        region: the checkpointed region, written into every node.
        constants: shared pool of constants: (dtype, shape, bytes) → value.
        at: nodes are inserted before this node of the graph instead of appended.

    Attributes:
        nodes: what was emitted.
        rounded: constants in float16 or bfloat16 that were other numbers before.
    """

    def __init__(
        self,
        graph: ir.Graph | None = None,
        *,
        opset: int = 21,
        prefix: str = "",
        phase: Phase = Phase.FORWARD,
        origin: str = "",
        region: str = "",
        constants: dict[tuple[Any, ...], ir.Value] | None = None,
        at: ir.Node | None = None,
    ) -> None:
        self.graph = graph
        self.opset = opset
        self.prefix = prefix
        self.phase = phase
        self.origin = origin
        self.region = region
        self.at = at
        self.nodes: list[ir.Node] = []
        self.rounded: set[ir.Value] = set()
        self.constants: dict[tuple[Any, ...], ir.Value] = {} if constants is None else constants
        self._outer: list[Any] = []
        self._owner_of_constants: Builder | None = None

    @classmethod
    def before(
        cls,
        node: ir.Node,
        *,
        opset: int,
        prefix: str = "",
        constants: dict[tuple[Any, ...], ir.Value] | None = None,
    ) -> Builder:
        """A builder that puts nodes before one of a graph, with its phase, origin and region.

        Args:
            node: of a graph.
            opset: of the standard domain.
            prefix: start of the names of the emitted values; by default that of the node's output.
            constants: shared pool of constants.
        """
        owner = node.graph
        assert isinstance(owner, ir.Graph)
        return cls(
            owner,
            opset=opset,
            prefix=prefix or node.outputs[0].name or node.name or node.op_type,
            phase=phase_of(node),
            origin=origin_of(node),
            region=region_of(node),
            constants=constants,
            at=node,
        )

    def subgraph(self, name: str, inputs: Sequence[ir.Value] = ()) -> Builder:
        """A builder of a body of ``If``, ``Loop`` or ``Scan``; its constants lie in this graph.

        Args:
            name: of the body; with this builder's prefix, the start of the names in it.
            inputs: of the body.
        """
        prefix = f"{self.prefix}/{name}" if self.prefix else name
        inner = Builder(
            ir.Graph(list(inputs), [], nodes=[], name=prefix),
            opset=self.opset,
            prefix=prefix,
            phase=self.phase,
            origin=self.origin,
            region=self.region,
        )
        inner._owner_of_constants = self
        return inner

    def returning(self, *outputs: ir.Value) -> ir.Graph:
        """The graph that is built, with these values as its next outputs."""
        assert isinstance(self.graph, ir.Graph)
        self.graph.outputs.extend(outputs)
        return self.graph

    # -- nodes -------------------------------------------------------------------------------

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def emit(*operands: Operand, **attributes: Any) -> Any:
            return self.node(op_type, operands, **attributes)

        return emit

    def node(
        self,
        op_type: str,
        operands: Iterable[Operand],
        *,
        domain: str = "",
        outputs: int = 1,
        name: str | None = None,
        **attributes: Any,
    ) -> Any:
        """Emits one node.

        Returns:
            The output value, or a tuple of them where ``outputs`` is above 1.
        """
        inputs = self._operands(op_type, list(operands), domain)
        while inputs and inputs[-1] is None:
            inputs.pop()
        node = ir.Node(
            domain,
            op_type,
            inputs,
            [_attribute(name, value) for name, value in attributes.items() if value is not None],
            num_outputs=outputs,
        )
        node.metadata_props[PHASE] = self.phase.value
        if self.origin:
            node.metadata_props[ORIGIN] = self.origin
        if self.region:
            node.metadata_props[REGION] = self.region
        if name:
            node.outputs[0].name = name
        elif self.prefix:
            node.outputs[0].name = f"{self.prefix}/{op_type}_{len(self.nodes)}"
            for i, value in enumerate(node.outputs[1:], 1):
                value.name = f"{self.prefix}/{op_type}_{len(self.nodes)}_{i}"
        infer = (
            shapes.infer if domain in ("", "com.microsoft") else _operator_types(domain, op_type)
        )
        infer(node)
        self.nodes.append(node)
        if self.graph is not None:
            if self.at is None:
                self.graph.append(node)
            else:
                self.graph.insert_before(self.at, node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def discard(self) -> None:
        """Takes back the nodes that were emitted; constants, which others may share, stay."""
        kept = [node for node in self.nodes if node.op_type == "Constant"]
        if self.graph is not None:
            gone = [node for node in self.nodes if node.op_type != "Constant"]
            self.graph.remove(gone, safe=True)
        self.nodes[:] = kept
        self.rounded.clear()

    # -- constants ---------------------------------------------------------------------------

    def constant(self, value: Any, dtype: ir.DataType | np.dtype | None = None) -> ir.Value:
        """A constant as an initializer (or a ``Constant`` node where there is no graph)."""
        if self._owner_of_constants is not None:
            return self._owner_of_constants.constant(value, dtype)
        if isinstance(dtype, ir.DataType):
            dtype = dtype.numpy()
        array = np.asarray(value, dtype=dtype)
        result = self._constant(array)
        if array.dtype in _NARROW and (array.astype(np.float64) != np.asarray(value)).any():
            self.rounded.add(result)
        return result

    def _constant(self, array: np.ndarray) -> ir.Value:
        key = (array.dtype.str, str(array.dtype), array.shape, array.tobytes())
        known = self.constants.get(key)
        if known is not None:
            return known
        tensor = ir.tensor(np.ascontiguousarray(array) if array.ndim else array)
        if self.graph is None:
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1)
            node.metadata_props[PHASE] = self.phase.value
            result = node.outputs[0]
            shapes.assign(result, tensor.dtype, ir.Shape(array.shape))
            result.const_value = tensor
            self.nodes.append(node)
        else:
            name = _constant_name(array, self.graph)
            result = ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            self.graph.register_initializer(result)
        self.constants[key] = result
        return result

    def _operands(
        self, op_type: str, operands: list[Operand], domain: str
    ) -> list[ir.Value | None]:
        same = _SAME_TYPE.get(op_type) if not domain else None
        dtype = None
        for i, operand in enumerate(operands):
            if isinstance(operand, ir.Value) and (same is None or i in same):
                dtype = operand.dtype
                if (op_type, i) not in _INT64:
                    break
        result: list[ir.Value | None] = []
        for i, operand in enumerate(operands):
            if operand is None or isinstance(operand, ir.Value):
                result.append(operand)
            elif isinstance(operand, np.ndarray | np.generic):
                result.append(self.constant(operand))
            elif not domain and (op_type, i) in _INT64:
                result.append(self.constant(operand, np.dtype(np.int64)))
            elif isinstance(operand, bool):
                result.append(self.constant(operand, np.dtype(np.bool_)))
            elif isinstance(operand, int | float) and dtype is not None:
                result.append(self.constant(operand, dtype))
            else:
                result.append(self.constant(operand))
        return result

    # -- arithmetic on values ----------------------------------------------------------------

    def __enter__(self) -> Builder:
        self._outer.append(ir.set_value_magic_handler(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ir.set_value_magic_handler(self._outer.pop())

    # -- phrases that many emitters need -----------------------------------------------------

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape as an int64 tensor: a constant where it is known, else a ``Shape`` node."""
        known = shapes.static(value)
        return self.constant(known, np.dtype(np.int64)) if known is not None else self.Shape(value)

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """One dimension as an int64 tensor of shape [1]."""
        if value.shape is not None:
            size = value.shape[axis]
            if isinstance(size, int):
                return self.constant([size], np.dtype(np.int64))
            axis %= len(value.shape)
            return self.Shape(value, start=axis, end=axis + 1)
        return self.Gather(self.Shape(value), [axis])

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in another dtype; itself where it has it already."""
        return value if value.dtype == dtype else self.Cast(value, to=int(dtype))

    def transposed(self, value: ir.Value, like: ir.Value | None = None) -> ir.Value:
        """The value with its last two axes exchanged; a transpose of a transpose is its input.

        Args:
            value: of two axes or more.
            like: has as many axes, where it is not known how many the value has.
        """
        length = shapes.rank(value)
        if length is None and like is not None:
            length = shapes.rank(like)
        assert length is not None, "capture gives every value a rank"
        order = [*range(length - 2), length - 1, length - 2]
        producer = value.producer()
        if producer is not None and producer.op_type == "Transpose" and producer.domain == "":
            perm, source = producer.attributes.get("perm"), producer.inputs[0]
            if perm is not None and list(perm.as_ints()) == order and source is not None:
                return source
        result: ir.Value = self.Transpose(value, perm=order)
        return result

    def zeros_like(self, value: ir.Value) -> ir.Value:
        """Zeros of the value's shape and dtype."""
        assert value.dtype is not None
        zeros: ir.Value = self.Expand(self.constant(0, value.dtype), self.shape(value))
        zeros.shape = value.shape
        return zeros


def _attribute(name: str, value: Any) -> ir.Attr:
    """An attribute; what kind it is of, onnx_ir finds out slowly where it is not one of these."""
    kind = None
    if isinstance(value, ir.Tensor):
        kind = ir.AttributeType.TENSOR
    elif isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        kind = ir.AttributeType.INTS
    return ir.convenience.convert_attribute(name, value, kind)


def _operator_types(domain: str, op_type: str) -> Callable[[ir.Node], None]:
    return shapes.OPERATORS.get((domain, op_type), lambda node: None)


def _constant_name(array: np.ndarray, graph: ir.Graph) -> str:
    text = "_".join(str(v) for v in array.reshape(-1)[:4].tolist()) or "empty"
    text = text.replace("-", "m").replace(".", "p").replace("+", "")
    name = base = f"const/{array.dtype}_{'x'.join(map(str, array.shape)) or 's'}_{text}"
    taken = 0
    while name in graph.initializers:
        taken += 1
        name = f"{base}.{taken}"
    return name
