"""The sizes of a model's values, as far as they follow from those of its inputs.

::

    before                                      what is known then
    x: [batch, seq, 64]
    n = Gather(Shape(x), 1)                     n holds seq
    t = Concat([-1], n, [4], [16])
    y = Reshape(x, t)                           y: [batch, seq, 4, 16]
    z = Reshape(Transpose<[0,2,1,3]>(y), [-1, n, 16])    z: [4*batch, seq, 16]

onnx's own inference keeps neither sums and products of sizes nor what a ``Reshape`` leaves to be
found, and older exporters name each size of each value anew. Here every size is a
:class:`~ortrain.deploy.optimization.fusions.sizes.Size` of the names that the inputs have; a size
that does not follow is a name of its own. They are written into the values' shapes, where equal
sizes have equal names, and are taken back when all is done.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.contents import (
    WHOLE,
    Content,
    content_of,
    numbers,
    of_constant,
)
from ortrain.deploy.optimization.fusions.fusion import graphs
from ortrain.deploy.optimization.fusions.reshaping import Sizes, Sources, sizes_after
from ortrain.deploy.optimization.fusions.sizes import Size
from ortrain.graph import shapes
from ortrain.graph.shapes import Dim

# What our names begin with; those of a file are what they are, of whatever characters.
_OURS = "ortrain: "
_ROUNDS = 4


class Extents:
    """Sizes and contents of a model's values, followed from its inputs to its outputs.

    Args:
        model: with the shapes that onnx has inferred.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._contents: dict[ir.Value, Content] = {}
        self._written: dict[str, Size] = {}  # by the names that are given here
        self._solved: dict[str, Size] = {}  # what names of a file turned out to be
        self._names: dict[Size, str] = {}  # of sums and products that a file has a name for
        self._within: dict[str, frozenset[str]] = {}  # of quotients
        self._given: set[str] = set()  # of inputs
        self._least: dict[str, Size] = {}  # of a number and another size
        self._met: set[ir.Value] = set()
        self._count = 0
        # Whatever a file calls its sizes, ours are called otherwise.
        self._taken = {
            dim
            for graph in graphs(model)
            for value in (*graph.inputs, *(v for node in graph for v in node.outputs))
            for dim in shapes.dims(value) or ()
            if isinstance(dim, str)
        }

    def follow(self) -> None:
        """Visits every node in order, again where names have turned out to be others."""
        for graph in graphs(self._model):
            for value in graph.inputs:
                self._name_axes(value)
                self._given.update(d for d in shapes.dims(value) or () if isinstance(d, str))
        for _ in range(_ROUNDS):
            solved = len(self._solved)
            for graph in graphs(self._model):
                for node in graph:
                    self._node(node)
            if len(self._solved) == solved:
                return

    def content(self, value: ir.Value | None) -> Content | None:
        """What a value holds, where it is one of sizes."""
        if value is None:
            return None
        if value not in self._contents:
            if value.is_graph_input() or (shapes.size(value) or 0) > shapes.MOST_SIZES:
                return None
            array = shapes.constant(value)
            found = None if array is None else of_constant(array)
            if found is None:
                return None
            self._contents[value] = found
        return self._contents[value]

    def sizes(self, value: ir.Value | None) -> Sizes:
        """The sizes of a value; None where its number of axes is unknown."""
        known = shapes.dims(value)
        return None if known is None else [self._size(d) for d in known]

    def numbers(self, node: ir.Node) -> np.ndarray | None:
        """What the first output of a node holds, where it is a vector of numbers."""
        value = node.outputs[0]
        content, kind = self._contents.get(value), value.dtype
        known = numbers(content)
        if content is None or known is None or kind not in WHOLE or kind is None:
            return None
        limits = (0, 1) if kind == ir.DataType.BOOL else _limits(kind.numpy())
        if any(not limits[0] <= number <= limits[1] for number in known):
            return None
        return np.asarray(known, kind.numpy()).reshape(content.shape)

    def forget(self) -> None:
        """Takes back the names that are given here."""
        for graph in graphs(self._model):
            for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
                self._clear(value)

    def _clear(self, value: ir.Value) -> None:
        known = shapes.dims(value)

        def ours(dim: Dim) -> bool:
            return isinstance(dim, str) and dim.startswith(_OURS) and dim not in self._taken

        if known is not None and any(map(ours, known)):
            value.shape = ir.Shape([None if ours(d) else d for d in known])

    # -- names and sizes -------------------------------------------------------------------------

    def _size(self, dim: Dim) -> Size | None:
        if dim is None or isinstance(dim, int):
            return None if dim is None else Size.of(dim)
        size = self._written.get(dim) or Size.symbol(dim)
        while known := [name for name in size.symbols if name in self._solved]:
            size = size.replaced(known[0], self._solved[known[0]])
        return size

    def _dim(self, size: Size) -> Dim:
        if size.number is not None:
            return size.number
        if (name := size.name or self._names.get(size)) is not None:
            return name
        text = f"{_OURS}{size}"
        while text in self._taken or self._written.setdefault(text, size) != size:
            text += "'"
        return text

    def _fresh(self) -> Size:
        self._count += 1
        while (name := f"{_OURS}#{self._count}") in self._taken:
            self._count += 1
        return Size.symbol(name)

    def _quotient(self, op_type: str, a: Size, b: Size) -> Size:
        name = f"{_OURS}{op_type}({a}, {b})"
        within = frozenset().union(
            *(self._within.get(part, frozenset({part})) for part in a.symbols | b.symbols)
        )
        if name in self._taken or self._within.setdefault(name, within) != within:
            return self._fresh()
        return Size.symbol(name)

    def _smaller(self, a: Size, b: Size) -> Size:
        size = self._quotient("Min", *sorted((a, b), key=str))
        for number, other in ((a.number, b), (b.number, a)):
            if number is not None and number > 1 and size.name is not None:
                self._least[size.name] = other
        return size

    def _symbols(self, size: Size) -> frozenset[str]:
        """All names that a size depends on."""
        own = size.symbols
        return own.union(*(self._within.get(name, frozenset()) for name in own))

    def _name_axes(self, value: ir.Value) -> None:
        """Gives a name to each axis that has neither a size nor one."""
        known = shapes.dims(value)
        if known is not None and None in known:
            value.shape = ir.Shape([self._dim(self._fresh()) if d is None else d for d in known])

    # -- nodes -----------------------------------------------------------------------------------

    def _node(self, node: ir.Node) -> None:
        inputs = [self.sizes(value) for value in node.inputs]
        contents: list[Content | None] = []
        if not node.domain:
            contents = [self.content(value) for value in node.inputs]
            first = inputs[0] if inputs else None
            content = content_of(node, contents, first, self._quotient)
            if content is not None:
                self._contents[node.outputs[0]] = content
        bodies = any(
            a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for a in node.attributes.values()
        )
        found = sizes_after(node, Sources(inputs, contents, self._smaller, self._least))
        for value, sizes in zip(node.outputs, found, strict=True):
            if bodies and value not in self._met:
                self._clear(value)  # what is known within a body holds for one run of it
            self._met.add(value)
            self._put(value, sizes)

    def _put(self, value: ir.Value, found: Sizes) -> None:
        """Writes sizes into a value's shape, beside what is known of it."""
        mine = self.sizes(value)
        if found is None or (mine is not None and len(mine) != len(found)):
            self._name_axes(value)
            return
        if mine is None:
            mine = [None] * len(found)
        told: list[Dim] = []
        for old, new in zip(mine, found, strict=True):
            size = self._agreed(value, old, new)
            told.append(self._dim(self._fresh() if size is None else size))
        value.shape = ir.Shape(told)

    def _agreed(self, value: ir.Value, old: Size | None, new: Size | None) -> Size | None:
        """One size of two that are known of the same axis."""
        if old is None or new is None or old == new:
            return new if old is None else old
        follows = self._symbols(new) <= self._given
        if old.number is not None and follows:
            return new  # a file whose inputs were made open says what was true before
        if not value.is_graph_output():
            for name, size in ((old.name, new), (new.name, old)):
                if name and name not in self._given and name not in self._symbols(size):
                    self._solved[name] = size
                    return size
        # The names of outputs are a user's, who may be wrong; a sum he gives a name to is his too.
        name = old.name
        if (
            name in self._given
            and new.name is None
            and new.number is None
            and follows
            and name not in self._symbols(new)
        ):
            self._solved[name] = new
            self._names[new] = name
        return new if follows or old.number is None or value.is_graph_output() else old


def _limits(dtype: np.dtype) -> tuple[int, int]:
    return np.iinfo(dtype).min, np.iinfo(dtype).max
