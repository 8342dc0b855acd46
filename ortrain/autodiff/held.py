"""What a step holds at each node, from shapes and lifetimes.

Tensors alone: what kernels take for themselves while they run is not seen, but for the blocks of
logits of a loss and the copies of a convolution, and neither is what the C library keeps. Of 4
layers of BERT-base on 8 texts of 512 tokens, PyTorch's operators had 994 MiB of tensors at the
most, and 971 are predicted; with a budget of half of it 499 and 476.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.autodiff.partition import VIEWS, is_constant
from ortrain.graph import shapes
from ortrain.graph.walk import reads
from ortrain.ops.base import DOMAIN, attributes_of
from ortrain.program import Program, Role, role_of

# What a node of these gives is its operand seen in another way.
SAME_MEMORY = VIEWS | {"Transpose", "Slice", "Expand", "Split"}
# What can be written over its first operand.
_IN_PLACE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Where", "Relu", "Tanh", "Exp", "Sqrt",
     "LinearCrossEntropyGradient"}
)  # fmt: skip

Sizes = Mapping[str, int]


def bytes_of(value: ir.Value, sizes: Sizes) -> int:
    """Bytes of a value; a size that is not known counts as 1."""
    count = math.prod(shapes.evaluate(dim, sizes) or 1 for dim in shapes.dims(value) or ())
    return int(count * (value.dtype.itemsize if value.dtype is not None else 4))


def saved_bytes(programs: Sequence[Program], sizes: Sizes) -> int:
    """Bytes of what the forward keeps for the pieces of the backward."""
    return sum(bytes_of(value, sizes) for value in programs[0].outputs(Role.SAVED))


@dataclass(frozen=True)
class Moment:
    """What is held while a node runs.

    Attributes:
        node: that runs.
        piece: 0 for the forward, 1 and on for the pieces of the backward.
        held: bytes.
    """

    node: ir.Node
    piece: int
    held: int


def curve(programs: Sequence[Program], sizes: Sizes) -> list[Moment]:
    """What a step holds beyond its inputs, node by node.

    Args:
        programs: the forward and the pieces of the backward, as :func:`partition` gives them.
        sizes: value of each symbolic dimension.
    """
    moments: list[Moment] = []
    kept: dict[str | None, int] = {}  # what pieces hand to later ones
    results = 0  # outputs of the user's, and gradients
    last: dict[str | None, int] = {}
    for place, program in enumerate(programs):
        last.update((value.name, place) for value in program.graph.inputs)
    for place, program in enumerate(programs):
        graph = program.graph
        given = {v: kept[v.name] for v in graph.inputs if v.name in kept}
        final = {v: n for v, n in given.items() if last[v.name] == place}
        before = results + sum(kept.values())
        living = _Living(graph, sizes, final)
        for node in graph:
            most = living.run(node)
            moments.append(Moment(node, place, before + most))
        for value in final:
            kept.pop(value.name)
        shared: set[ir.Value] = set()
        for value in graph.outputs:
            root = living.root(value)
            if root in shared:
                continue
            shared.add(root)
            if role_of(value) is Role.SAVED:
                kept[value.name] = living.size(root)
            else:
                results += living.size(root)
    return moments


class _Living:
    """What lives of one program's values.

    Args:
        graph: of the program.
        sizes: of symbols.
        given: inputs that are freed once they were read, and their bytes.
    """

    def __init__(self, graph: ir.Graph, sizes: Sizes, given: Mapping[ir.Value, int]) -> None:
        self._sizes, self._given = sizes, given
        self._root: dict[ir.Value, ir.Value] = {}
        inputs = set(graph.inputs)
        for node in graph:
            source = node.inputs[0] if node.inputs else None
            if source is not None and _is_view(node, source):
                self._root.update(dict.fromkeys(node.outputs, self.root(source)))
        ends: dict[ir.Value, ir.Node] = {}
        for node in graph:
            for value in (*reads(node), *node.outputs):
                ends[self.root(value)] = node
        for value in graph.outputs:
            ends.pop(self.root(value), None)
        self._frees: dict[ir.Node, list[ir.Value]] = {}
        for value, end in ends.items():
            if value not in inputs or value in given:
                self._frees.setdefault(end, []).append(value)
        self._now = 0

    def root(self, value: ir.Value) -> ir.Value:
        """The value whose memory this one is."""
        return self._root.get(value, value)

    def size(self, value: ir.Value) -> int:
        """Bytes of a root; none of an input that stays, and of a constant."""
        producer = value.producer()
        if producer is None:
            return self._given.get(value, 0)
        return 0 if is_constant(producer) else bytes_of(value, self._sizes)

    def run(self, node: ir.Node) -> int:
        """Runs a node; gives what is held meanwhile beyond what there was, in bytes."""
        frees = self._frees.get(node, [])
        made = sum(self.size(v) for v in node.outputs if v not in self._root)
        over = 0
        if node.op_type in _IN_PLACE and node.domain in ("", DOMAIN):
            over = made if any(self.size(v) == made for v in frees if v not in node.outputs) else 0
        most = self._now + made - over + _for_itself(node, self._sizes)
        self._now += made - sum(map(self.size, frees))
        return max(most, self._now)


def _for_itself(node: ir.Node, sizes: Sizes) -> int:
    """Bytes that a node has while it runs, beyond its operands and results."""
    takes = _TAKES.get((node.domain, node.op_type))
    return 0 if takes is None else takes(node, sizes)


def _block_of_logits(node: ir.Node, sizes: Sizes) -> int:
    """Of a loss in blocks the logits of one.

    Narrow ones are there in float32 as well, and with them a narrow copy of a wide weight.
    """
    x, weight = node.inputs[:2]
    assert x is not None
    assert weight is not None
    assert x.dtype is not None
    assert weight.dtype is not None
    given, loss = attributes_of(node), node.outputs[0].dtype
    products = ir.DataType(given.get("product_type", 0) or int(x.dtype))
    wide = loss or products
    count, classes = (
        shapes.evaluate((shapes.dims(v) or (None,))[0], sizes) or 1 for v in (x, weight)
    )
    block = -(-count // -(-count // given["rows"])) * classes
    own = block * wide.itemsize
    if products is not wide:
        own += block * products.itemsize
    if products is not weight.dtype:
        own += bytes_of(weight, sizes) * products.itemsize // weight.dtype.itemsize
    return int(own)


def _blocked_images(node: ir.Node, sizes: Sizes) -> int:
    """Of a convolution the copies with channels in blocks, of which oneDNN and MLAS compute.

    First there are those of the image, the weight and the result, then the result's and itself.
    """
    x, w, y = (_blocked(v, sizes) for v in (*node.inputs[:2], node.outputs[0]))
    return w + max(x, y)


def _blocked_gradients(node: ir.Node, sizes: Sizes) -> int:
    """The same of its gradients, one after the other."""
    dy, x, w = (_blocked(v, sizes) for v in node.inputs[:3])
    needs = attributes_of(node).get("needs", (1, 1, 1))
    return max(needs[0] * (w + max(dy, x)), needs[1] * max(x + dy, w))


def _blocked(value: ir.Value | None, sizes: Sizes) -> int:
    """Bytes of a copy; the few channels of a photograph are read as they lie."""
    assert value is not None
    dims = shapes.dims(value) or ()
    few = len(dims) > 1 and isinstance(dims[1], int) and dims[1] < _FEW_CHANNELS
    return 0 if few else bytes_of(value, sizes)


_FEW_CHANNELS = 4
_TAKES: Mapping[tuple[str, str], Callable[[ir.Node, Sizes], int]] = {
    (DOMAIN, "LinearCrossEntropy"): _block_of_logits,
    ("", "Conv"): _blocked_images,
    (DOMAIN, "ConvGradient"): _blocked_gradients,
}


def peak(programs: Sequence[Program], sizes: Sizes) -> int:
    """The most that a step holds beyond its inputs, in bytes."""
    return max((moment.held for moment in curve(programs, sizes)), default=0)


def largest(programs: Sequence[Program], sizes: Sizes) -> int:
    """The most bytes that one of the results of a step's nodes has."""
    values = (v for program in programs for node in program.graph for v in node.outputs)
    return max((bytes_of(value, sizes) for value in values), default=0)


def _is_view(node: ir.Node, source: ir.Value) -> bool:
    """Whether a node's results lie in the memory of its first operand.

    A reshape that merges axes which were moved copies them.
    """
    if node.domain or node.op_type not in SAME_MEMORY:
        return False
    made_by, length = source.producer(), shapes.rank(node.outputs[0])
    moved = made_by is not None and made_by.op_type == "Transpose"
    return not (node.op_type == "Reshape" and moved and (length or 0) < (shapes.rank(source) or 0))
