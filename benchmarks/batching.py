"""Real words a second by how sentences become batches: what costs nothing against ortrain.

    python benchmarks/batching.py [classifier language-model] [--precisions fp32] [--sentences N]

A classifier of MiniLM's shape and a language model, a Llama of that shape, train on sentences as
long as SST-2's, 32 at a time. They are padded to the longest of a batch; or grouped by length
before, as transformers' `train_sampling_strategy="group_by_length"` does; or, for the language
model, packed into one row without padding, by transformers' `DataCollatorWithFlattening`. Eager and
ortrain with its default options train in each way, on the same sentences, in turns of ten batches.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import workloads
from contestants import Training
from measurement import Results, Row, arguments, one_of, turns
from padding import BATCH, TURN, Sentence, batches, drawn
from workloads import Batch, Workload

WORDS = 8192
NAMES = {"fp32": ("eager", "auto"), "bf16": ("eager-bf16", "auto-bf16")}
MODELS = {"classifier": ("padded", "grouped"), "language-model": ("padded", "grouped", "packed")}


def grouped(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Sentences of one length beside each other, in the order of transformers' sampler."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    dice = torch.Generator().manual_seed(0)
    lengths = [len(each.ids) for each in sentences]
    return [sentences[i] for i in LengthGroupedSampler(BATCH, lengths=lengths, generator=dice)]


def packed(sentences: Sequence[Sentence]) -> list[Batch]:
    """Batches of one row each, in which positions begin anew with each sentence."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening()
    rows = [{"input_ids": each.ids} for each in sentences]
    return [collate(rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)]


def language(given: Sequence[Batch]) -> list[Batch]:
    """Batches whose labels are their words, as a language model takes them."""
    return [
        {**batch, "labels": batch["input_ids"].where(batch["attention_mask"] == 1, -100)}
        for batch in given
    ]


def language_model() -> torch.nn.Module:
    """A Llama of MiniLM's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=12,
    )
    config.use_cache = False
    return LlamaForCausalLM(config).train()


def made(model: str, way: str, sentences: Sequence[Sentence]) -> workloads.Made:
    """A model and its batches."""
    some = grouped(sentences) if way == "grouped" else sentences
    if model == "classifier":
        return workloads.minilm_model(), batches(some, 0)
    some = [Sentence([i % WORDS for i in each.ids], each.label) for each in some]
    return language_model(), packed(some) if way == "packed" else language(batches(some, 0))


def measure(model: str, precision: str, sentences: Sequence[Sentence]) -> dict[str, Row]:
    """A row for each way and contestant."""
    ways = {
        f"{name}, {way}": Training(
            name, Workload(title=model, make=partial(made, model, way, sentences), only_loss=True)
        )
        for way in MODELS[model]
        for name in NAMES[precision]
    }
    for training in ways.values():
        training.wrap()
        training.settle()
        training.steps = 0
    steps = -(-len(sentences) // BATCH)
    seconds = dict.fromkeys(ways, 0.0)
    for name in turns([*ways], -(-steps // TURN)):
        size = min(TURN, steps - ways[name].steps)
        seconds[name] += ways[name].turn(size, warm_up=0) / 1e3
    words = sum(len(each.ids) for each in sentences)
    rows: dict[str, Row] = {}
    for name, training in ways.items():
        places = sum(batch["input_ids"].numel() for batch in training.batches)
        rows[name] = {
            "seconds": seconds[name],
            "words_per_second": words / seconds[name],
            "ratio": seconds[name] / next(iter(seconds.values())),
            "real": words / places,
            "ran": training.ran(),
        }
    return rows


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("models", nargs="*", default=[*MODELS], type=one_of(MODELS))
    parser.add_argument("--precisions", nargs="+", default=[*NAMES], type=one_of(NAMES))
    parser.add_argument("--sentences", type=int, default=1920, help="(%(default)s)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    sentences = drawn(options.sentences)
    random.Random(1).shuffle(sentences)
    results = Results("batching", options.json)
    for model in options.models:
        for precision in options.precisions:
            rows = measure(model, precision, sentences)
            print(f"{model}, {precision}")
            for name, row in rows.items():
                print(
                    f"  {name:<22}{row['words_per_second']:8.0f} words/s, {1 / row['ratio']:.2f}x; "
                    f"{row['real']:.0%} of the places are words; {row['ran']}",
                    flush=True,
                )
            results.save(models={f"{model}, {precision}": rows})


if __name__ == "__main__":
    main()
