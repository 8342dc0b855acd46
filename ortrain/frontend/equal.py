"""Which parts of a model are equal blocks: the layers of a transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ortrain.pytorch.modules import children_of


def equal_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of a model: all members of a list that are of one class, and have parts."""
    return [*_found(module, set())]


def _found(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    members = [*children_of(module).values()]
    if isinstance(module, nn.ModuleList | nn.Sequential) and _are_alike(members):
        yield from (member for member in members if member is not None)
        return
    for member in members:
        if member is not None:
            yield from _found(member, seen)


def _are_alike(members: Sequence[nn.Module | None]) -> bool:
    kinds = {type(member) for member in members}
    return (
        len(members) > 1
        and len(kinds) == 1
        and all(m is not None and _has_parts(m) for m in members)
    )


def _has_parts(module: nn.Module) -> bool:
    return bool(children_of(module)) and any(True for _ in module.parameters())
