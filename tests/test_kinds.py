"""Arguments of another kind: each public callable names the one that is wrong, before it acts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from transformers import TrainingArguments

import ortrain
from ortrain import DebugOptions, Options, ORTModule, ondevice, optim
from ortrain.deploy import Budgets, GoldenSet, ModelFolder, ORTConfig, compare, export_onnx
from ortrain.deploy.generation import ORTGenerator
from ortrain.errors import OrtrainError
from ortrain.ondevice import artifacts, losses, onnxblock
from ortrain.ondevice import optim as in_graph
from ortrain.ondevice.running.adapters import export_adapter

NET = nn.Linear(2, 2)
WRONG: dict[str, Any] = {
    "None": None,
    "int": 5,
    "float": 1.5,
    "bool": True,
    "str": "text",
    "bytes": b"bytes",
    "list": [1, 2, 3],
    "names": ["a"],
    "pair": (0.5, 0.5),
    "dict": {"a": 1},
    "Options": Options(),
    "DebugOptions": DebugOptions(),
    "class": nn.Linear,
    "module": NET,
    "function": lambda *_: None,
    "object": object(),
    "array": np.zeros(3, np.float32),
    "tensor": torch.zeros(3),
    "path": Path("nowhere"),
}
MODEL = onnx.ModelProto()
STATE = object.__new__(ondevice.CheckpointState)  # its kind is all that is looked at
MODULE = object.__new__(ondevice.Module)

NUMBER = {"int", "float"}
PATH = {"str", "path"}
URI = {*PATH, "bytes"}
NAMES = {"names", "dict"}
FLAG = {"bool"}
# Callables, the arguments that they need, and for each parameter what is of its kind.
TABLE: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, set[str]]]] = {
    "ORTModule": (
        ORTModule,
        {"module": NET},
        {
            "module": {"module"},
            "debug_options": {"None", "DebugOptions"},
            "options": {"None", "Options"},
        },
    ),
    "Options": (
        Options,
        {},
        {
            "engine": set(),
            "inference": {"None"},
            "precision": {"None"},
            "fallback": set(),
            "provider": {"None", "str"},  # which the executor looks up
            "opset": set(),
            "threads": {"int"},
            "arena": FLAG,
            "cuda_graphs": FLAG | {"None"},
            "skip_padding": FLAG | {"None"},
            "memory_budget": {"None", "int", "float", "str"},
            "backward_pieces": {"int"},
            "cache_dir": {"None", *PATH},
            "cache_bytes": {"None", "int"},
            "policy": set(),
            "retry": FLAG,
            "certificate": {"int"},
            "keep_in_torch": {"names"},
            "custom_autograd": FLAG,
            "parts": FLAG,
            "deterministic": FLAG,
        },
    ),
    "DebugOptions": (
        DebugOptions,
        {},
        {
            "log_level": {"int"},
            "save_onnx": set(),
            "onnx_prefix": {"str"},
            "save_path": PATH,
            "print_input_density": FLAG,
            "print_memory_stats": FLAG,
        },
    ),
    "explain": (
        ortrain.explain,
        {"model": NET},
        {"model": {"module"}, "options": {"None", "Options"}},
    ),
    "export": (
        ortrain.export,
        {"module": NET},
        {
            "module": {"module"},
            "args": {"list", "names", "pair"},
            "kwargs": {"None", "dict"},
            "opset": {"int"},
            "still": FLAG,
        },
    ),
    "export_onnx": (
        export_onnx,
        {"module": NET, "samples": [{}], "path": "nowhere"},
        {
            "module": {"module"},
            "samples": set(),
            "path": PATH,
            "opset": set(),
            "outputs": {"None", *NAMES},
            "dimensions": NAMES,
            "external_data_above": {"int"},
        },
    ),
    "compare": (
        compare,
        {"before": "nowhere", "after": "nowhere", "golden": GoldenSet([{"x": np.zeros((1, 1))}])},
        {
            "before": PATH,
            "after": PATH,
            "golden": set(),
            "budgets": {"None"},
            "provider": set(),
            "threads": {"None", "int"},
            "latency_runs": {"int"},
            "memory": FLAG,
            "thresholds": {"pair"},
        },
    ),
    "GoldenSet": (
        GoldenSet,
        {"batches": [{"x": np.zeros((3, 1))}]},
        {
            "batches": set(),
            "labels": {"None", "list", "array", "tensor"},
            "slices": {"dict"},
            "id2label": {"dict"},
            "task": {"None"},
            "metric": {"None"},
        },
    ),
    "GoldenSet.draw": (
        GoldenSet.draw,
        {"data": [{"input_ids": [1]}]},
        {
            "data": set(),
            "labels": {"None", "list", "pair", "array", "tensor"},
            "limit": {"int"},
            "batch_size": {"int"},
            "seed": {"None", "int"},
            "batched": {"None", *FLAG},
            "input_names": {"None", *NAMES},
            "slices": {"None", "dict"},
            "slice_columns": NAMES,
            "id2label": {"None", "dict"},
            "task": {"None"},
            "metric": {"None"},
        },
    ),
    "GoldenSet.from_file": (
        GoldenSet.from_file,
        {"path": "nowhere", "model": "nowhere"},
        {
            "path": PATH,
            "model": PATH,
            "text_column": {"str"},
            "label_column": {"str"},
            "slice_columns": NAMES,
            "batch_size": {"int"},
            "max_length": {"None", "int"},
            "limit": {"None", "int"},
            "task": {"None"},
            "metric": {"None"},
        },
    ),
    "Budgets": (
        Budgets,
        {},
        {
            each.name: {"None", "float", *({"int"} if each.name != "min_agreement" else set())}
            for each in fields(Budgets)
        },
    ),
    "ModelFolder.open": (
        ModelFolder.open,
        {"source": "nowhere"},
        {"source": PATH, "file_names": {"None", *NAMES}},
    ),
    "ORTConfig": (
        ORTConfig,
        {},
        {
            "opset": {"None", "int"},
            "use_external_data_format": FLAG,
            "one_external_file": FLAG,
            "optimization": {"None", "dict", "Options", "DebugOptions"},
            "quantization": {"None", "dict", "Options", "DebugOptions"},
        },
    ),
    "ORTGenerator": (ORTGenerator, {"model": NET}, {"model": set()}),
    "generate_artifacts": (
        ondevice.generate_artifacts,
        {"model": MODEL},
        {
            "model": {*PATH, "module"},
            "requires_grad": {"None", *NAMES},
            "frozen_params": {"None", *NAMES},
            "loss": {"None", "function", "module"},
            "optimizer": {"None"},
            "artifact_directory": {"None", *PATH},
            "prefix": {"str"},
            "ort_format": FLAG,
            "custom_op_library": {"None", *PATH},
            "additional_output_names": {"None", *NAMES},
            "nominal_checkpoint": FLAG,
            "loss_input_names": {"None", *NAMES},
            "lora": {"None"},
            "example_inputs": {"None", "list", "names", "pair", "dict", "str", "bytes"},
            "example_targets": {"list", "names", "pair", "str", "bytes"},
        },
    ),
    "Module": (
        ondevice.Module,
        {"train_model_uri": "nowhere", "state": STATE},
        {
            "train_model_uri": URI,
            "state": set(),
            "eval_model_uri": {"None", *URI},
            "device": {"str"},
            "session_options": {"None"},
        },
    ),
    "Optimizer": (
        ondevice.Optimizer,
        {"optimizer_uri": "nowhere", "module": MODULE},
        {"optimizer_uri": URI, "module": set()},
    ),
    "TrainStep": (
        ondevice.TrainStep,
        {"train_step_model_uri": "nowhere", "state": STATE},
        {
            "train_step_model_uri": URI,
            "state": set(),
            "session_options": {"None"},
            "device": {"str"},
        },
    ),
    "LinearLRScheduler": (
        ondevice.LinearLRScheduler,
        {
            "optimizer": object.__new__(ondevice.Optimizer),
            "warmup_step_count": 1,
            "total_step_count": 9,
            "initial_lr": 1.0,
        },
        {
            "optimizer": set(),
            "warmup_step_count": {"int"},
            "total_step_count": {"int"},
            "initial_lr": NUMBER,
        },
    ),
    "export_adapter": (
        export_adapter,
        {"state": STATE, "path": "nowhere"},
        {
            "state": set(),
            "path": PATH,
            "adapter_version": {"int"},
            "model_version": {"int"},
        },
    ),
    "LoRA": (
        ondevice.LoRA,
        {},
        {
            "rank": {"int"},
            "targets": {"str", *NAMES},
            "alpha": {"None", *NUMBER},
            "seed": {"int"},
        },
    ),
    "FusedAdam": (
        optim.FusedAdam,
        {"params": NET.parameters},
        {
            "params": set(),
            "lr": NUMBER,
            "bias_correction": FLAG,
            "betas": {"pair"},
            "eps": NUMBER,
            "adam_w_mode": set(),
            "weight_decay": NUMBER,
            "set_grad_none": FLAG,
        },
    ),
    "Lamb": (
        optim.Lamb,
        {"params": NET.parameters},
        {
            "params": set(),
            "lr": NUMBER,
            "betas": {"pair"},
            "eps": NUMBER,
            "weight_decay": NUMBER,
            "ratio_min": NUMBER,
            "ratio_max": NUMBER,
            "max_norm_clip": {"None", *NUMBER},
            "bias_correction": FLAG,
        },
    ),
    "SGD": (
        optim.SGD,
        {"params": NET.parameters},
        {
            "params": set(),
            "lr": NUMBER,
            "momentum": NUMBER,
            "dampening": NUMBER,
            "weight_decay": NUMBER,
            "nesterov": FLAG,
        },
    ),
    "clip_grad_norm_": (
        optim.clip_grad_norm_,
        {"parameters": NET.parameters, "max_norm": 1.0},
        {
            "parameters": {"tensor"},
            "max_norm": NUMBER,
            "norm_type": NUMBER,
            "error_if_nonfinite": FLAG,
        },
    ),
    "ORTTrainer": (
        ortrain.ORTTrainer,
        {"model": NET},
        {
            "model": {"None", "module"},
            "args": {"None"},
            "options": {"None", "Options"},
        },
    ),
    "ORTTrainingArguments": (
        ortrain.ORTTrainingArguments,
        {"output_dir": "nowhere"},
        {
            "use_module_with_loss": FLAG,
            "inference_with_ort": FLAG,
            "save_onnx": FLAG,
            "onnx_prefix": {"None", "str"},
            "onnx_log_level": set(),
            "ort_engine": {"str"},
            "ort_fallback": {"str"},
            "skip_padding": FLAG | {"None"},
            "memory_budget": {"None", "int", "float", "str"},
        },
    ),
    "ClipGradNorm": (onnxblock.optim.ClipGradNorm, {}, {"max_norm": NUMBER}),
    "onnxblock AdamW": (
        onnxblock.optim.AdamW,
        {},
        {
            "bias_correction": FLAG,
            "betas": {"pair"},
            "eps": NUMBER,
            "weight_decay": NUMBER,
            "clip_grad": {"None"},
        },
    ),
    **{
        kind.__name__ + " in the graph": (
            kind,
            {},
            {
                each.name: {
                    "betas": {"pair"},
                    "bias_correction": FLAG,
                    "nesterov": FLAG,
                    "max_norm": {"None", *NUMBER},
                    "groups": set(),
                }.get(each.name, NUMBER)
                for each in fields(kind)
            },
        )
        for kind in (in_graph.Adam, in_graph.AdamW, in_graph.SGD, in_graph.Lion)
    },
}
# Of a public callable that is not in the table, why.
ELSEWHERE = {
    "CheckpointState": "made by load_checkpoint",
    "LossType": "an enumeration",
    "OptimType": "an enumeration",
    "Parameter": "made by a state",
    "AdamWMode": "an enumeration",
    "FP16_Optimizer": "takes any optimizer, and warns of one that it does not know",
}


@pytest.mark.parametrize(
    ("callee", "parameter"), [(name, each) for name, row in TABLE.items() for each in row[2]]
)
def test_an_argument_of_another_kind_is_told_by_its_name(
    callee: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, needed, takes = TABLE[callee]
    for wrong in WRONG.keys() - takes[parameter]:
        given = {n: v() if n in ("params", "parameters") else v for n, v in needed.items()}
        with pytest.raises((TypeError, ValueError, OrtrainError)) as error:
            call(**{**given, parameter: WRONG[wrong]})
        assert parameter in str(error.value), wrong
        assert len(str(error.value)) < 300
        assert not any(tmp_path.iterdir())


def test_the_table_has_every_parameter_of_every_public_callable() -> None:
    public = {
        name: getattr(package, name)
        for package in (ondevice, optim)
        for name in package.__all__
        if name not in ELSEWHERE
    }
    assert {call for call, _, _ in TABLE.values()} >= set(public.values())
    for name, (call, _, takes) in TABLE.items():
        own = {
            n
            for n, p in inspect.signature(call).parameters.items()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        if call not in (ortrain.ORTTrainingArguments, ortrain.ORTTrainer, ORTGenerator):
            assert own == {*takes}, name


def test_settings_in_each_others_places_say_where_they_go() -> None:
    with pytest.raises(TypeError, match=r"debug_options=Options.*write options=Options\(…\)"):
        ORTModule(NET, Options())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"options=DebugOptions.*write debug_options=DebugOptions"):
        ORTModule(NET, options=DebugOptions())  # type: ignore[arg-type]
    model = ORTModule(NET)
    with pytest.raises(TypeError, match="options=DebugOptions"):
        type(model).options.__set__(model, DebugOptions())  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"options=Options.*as options=Options\(…\)"):
        ortrain.ORTTrainer(NET, TrainingArguments("nowhere"), Options())


def test_modules_and_states_in_each_others_places_are_told() -> None:
    with pytest.raises(TypeError, match="state=Module"):
        ondevice.Module("train.onnx", MODULE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state=Module"):
        ondevice.TrainStep("step.onnx", MODULE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module=CheckpointState"):
        ondevice.Optimizer("optimizer.onnx", STATE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"state='checkpoint'.*load_checkpoint"):
        ondevice.Module("train.onnx", "checkpoint")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer=Module"):
        ondevice.LinearLRScheduler(MODULE, 1, 2, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="train_model_uri=CheckpointState"):
        ondevice.Module(STATE, "train.onnx")  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [losses.MSELoss, artifacts.LossType, nn.MSELoss])
def test_a_class_of_losses_is_no_loss(loss: Any) -> None:
    with pytest.raises(TypeError, match=r"loss=the class .*: expected a LossType"):
        ondevice.generate_artifacts(MODEL, loss=loss)
