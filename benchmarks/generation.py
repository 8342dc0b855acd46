"""`generate` of transformers models in PyTorch and in onnxruntime, alternating in one process.

python benchmarks/generation.py [--rounds N] [--json FILE]

Each call generates as many tokens as every other, which must be PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from workloads import alternate, machine

from ortrain.deploy.generation import ORTGenerator

BATCH, PROMPT, TOKENS = 8, 32, 64
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "4 beams": {"do_sample": False, "num_beams": 4},
}


def models() -> dict[str, Any]:
    """Random models of 4 layers and width 256, by name; of weights that amplify no rounding."""
    torch.manual_seed(0)
    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
    t5 = T5Config(vocab_size=8000, decoder_start_token_id=0, initializer_factor=1.5, **sizes)
    known = {"bos_token_id": 1, "eos_token_id": 2}
    gpt2 = GPT2Config(vocab_size=8000, n_embd=256, n_layer=4, n_head=4, **known)
    return {"T5": T5ForConditionalGeneration(t5).eval(), "GPT-2": GPT2LMHeadModel(gpt2).eval()}


def measure(model: Any, search: dict[str, Any], rounds: int) -> dict[str, float]:
    """Medians in milliseconds of both, and the median of their ratios."""
    vocabulary = model.config.vocab_size
    prompt = torch.randint(3, vocabulary, (BATCH, PROMPT))
    call = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "min_new_tokens": TOKENS,
        "max_new_tokens": TOKENS,
        "pad_token_id": 0,
        **search,
    }
    generators = {"PyTorch": model, "onnxruntime": ORTGenerator(model)}
    found = {name: each.generate(**call) for name, each in generators.items()}
    calls = {name: partial(each.generate, **call) for name, each in generators.items()}
    times = alternate(calls, rounds)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    return {
        "PyTorch_ms": statistics.median(times["PyTorch"]),
        "onnxruntime_ms": statistics.median(times["onnxruntime"]),
        "ratio": statistics.median(ratios),
        "equal_tokens": (found["PyTorch"] == found["onnxruntime"]).float().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results/generation.json"
    )
    options = parser.parse_args()
    print("  ".join(f"{key}={value}" for key, value in machine().items()))
    print(f"{TOKENS} tokens for each of {BATCH} prompts of {PROMPT}")
    print(f"{'':24}{'PyTorch':>10}{'onnxruntime':>13}{'ratio':>8}{'equal tokens':>14}")
    found: dict[str, Any] = {}
    for name, model in models().items():
        for search, settings in SEARCHES.items():
            row = found[f"{name}, {search}"] = measure(model, settings, options.rounds)
            print(
                f"{name + ', ' + search:24}{row['PyTorch_ms']:>8.0f}ms"
                f"{row['onnxruntime_ms']:>11.0f}ms{row['ratio']:>8.2f}"
                f"{row['equal_tokens']:>13.1%}",
                flush=True,
            )
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine(), "calls": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
