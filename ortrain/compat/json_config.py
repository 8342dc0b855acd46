"""``load_from_json``: settings from a JSON file, into an ORTModule that is there."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ortrain.config import Options, json_config_path
from ortrain.json_config import settings_in
from ortrain.kinds import NONE, expect_path, shown
from ortrain.module import ORTModule


def load_from_json(ortmodule: Any, path: str | os.PathLike[str] | None = None) -> None:
    """Takes the settings of a JSON file into an ORTModule; the next call captures anew.

    Args:
        ortmodule: an ORTModule, or a module with some inside, all of which take them.
        path: of the file; the one in ``ORTMODULE_JSON_CONFIG_PATH`` wins. Without both nothing
            changes.

    Raises:
        TypeError: there is no ORTModule.
        InputError: the file cannot be read, has a key that does not exist, or a bad value.
    """
    inside = [ortmodule] if isinstance(ortmodule, ORTModule) else []
    if not inside and hasattr(ortmodule, "modules"):
        inside = [each for each in ortmodule.modules() if isinstance(each, ORTModule)]
    if not inside:
        raise TypeError(f"ortmodule={shown(ortmodule)}: expected an ORTModule")
    expect_path("path", path, NONE)
    chosen = json_config_path() or path
    if chosen is None:
        return
    settings = settings_in(chosen)
    for module in inside:
        _, debug_options = settings.applied(Options(), module._debug_options)
        module.options = replace(module.options, **settings.options)
        module._show(debug_options)
    settings.tell()
