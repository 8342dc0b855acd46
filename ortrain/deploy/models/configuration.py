"""The configuration of a folder, as transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ortrain.errors import InputError


def config_of(folder: Path, given: dict[str, Any], *, trusted: bool = False) -> Any:
    """The configuration of a folder, with some attributes replaced.

    Args:
        folder: of the model, or one in it.
        given: attributes, and ``config`` itself, which is taken out.
        trusted: whether code that lies beside it may be run.

    Raises:
        TypeError: there is no attribute of a name.
        InputError: there is no configuration, or none that transformers can read.
    """
    config = given.pop("config", None)
    if config is None:
        place = next((p for p in (folder, folder.parent) if (p / "config.json").is_file()), None)
        if place is None:
            raise InputError(
                f"there is no config.json in {folder}",
                because="without it nobody knows which model this is",
                help="copy it from the checkpoint, or pass config=…",
            )
        try:
            config = AutoConfig.from_pretrained(place, trust_remote_code=trusted)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"transformers cannot read {place / 'config.json'}",
                because=str(error).strip().splitlines()[0],
            ) from error
    for name, value in given.items():
        if not hasattr(config, name):
            raise TypeError(
                f"from_pretrained has no argument {name!r}, and {type(config).__name__} no "
                "attribute of that name"
            )
        setattr(config, name, value)
    return config
