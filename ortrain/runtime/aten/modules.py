"""Modules of ours that generated functions call, by their names there."""

from __future__ import annotations

from types import ModuleType

from ortrain.runtime.aten import (
    attention,
    batches,
    blas,
    control,
    convolutions,
    draws,
    flash,
    hash,
    host,
    late,
    linear_loss,
    norms,
    recurrent,
    resampling,
    strips,
)

MODULES: dict[str, ModuleType] = {
    "attention": attention,
    "batches": batches,
    "blas": blas,
    "control": control,
    "convolutions": convolutions,
    "draws": draws,
    "flash": flash,
    "hash": hash,
    "host": host,
    "late": late,
    "linear_loss": linear_loss,
    "norms": norms,
    "recurrent": recurrent,
    "resampling": resampling,
    "strips": strips,
}
