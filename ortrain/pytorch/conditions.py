"""What a trace knows and asks of symbolic sizes.

Private: ``torch.fx.experimental.symbolic_shapes.ShapeEnv``: its ``guards``, ``var_to_range``,
``evaluate_expr``, and ``expr`` and ``hint`` of a symbol's node; ``Min`` and ``Max`` of
``torch.utils._sympy``. Without them graphs with symbolic sizes are made anew each time, instead of
being found again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import Max, Min

from ortrain.pytorch.tracing import fake_mode_of


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
        expression = sympy.sympify(size.node.expr)
        for symbol in sorted(expression.free_symbols, key=str):
            kind = {"integer": True} if symbol.is_integer else {"real": True}
            self.names.setdefault(symbol, sympy.Symbol(f"size_{len(self.names)}", **kind))
        return str(expression.xreplace(self.names))

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
        environment: Any = self.environment
        try:
            return all(environment.evaluate_expr(each.xreplace(own)) for each in conditions)
        except Exception:
            return False  # of sizes that no call knows


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

    Returns:
        Whether there were some that were not decided.
    """
    found = False
    for value in values:
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if not isinstance(size, torch.SymInt | torch.SymFloat):
                continue
            for symbol in sympy.sympify(size.node.expr).free_symbols:
                if not free_unbacked_symbols(symbol):
                    size.node.shape_env.evaluate_expr(symbol)
                    found = True
    return found
