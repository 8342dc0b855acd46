"""What a function frees, where it writes over what it has read, and what it may return.

A tensor owns its memory or is a view: its *roots* are the tensors whose memory it may share.
Nothing is written into that anything else may still read, and nothing is returned that shares
memory with an argument or with another result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ortrain.runtime.aten.lines import Block, Line
from ortrain.runtime.aten.operands import Tensor

# Calls that have a form which writes into its first operand.
IN_PLACE = frozenset(
    f"torch.{name}"
    for name in """
    add sub mul div neg exp log sqrt rsqrt reciprocal abs erf relu sigmoid tanh masked_fill clamp
    floor ceil round sin cos square logical_not bitwise_and bitwise_or bitwise_xor addcmul addcdiv
    index_add
    """.split()
)
# The operands may change places.
_COMMUTATIVE = frozenset({"torch.add", "torch.mul"})
# Views of which one element stands for several.
_SPREAD = frozenset(
    {".expand", ".expand_as", ".as_strided", ".unfold", "torch.broadcast_to", "late.expand"}
)


def plan(block: Block, kept: Collection[Tensor] = ()) -> None:
    """Plans a function and those inside it, in place.

    Args:
        block: the function.
        kept: tensors that it must not write into: its arguments, and constants.
    """
    for line in block.lines:
        if line.body is not None:
            plan(line.body)
    drop_unread(block)
    free(block)
    others = (*block.parameters, *block.outside(), *kept)
    write_over(block, {root for t in others for root in t.roots})


def drop_unread(block: Block) -> int:
    """Drops calls whose results nothing reads, such as of a tensor of which only sizes were asked.

    Returns:
        How many calls there are no more.
    """
    read, kept = {*_results(block)}, []
    for line in reversed(block.lines):
        targets = _targets(line)
        if len(targets) < max(len(line.targets), 1) or any(t in read for t in targets):
            read.update(line.reads())
            kept.append(line)
    dropped = len(block.lines) - len(kept)
    block.lines[:] = kept[::-1]
    return dropped


def free(block: Block) -> None:
    """Has each tensor freed after the last line that reads it."""
    seen = set(_results(block))
    own = {*block.parameters, *_made(block)}
    for line in reversed(block.lines):
        touched = [*line.reads(), *_targets(line)]
        last = [t for t in dict.fromkeys(touched) if t not in seen and t in own]
        line.frees = last
        seen.update(last)


def write_over(block: Block, kept: Collection[str]) -> int:
    """Has elementwise calls write into an operand that nothing reads after them.

    Args:
        block: with what is freed where.
        kept: roots that are not the function's own.

    Returns:
        How many calls were changed.
    """
    own = {root for t in _made(block) for root in t.roots} - set(kept)
    sharing: dict[str, set[Tensor]] = {}
    spread: set[Tensor] = set()
    for line in block.lines:
        for made in _targets(line):
            for root in made.roots:
                sharing.setdefault(root, set()).add(made)
            if _may_spread(line, made, spread):
                spread.add(made)
    returned = {root for t in _results(block) for root in t.roots}
    alive: set[Tensor] = set(block.parameters)
    changed = 0
    for line in block.lines:
        ends = set(line.frees)
        if line.function in IN_PLACE and len(line.targets) == 1:
            for place in (0, 1) if line.function in _COMMUTATIVE else (0,):
                operand = line.args[place] if len(line.args) > place else None
                target = line.targets[0]
                if not isinstance(operand, Tensor) or not isinstance(target, Tensor):
                    continue
                others = {t for root in operand.roots for t in sharing.get(root, ())} - ends
                read = [t for t in line.reads() if t is not operand]
                if (
                    operand in ends
                    and operand not in spread
                    and operand.roots <= own
                    and not others & alive
                    and not any(t.roots & operand.roots for t in read)
                    and not operand.roots & returned
                    and _alike(operand, target)
                ):
                    rest = [a for i, a in enumerate(line.args) if i != place]
                    line.args = (operand, *rest)
                    line.function = f".{line.function.removeprefix('torch.')}_"
                    changed += 1
                    _take_over(block, operand, target, sharing)
                    break
        alive.update(_targets(line))
        alive -= ends
    return changed


def _may_spread(line: Line, made: Tensor, spread: Collection[Tensor]) -> bool:
    """Whether one element of what a line makes may stand for several.

    So it may of a view of such a tensor, wherever the line reads it; and of what a function inside
    returns, which is not looked into.
    """
    if line.function in _SPREAD or line.function.startswith("control."):
        return True
    first = line.args[0] if line.args else None
    views = (t for t in line.reads() if t is first or t.roots & made.roots)
    return any(t in spread for t in views)


def _take_over(
    block: Block, operand: Tensor, target: Tensor, sharing: dict[str, set[Tensor]]
) -> None:
    """The result of a call in place lies in the operand's memory, and so do views of it."""
    (old,) = target.roots
    for tensor in sharing.get(old, set()):
        tensor.roots = tensor.roots - {old} | operand.roots
        for root in operand.roots:
            sharing.setdefault(root, set()).add(tensor)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to have the same dtype and sizes."""
    return (
        a.dtype is not None
        and a.dtype is b.dtype
        and a.dims is not None
        and a.dims == b.dims
        and None not in a.dims
    )


def _targets(line: Line) -> list[Tensor]:
    return [t for t in line.targets if isinstance(t, Tensor)]


def _made(block: Block) -> Iterator[Tensor]:
    for line in block.lines:
        yield from _targets(line)


def _results(block: Block) -> list[Tensor]:
    return [t for t in block.results if isinstance(t, Tensor)]
