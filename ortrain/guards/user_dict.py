"""``collections.UserDict`` among arguments: what tokenizers and feature extractors return.

A graph takes its entries, and its attributes as far as they are constants. What else it holds, such
as a tokenizer's own encodings, stands in a trace as something that raises where it is looked at.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

from torch.utils import _pytree as pytree

from ortrain.errors import CaptureError

_CONSTANTS = (type(None), bool, int, float, str)


class _Unseen:
    """Stands for what no graph can take; whoever looks at it gets an error."""

    def __init__(self, kind: str, name: str) -> None:
        self.__dict__.update(_kind=kind, _name=name)

    def _refuse(self, *args: Any) -> NoReturn:
        raise CaptureError(
            f"the forward reads {self.__dict__['_name']} of a {self.__dict__['_kind']}",
            because="what that holds is no tensor and no constant",
            help="read it outside of the module, and pass what is needed as a tensor",
        )

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _refuse


def parts(value: UserDict[Any, Any]) -> tuple[tuple[Hashable, ...], list[Any]]:
    """What a call takes of one: entries by their keys, then constants by the attributes' names."""
    others = _constants(value)
    names = (*value.data, *((UserDict, name) for name in others))
    return names, [*value.data.values(), *others.values()]


def register(kind: type) -> None:
    """Lets traces take apart the dictionaries of a class, and make them without their constructor.

    Args:
        kind: the class, of which nobody has told torch.
    """

    def flatten(value: Any) -> tuple[list[Any], Any]:
        others = _constants(value)
        unseen = [name for name in vars(value) if name != "data" and name not in others]
        return [*value.data.values()], (tuple(value.data), tuple(others.items()), tuple(unseen))

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(value)
        keys: list[Any] = [pytree.MappingKey(key) for key in context[0]]
        return list(zip(keys, children, strict=True)), context

    def unflatten(children: Any, context: Any) -> Any:
        keys, others, unseen = context
        made: Any = object.__new__(kind)
        made.__dict__.update(others)
        made.__dict__.update({name: _Unseen(kind.__qualname__, name) for name in unseen})
        made.__dict__["data"] = dict(zip(keys, children, strict=True))
        return made

    made: Callable[..., Any] = pytree.register_pytree_node
    made(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def _constants(value: UserDict[Any, Any]) -> dict[str, Any]:
    attributes = vars(value).items()
    return {n: v for n, v in attributes if n != "data" and isinstance(v, _CONSTANTS)}
