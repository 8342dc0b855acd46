"""``ORTTrainerOptions``: the settings of the second generation, as groups of names."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ortrain.classic.amp import LossScaler
from ortrain.classic.names import unknown
from ortrain.classic.optim.lr_scheduler import _LRScheduler
from ortrain.config import Options
from ortrain.errors import InputError
from ortrain.kinds import NONE, expect, expect_names

_Kinds = type | tuple[type, ...]


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        default: its value where none is given.
        kinds: classes of its values.
        expected: these in words.
        low: least number; None for no bound.
        high: largest number; None for no bound.
        unused: why nothing depends on it here; empty for a setting that is used.
        names: its values are lists of names.
    """

    default: Any
    kinds: _Kinds
    expected: str
    low: int | None = None
    high: int | None = None
    unused: str = ""
    names: bool = False


def _flag(default: bool = False, unused: str = "") -> Setting:
    return Setting(default, bool, "True or False", unused=unused)


def _whole(default: int, low: int, high: int | None = None, unused: str = "") -> Setting:
    return Setting(default, int, "a whole number", low, high, unused)


def _text(default: str, unused: str = "") -> Setting:
    return Setting(default, str, "a string", unused=unused)


def _list(unused: str = "") -> Setting:
    return Setting([], list, "a list of names", unused=unused, names=True)


def _dict(unused: str) -> Setting:
    return Setting({}, dict, "a dict", unused=unused)


_RECOMPUTE = "what is computed again is decided by ortrain=Options(memory_budget=…)"
_ONE_STAGE = "it belongs to parallelism by layers, which is not served"
_CASTS = "the casts of mixed precision are PyTorch's autocast, placed by ortrain's own pass"
_FILES = "graphs are written by ORTModule's DebugOptions(save_onnx=True)"
_SESSION = "sessions are made by the pipeline; ortrain=Options(engine=…, provider=…) chooses"

Schema = Mapping[str, "Setting | Schema"]
_STAGES: dict[str, Setting | Schema] = {
    "pipeline_parallel_size": _whole(1, 1),
    "num_pipeline_micro_batches": _whole(1, 1, unused=_ONE_STAGE),
    "pipeline_cut_info_string": _text("", _ONE_STAGE),
    "sliced_schema": _dict(_ONE_STAGE),
    "sliced_axes": _dict(_ONE_STAGE),
    "sliced_tensor_names": _list(_ONE_STAGE),
}
SCHEMA: Schema = {
    "batch": {"gradient_accumulation_steps": _whole(1, 1)},
    "device": {"id": _text("cuda"), "mem_limit": _whole(0, 0)},
    "distributed": {
        "world_rank": _whole(0, 0),
        "world_size": _whole(1, 1),
        "local_rank": _whole(0, 0),
        "data_parallel_size": _whole(1, 1),
        "horizontal_parallel_size": _whole(1, 1),
        "pipeline_parallel": _STAGES,
        "allreduce_post_accumulation": _flag(),
        "deepspeed_zero_optimization": {"stage": _whole(0, 0, 1)},
        "enable_adasum": _flag(),
    },
    "lr_scheduler": Setting(
        None, (_LRScheduler, NONE), "a schedule of optim.lr_scheduler, or None"
    ),
    "mixed_precision": {
        "enabled": _flag(),
        "loss_scaler": Setting(None, (LossScaler, NONE), "an amp.LossScaler, or None"),
    },
    "graph_transformer": {
        "attn_dropout_recompute": _flag(unused=_RECOMPUTE),
        "gelu_recompute": _flag(unused=_RECOMPUTE),
        "transformer_layer_recompute": _flag(unused=_RECOMPUTE),
        "number_recompute_layers": _whole(0, 0, unused=_RECOMPUTE),
        "propagate_cast_ops_config": {
            "strategy": Setting("INSERT_AND_REDUCE", object, "a strategy", unused=_CASTS),
            "level": _whole(-1, -1, unused=_CASTS),
            "allow": _list(_CASTS),
        },
        "allow_layer_norm_mod_precision": _flag(unused=_CASTS),
    },
    "utils": {
        "frozen_weights": _list(),
        "grad_norm_clip": _flag(True),
        "invertible_layer_norm_gradient": _flag(
            unused="what the backward keeps of a layer norm is decided by "
            "ortrain=Options(memory_budget=…)"
        ),
        "run_symbolic_shape_infer": _flag(unused="sizes are symbolic from the capture on"),
    },
    "debug": {
        "deterministic_compute": _flag(),
        "check_model_export": _flag(),
        "graph_save_paths": {
            "model_after_graph_transforms_path": _text("", _FILES),
            "model_with_gradient_graph_path": _text("", _FILES),
            "model_with_training_graph_path": _text("", _FILES),
            "model_with_training_graph_after_optimization_path": _text("", _FILES),
        },
    },
    "_internal_use": {
        "enable_internal_postprocess": _flag(
            True, "graphs come from ortrain's own capture, which needs no mending"
        ),
        "extra_postprocess": Setting(None, object, "a function, or None"),
        "onnx_opset_version": Setting(None, (int, NONE), "12 to 23, or None", 12, 23),
        "enable_onnx_contrib_ops": _flag(True, "graphs have standard operators and ortrain's own"),
    },
    "provider_options": _dict(_SESSION),
    "session_options": Setting(None, object, "None", unused=_SESSION),
    "ortrain": Setting(None, (Options, NONE), "an ortrain.Options, or None"),
}
# Until 2021 these stood in `distributed` itself.
_MOVED = frozenset(_STAGES)


class ORTTrainerOptions:
    """The settings of a trainer: ``options.batch.gradient_accumulation_steps`` and so on.

    Args:
        options: nested dicts of the settings that differ from their defaults. ``"ortrain"``, which
            the original did not have, takes the `ortrain.Options` of the pipeline.

    Raises:
        InputError: an unknown name, which is told with near ones, or a value out of its range.
        TypeError: a value of another type.
    """

    batch: Any
    device: Any
    distributed: Any
    lr_scheduler: Any
    mixed_precision: Any
    graph_transformer: Any
    utils: Any
    debug: Any
    _internal_use: Any
    provider_options: dict[str, Any]
    session_options: Any
    ortrain: Options | None

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        options = {} if options is None else options
        expect("options", options, Mapping, "a dict of settings")
        given = dict(options)
        distributed = given.get("distributed")
        if isinstance(distributed, Mapping) and (old := _MOVED & {*distributed}):
            inner = dict(distributed.get("pipeline_parallel", {}))
            inner |= {name: distributed[name] for name in old}
            outer = {name: value for name, value in distributed.items() if name not in old}
            given["distributed"] = {**outer, "pipeline_parallel": inner}
        for name, value in _filled(SCHEMA, given, "").items():
            setattr(self, name, value)

    def unused(self) -> Iterator[tuple[str, str]]:
        """Settings that differ from their defaults and change nothing here: name and reason."""
        yield from _unused(SCHEMA, self, "")

    def __repr__(self) -> str:
        return f"ORTTrainerOptions({_differing(SCHEMA, self)!r})"


def _filled(schema: Schema, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of all settings of a group."""
    for name in given:
        if name not in schema:
            raise unknown(f"the option {where}{name}:", name, [*schema])
    values: dict[str, Any] = {}
    for name, entry in schema.items():
        full = f"{where}{name}"
        if not isinstance(entry, Setting):
            inner = given.get(name, {})
            expect(full, inner, Mapping, f"a dict with some of {', '.join(entry)}")
            values[name] = SimpleNamespace(**_filled(entry, inner, f"{full}."))
            continue
        value = given.get(name, entry.default)
        if name in given:
            _check(full, value, entry)
        values[name] = copy.copy(value) if isinstance(value, list | dict) else value
    return values


def _check(name: str, value: Any, entry: Setting) -> None:
    expect(name, value, entry.kinds, entry.expected)
    if entry.names:
        expect_names(name, value)
    if name == "_internal_use.extra_postprocess" and not (value is None or callable(value)):
        raise TypeError(f"{name}: expected a function of an ONNX model, or None")
    if isinstance(value, int) and not isinstance(value, bool):
        low, high = entry.low, entry.high
        if (low is not None and value < low) or (high is not None and value > high):
            bound = f"{low} or more" if high is None else f"{low} to {high}"
            raise InputError(f"the option {name} is {value}: expected {bound}")


def _unused(schema: Schema, values: object, where: str) -> Iterator[tuple[str, str]]:
    for name, entry in schema.items():
        value = getattr(values, name)
        if not isinstance(entry, Setting):
            yield from _unused(entry, value, f"{where}{name}.")
        elif entry.unused and value != entry.default:
            yield f"{where}{name}", entry.unused


def _differing(schema: Schema, values: object) -> dict[str, Any]:
    """What differs from the defaults, as it would be given."""
    found: dict[str, Any] = {}
    for name, entry in schema.items():
        value = getattr(values, name)
        if not isinstance(entry, Setting):
            if inner := _differing(entry, value):
                found[name] = inner
        elif value != entry.default:
            found[name] = value
    return found


__all__ = ["SCHEMA", "ORTTrainerOptions", "Setting"]
