"""Arguments that transformers no longer has act by their names of today, or are told of."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from ortrain.compat.arguments import (
    ORTOptimizerNames,
    ORTSeq2SeqTrainingArguments,
    ORTTrainingArguments,
)
from ortrain.compat.old_fields import _RENAMED, _WITHOUT_EFFECT, OldFields
from ortrain.errors import OrtrainWarning

KINDS = [ORTTrainingArguments, ORTSeq2SeqTrainingArguments]
# Old field with a value → field of today with its value.
MOVED: dict[tuple[str, Any], tuple[str, Any]] = {
    ("evaluation_strategy", "epoch"): ("eval_strategy", "epoch"),
    ("no_cuda", True): ("use_cpu", True),
    ("push_to_hub_model_id", "me/model"): ("hub_model_id", "me/model"),
    ("push_to_hub_token", "t"): ("hub_token", "t"),
    ("warmup_ratio", 0.1): ("warmup_steps", 0.1),
    ("group_by_length", True): ("train_sampling_strategy", "group_by_length"),
    ("adafactor", True): ("optim", "adafactor"),
    ("include_inputs_for_metrics", True): ("include_for_metrics", ["inputs"]),
    ("per_gpu_train_batch_size", 3): ("per_device_train_batch_size", 3),
    ("per_gpu_eval_batch_size", 3): ("per_device_eval_batch_size", 3),
}
SILENT = {"overwrite_output_dir", "ort"}
OTHER = {
    "save_safetensors": False,
    "dispatch_batches": True,
    "split_batches": True,
    "fsdp_min_num_params": 7,
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
}
SET: dict[type, Any] = {bool: True, str: "given", int: 3, type(None): "given"}


def made(kind: type, folder: Path, **given: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = kind(str(folder), report_to="none", **given)
    return arguments, [str(w.message) for w in caught if w.category is OrtrainWarning]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("old", MOVED, ids=lambda old: old[0])
def test_a_field_that_moved_acts(kind: type, old: tuple[str, Any], tmp_path: Path) -> None:
    arguments, told = made(kind, tmp_path, **dict([old]))
    name, value = MOVED[old]
    assert getattr(arguments, name) == value
    assert len(told) == 1
    assert told[0].startswith(f"training arguments: {old[0]} is {name}")


@pytest.mark.parametrize("name", _WITHOUT_EFFECT)
def test_a_field_without_effect_is_told(name: str, tmp_path: Path) -> None:
    value = SET[type(OldFields.__dataclass_fields__[name].default)]
    _, told = made(ORTTrainingArguments, tmp_path, **{name: value})
    assert told == [f"training arguments: {name} has no effect: {_WITHOUT_EFFECT[name]}"]


def test_the_cases_are_all_old_fields_and_no_field_of_today() -> None:
    old = {field.name for field in fields(OldFields)}
    assert old == {name for name, _ in MOVED} | {*_WITHOUT_EFFECT} | SILENT | {*OTHER}
    assert {*_RENAMED} <= old
    # Those of transformers itself, below what is added to them.
    own = next(kind for kind in TrainingArguments.__mro__ if not issubclass(kind, OldFields))
    assert not old & {field.name for field in fields(own)}


def test_without_old_fields_nothing_is_told(tmp_path: Path) -> None:
    arguments, told = made(ORTTrainingArguments, tmp_path, overwrite_output_dir=True)
    assert told == []
    assert arguments.overwrite_output_dir


def test_the_rest_of_the_old_fields(tmp_path: Path) -> None:
    _, told = made(ORTTrainingArguments, tmp_path, save_safetensors=False)
    assert "always safetensors" in told[0]
    arguments, _ = made(ORTTrainingArguments, tmp_path, split_batches=True)
    assert arguments.accelerator_config.split_batches
    with pytest.raises(ValueError, match="split_batches and accelerator_config"):
        made(ORTTrainingArguments, tmp_path, split_batches=True, accelerator_config={})
    wrapped = {"fsdp_min_num_params": 7, "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}
    arguments, told = made(ORTTrainingArguments, tmp_path, **wrapped)
    assert arguments.fsdp_config["min_num_params"] == 7
    assert arguments.fsdp_config["transformer_layer_cls_to_wrap"] == "BertLayer"
    assert told == ["training arguments: fsdp_min_num_params stands in fsdp_config now"]
    with pytest.raises(ValueError, match="fsdp_min_num_params and fsdp_config"):
        made(ORTTrainingArguments, tmp_path, **wrapped, fsdp_config={"xla": False})
    arguments, _ = made(ORTTrainingArguments, tmp_path, warmup_ratio=0.5, warmup_steps=7)
    assert arguments.warmup_steps == 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.filterwarnings("ignore:optim=:FutureWarning")
def test_a_command_line_of_old_examples_is_read(kind: type, tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path} --overwrite_output_dir --do_train --no_cuda --report_to none"
    line += " --evaluation_strategy steps --eval_steps 5 --optim adamw_ort_fused"
    (arguments,) = HfArgumentParser(kind).parse_args_into_dataclasses(line.split())
    assert arguments.overwrite_output_dir
    assert arguments.eval_strategy == "steps"
    assert arguments.optim == ORTOptimizerNames.ADAMW_ORT_FUSED


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_has_its_own_argument_for_inference(kind: type, tmp_path: Path) -> None:
    @dataclass
    class InferenceArguments:
        inference_with_ort: bool = False

    parser = HfArgumentParser((kind, InferenceArguments))  # type: ignore[arg-type]
    line = f"--output_dir {tmp_path} --report_to none --inference_with_ort"
    arguments, own = parser.parse_args_into_dataclasses(line.split())
    assert own.inference_with_ort
    assert not arguments.inference_with_ort
    arguments.inference_with_ort = True
    assert arguments.inference_with_ort


@pytest.mark.parametrize("kind", KINDS)
def test_methods_take_what_they_took(kind: type, tmp_path: Path) -> None:
    arguments, _ = made(kind, tmp_path)
    arguments.set_lr_scheduler("cosine", 2.0, -1, 0.25)
    assert (arguments.lr_scheduler_type, arguments.warmup_steps) == ("cosine", 0.25)
    arguments.set_lr_scheduler(warmup_ratio=0.25, warmup_steps=7)
    assert arguments.warmup_steps == 7
    arguments.set_evaluate("steps", 5, jit_mode=False)
    assert (arguments.eval_strategy, arguments.eval_steps) == ("steps", 5)
    with pytest.warns(OrtrainWarning, match="jit_mode has no effect"):
        arguments.set_testing(4, False, True)
    assert arguments.per_device_eval_batch_size == 4
