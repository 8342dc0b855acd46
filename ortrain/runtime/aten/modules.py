"""Modules of ours that generated functions call, by their names there."""

from __future__ import annotations

from types import ModuleType

from ortrain.runtime.aten import (
    attention,
    blas,
    control,
    draws,
    flash,
    hash,
    host,
    late,
    recurrent,
    resampling,
)

MODULES: dict[str, ModuleType] = {
    "attention": attention,
    "blas": blas,
    "control": control,
    "draws": draws,
    "flash": flash,
    "hash": hash,
    "host": host,
    "late": late,
    "recurrent": recurrent,
    "resampling": resampling,
}
