"""PEFT's adapters, by an own loop and by a Trainer, with saving, resuming and merging."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from tests.libraries.made import WORDS, llama
from tests.libraries.ways import Way

PARTS = ["q_proj", "v_proj"]


def _batch(way: Way, step: int) -> dict[str, Any]:
    shape = (16, 96) if way.large else (8, 12)
    ids = torch.randint(3, len(WORDS), shape, generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def _loop(way: Way, inner: Any, steps: int, before: Callable[[int], None] | None = None) -> None:
    model = way.module(inner)
    adapters = [p for name, p in inner.named_parameters() if "lora" in name or "ia3" in name]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    for step in range(steps):
        if before is not None:
            before(step)
        loss = model(**_batch(way, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.losses.append(float(loss.detach()))


def _base(way: Way) -> Any:
    return llama(way.large, LlamaForCausalLM)


def lora(way: Way) -> None:
    """LoRA, saved half-way, loaded into a new model, and merged at the end."""
    config = LoraConfig(r=8, target_modules=PARTS, lora_dropout=0.0)
    torch.manual_seed(1)
    inner = get_peft_model(_base(way), config)
    half = way.steps // 2
    _loop(way, inner, half)
    with tempfile.TemporaryDirectory() as folder:
        inner.save_pretrained(folder)
        again = PeftModel.from_pretrained(_base(way), folder, is_trainable=True)
    _loop(way, again, way.steps - half)
    merged = again.merge_and_unload().eval()
    with torch.no_grad():
        way.losses.append(float(way.module(merged)(**_batch(way, 0)).loss))


def two_adapters(way: Way) -> None:
    """Two adapters in turns of ten steps."""
    torch.manual_seed(1)
    inner = get_peft_model(_base(way), LoraConfig(r=8, target_modules=PARTS), "first")
    inner.add_adapter("second", LoraConfig(r=4, target_modules=PARTS))

    def switch(step: int) -> None:
        if step % 10 == 0:
            inner.set_adapter("second" if step // 10 % 2 else "first")

    _loop(way, inner, way.steps, switch)


def dora(way: Way) -> None:
    """LoRA with weights taken apart into lengths and directions."""
    torch.manual_seed(1)
    config = LoraConfig(r=8, target_modules=PARTS, use_dora=True)
    _loop(way, get_peft_model(_base(way), config), way.steps)


def ia3(way: Way) -> None:
    """Factors of activations."""
    torch.manual_seed(1)
    config = IA3Config(target_modules=[*PARTS, "down_proj"], feedforward_modules=["down_proj"])
    _loop(way, get_peft_model(_base(way), config), way.steps)


def trainer(way: Way) -> None:
    """LoRA by a Trainer that stops half-way and resumes."""
    rows = [{k: v[0] for k, v in _batch(way, step).items()} for step in range(128)]
    with tempfile.TemporaryDirectory() as folder:
        for last in (way.steps // 2, way.steps):
            torch.manual_seed(1)
            inner = get_peft_model(_base(way), LoraConfig(r=8, target_modules=PARTS))
            given = {**way.arguments(folder), "max_steps": last, "save_strategy": "steps"}
            args = TrainingArguments(
                **given, save_steps=way.steps // 2, per_device_train_batch_size=8
            )
            made = way.trainer(
                Trainer,
                model=inner,
                args=args,
                train_dataset=rows,
                data_collator=default_data_collator,
            )
            way.losses.clear()  # those of the first half come again
            way.trained(made, resume_from_checkpoint=last == way.steps)
