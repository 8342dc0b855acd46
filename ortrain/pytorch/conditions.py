"""What a trace knows and asks of symbolic sizes.

Private: ``torch.fx.experimental.symbolic_shapes.ShapeEnv``: its ``guards``, ``var_to_range``,
``evaluate_expr``, and ``expr`` and ``hint`` of a symbol's node; ``Min`` and ``Max`` of
``torch.utils._sympy``. Without them graphs with symbolic sizes are made anew each time, instead of
being found again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import Max, Min
from torch.utils._sympy.functions import Mod as Mod
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ortrain.pytorch.tracing import fake_mode_of


def is_made_of_sizes(number: Any) -> bool:
    """Whether a float of a trace is made of sizes, and of nothing that a tensor or caller gives."""
    if not isinstance(number, torch.SymFloat):
        return False
    symbols = number.node.expr.free_symbols
    given = any(symbol_is_type(symbol, SymT.FLOAT) for symbol in symbols)
    return not given and not free_unbacked_symbols(number)


class Symbols:
    """The symbols in the sizes of some inputs, by the order in which they appear.

    Args:
        values: tensors and numbers of a trace.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        values = list(values)
        mode = fake_mode_of(values)
        numbers = [v for v in values if isinstance(v, torch.SymInt | torch.SymFloat)]
        self.environment = getattr(mode, "shape_env", None)
        if self.environment is None and numbers:
            self.environment = numbers[0].node.shape_env
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}

    def plain(self, size: Any) -> str:
        """A size or a number in the names of these symbols."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return repr(size)
        return str(self.expression(size))

    def expression(self, size: Any) -> Any:
        """The same as an expression of sympy."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return sympy.sympify(size)
        expression = sympy.sympify(size.node.expr)
        for symbol in sorted(expression.free_symbols, key=str):
            kind = {"integer": True} if symbol.is_integer else {"real": True}
            self.names.setdefault(symbol, sympy.Symbol(f"size_{len(self.names)}", **kind))
        return expression.xreplace(self.names)

    def ranges(self) -> list[str]:
        """Of the symbols so far."""
        known = {} if self.environment is None else self.environment.var_to_range
        return [str(known.get(symbol)) for symbol in self.names]

    def conditions(self) -> list[Any]:
        """All that the trace has asked of these symbols alone, in their names."""
        found = [] if self.environment is None else self.environment.guards
        asked = dict.fromkeys(sympy.sympify(guard.expr) for guard in found)
        return [e.xreplace(self.names) for e in asked if e.free_symbols <= {*self.names}]

    def hold(self, conditions: Sequence[Any]) -> bool:
        """Asks such conditions of these symbols; Dynamo guards what it has not known."""
        own = {name: symbol for symbol, name in self.names.items()}
        return _ask(self.environment, [each.xreplace(own) for each in conditions])


def hold(conditions: Sequence[Any], values: Iterable[Any]) -> bool:
    """Asks conditions on the sizes of values of a trace; Dynamo guards what it has not known."""
    return _ask(Symbols(values).environment, conditions)


def _ask(environment: Any, conditions: Sequence[Any]) -> bool:
    if environment is None:
        return all(each == sympy.true for each in conditions)
    try:
        return all(environment.evaluate_expr(each) for each in conditions)
    except Exception:
        return False  # of sizes that no call knows


# Other sizes than one, by how they come of it.
_OTHERS: list[Callable[[int], int]] = [
    lambda n: n + 1, lambda n: 2 * n, lambda n: 3 * n, lambda n: n + 2, lambda n: n + 4,
    lambda n: n + 8, lambda n: n // 2, lambda n: n - 1,
]  # fmt: skip


def _others(known: Mapping[Any, Any], symbols: Iterable[Any]) -> Iterator[dict[Any, Any]]:
    """Other numbers of some symbols, all changed in the same way."""
    for change in _OTHERS:
        found = {symbol: sympy.Integer(change(int(known[symbol]))) for symbol in symbols}
        if all(number > 0 and number != known[symbol] for symbol, number in found.items()):
            yield found


class Sizes:
    """The shapes of tensors for which a graph is valid.

    Args:
        tensors: fakes of the graph's trace, once all that it asks of their sizes is known; None for
            those of which it asks nothing.
        ones: whether a size of 1 is one like others, but for the code's questions whether it is.
    """

    def __init__(self, tensors: Sequence[Tensor | None], *, ones: bool = True) -> None:
        self._ones = ones
        symbols = Symbols(tensor for tensor in tensors if tensor is not None)
        self._shapes = [
            None if tensor is None else [symbols.expression(size) for size in tensor.shape]
            for tensor in tensors
        ]
        self._conditions = symbols.conditions()

    def accept(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether the graph is valid for these shapes."""
        for own, shape in zip(self._shapes, shapes, strict=True):
            if own is not None and len(own) != len(shape):
                return False
        known = self._known(shapes)
        pairs = zip(self._shapes, shapes, strict=True)
        if any(self._at(own, known) != [*shape] for own, shape in pairs if own is not None):
            return False
        return self._hold(known)

    def fixed(self, shapes: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
        """The places of sizes that are symbols and for which the graph allows no other number.

        Those of an image may be so, of which the code takes windows as large as itself. Some other
        sizes are tried: of each symbol alone, of each two, and of all.

        Args:
            shapes: for which it is valid.

        Returns:
            ``(which tensor, which axis)``.
        """
        known = self._known(shapes)
        left = {*known}
        groups = [*map(set, combinations(known, 1)), *map(set, combinations(known, 2)), {*known}]
        for group in groups:
            if group & left and any(self._hold(known | other) for other in _others(known, group)):
                left -= group
        return {
            (i, axis)
            for i, own in enumerate(self._shapes)
            for axis, each in enumerate(own or ())
            if each.free_symbols & left
        }

    def _known(self, shapes: Sequence[Sequence[int]]) -> dict[Any, Any]:
        """The numbers of the symbols in these shapes."""
        known: dict[Any, Any] = {}
        for own, shape in zip(self._shapes, shapes, strict=True):
            for expression, size in zip(own or (), shape, strict=False):
                if expression.is_Symbol:
                    known.setdefault(expression, sympy.Integer(size))
        return known

    @staticmethod
    def _at(shape: Sequence[Any], known: dict[Any, Any]) -> list[Any]:
        return [each.xreplace(known) for each in shape]

    def _hold(self, known: dict[Any, Any]) -> bool:
        """Whether all conditions do for such numbers."""
        ones = {symbol for symbol, size in known.items() if size == 1}
        if ones and not self._ones:
            return False
        return all(
            each.xreplace(known) == sympy.true or any(map(partial(_asks_for_more, each), ones))
            for each in self._conditions
        )


def _asks_for_more(condition: Any, symbol: Any) -> bool:
    """Whether a condition is that a size is more than 1, as code asks that may broadcast it."""
    forms = sympy.Ne(symbol, 1), symbol > 1, sympy.Ge(symbol, 2)
    return (
        condition in forms or condition == sympy.Lt(1, symbol) or condition == sympy.Le(2, symbol)
    )


def example_of(size: Any) -> int:
    """The value that a size had when it was traced, without a condition on it; 1 without one."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return size.node.hint if size.node.has_hint() else 1


def decide_bounds(values: Iterable[Any]) -> None:
    """Decides which of two sizes is the smaller one, where a size of some tensors is that.

    ``positions[:, :length]`` is as long as the shorter of the two, and what it is added to has the
    length alone. Which one that is becomes a condition of the graph. Of a number and a symbol that
    are equal now it is the symbol, which goes on to be one.
    """
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if not isinstance(size, torch.SymInt):
                continue
            environment: Any = size.node.shape_env
            for bound in sympy.sympify(size.node.expr).atoms(Min, Max):
                first, *others = sorted(bound.args, key=lambda each: not each.free_symbols)
                for other in others:
                    if not free_unbacked_symbols(first) | free_unbacked_symbols(other):
                        pair = (first, other) if isinstance(bound, Min) else (other, first)
                        environment.evaluate_expr(sympy.Le(*pair))
                        # What fakes are remembered to give has the size undecided.
                        getattr(environment, "fake_tensor_cache", {}).clear()


def with_sizes(values: Sequence[Any], tried: Sequence[int]) -> Iterator[list[Any]]:
    """Sizes and strides as they are where their symbols have some values, and none is negative.

    Args:
        values: they may have symbols.
        tried: the values of a symbol. Up to three symbols have all combinations of them; of more
            symbols all have the same value.
    """
    exprs = [sympy.sympify(v.node.expr) if isinstance(v, torch.SymInt) else v for v in values]
    symbols = sorted({s for e in exprs for s in getattr(e, "free_symbols", ())}, key=str)
    count = len(symbols)
    for chosen in product(tried, repeat=count) if count <= 3 else [[n] * count for n in tried]:
        known = dict(zip(symbols, map(sympy.Integer, chosen), strict=True))
        try:
            found = [int(e.xreplace(known)) if isinstance(e, sympy.Expr) else e for e in exprs]
        except ZeroDivisionError:  # a size is a share of another one
            continue
        if min(found, default=0) >= 0:  # a convolution leaves nothing of so few
            yield found


def decide_sizes(values: Iterable[Any]) -> bool:
    """Has the symbols in some sizes and numbers be what they are: a condition of the graph.

    Those of batches, as far as one can tell, stay open unless there are no others.

    Returns:
        Whether there were some that were not decided.
    """
    batches, others = dict[Any, Any](), dict[Any, Any]()
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        for axis, size in enumerate(value.shape if is_tensor else (value,)):
            if not isinstance(size, torch.SymInt | torch.SymFloat):
                continue
            found = batches if is_tensor and value.dim() > 1 and not axis else others
            for symbol in sympy.sympify(size.node.expr).free_symbols:
                if not free_unbacked_symbols(symbol):
                    found[symbol] = size.node.shape_env
    left = {symbol: found for symbol, found in others.items() if symbol not in batches} or {
        **batches, **others,
    }  # fmt: skip
    for symbol, environment in left.items():
        environment.evaluate_expr(symbol)
    return bool(left)
