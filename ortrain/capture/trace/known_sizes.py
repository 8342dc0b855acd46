"""Arithmetic on the sizes of a trace is done once for each pair of operands.

A trace computes with symbols wherever PyTorch computes with sizes: whether a tensor is contiguous,
how two shapes broadcast, how many bytes a result has. Four layers of a BERT ask 22,000 times for
the sum, the product or the order of two sizes, and a few hundred of these questions are different
ones: 0.3 s of 2.6 s of processor time. What PyTorch does with an answer, above all the conditions
that it derives, stays with PyTorch: each question gets a node of its own, as if computed again.

Used of torch beyond what it documents (``tests/capture/trace/test_known_results.py`` pins each):
``torch.fx.experimental.sym_node.SymNode``, with the methods that compute (``_add`` and so on) and
the attributes that decide what they give; ``ShapeEnv._replacements_version_counter`` and
``_translation_validation_enabled``; ``torch.fx.experimental.proxy_tensor.get_proxy_mode``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

from ortrain.capture.trace.patched import replaced
from ortrain.exclusive import this_thread

ARITHMETIC = ("add", "sub", "mul", "int_floordiv")
RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge")

# Expression, type, example and whether it is a sum of different symbols, of a result.
_Answer = tuple[Any, type, Any, bool]


class _Known:
    """The answers of one shape environment, while what it replaces stays the same.

    What a symbol equals (``s1 = 2*s0``) may be learnt in the middle of a trace, and an expression
    that was computed before may then be simpler.
    """

    def __init__(self) -> None:
        self.environment: Any = None
        self.version = -1
        self.answers: dict[Any, _Answer] = {}

    def of(self, environment: Any) -> dict[Any, _Answer]:
        version = environment._replacements_version_counter
        if environment is not self.environment or version != self.version:
            self.environment, self.version, self.answers = environment, version, {}
        return self.answers


@contextlib.contextmanager
def sizes_computed_once() -> Iterator[None]:
    """Inside, sums, products, quotients and relations of sizes are looked up where they are known.

    Of sizes without an example, as of those that values decide, each is computed.
    """
    known, here = _Known(), this_thread()

    def node(method: str, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def computed(one: Any, other: Any) -> Any:
            a, b, environment = one._hint, other._hint, one.shape_env
            if type(a) is not int or type(b) is not int or not here():
                return compute(one, other)
            if environment is None or environment._translation_validation_enabled:
                return compute(one, other)
            if get_proxy_mode() is not None:  # the graph is to have a node for it
                return compute(one, other)
            answers = known.of(environment)
            sums = one._optimized_summation, other._optimized_summation
            key = (method, one._expr, other._expr, a, b, *sums)
            if answer := answers.get(key):
                return _node(answer, environment)
            result = compute(one, other)
            unchanged = environment._replacements_version_counter == known.version
            if unchanged and type(result) is SymNode and result.constant is None:
                sums_up = result._optimized_summation
                answers[key] = (result._expr, result.pytype, result._hint, sums_up)
            return result

        return computed

    def size(method: str, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        made = torch.SymBool if method in RELATIONS else torch.SymInt

        def computed(one: Any, other: Any) -> Any:
            """Past what Python's numbers need: both operands are known to be sizes."""
            own = one.node
            if type(own) is not SymNode or own.constant is not None or not here():
                return compute(one, other)
            if type(other) is torch.SymInt:
                second = other.node
                if type(second) is not SymNode:
                    return compute(one, other)
            elif type(other) is int:
                second = own.wrap_int(other)
            else:
                return compute(one, other)
            if own.pytype is not int or second.pytype is not int:
                return compute(one, other)
            result = getattr(own, method)(second)
            return made(result) if result.constant is None else result.constant

        return computed

    with contextlib.ExitStack() as patches:
        for method in (*ARITHMETIC, *RELATIONS):
            name = f"_{method}"
            patches.enter_context(replaced(SymNode, name, node(method, getattr(SymNode, name))))
        for method in ("add", "sub", "mul", *RELATIONS):
            name = f"__{method}__"
            own = getattr(torch.SymInt, name)
            patches.enter_context(replaced(torch.SymInt, name, size(method, own)))
        yield


def _node(answer: _Answer, environment: Any) -> SymNode:
    """A node of its own: a trace keeps apart, by identity, what came from different places."""
    expression, kind, hint, sums_up = answer
    return SymNode(expression, environment, kind, hint, optimized_summation=sums_up)
