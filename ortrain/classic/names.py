"""What to say of a name that is not known: the nearest ones that are."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from ortrain.errors import InputError, listing
from ortrain.kinds import shown


def unknown(what: str, name: object, known: Collection[str], *, help: str = "") -> InputError:
    """The error of a name that is not among those that are known.

    Args:
        what: kind of the name, for people: "the optimizer attribute".
        name: as it was given.
        known: the names that are served.
        help: the way out; the known names where it is empty.
    """
    near = difflib.get_close_matches(str(name), known, 3, 0.5)
    return InputError(
        f"{what} {shown(name)} is not known",
        because=f"near it are {listing([repr(each) for each in near])}" if near else "",
        help=help or f"known are {listing(sorted(known), 40) or 'none'}",
    )


__all__ = ["unknown"]
